def tensor_parallel(model, mesh):
    raise ValueError("soon")
