"""A linear layer that is a DTensor whose classes are sharded over the ranks of a mesh: what each rank computes with.

Input and target are made whole on every rank of the mesh dimension, the classes stay where they are. Of an input that
was sharded, say along the sequence, each rank hands back what its classes add to the gradient as `Partial`: DTensor
sums it with one reduce-scatter, a quarter of what a float32 sum on all ranks would send. Losses are `Replicate`.
"""

from typing import NamedTuple

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from llmk.registry import cdiv


def mesh_dim_of_classes(input: Tensor, linear_weight: Tensor) -> int | None:
    """The mesh dimension over which the rows of `linear_weight` are sharded; None where that is not all that is.

    Over the other dimensions of the mesh both tensors must be replicated.
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


class Slices(NamedTuple):
    """What each rank of one mesh dimension computes with: the classes it has, and all of the rest."""

    input: Tensor
    linear_weight: Tensor
    linear_bias: Tensor | None
    target: Tensor | None
    weight: Tensor | None
    row_weight: Tensor | None
    vocab_start: int
    num_classes: int
    group_name: str
    dx_group_name: str
    mesh: DeviceMesh | None  # where the results are DTensors, as the input is

    def whole(self, result: Tensor) -> Tensor:
        """What all ranks computed alike, as the caller gets it."""
        if self.mesh is None:
            return result
        return DTensor.from_local(result, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)


def slices_of(
    dim: int, input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor | None = None,
    weight: Tensor | None = None, row_weight: Tensor | None = None,
) -> Slices:  # fmt: skip
    """A call whose classes are sharded over dimension `dim` of the mesh of `linear_weight`."""
    assert isinstance(linear_weight, DTensor)
    mesh, num_classes = linear_weight.device_mesh, linear_weight.shape[0]
    others = {"input": input, "linear_bias": linear_bias, "target": target, "weight": weight, "row_weight": row_weight}
    for name, tensor in others.items():
        if isinstance(tensor, DTensor) and tensor.device_mesh != mesh:
            raise ValueError(f"{name}: expected {mesh}, the mesh of linear_weight, got {tensor.device_mesh}")
    if linear_bias is not None and not isinstance(linear_bias, DTensor):
        raise TypeError("linear_bias: expected a DTensor like linear_weight, got a plain tensor")
    group_name = mesh.get_group(dim).group_name
    whole: list[Placement] = [Replicate() for _ in range(mesh.ndim)]
    added: list[Placement] = [Partial() if i == dim else Replicate() for i in range(mesh.ndim)]
    # A whole input's gradient is summed by the op, in float32; a sharded one's by DTensor, in its dtype.
    scattered = isinstance(input, DTensor) and not input.placements[dim].is_replicate()
    return Slices(
        _on_each_rank(input, whole, added if scattered else whole),
        linear_weight.to_local(),
        None if linear_bias is None else linear_bias.redistribute(placements=linear_weight.placements).to_local(),
        *(None if each is None else _on_each_rank(each, whole, whole) for each in (target, weight, row_weight)),
        # Shard splits as torch.chunk does: the last ranks may have less, or nothing.
        vocab_start=min(mesh.get_local_rank(dim) * cdiv(num_classes, mesh.size(dim)), num_classes),
        num_classes=num_classes,
        group_name=group_name,
        dx_group_name="" if scattered else group_name,
        mesh=mesh if isinstance(input, DTensor) else None,
    )


def _on_each_rank(tensor: Tensor, whole: list[Placement], gradient: list[Placement]) -> Tensor:
    """The whole tensor, for which each rank gives a gradient that is placed as said."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.redistribute(placements=whole).to_local(grad_placements=gradient)
