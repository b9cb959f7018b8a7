"""Readers of data sets: built-in ones by name, and the user's tables, arrays and images."""
