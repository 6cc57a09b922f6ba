"""Mixtures of experts: the router, the permutation of tokens, and the experts."""
