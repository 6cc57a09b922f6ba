"""What Triton's interpreter sees of a kernel."""
