"""Readers of data sets: built-in ones by name, and tables, arrays and images of the user."""
