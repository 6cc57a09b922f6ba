"""Losses of predictions that exist whole."""
