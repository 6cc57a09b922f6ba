"""A vocabulary spread over the ranks of a group: the classes that each has, and its rows of the weight."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class OwnRows(torch.autograd.Function):
    """The rows of one rank; the gradient of all rows, on every rank."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        whole, start, stop = args
        ctx.bounds, ctx.shape = (start, stop), whole.shape
        return whole[start:stop].clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (grad,) = grad_outputs
        start, stop = ctx.bounds
        whole = grad.new_zeros(ctx.shape)
        whole[start:stop] = grad
        dist.all_reduce(whole)
        return whole, None, None


def bounds(slicing: str, rank: int, world: int, V: int) -> tuple[int, int]:
    """The classes of a rank: as `Shard` has them, or the first rank none, the last the first ones and the most."""
    if slicing == "shards":
        share = -(-V // world)
        return min(rank * share, V), min((rank + 1) * share, V)
    most = V - min(V // 3, world - 2)
    if rank == world - 1:
        return 0, most
    first = V if rank == 0 else min(V, most + rank - 1)
    return first, min(V, first + 1)
