"""`auto` against plain models, models on the trusted rows alone, and cleanlab, on many tables."""
