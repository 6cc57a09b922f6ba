"""Operators that are not llmk's: records made from what a stranger's file has."""
