"""`auto` against plain models, models on the trusted rows alone, and cleanlab: many tables, kinds of noise and sizes."""
