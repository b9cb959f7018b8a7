"""Audit labels by the probabilities of any model, from a file or an array. No run folder is needed."""
