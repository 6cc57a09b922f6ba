"""Mixtures of experts: the router's choice, tokens sorted by expert, and the experts themselves."""
