"""The local tensors of a linear layer whose weight is a DTensor with its classes sharded over a mesh dimension.

Input and target are replicated over the mesh dimension; the classes stay sharded. For an input that was sharded, say
along the sequence, each rank returns the gradient of its classes as `Partial`: DTensor sums it with one reduce-scatter,
a quarter of what a float32 sum on all ranks would send. Losses are `Replicate`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from llmk.ops.linear_loss.chunked._vocab_shard import VocabShard
from llmk.registry import cdiv


def vocab_mesh_dim(input: Tensor, linear_weight: Tensor) -> int | None:
    """Return the only mesh dimension over which the rows of `linear_weight` are sharded, else None.

    Both tensors must be replicated over the other mesh dimensions.
    """
    if not isinstance(linear_weight, DTensor):
        return None
    sharded = [i for i, placement in enumerate(linear_weight.placements) if not placement.is_replicate()]
    if len(sharded) != 1 or type(linear_weight.placements[sharded[0]]) is not Shard:
        return None
    (dim,) = sharded
    if not linear_weight.placements[dim].is_shard(0):
        return None
    if isinstance(input, DTensor) and input.device_mesh == linear_weight.device_mesh:
        others = input.placements[:dim] + input.placements[dim + 1 :]
        return dim if all(placement.is_replicate() for placement in others) else None
    return dim


def on_this_rank(
    fields: Mapping[str, Any], linears: Sequence[Sequence[str]], others: Sequence[str]
) -> tuple[Mapping[str, Any], Callable[[Tensor], Tensor], bool]:
    """Compute `local_fields` where a weight is no plain tensor."""
    dims = {vocab_mesh_dim(fields[input], fields[weight]) for input, weight, _ in linears}
    dim = dims.pop()
    if dims or dim is None:
        return fields, lambda result: result, any(isinstance(fields[weight], DTensor) for _, weight, _ in linears)
    local = dict(fields)
    for input, weight, bias in linears:
        local |= _local_linear(dim, {name: fields[name] for name in (input, weight, bias)})
    input, weight, _ = linears[0]
    mesh, num_classes = fields[weight].device_mesh, fields[weight].shape[0]
    for name in others:
        _check_mesh(name, fields[name], mesh, weight)
        local[name] = _whole(fields[name], mesh)
    group_name = mesh.get_group(dim).group_name
    local["shard"] = VocabShard(
        # Shard splits as torch.chunk does: the last ranks may have less, or nothing.
        first_class=min(mesh.get_local_rank(dim) * cdiv(num_classes, mesh.size(dim)), num_classes),
        num_classes=num_classes,
        group_name=group_name,
        dx_group_name="" if _is_scattered(fields[input], dim) else group_name,
    )
    if not isinstance(fields[input], DTensor):
        return local, lambda result: result, False
    return local, lambda result: DTensor.from_local(result, mesh, [Replicate()] * mesh.ndim, run_check=False), False


def _local_linear(dim: int, linear: dict[str, Any]) -> dict[str, Tensor | None]:
    """Return a linear layer's replicated input and this rank's weight and bias."""
    (input_name, input), (weight_name, weight), (bias_name, bias) = linear.items()
    mesh = weight.device_mesh
    _check_mesh(input_name, input, mesh, weight_name)
    _check_mesh(bias_name, bias, mesh, weight_name)
    if bias is not None and not isinstance(bias, DTensor):
        raise TypeError(f"{bias_name}: expected a DTensor like {weight_name}, got a plain tensor")
    # A whole input's gradient is summed by the op, in float32; a sharded one's by DTensor, in its dtype.
    summed = [Partial() if i == dim and _is_scattered(input, dim) else Replicate() for i in range(mesh.ndim)]
    return {
        input_name: _whole(input, mesh, summed),
        weight_name: weight.to_local(),
        bias_name: None if bias is None else bias.redistribute(placements=weight.placements).to_local(),
    }


def _is_scattered(input: Tensor, dim: int) -> bool:
    return isinstance(input, DTensor) and not input.placements[dim].is_replicate()


def _check_mesh(name: str, tensor: Tensor | None, mesh: DeviceMesh, weight_name: str) -> None:
    if isinstance(tensor, DTensor) and tensor.device_mesh != mesh:
        raise ValueError(f"{name}: expected {mesh}, the mesh of {weight_name}, got {tensor.device_mesh}")


def _whole(tensor: Tensor | None, mesh: DeviceMesh, gradient: Sequence[Placement] | None = None) -> Tensor | None:
    """Return the replicated tensor; `gradient` is the placement of its gradient, replicated by default."""
    if not isinstance(tensor, DTensor):
        return tensor
    whole = [Replicate()] * mesh.ndim
    return tensor.redistribute(placements=whole).to_local(grad_placements=whole if gradient is None else gradient)
