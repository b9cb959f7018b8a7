"""Containers for examples and their labels: batches, splits, data sets and the loader that shuffles them."""
