r"""The experts of a mixture: tokens to their experts, a gated unit between two products, and the weighted sums.

Sources: Shazeer et al., 2017, https://arxiv.org/abs/1701.06538; the gated unit with limit, scale and offset is that of
GPT-OSS, https://arxiv.org/abs/2508.10925. The reference is a loop over the experts.

Forward, for tokens x [T, H], each with K experts and weights w, the N = T * K pairs sorted by expert (`moe_permute`):

    rows[r]   = W_gate_up[e] @ x[token of r]
    hidden[r] = w * gated unit of (rows[r] + b_gate_up[e])         `_gated_unit.py`
    y[t]      = sum over the token's rows of (W_down[e] @ hidden[r] + w * b_down[e])

The weight is multiplied in before the second product, which costs no pass: the sum needs none. So hidden, which is in
the dtype of x, must hold it: a weight is no more than a few, and what float16 can overflow at is h itself.

Backward, given dy, its rows gathered again, as are those of x:

    dh        = dy_rows @ W_down,  then hidden, drows and dw in one pass (`_gated_unit.py`)
    dW_down   = dy_rows^T @ hidden,  dW_gate_up = drows^T @ x_rows,  expert by expert
    db_gate_up, db_down = the sums of drows and of w * dy_rows,  expert by expert
    dx[t]     = sum over the token's rows of drows @ W_gate_up

Kept for it: x, the rows of the first product, the order and the weights; no gathered tokens and no expert's output. So
dw comes from the unweighted hidden row h and its gradient: w's own factor of y is W_down @ h, and (W_down @ h) . dy is
h . dh, to which the bias adds b_down . dy.

Two kernel operators, of the first product and of the rest, so that the rows are let go between their backward passes.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from llmk.ops.common.activations import ACTIVATIONS
from llmk.ops.common.activations import activation as activation_of
from llmk.ops.common.groups import groups_of
from llmk.ops.experts._gated_unit import (
    Gate,
    gated_rows,
    gated_rows_backward,
    gated_rows_backward_cpu,
    gated_rows_cpu,
    split,
)
from llmk.ops.experts._gather_scatter import dot_rows, gather_rows, sum_rows
from llmk.ops.experts._grouped_products import (
    Groups,
    group_sums,
    grouped_outer,
    grouped_outer_cpu,
    grouped_product,
    grouped_product_cpu,
)
from llmk.ops.experts._patterns import EXPERTS
from llmk.ops.experts._sorting import (
    check_indices,
    check_tokens,
    check_weights,
    positions_of,
    raise_out_of_range,
    sort_by_expert,
)
from llmk.registry import (
    Cost,
    KernelOp,
    Sample,
    autocast_dtype,
    check_finite,
    check_option,
    check_positive,
    check_same,
    check_shape,
    check_switch,
    or_no_gradient,
    public_op,
    replicate_only,
)


def moe_experts_reference(
    input: Tensor,
    gate_up: Tensor,
    down: Tensor,
    indices: Tensor,
    weights: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    interleaved: bool = False,
    transposed: bool = False,
    limit: float = 0.0,
    alpha: float = 1.0,
    up_offset: float = 0.0,
) -> Tensor:
    if transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    y = torch.zeros_like(input)
    for e in range(gate_up.shape[0]):
        tokens, k = torch.where(indices == e)
        rows = torch.nn.functional.linear(input[tokens], gate_up[e], None if gate_up_bias is None else gate_up_bias[e])
        gate, up = split(rows, interleaved)
        if limit > 0:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        w = weights[tokens, k, None]
        hidden = (w * (activation_of(alpha * gate, activation) / alpha * (up + up_offset))).to(y.dtype)
        rows = torch.nn.functional.linear(hidden, down[e])
        if down_bias is not None:
            wide = torch.promote_types(y.dtype, torch.float32)
            rows = (rows.to(wide) + w.to(wide) * down_bias[e].to(wide)).to(y.dtype)
        y = y.index_add(0, tokens, rows)
    return y


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
    grad: Tensor,
    input: Tensor | None,
    gate_up: Tensor | None,
    order: Tensor,
    positions: Tensor,
    offsets: Tensor,
    transposed: bool,
) -> tuple[Tensor, Tensor]:
    """dx where there is a weight, its gradient where there is an input; an empty tensor for each other."""
    dx = dw = None
    if gate_up is not None:
        drows = grouped_product(grad, gate_up if transposed else gate_up.transpose(1, 2), offsets)
        dx = sum_rows(drows, positions, offsets=offsets)
        del drows  # before the tokens' rows take as much
    if input is not None:
        tokens = gather_rows(input, positions, offsets)
        dw = grouped_outer(tokens, grad, offsets) if transposed else grouped_outer(grad, tokens, offsets)
    return or_no_gradient(dx, grad), or_no_gradient(dw, grad)


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
    return or_no_gradient(dx, grad), or_no_gradient(dw, grad)


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


moe_experts_up_fwd.register_backward(
    moe_experts_up_bwd,
    outputs=("rows", "order", "positions", "offsets"),
    depends_on=[["input", "gate_up"]],
    saved_if={"input": lambda need_gate_up: need_gate_up, "gate_up": lambda need_input: need_input},
)

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
    need_gate_up_bias: bool, need_down: bool, need_down_bias: bool, need_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the rows, the first bias, `down`, the second bias and the weights; empty where not needed."""
    gate = Gate(activation, interleaved, limit, alpha, up_offset)
    dy = gather_rows(grad, positions, offsets)
    dh = grouped_product(dy, down if transposed else down.transpose(1, 2), offsets)
    extra = None
    if need_weights and down_bias is not None:
        extra = dot_rows(down_bias, indices, grad, torch.float32)
    needs = {"need_hidden": need_down, "need_weights": need_weights}
    hidden, drows, dweights = gated_rows_backward(
        dh, rows, gate_up_bias, weights, extra, indices, order, offsets, gate, **needs
    )
    del dh  # before the weight's gradient takes more
    ddown = None
    if hidden is not None:
        ddown = grouped_outer(hidden, dy, offsets) if transposed else grouped_outer(dy, hidden, offsets)
    return (
        drows,
        or_no_gradient(group_sums(drows, offsets) if need_gate_up_bias else None, grad),
        or_no_gradient(ddown, grad),
        or_no_gradient(group_sums(dy, offsets, order, weights) if need_down_bias else None, grad),
        or_no_gradient(dweights, grad),
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
    need_gate_up_bias, need_down, need_down_bias, need_weights,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    gate, groups = Gate(activation, interleaved, limit, alpha, up_offset), groups_of(offsets)
    of_rows, dtype = weights.float().flatten()[order], rows.dtype
    dy = grad[order // positions.shape[1]]
    dh = grouped_product_cpu(dy, down if transposed else down.transpose(1, 2), groups)
    hidden, drows, dots = gated_rows_backward_cpu(dh, _with_bias(rows, gate_up_bias, groups), of_rows, gate)
    dup_bias = ddown = ddown_bias = dweights = None
    drows[groups[-1][1] :] = 0
    if need_gate_up_bias:
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
        or_no_gradient(dup_bias, grad),
        or_no_gradient(ddown, grad),
        or_no_gradient(ddown_bias, grad),
        or_no_gradient(dweights, grad),
    )


@moe_experts_down_fwd.register_fake
def _(rows, gate_up_bias, down, down_bias, weights, indices, order, positions, offsets, *options) -> Tensor:
    transposed = options[2]
    return rows.new_empty((positions.shape[0], down.shape[2 if transposed else 1]))


@moe_experts_down_fwd.register_flop_formula
def _(rows: Tensor, gate_up_bias, down: Tensor, *args, out_val=None) -> int:
    return 2 * rows.shape[0] * down.shape[1] * down.shape[2]


@moe_experts_down_bwd.register_flop_formula
def _(grad, rows, gate_up_bias, down, *args, out_val=None) -> int:
    return 2 * rows.shape[0] * down.shape[1] * down.shape[2] * (1 + args[-3])


for _op in (moe_experts_up_fwd, moe_experts_down_fwd):
    _op.register_sharding(replicate_only)
moe_experts_down_fwd.register_backward(
    moe_experts_down_bwd, depends_on=[["rows", "gate_up_bias", "down", "down_bias", "weights"]]
)


def _experts(
    device: torch.device, dtype: torch.dtype, T: int, E: int, K: int, H: int, F: int, transposed: bool = False
) -> tuple[Tensor, ...]:
    randn = partial(torch.randn, device=device, dtype=dtype)
    gate_up, down = randn(E, 2 * F, H) / H**0.5, randn(E, H, F) / F**0.5
    if transposed:
        gate_up, down = gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    indices = torch.rand(T, E, device=device, dtype=torch.float32).topk(K, dim=1).indices
    weights = torch.rand(T, K, device=device, dtype=torch.float32).to(dtype) + 0.1
    return randn(T, H), gate_up, down, indices, weights


def moe_experts_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    randn = partial(torch.randn, device=device, dtype=dtype)

    def sample(why: str, sizes: tuple[int, int, int, int, int], **options: Any) -> Sample:
        return Sample(_experts(device, dtype, *sizes, options.get("transposed", False)), options, why=why)

    yield sample("powers of two", (8, 4, 2, 16, 32))
    as_gpt_oss = {"interleaved": True, "transposed": True, "limit": 1.0, "alpha": 1.702, "up_offset": 1.0}
    yield sample("GPT-OSS's gate, odd sizes", (9, 5, 3, 19, 11), gate_up_bias=randn(5, 22), **as_gpt_oss)
    x, gate_up, down, indices, weights = _experts(device, dtype, 7, 6, 2, 12, 8)
    yield Sample((x, gate_up, down, indices // 3 * 3, weights.float()), why="experts without tokens, float32 weights")
    options = {"activation": "gelu_tanh", "down_bias": randn(6, 12)}
    yield Sample((x, gate_up, down, indices.clamp(min=5), weights), options, why="one expert has all")
    yield Sample((x, gate_up[:4], down[:4], indices.clamp(max=4).int(), weights), why="pairs of no expert, int32")
    strided = [t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in (x, gate_up, down, indices, weights)]
    yield Sample(tuple(strided), why="everything strided")
    yield sample("a relu", (5, 4, 2, 16, 16), activation="relu")
    yield sample("no tokens", (0, 4, 2, 16, 32))


def moe_experts_resized(rows: int, device: torch.device, dtype: torch.dtype) -> Sample:
    return Sample(_experts(device, dtype, rows, 4, 2, 24, 16), why="resized")


def moe_experts_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for T, E, K, H, F in [(16384, 128, 8, 2048, 768), (16384, 32, 4, 2880, 2880)]:
        yield Sample(_experts(device, dtype, T, E, K, H, F), why=f"{T}x{H}x{F}, {K} of {E} experts")


def moe_experts_cost(
    input: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor, **options: Any
) -> Cost:
    flops = 2 * indices.numel() * (gate_up[0].numel() + down[0].numel())
    matrices = (gate_up.numel() + down.numel()) * input.element_size()
    tokens, width = input.numel() * input.element_size(), gate_up[0].numel() // input.shape[1]
    kept = indices.numel() * width * input.element_size()
    return Cost(2 * tokens + matrices + kept, 5 * tokens + 3 * matrices + 2 * kept, flops, 3 * flops)


@public_op(
    reference=moe_experts_reference,
    differentiable=("input", "gate_up", "down", "weights", "gate_up_bias", "down_bias"),
    kernel_ops=(moe_experts_up_fwd, moe_experts_up_bwd, moe_experts_down_fwd, moe_experts_down_bwd),
    samples=moe_experts_samples,
    resized=moe_experts_resized,
    workloads=moe_experts_workloads,
    cost=moe_experts_cost,
    patterns=EXPERTS,
    choices=(
        "the products are those of grouped_linear; the gathered tokens and the experts' outputs are not kept, which "
        "gathers the tokens and the outputs' gradients once more in the backward pass",
    ),
)
def moe_experts(
    input: Tensor,
    gate_up: Tensor,
    down: Tensor,
    indices: Tensor,
    weights: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    interleaved: bool = False,
    transposed: bool = False,
    limit: float = 0.0,
    alpha: float = 1.0,
    up_offset: float = 0.0,
) -> Tensor:
    """The experts of a mixture: the weighted sum of the outputs of the K experts of each token.

    An expert is a gated unit between two linear layers. Nothing waits for the device, and how tokens are split over the
    experts changes no graph. Experts whose weights want no gradient cost none. Under autocast it runs in autocast's
    dtype.

    Args:
        input: Tokens `[T, H]`, float32, float16 or bfloat16, any strides.
        gate_up: The first layers `[E, 2F, H]`, gates then ups, dtype of `input`; `[E, H, 2F]` where `transposed`.
        down: The second layers `[E, H, F]`, dtype of `input`; `[E, F, H]` where `transposed`.
        indices: Each token's experts `[T, K]`, int64 or int32. E is none: the expert of another process.
        weights: Their weights `[T, K]`, float32 or the dtype of `input`, which holds the product of a weight and what
            the gated unit makes.
        gate_up_bias: `[E, 2F]`, dtype of `input`, laid out as the first layers.
        down_bias: `[E, H]`, dtype of `input`. It is multiplied by the weight too.
        activation: "none", "relu", "relu_squared", "gelu", "gelu_tanh" or "silu".
        interleaved: Gates and ups take turns, instead of gates then ups.
        transposed: The layout of both weights.
        limit: Gates are at most this and ups within plus and minus it; 0 is off.
        alpha: The activation f becomes `f(alpha * gate) / alpha`: of SiLU, `gate * sigmoid(alpha * gate)`.
        up_offset: What is added to ups, after the limit.

    Returns:
        `[T, H]`, contiguous, in the dtype of `input`.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape, a device or an option does not fit.
        IndexError: On the CPU, an index is neither an expert nor E. On a GPU it counts as none.

    Sources: Shazeer et al., 2017, https://arxiv.org/abs/1701.06538; GPT-OSS, https://arxiv.org/abs/2508.10925.
    """
    dtype = autocast_dtype(input.device)
    if dtype is not None:
        input, gate_up, down = input.to(dtype), gate_up.to(dtype), down.to(dtype)
        gate_up_bias, down_bias = (b if b is None else b.to(dtype) for b in (gate_up_bias, down_bias))
        weights = weights if weights.dtype == torch.float32 else weights.to(dtype)
    check_tokens(input)
    _check_matrices(input, gate_up, down, transposed)
    check_indices(indices, input)
    check_weights(weights, indices, "indices", input, "input")
    E, width = gate_up.shape[0], gate_up.shape[2 if transposed else 1]
    for name, bias, size in (("gate_up_bias", gate_up_bias, width), ("down_bias", down_bias, input.shape[1])):
        if bias is not None:
            check_shape(name, bias, (E, size), "one for each expert's output")
            check_same(name, bias, "input", input, dtype=True)
    check_option("activation", activation, ACTIVATIONS)
    check_switch("limit", limit)
    check_positive("alpha", alpha)
    check_finite("up_offset", up_offset)
    rows, order, positions, offsets = moe_experts_up_fwd(input, gate_up, indices, transposed)
    options = activation, interleaved, transposed, limit, alpha, up_offset
    return moe_experts_down_fwd(
        rows, gate_up_bias, down, down_bias, weights, indices, order, positions, offsets, *options
    )


def _check_matrices(input: Tensor, gate_up: Tensor, down: Tensor, transposed: bool) -> None:
    H = input.shape[1]
    for name, weight in (("gate_up", gate_up), ("down", down)):
        check_same(name, weight, "input", input, dtype=True)
    rows, columns = (2, 1) if transposed else (1, 2)
    if gate_up.dim() != 3 or gate_up.shape[columns] != H or gate_up.shape[rows] % 2 or gate_up.shape[0] == 0:
        layout = f"[E, {H}, 2F]" if transposed else f"[E, 2F, {H}]"
        raise ValueError(f"gate_up: expected shape {layout} to fit input, got {tuple(gate_up.shape)}")
    E, F = gate_up.shape[0], gate_up.shape[rows] // 2
    check_shape("down", down, (E, F, H) if transposed else (E, H, F), "to fit gate_up")
