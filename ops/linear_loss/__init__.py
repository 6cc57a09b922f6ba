"""Losses fused with the output projection, which never materialize the logits."""
