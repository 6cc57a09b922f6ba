"""Losses fused with the projection to the vocabulary, whose logits never exist whole."""
