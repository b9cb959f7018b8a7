"""Hugging Face data sets."""
