"""Columns of tables: read from files, given a kind by their content, turned into features."""
