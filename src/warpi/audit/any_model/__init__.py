"""Audit the predictions of any model: probabilities from a file or an array, and no run folder."""
