"""A vocabulary spread over the ranks of a group: the classes that each has, and its rows of the weight."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from llmk.opcheck.calls import require_accurate
from llmk.opcheck.inputs import Outcome
from llmk.registry import Op, Sample


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


def require_same_on_ranks(*found: Tensor) -> None:
    """Require the same bits on all ranks."""
    for numbers in (x.detach().contiguous().nan_to_num() for x in found):
        everywhere = [torch.empty_like(numbers) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, numbers)
        assert all(torch.equal(numbers, other) for other in everywhere)


def require_accurate_on_ranks(op: Op, sample: Sample, outcome: Outcome) -> None:
    """Require the accuracy rule of the first rank's results and gradients, and the same bits of the others'."""
    require_same_on_ranks(*(x for x in outcome.results() if x is not None))
    if dist.get_rank() == 0:
        require_accurate(op, sample, outcome)
