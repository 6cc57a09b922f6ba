"""Linear layers with what follows them."""
