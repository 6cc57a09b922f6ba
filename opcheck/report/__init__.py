"""The findings, for people and for programs."""
