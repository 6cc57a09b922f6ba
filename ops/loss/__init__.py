"""Losses of logits, probabilities and boxes."""
