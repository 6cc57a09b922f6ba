"""The views of a kernel that Triton's interpreter has."""
