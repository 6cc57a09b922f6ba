"""Losses as functions of log-probabilities, and their derivatives: no chunks, no kernels."""
