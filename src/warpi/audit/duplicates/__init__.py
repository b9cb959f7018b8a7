"""Copies, near copies, outliers and broken images."""
