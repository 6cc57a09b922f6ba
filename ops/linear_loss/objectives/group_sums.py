"""Sums over the ranks that share a batch, where every rank computes the same loss from them.

Rank r has inputs x_r and makes s_r of them, and the loss is L = f(s) of the sum s of all s_r. Each rank computes f by
itself and gets the same L. It wants dL/dx_r = f'(s) ds_r/dx_r, and its own f'(s) is the whole factor. So the gradient
goes back through the sum as it comes. If it were summed over the ranks, the loss would count once for each of them.

A value v that all ranks have may be used by each in a term of its own: L is the sum of h_r(v). The backward pass of
rank r brings h_r'(v) alone, and dL/dv is the sum of these over the ranks.

    sum_over_group     forward the sum over the ranks, backward the identity
    share_with_group   forward the identity, backward the sum over the ranks

Each is the backward pass of the other. Sums are in the order of the ranks: all ranks get the same bits.
`max_over_group` is for metrics, which have no gradient.

Source: f and g of Shoeybi et al., Megatron-LM, 2019, https://arxiv.org/abs/1909.08053, section 3.
"""

from torch import Tensor

from llmk.registry import KernelOp, replicate_only
from llmk.registry.private.processes import collectives, group_named


def _gather(x: Tensor, group_name: str) -> Tensor:
    """Gather the values `[...]` of all ranks: `[ranks, ...]`."""
    ranks = group_named(group_name).size()
    parts = collectives.all_gather_into_tensor(x.reshape(1, -1).contiguous(), ranks, group_name)
    return collectives.wait_tensor(parts).view(ranks, *x.shape)


def _sum_over_group(x: Tensor, group_name: str) -> Tensor:
    return _gather(x, group_name).sum(0)


def _max_over_group(x: Tensor, group_name: str) -> Tensor:
    return _gather(x, group_name).amax(0)


def _share_with_group(x: Tensor, group_name: str) -> Tensor:
    return x.clone()


sum_over_group = KernelOp(_sum_over_group)
max_over_group = KernelOp(_max_over_group)
share_with_group = KernelOp(_share_with_group)

for _op in (sum_over_group, max_over_group, share_with_group):
    _op.register_kernel("cpu")(_op.fn)
    _op.register_sharding(replicate_only)

    @_op.register_fake
    def _(x: Tensor, group_name: str) -> Tensor:
        return x.new_empty(x.shape)


def _setup(ctx, inputs, output) -> None:
    _, ctx.group_name = inputs


def _sum_backward(ctx, grad):
    return share_with_group(grad, ctx.group_name), None


def _share_backward(ctx, grad):
    return sum_over_group(grad, ctx.group_name), None


sum_over_group.register_autograd(_sum_backward, setup_context=_setup)
share_with_group.register_autograd(_share_backward, setup_context=_setup)
