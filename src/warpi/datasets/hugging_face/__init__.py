"""Data sets of Hugging Face `datasets`."""
