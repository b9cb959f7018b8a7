"""Copies, near copies, outliers and broken images among the rows of splits."""
