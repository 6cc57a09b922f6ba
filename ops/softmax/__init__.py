"""Softmax, sparsemax and attention over layers."""
