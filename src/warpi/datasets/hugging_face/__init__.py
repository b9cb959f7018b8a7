"""Read Hugging Face data sets from disk."""
