"""The kernel operators of `moe_experts`: the first product with what comes before it, and all that follows.

Each is one node of a graph: on a CPU it is a loop over the experts' rows, and on a GPU its buffers are its own.
"""

import torch
from torch import Tensor

from llmk.ops.experts._gate import Gate, gated_rows, gated_rows_backward, gated_rows_backward_cpu, gated_rows_cpu
from llmk.ops.experts._grouped import group_sums, grouped_outer, grouped_product
from llmk.ops.experts._grouped_products_cpu import Groups, grouped_outer_cpu, grouped_product_cpu
from llmk.ops.experts._order import groups_of, positions_of, raise_out_of_range, sort_by_expert
from llmk.ops.experts._rows import dot_rows, gather_rows, sum_rows
from llmk.registry import KernelOp, replicate_only

# The first product.


def _moe_experts_up_fwd(
    input: Tensor, gate_up: Tensor, indices: Tensor, transposed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The rows `[N, 2F]`, and the order of the pairs, their positions and the experts' ends."""
    order, offsets = sort_by_expert(indices, gate_up.shape[0])
    positions = positions_of(order, indices.shape)
    tokens = gather_rows(input, positions, offsets)
    rows = grouped_product(tokens, gate_up.transpose(1, 2) if transposed else gate_up, offsets)
    return rows, order, positions, offsets


def _moe_experts_up_bwd(
    grad: Tensor, input: Tensor | None, gate_up: Tensor | None, order: Tensor, positions: Tensor, offsets: Tensor,
    transposed: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dx where there is a weight, its gradient where there is an input; an empty tensor for each other."""
    dx = dw = None
    if gate_up is not None:
        drows = grouped_product(grad, gate_up if transposed else gate_up.transpose(1, 2), offsets)
        dx = sum_rows(drows, positions, offsets=offsets)
        del drows  # before the tokens' rows take as much
    if input is not None:
        tokens = gather_rows(input, positions, offsets)
        dw = grouped_outer(tokens, grad, offsets) if transposed else grouped_outer(grad, tokens, offsets)
    return _or_empty(dx, grad), _or_empty(dw, grad)


def _or_empty(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.empty((0,), dtype=like.dtype, device=like.device) if gradient is None else gradient


moe_experts_up_fwd = KernelOp(_moe_experts_up_fwd, opaque=True)
moe_experts_up_bwd = KernelOp(_moe_experts_up_bwd, opaque=True)


@moe_experts_up_fwd.register_kernel("cpu")
def _(input: Tensor, gate_up: Tensor, indices: Tensor, transposed: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    raise_out_of_range(indices, gate_up.shape[0])
    order, offsets = sort_by_expert(indices, gate_up.shape[0])
    weight = gate_up.transpose(1, 2) if transposed else gate_up
    rows = grouped_product_cpu(input[order // indices.shape[1]], weight, groups_of(offsets))
    return rows.to(input.dtype), order, positions_of(order, indices.shape), offsets


@moe_experts_up_bwd.register_kernel("cpu")
def _(grad, input, gate_up, order, positions, offsets, transposed) -> tuple[Tensor, Tensor]:
    groups, dx, dw = groups_of(offsets), None, None
    if gate_up is not None:
        weight = gate_up if transposed else gate_up.transpose(1, 2)
        dx = grouped_product_cpu(grad, weight, groups)[positions.long()].sum(1).to(grad.dtype)
    if input is not None:
        tokens = input[order // positions.shape[1]]
        a, b = (tokens, grad) if transposed else (grad, tokens)
        dw = grouped_outer_cpu(a, b, groups).to(grad.dtype)
    return _or_empty(dx, grad), _or_empty(dw, grad)


@moe_experts_up_fwd.register_fake
def _(input: Tensor, gate_up: Tensor, indices: Tensor, transposed: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    N, width = indices.numel(), gate_up.shape[2 if transposed else 1]
    return (
        input.new_empty((N, width)),
        indices.new_empty((N,), dtype=torch.int64),
        indices.new_empty(indices.shape, dtype=torch.int32),
        indices.new_empty(gate_up.shape[:1], dtype=torch.int32),
    )


@moe_experts_up_bwd.register_fake
def _(grad, input, gate_up, order, positions, offsets, transposed) -> tuple[Tensor, Tensor]:
    dx_shape, dw_shape = (0,), (0,)
    if gate_up is not None:
        dx_shape = (positions.shape[0], gate_up.shape[1 if transposed else 2])
    if input is not None:
        sizes = (input.shape[1], grad.shape[1]) if transposed else (grad.shape[1], input.shape[1])
        dw_shape = (offsets.shape[0], *sizes)
    return grad.new_empty(dx_shape), grad.new_empty(dw_shape)


@moe_experts_up_fwd.register_flop_formula
def _(input: Tensor, gate_up: Tensor, indices: Tensor, transposed: bool, out_val=None) -> int:
    return 2 * indices.numel() * gate_up.shape[1] * gate_up.shape[2]


@moe_experts_up_bwd.register_flop_formula
def _(grad, input, gate_up, order, positions, offsets, transposed, out_val=None) -> int:
    features = [] if input is None else [input.shape[1]]
    if gate_up is not None:
        features.append(gate_up.shape[1 if transposed else 2])
    return sum(2 * grad.numel() * H for H in features)


def _setup_up(ctx, inputs, output) -> None:
    input, gate_up, _, ctx.transposed = inputs
    need_dx, need_dw, *_ = ctx.needs_input_grad
    ctx.save_for_backward(input if need_dw else None, gate_up if need_dx else None, *output[1:])


def _up_backward(ctx, grad):
    need_dx, need_dw, *_ = ctx.needs_input_grad
    dx, dw = moe_experts_up_bwd(grad, *ctx.saved_tensors, ctx.transposed)
    return dx if need_dx else None, dw if need_dw else None, None, None


moe_experts_up_fwd.register_autograd(_up_backward, setup_context=_setup_up)

# The gated unit, the second product and the sums.


def _moe_experts_down_fwd(
    rows: Tensor, gate_up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None, weights: Tensor,
    indices: Tensor, order: Tensor, positions: Tensor, offsets: Tensor,
    activation: str, interleaved: bool, transposed: bool, limit: float, alpha: float, up_offset: float,
) -> Tensor:  # fmt: skip
    gate = Gate(activation, interleaved, limit, alpha, up_offset)
    hidden = gated_rows(rows, gate_up_bias, weights, indices, order, offsets, gate)
    outputs = grouped_product(hidden, down.transpose(1, 2) if transposed else down, offsets)
    if down_bias is None:
        return sum_rows(outputs, positions, offsets=offsets)
    return sum_rows(outputs, positions, weights, down_bias, indices, offsets)


def _moe_experts_down_bwd(
    grad: Tensor, rows: Tensor, gate_up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None, weights: Tensor,
    indices: Tensor, order: Tensor, positions: Tensor, offsets: Tensor,
    activation: str, interleaved: bool, transposed: bool, limit: float, alpha: float, up_offset: float,
    need_up_bias: bool, need_down: bool, need_down_bias: bool, need_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the rows, the first bias, `down`, the second bias and the weights; empty where not needed."""
    gate = Gate(activation, interleaved, limit, alpha, up_offset)
    dy = gather_rows(grad, positions, offsets)
    dh = grouped_product(dy, down if transposed else down.transpose(1, 2), offsets)
    extra = None
    if need_weights and down_bias is not None:
        extra = dot_rows(down_bias, indices, grad, torch.float32)
    hidden, drows, dweights = gated_rows_backward(
        dh, rows, gate_up_bias, weights, extra, indices, order, offsets, gate,
        need_hidden=need_down, need_weights=need_weights,
    )  # fmt: skip
    del dh  # before the weight's gradient takes more
    ddown = None
    if hidden is not None:
        ddown = grouped_outer(hidden, dy, offsets) if transposed else grouped_outer(dy, hidden, offsets)
    return (
        drows,
        _or_empty(group_sums(drows, offsets) if need_up_bias else None, grad),
        _or_empty(ddown, grad),
        _or_empty(group_sums(dy, offsets, order, weights) if need_down_bias else None, grad),
        _or_empty(dweights, weights),
    )


moe_experts_down_fwd = KernelOp(_moe_experts_down_fwd, opaque=True)
moe_experts_down_bwd = KernelOp(_moe_experts_down_bwd, opaque=True)


def _with_bias(rows: Tensor, bias: Tensor | None, groups: Groups) -> Tensor:
    """float32, on a CPU; rows that no expert has become zeros."""
    rows = rows.float().clone()
    for e, (begin, end) in enumerate(groups):
        if bias is not None:
            rows[begin:end] += bias[e].float()
    rows[groups[-1][1] :] = 0
    return rows


@moe_experts_down_fwd.register_kernel("cpu")
def _(
    rows, gate_up_bias, down, down_bias, weights, indices, order, positions, offsets,
    activation, interleaved, transposed, limit, alpha, up_offset,
) -> Tensor:  # fmt: skip
    gate, groups = Gate(activation, interleaved, limit, alpha, up_offset), groups_of(offsets)
    of_rows = weights.float().flatten()[order]
    hidden = gated_rows_cpu(_with_bias(rows, gate_up_bias, groups), of_rows, gate).to(rows.dtype)
    outputs = grouped_product_cpu(hidden, down.transpose(1, 2) if transposed else down, groups)
    if down_bias is not None:
        for e, (begin, end) in enumerate(groups):
            outputs[begin:end] += of_rows[begin:end, None] * down_bias[e].float()
    return outputs[positions.long()].sum(1).to(rows.dtype)


@moe_experts_down_bwd.register_kernel("cpu")
def _(
    grad, rows, gate_up_bias, down, down_bias, weights, indices, order, positions, offsets,
    activation, interleaved, transposed, limit, alpha, up_offset,
    need_up_bias, need_down, need_down_bias, need_weights,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    gate, groups = Gate(activation, interleaved, limit, alpha, up_offset), groups_of(offsets)
    of_rows, dtype = weights.float().flatten()[order], rows.dtype
    dy = grad[order // positions.shape[1]]
    dh = grouped_product_cpu(dy, down if transposed else down.transpose(1, 2), groups)
    hidden, drows, dots = gated_rows_backward_cpu(dh, _with_bias(rows, gate_up_bias, groups), of_rows, gate)
    dup_bias = ddown = ddown_bias = dweights = None
    drows[groups[-1][1] :] = 0
    if need_up_bias:
        dup_bias = torch.stack([drows[begin:end].sum(0) for begin, end in groups]).to(dtype)
    if need_down:
        a, b = (hidden.to(dtype), dy) if transposed else (dy, hidden.to(dtype))
        ddown = grouped_outer_cpu(a, b, groups).to(dtype)
    if need_down_bias:
        weighted = dy.float() * of_rows[:, None]
        ddown_bias = torch.stack([weighted[begin:end].sum(0) for begin, end in groups]).to(dtype)
    if need_weights:
        for e, (begin, end) in enumerate(groups):
            if down_bias is not None:
                dots[begin:end] += dy[begin:end].float() @ down_bias[e].float()
        dots[groups[-1][1] :] = 0
        dweights = dots[positions.long()].to(weights.dtype)
    return (
        drows.to(dtype),
        _or_empty(dup_bias, grad),
        _or_empty(ddown, grad),
        _or_empty(ddown_bias, grad),
        _or_empty(dweights, weights),
    )


@moe_experts_down_fwd.register_fake
def _(rows, gate_up_bias, down, down_bias, weights, indices, order, positions, offsets, *options) -> Tensor:
    transposed = options[2]
    return rows.new_empty((positions.shape[0], down.shape[2 if transposed else 1]))


@moe_experts_down_bwd.register_fake
def _(
    grad, rows, gate_up_bias, down, down_bias, weights, indices, order, positions, offsets, *options
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    E, needs = offsets.shape[0], options[-4:]
    shapes = [(E, rows.shape[1]), down.shape, (E, grad.shape[1])]
    up_bias, of_down, down_bias = (
        rows.new_empty(shape if need else (0,)) for shape, need in zip(shapes, needs, strict=False)
    )
    return (
        rows.new_empty(rows.shape),
        up_bias,
        of_down,
        down_bias,
        weights.new_empty(weights.shape if needs[3] else (0,)),
    )


@moe_experts_down_fwd.register_flop_formula
def _(rows: Tensor, gate_up_bias, down: Tensor, *args, out_val=None) -> int:
    return 2 * rows.shape[0] * down.shape[1] * down.shape[2]


@moe_experts_down_bwd.register_flop_formula
def _(grad, rows, gate_up_bias, down, *args, out_val=None) -> int:
    return 2 * rows.shape[0] * down.shape[1] * down.shape[2] * (1 + args[-3])


for _op in (moe_experts_up_fwd, moe_experts_up_bwd, moe_experts_down_fwd, moe_experts_down_bwd):
    _op.register_sharding(replicate_only)


def _setup_down(ctx, inputs, output) -> None:
    ctx.options = inputs[9:]
    ctx.save_for_backward(*inputs[:9])


def _down_backward(ctx, grad):
    need_rows, need_up_bias, need_down, need_down_bias, need_weights, *_ = ctx.needs_input_grad
    needs = need_rows, need_up_bias, need_down, need_down_bias, need_weights
    gradients = moe_experts_down_bwd(grad, *ctx.saved_tensors, *ctx.options, *needs[1:])
    found = [gradient if need else None for gradient, need in zip(gradients, needs, strict=True)]
    return *found, *[None] * (4 + len(ctx.options))


moe_experts_down_fwd.register_autograd(_down_backward, setup_context=_setup_down)
