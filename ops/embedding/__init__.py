"""Rows of a table, looked up by number."""
