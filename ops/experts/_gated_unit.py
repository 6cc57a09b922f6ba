"""The gated unit between the two products of experts, with the routing weight of each row.

Of a row of the first product, gate g and up u, with limit l, offset o and scale a (1 unless given):

    g = min(g + b_g, l)        u = clamp(u + b_u, -l, l)         where there are a bias and a limit
    f_a(g) = f(a g) / a        the activation; for SiLU g * sigmoid(a g)
    h = f_a(g) * (u + o)
    hidden = w * h             w the routing weight, which the second product then carries through

Backward, of dh = dhidden / w, the gradient of the row's unweighted h:

    dw = h . dh + c            c what the second product's bias adds
    dg = w * dh * (u + o) * f'(a g)      0 where the limit cut, as du
    du = w * dh * f_a(g)

Gate and up lie one after the other, or in turns.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.activations import (
    activate,
    activate_with_grad,
    activation,
    activation_with_grad,
    times_slope,
    times_slope_reference,
)
from llmk.ops.common.math import everywhere
from llmk.ops.common.rows import contiguous
from llmk.registry import empty, jit, next_power_of_2, wrap_triton


@dataclass(frozen=True)
class Gate:
    """The gated unit's options, as `moe_experts` takes them; a limit of 0 is none."""

    activation: str
    interleaved: bool
    limit: float
    alpha: float
    up_offset: float

    def numbers(self) -> tuple[float, float, float]:
        return self.limit, self.alpha, self.up_offset

    def options(self, F: int) -> dict[str, Any]:
        """Return flags, and the widest of three blocks that leaves no part of itself idle, else the widest."""
        flags = {"ACTIVATION": self.activation, "LIMITED": self.limit > 0, "INTERLEAVED": self.interleaved}
        fitting = [size for size in (1024, 512, 256) if F % size == 0]
        block = fitting[0] if fitting else min(1024, next_power_of_2(max(F, 1)))
        return flags | {"BLOCK_F": block, "num_warps": max(1, min(4, block // 128))}


@jit
def _load_two(ptr, start, F, live, INTERLEAVED: tl.constexpr, BLOCK_F: tl.constexpr):
    """Load the gates and ups of a row from column `start` on, in float32."""
    if INTERLEAVED:
        cols = 2 * start + tl.arange(0, 2 * BLOCK_F)
        both = tl.load(ptr + cols, mask=(cols < 2 * F) & everywhere(live, cols), other=0.0).to(tl.float32)
        gate, up = tl.split(tl.reshape(both, (BLOCK_F, 2)))
    else:
        cols = start + tl.arange(0, BLOCK_F)
        gate = tl.load(ptr + cols, mask=(cols < F) & everywhere(live, cols), other=0.0).to(tl.float32)
        up = tl.load(ptr + F + cols, mask=(cols < F) & everywhere(live, cols), other=0.0).to(tl.float32)
    return gate, up


@jit
def _store_two(ptr, gate, up, start, F, INTERLEAVED: tl.constexpr, BLOCK_F: tl.constexpr):
    if INTERLEAVED:
        cols = 2 * start + tl.arange(0, 2 * BLOCK_F)
        both = tl.reshape(tl.join(gate, up), (2 * BLOCK_F,))
        tl.store(ptr + cols, both.to(ptr.dtype.element_ty), mask=cols < 2 * F)
    else:
        cols = start + tl.arange(0, BLOCK_F)
        tl.store(ptr + cols, gate.to(ptr.dtype.element_ty), mask=cols < F)
        tl.store(ptr + F + cols, up.to(ptr.dtype.element_ty), mask=cols < F)


@jit
def _gate_and_up(ptr, bias_ptr, start, F, live, INTERLEAVED: tl.constexpr, BLOCK_F: tl.constexpr):
    gate, up = _load_two(ptr, start, F, live, INTERLEAVED, BLOCK_F)
    if bias_ptr is not None:
        gate_bias, up_bias = _load_two(bias_ptr, start, F, live, INTERLEAVED, BLOCK_F)
        gate, up = gate + gate_bias, up + up_bias
    return gate, up


@jit
def _row_of(row, offsets_ptr, order_ptr, indices_ptr, E):
    """A row's pair, whether it has an expert, and which, 0 if none."""
    live = row < tl.load(offsets_ptr + E - 1)
    pair = tl.load(order_ptr + row)
    return pair, live, tl.where(live, tl.load(indices_ptr + pair), 0).to(tl.int64)


@jit
def gated_rows_kernel(
    rows_ptr, bias_ptr, weights_ptr, offsets_ptr, order_ptr, indices_ptr, hidden_ptr, E, F, limit, alpha, up_offset,
    ACTIVATION: tl.constexpr, LIMITED: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    limit, alpha, up_offset = tl.cast(limit, tl.float32), tl.cast(alpha, tl.float32), tl.cast(up_offset, tl.float32)
    row = tl.program_id(0).to(tl.int64)
    pair, live, expert = _row_of(row, offsets_ptr, order_ptr, indices_ptr, E)
    if bias_ptr is not None:  # here: Triton 3.6 returns no None from a function
        bias_ptr += expert * (2 * F)
    weight = tl.load(weights_ptr + pair).to(tl.float32)
    for start in range(0, F, BLOCK_F):
        gate, up = _gate_and_up(rows_ptr + row * (2 * F), bias_ptr, start, F, live, INTERLEAVED, BLOCK_F)
        if LIMITED:
            gate = tl.where(gate > limit, limit, gate)
            up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        hidden = weight * (activate(alpha * gate, ACTIVATION) / alpha * (up + up_offset))
        cols = start + tl.arange(0, BLOCK_F)
        hidden = tl.where(live, hidden, 0.0).to(hidden_ptr.dtype.element_ty)
        tl.store(hidden_ptr + row * F + cols, hidden, mask=cols < F)


@jit
def gated_rows_backward_kernel(
    dh_ptr, rows_ptr, bias_ptr, weights_ptr, extra_ptr, offsets_ptr, order_ptr, indices_ptr,
    hidden_ptr, drows_ptr, dweights_ptr, E, F, limit, alpha, up_offset,
    ACTIVATION: tl.constexpr, LIMITED: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    limit, alpha, up_offset = tl.cast(limit, tl.float32), tl.cast(alpha, tl.float32), tl.cast(up_offset, tl.float32)
    row = tl.program_id(0).to(tl.int64)
    pair, live, expert = _row_of(row, offsets_ptr, order_ptr, indices_ptr, E)
    if bias_ptr is not None:  # here: Triton 3.6 returns no None from a function
        bias_ptr += expert * (2 * F)
    weight = tl.load(weights_ptr + pair).to(tl.float32)
    weight = tl.where(live, weight, 0.0)
    total = tl.zeros((BLOCK_F,), dtype=tl.float32)
    for start in range(0, F, BLOCK_F):
        gate, up = _gate_and_up(rows_ptr + row * (2 * F), bias_ptr, start, F, live, INTERLEAVED, BLOCK_F)
        cols = start + tl.arange(0, BLOCK_F)
        dh = tl.load(dh_ptr + row * F + cols, mask=(cols < F) & everywhere(live, cols), other=0.0).to(tl.float32)
        gate_within, up_within = gate <= limit, tl.abs(up) <= limit
        if LIMITED:
            gate = tl.where(gate > limit, limit, gate)
            up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        activated, derivative = activate_with_grad(alpha * gate, ACTIVATION)
        activated, up = activated / alpha, up + up_offset
        total += tl.where(cols < F, activated * up * dh, 0.0)
        if hidden_ptr is not None:
            hidden = weight * (activated * up)
            tl.store(hidden_ptr + row * F + cols, hidden.to(hidden_ptr.dtype.element_ty), mask=cols < F)
        dgate, dup = times_slope(dh * weight * up, derivative, ACTIVATION), dh * weight * activated
        if LIMITED:  # last: 0 times an infinite gate is NaN
            dgate, dup = tl.where(gate_within, dgate, 0.0), tl.where(up_within, dup, 0.0)
        _store_two(drows_ptr + row * (2 * F), dgate, dup, start, F, INTERLEAVED, BLOCK_F)
    if dweights_ptr is not None:
        dweight = tl.sum(total, axis=0)
        if extra_ptr is not None:
            dweight += tl.load(extra_ptr + pair)
        tl.store(dweights_ptr + pair, tl.where(live, dweight, 0.0).to(dweights_ptr.dtype.element_ty))


def gated_rows(
    rows: Tensor, bias: Tensor | None, weights: Tensor, indices: Tensor, order: Tensor, offsets: Tensor, gate: Gate
) -> Tensor:
    """`hidden [N, F]` of `rows [N, 2F]`; zeros in rows that no expert has."""
    (N, F), E = (rows.shape[0], rows.shape[1] // 2), offsets.shape[0]
    hidden = empty((N, F), rows.dtype, rows.device)
    inputs, pairs = (rows.contiguous(), contiguous(bias), weights.contiguous()), (offsets, order, indices.contiguous())
    wrap_triton(gated_rows_kernel)[(N,)](*inputs, *pairs, hidden, E, F, *gate.numbers(), **gate.options(F))
    return hidden


def gated_rows_backward(
    dh: Tensor,
    rows: Tensor,
    bias: Tensor | None,
    weights: Tensor,
    extra: Tensor | None,
    indices: Tensor,
    order: Tensor,
    offsets: Tensor,
    gate: Gate,
    *,
    need_hidden: bool,
    need_weights: bool,
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """`hidden` where it is needed, `drows`, and the gradient of `weights` where that is, to which `extra` adds."""
    (N, F), E = dh.shape, offsets.shape[0]
    hidden = empty((N, F), rows.dtype, rows.device) if need_hidden else None
    drows = empty((N, 2 * F), rows.dtype, rows.device)
    dweights = empty(tuple(weights.shape), weights.dtype, rows.device) if need_weights else None
    inputs = dh.contiguous(), rows.contiguous(), contiguous(bias), weights.contiguous(), extra
    pairs = offsets, order, indices.contiguous()
    wrap_triton(gated_rows_backward_kernel)[(N,)](
        *inputs, *pairs, hidden, drows, dweights, E, F, *gate.numbers(), **gate.options(F)
    )
    return hidden, drows, dweights


def split(rows: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of gate and up, in plain PyTorch."""
    if interleaved:
        return rows[..., ::2], rows[..., 1::2]
    gate, up = rows.chunk(2, dim=-1)
    return gate, up


def _joined(gate: Tensor, up: Tensor, interleaved: bool) -> Tensor:
    return torch.stack([gate, up], dim=-1).flatten(-2) if interleaved else torch.cat([gate, up], dim=-1)


def gated_rows_cpu(rows: Tensor, weights: Tensor, gate: Gate) -> Tensor:
    """float32 `[N, F]` of rows that have their bias, float32 too; a weight for each row."""
    g, u = split(rows, gate.interleaved)
    if gate.limit > 0:
        g, u = g.clamp(max=gate.limit), u.clamp(-gate.limit, gate.limit)
    return weights.unsqueeze(1) * (activation(gate.alpha * g, gate.activation) / gate.alpha * (u + gate.up_offset))


def gated_rows_backward_cpu(dh: Tensor, rows: Tensor, weights: Tensor, gate: Gate) -> tuple[Tensor, Tensor, Tensor]:
    """float32 `hidden`, `drows` and a gradient for each row's weight."""
    g, u = split(rows, gate.interleaved)
    gate_within, up_within = g <= gate.limit, u.abs() <= gate.limit
    if gate.limit > 0:
        g, u = g.clamp(max=gate.limit), u.clamp(-gate.limit, gate.limit)
    activated, derivative = activation_with_grad(gate.alpha * g, gate.activation)
    activated, u = activated / gate.alpha, u + gate.up_offset
    h, weighted = activated * u, dh * weights.unsqueeze(1)
    dg, du = times_slope_reference(weighted * u, derivative, gate.activation), weighted * activated
    if gate.limit > 0:  # last: 0 times an infinite gate is NaN
        dg, du = torch.where(gate_within, dg, 0.0), torch.where(up_within, du, 0.0)
    return weights.unsqueeze(1) * h, _joined(dg, du, gate.interleaved), (h * dh).sum(1)
