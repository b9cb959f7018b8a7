"""Models that learn from soft labels, and their predictions as torch modules."""
