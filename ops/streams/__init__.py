"""Several residual streams around a layer: hyper-connections."""
