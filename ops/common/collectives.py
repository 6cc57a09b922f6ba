"""What the ranks of a group send each other, with gradients.

Tokens, where each operator is the backward pass of the other:

    gather_from_ranks    [T, ...] -> [R T, ...]  the rows of all ranks, in their order; backward the sum
    sum_over_ranks       [R T, ...] -> [T, ...]  of this rank's rows the sum of what each has; backward the gather
    exchange_with_ranks  [N, ...] -> [M, ...]    rows that this rank sends to each, for those that each sends here

Sums are float32 in the order of the ranks, with one rounding: same inputs, same bits. They are operators, not an
`autograd.Function`: traced by torch 2.11 that loses the gradient of one that waits for what comes.

Sums over the ranks that share a batch, where every rank computes the same loss from them. Rank r has inputs x_r and
makes s_r of them, and the loss is L = f(s) of the sum s of all s_r. Each rank computes f by itself and gets the same L.
It wants dL/dx_r = f'(s) ds_r/dx_r, and its own f'(s) is the whole factor. So the gradient goes back through the sum as
it comes. If it were summed over the ranks, the loss would count once for each of them.

A value v that all ranks have may be used by each in a term of its own: L is the sum of h_r(v). The backward pass of
rank r brings h_r'(v) alone, and dL/dv is the sum of these over the ranks.

    sum_over_group     forward the sum over the ranks, backward the identity
    share_with_group   forward the identity, backward the sum over the ranks

Each is the backward pass of the other; all ranks get the same bits. `max_over_group` is for metrics, which have no
gradient.

Source: f and g of Shoeybi et al., Megatron-LM, 2019, https://arxiv.org/abs/1909.08053, section 3.
"""

import torch
from torch import Tensor

from llmk.registry import KernelOp, is_sharded, replicate_only
from llmk.registry.checks import resolve_group
from llmk.registry.private.processes import collectives, group_named


def place_in(context_group: str, *tensors: Tensor) -> tuple[int, int]:
    """Return this rank's place in a group whose ranks have consecutive parts of sequences, and the number of ranks.

    Raises:
        ValueError: It is no group's name, or one of the tensors is a DTensor.
    """
    if is_sharded(*tensors):
        raise ValueError(
            f"context_group: expected '' for DTensors, of which a call gets all tokens, got {context_group!r}"
        )
    group = resolve_group("context_group", context_group)
    return group.rank(), group.size()


def _gather_from_ranks(x: Tensor, ranks: int, group_name: str) -> Tensor:
    return collectives.wait_tensor(collectives.all_gather_into_tensor(x.contiguous(), ranks, group_name))


def _sum_over_ranks(x: Tensor, ranks: int, group_name: str) -> Tensor:
    share = [x.shape[0] // ranks] * ranks
    parts = _exchange_with_ranks(x, share, share, group_name).unflatten(0, (ranks, -1))
    return parts.sum(0, dtype=torch.float32).to(x.dtype)


def _exchange_with_ranks(x: Tensor, sends: list[int], receives: list[int], group_name: str) -> Tensor:
    return collectives.wait_tensor(collectives.all_to_all_single(x.contiguous(), receives, sends, group_name))


def _of_all_ranks(x: Tensor, group_name: str) -> Tensor:
    """Return the values `[...]` of all ranks: `[ranks, ...]`."""
    ranks = group_named(group_name).size()
    return _gather_from_ranks(x.unsqueeze(0), ranks, group_name)


def _sum_over_group(x: Tensor, group_name: str) -> Tensor:
    return _of_all_ranks(x, group_name).sum(0)


def _max_over_group(x: Tensor, group_name: str) -> Tensor:
    return _of_all_ranks(x, group_name).amax(0)


def _share_with_group(x: Tensor, group_name: str) -> Tensor:
    return x.clone()


gather_from_ranks = KernelOp(_gather_from_ranks)
sum_over_ranks = KernelOp(_sum_over_ranks)
exchange_with_ranks = KernelOp(_exchange_with_ranks)
sum_over_group = KernelOp(_sum_over_group)
max_over_group = KernelOp(_max_over_group)
share_with_group = KernelOp(_share_with_group)

for _op in (gather_from_ranks, sum_over_ranks, exchange_with_ranks, sum_over_group, max_over_group, share_with_group):
    _op.register_kernel("cpu")(_op.fn)
    _op.register_sharding(replicate_only)


@gather_from_ranks.register_fake
def _(x: Tensor, ranks: int, group_name: str) -> Tensor:
    return x.new_empty((x.shape[0] * ranks, *x.shape[1:]))


@sum_over_ranks.register_fake
def _(x: Tensor, ranks: int, group_name: str) -> Tensor:
    return x.new_empty((x.shape[0] // ranks, *x.shape[1:]))


@exchange_with_ranks.register_fake
def _(x: Tensor, sends: list[int], receives: list[int], group_name: str) -> Tensor:
    return x.new_empty((sum(receives), *x.shape[1:]))


for _op in (sum_over_group, max_over_group, share_with_group):

    @_op.register_fake
    def _(x: Tensor, group_name: str) -> Tensor:
        return x.new_empty(x.shape)


def _setup(ctx, inputs, output) -> None:
    _, *ctx.where = inputs


def _gather_backward(ctx, grad):
    return sum_over_ranks(grad, *ctx.where), None, None


def _sum_backward(ctx, grad):
    return gather_from_ranks(grad, *ctx.where), None, None


def _exchange_backward(ctx, grad):
    sends, receives, group_name = ctx.where
    return exchange_with_ranks(grad, receives, sends, group_name), None, None, None


gather_from_ranks.register_autograd(_gather_backward, setup_context=_setup)
sum_over_ranks.register_autograd(_sum_backward, setup_context=_setup)
exchange_with_ranks.register_autograd(_exchange_backward, setup_context=_setup)
sum_over_group.register_autograd(lambda ctx, grad: (share_with_group(grad, *ctx.where), None), setup_context=_setup)
share_with_group.register_autograd(lambda ctx, grad: (sum_over_group(grad, *ctx.where), None), setup_context=_setup)
