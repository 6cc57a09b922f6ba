"""Rows of logits that are never stored: their softmax, its gradients, and the loop over chunks of them."""
