"""Loops over the chunks of a linear layer: what a kernel operator computes, and its derivative."""
