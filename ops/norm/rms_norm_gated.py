r"""Root mean square normalization with a gate: the norm at the end of a layer of linear attention or of Mamba-2.

Sources: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, https://arxiv.org/abs/1910.07467. The norm
before the gate is Gated DeltaNet's: Yang et al., 2024, https://arxiv.org/abs/2412.06464; the gate before the norm
Mamba-2's: Dao and Gu, 2024, https://arxiv.org/abs/2405.21060; the sigmoid Kimi Linear's, 2025,
https://arxiv.org/abs/2510.26692.

Forward, for each group of N values of a row, with f the activation and a = f(gate):

    h = x                         (norm before the gate)     or   x * a   (gate before the norm)
    n = h * rstd                  with rstd = 1 / sqrt(ms) and ms = mean(h^2) + eps
    y = n * w * a                                            or   n * w

Backward, given dy, with g = dy * a where the norm comes first and g = dy where the gate does:

    dh    = rstd * (g * w - h * mean(g * w * h) / ms)
    dx    = dh                                               or   dh * a
    dgate = dy * n * w * f'(gate)                            or   dh * x * f'(gate)
    dw    = sum over rows of g * n

All in float32; h and a are computed again, so that x, gate and ms are what is kept. In a group of one value the two
terms of dh cancel to eps: dh = rstd * g * w * eps / ms.

A program has a group of several rows in registers. Each program sums the weight's gradient in float32 over its own
rows, and the programs' sums are added in a fixed order: no atomics. Wider groups go through plain PyTorch: past 8,192
columns forward, and backward past 16 KiB, or half of that where Triton cannot read 16 bytes at a time.
"""

from collections.abc import Iterator
from functools import partial

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.activations import GATES, activate, activate_with_grad, activation_with_grad
from llmk.ops.common.activations import activation as activated
from llmk.ops.common.row_plan import RowKind, RowPlan
from llmk.ops.common.rows import contiguous, row_starts, rows_ahead, strided_rows, strided_rows_aligned
from llmk.ops.common.samples import normal_resized, normal_workloads
from llmk.ops.common.sums import sum_partials
from llmk.ops.norm._patterns import RMS_NORM_GATED
from llmk.registry import (
    Cost,
    KernelOp,
    Sample,
    cdiv,
    check_like,
    check_not_negative,
    check_option,
    check_parameter,
    check_rows,
    empty,
    jit,
    max_warps,
    no_gradient,
    public_op,
    split_rows,
    wrap_triton,
)


def rms_norm_gated_reference(
    input: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    activation: str = "silu",
    norm_before_gate: bool = True,
    group_size: int = 0,
) -> Tensor:
    a = torch.nn.functional.silu(gate) if activation == "silu" else torch.sigmoid(gate)
    h = input if norm_before_gate else input * a
    size = group_size or input.shape[-1]
    n = torch.nn.functional.rms_norm(h.unflatten(-1, (-1, size)), (size,), None, eps).flatten(-2)
    y = n if weight is None else n * weight
    return y * a if norm_before_gate else y


@jit
def _load(ptr, starts, cols, mask):
    return tl.load(ptr + starts + cols, mask=mask, other=0.0).to(tl.float32)


@jit
def _weight(w_ptr, cols, N):
    """A block of the weight; 1 where there is none."""
    if w_ptr is None:
        w = tl.full(cols.shape, 1.0, tl.float32)
    else:
        w = tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    return w


@jit
def _normalized(x, z, ACTIVATION: tl.constexpr, NORM_FIRST: tl.constexpr):
    """Return the values that are normalized, and the factor of the normalized ones."""
    a = activate(z, ACTIVATION)
    if NORM_FIRST:
        h, factor = x, a
    else:
        h, factor = x * a, tl.full(x.shape, 1.0, tl.float32)
    return h, factor


@jit
def rms_norm_gated_kernel(
    x_ptr, z_ptr, w_ptr, y_ptr, ms_ptr, M, N,
    x_stride, x_inner, x_inner_stride, z_stride, z_inner, z_inner_stride, eps,
    ACTIVATION: tl.constexpr, NORM_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    eps = tl.cast(eps, tl.float32)
    group, groups = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    there = (rows < M)[:, None]
    x_ptr += group * N
    z_ptr += group * N
    y_ptr += group * N
    if w_ptr is not None:
        w_ptr += group * N
    x_starts = row_starts(rows, x_stride, x_inner, x_inner_stride)[:, None]
    z_starts = row_starts(rows, z_stride, z_inner, z_inner_stride)[:, None]
    y_starts = (rows * groups * N)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = there & (cols < N)
    x, z = _load(x_ptr, x_starts, cols, mask), _load(z_ptr, z_starts, cols, mask)
    h, factor = _normalized(x, z, ACTIVATION, NORM_FIRST)
    ms = tl.sum(h * h, axis=1) / N + eps
    y = h * tl.div_rn(1.0, tl.sqrt_rn(ms))[:, None] * _weight(w_ptr, cols, N) * factor
    tl.store(y_ptr + y_starts + cols, y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(ms_ptr + rows * groups + group, ms, mask=rows < M)


@jit
def _through_gate(x, z, dy, ACTIVATION: tl.constexpr, NORM_FIRST: tl.constexpr):
    """a, f'(gate), what is normalized, and the gradient of the normalized times w."""
    a, slope = activate_with_grad(z, ACTIVATION)
    if NORM_FIRST:
        h, g = x, dy * a
    else:
        h, g = x * a, dy
    return a, slope, h, g


@jit
def _gradients(x, dy, w, a, slope, h, g, rstd, mean, unit, NORM_FIRST: tl.constexpr, ONE: tl.constexpr):
    """dx, dgate and the row's part of dw, from mean = mean(g * w * h) / ms and unit = eps / ms."""
    n = h * rstd
    dh = rstd * (g * w) * unit if ONE else rstd * (g * w - h * mean)
    if NORM_FIRST:
        dx, dz = dh, dy * n * w * slope
    else:
        dx, dz = dh * a, dh * x * slope
    return dx, dz, g * n


@jit
def rms_norm_gated_backward_kernel(
    dy_ptr, x_ptr, z_ptr, w_ptr, ms_ptr, dx_ptr, dz_ptr, dw_ptr, M, N,
    dy_stride, dy_inner, dy_inner_stride, x_stride, x_inner, x_inner_stride, z_stride, z_inner, z_inner_stride, eps,
    ACTIVATION: tl.constexpr, NORM_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    eps = tl.cast(eps, tl.float32)
    ONE: tl.constexpr = BLOCK_N == 1
    program, group, groups = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    dy_ptr += group * N
    x_ptr += group * N
    z_ptr += group * N
    dx_ptr += group * N
    dz_ptr += group * N
    if w_ptr is not None:
        w_ptr += group * N
    if dw_ptr is not None:
        dw_ptr += (program * groups + group) * N
    column = tl.arange(0, BLOCK_N)
    cols = column[None, :]
    dw = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    # Persistent: the next rows are prefetched while these are computed, and dw stays in registers where a row does.
    for first in tl.range(program * BLOCK_M, M, tl.num_programs(0) * BLOCK_M, num_stages=NUM_STAGES):
        rows = first + tl.arange(0, BLOCK_M)
        there = (rows < M)[:, None]
        dy_starts = row_starts(rows, dy_stride, dy_inner, dy_inner_stride)[:, None]
        x_starts = row_starts(rows, x_stride, x_inner, x_inner_stride)[:, None]
        z_starts = row_starts(rows, z_stride, z_inner, z_inner_stride)[:, None]
        out_starts = (rows * groups * N)[:, None]
        ms = tl.load(ms_ptr + rows * groups + group, mask=rows < M, other=1.0)
        rstd = tl.div_rn(1.0, tl.sqrt_rn(ms))[:, None]
        unit = tl.div_rn(eps, ms)[:, None]
        mask = there & (cols < N)
        x, z = _load(x_ptr, x_starts, cols, mask), _load(z_ptr, z_starts, cols, mask)
        dy = _load(dy_ptr, dy_starts, cols, mask)
        # In one dimension: what is read or written as a row of two has a layout of its own, in which Triton then
        # computes much of a tile a second time. Again in each turn, as it would take registers between them.
        w = _weight(w_ptr, column, N)[None, :]
        a, slope, h, g = _through_gate(x, z, dy, ACTIVATION, NORM_FIRST)
        mean = tl.div_rn(tl.sum(g * w * h, axis=1) / N, ms)[:, None]
        dx, dz, part = _gradients(x, dy, w, a, slope, h, g, rstd, mean, unit, NORM_FIRST, ONE)
        dw += part
        tl.store(dx_ptr + out_starts + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        tl.store(dz_ptr + out_starts + cols, dz.to(dz_ptr.dtype.element_ty), mask=mask)
    if dw_ptr is not None:
        tl.store(dw_ptr + column, tl.sum(dw, axis=0), mask=column < N)


FORWARD = RowKind({2048: (1, 4), 4096: (1, 8), 8192: (1, 16)})
"""The program holds x and the gate."""

BACKWARD = RowKind({2048: (1, 8), 4096: (1, 16), 8192: (1, 16)}, row_bytes=16384, resident=4096)
"""It has dy and the weight's gradient there too."""


def _backward_plan(x: Tensor, weight: Tensor | None, N: int) -> RowPlan:
    # H100, bf16, of the copy bandwidth: 0.91 at 8192x8192, 0.92 at 16384x4096 and 524288x128, 0.89 at 8192x5120; one
    # stage instead of three 0.77, 0.74, 0.81 and 0.63. AMD's prefetch was not tried.
    stages = 1
    if max_warps() == 32:
        tile = BACKWARD.tile(N)
        of_weight = 0 if weight is None else weight.element_size()
        stages += rows_ahead(tile["BLOCK_N"] * (3 * tile["BLOCK_M"] * x.element_size() + of_weight), x.device)
    return RowPlan.of(BACKWARD, x.numel() // N, N, x.device, NUM_STAGES=stages)


def _rms_norm_gated_fwd(
    input: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    activation: str,
    norm_before_gate: bool,
    group_size: int,
) -> tuple[Tensor, Tensor]:
    x, x_strides = strided_rows(input)
    z, z_strides = strided_rows(gate)
    width, N = x.shape[-1], group_size
    if not FORWARD.holds(N, x.dtype):
        return _forward_plain(input, gate, weight, eps, activation, norm_before_gate, group_size)
    M, groups = x.numel() // width, width // N
    y = empty(input.shape, input.dtype, input.device)
    ms = empty((*input.shape[:-1], groups), torch.float32, input.device)
    tile = FORWARD.tile(N)
    wrap_triton(rms_norm_gated_kernel)[(cdiv(M, tile["BLOCK_M"]), groups)](
        x, z, contiguous(weight), y, ms, M, N, *x_strides, *z_strides, eps,
        ACTIVATION=activation, NORM_FIRST=norm_before_gate, **tile,
    )  # fmt: skip
    return y, ms


def _rms_norm_gated_bwd(
    grad: Tensor,
    input: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    ms: Tensor,
    eps: float,
    activation: str,
    norm_before_gate: bool,
    group_size: int,
    need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dy, dy_strides = strided_rows(grad)
    x, x_strides = strided_rows(input)
    z, z_strides = strided_rows(gate)
    w, width, N = contiguous(weight), x.shape[-1], group_size
    rows = (dy, dy_strides), (x, x_strides), (z, z_strides)
    if not BACKWARD.holds(N, x.dtype, lambda: strided_rows_aligned(N, *rows)):
        options = eps, activation, norm_before_gate, group_size, need_weight
        return _backward_plain(grad, input, gate, weight, ms, *options)
    M, groups = x.numel() // width, width // N
    dx = empty(input.shape, input.dtype, input.device)
    dz = empty(gate.shape, gate.dtype, gate.device)
    plan = _backward_plan(x, w, N)
    programs = cdiv(plan.programs, groups)
    partials = empty((programs, width), torch.float32, x.device) if need_weight else None
    wrap_triton(rms_norm_gated_backward_kernel)[(programs, groups)](
        dy, x, z, w, ms.contiguous(), dx, dz, partials, M, N, *dy_strides, *x_strides, *z_strides, eps,
        ACTIVATION=activation, NORM_FIRST=norm_before_gate, **plan.tile,
    )  # fmt: skip
    if weight is None or partials is None:
        return dx, dz, no_gradient(grad)
    return dx, dz, sum_partials(partials, weight.dtype)


def _forward_plain(
    input: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    activation: str,
    norm_before_gate: bool,
    group_size: int,
) -> tuple[Tensor, Tensor]:
    x, a = input.float(), activated(gate.float(), activation)
    h = (x if norm_before_gate else x * a).unflatten(-1, (-1, group_size))
    ms = h.square().mean(-1, keepdim=True) + eps
    y = (h * torch.rsqrt(ms)).flatten(-2)
    y = y if weight is None else y * weight.float()
    y = (y * a if norm_before_gate else y).to(input.dtype).contiguous()
    return y, ms.squeeze(-1).contiguous()


def _backward_plain(
    grad: Tensor,
    input: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    ms: Tensor,
    eps: float,
    activation: str,
    norm_before_gate: bool,
    group_size: int,
    need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dy, x, ms = grad.float(), input.float(), ms.unsqueeze(-1)
    a, slope = activation_with_grad(gate.float(), activation)
    h, g = (x, dy * a) if norm_before_gate else (x * a, dy)
    gw = g if weight is None else g * weight.float()
    rstd = torch.rsqrt(ms)
    grouped_h, grouped_gw = (t.unflatten(-1, (-1, group_size)) for t in (h, gw))
    mean = (grouped_gw * grouped_h).mean(-1, keepdim=True) / ms
    dh = rstd * (grouped_gw * (eps / ms) if group_size == 1 else grouped_gw - grouped_h * mean)
    n, dh = (grouped_h * rstd).flatten(-2), dh.flatten(-2)
    if norm_before_gate:
        dx, dz = dh, dy * n * slope if weight is None else dy * n * weight.float() * slope
    else:
        dx, dz = dh * a, dh * x * slope
    if weight is None or not need_weight:
        dw = no_gradient(grad)
    else:
        dw = ((g * n).flatten(0, -2).sum(0) if n.dim() > 1 else g * n).to(weight.dtype)
    return dx.to(input.dtype).contiguous(), dz.to(gate.dtype).contiguous(), dw


rms_norm_gated_fwd = KernelOp(_rms_norm_gated_fwd, launch_cached=True)
rms_norm_gated_bwd = KernelOp(_rms_norm_gated_bwd, launch_cached=True)
rms_norm_gated_fwd.register_kernel("cpu")(_forward_plain)
rms_norm_gated_bwd.register_kernel("cpu")(_backward_plain)


@rms_norm_gated_fwd.register_fake
def _(input, group_size):
    groups = input.shape[-1] // group_size
    return input.new_empty(input.shape), input.new_empty((*input.shape[:-1], groups), dtype=torch.float32)


rms_norm_gated_fwd.register_backward(rms_norm_gated_bwd, outputs=("output", "ms"))
rms_norm_gated_fwd.register_sharding(split_rows(outputs=2, inputs=2, parameters=1))


def rms_norm_gated_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    randn = partial(torch.randn, device=device, dtype=dtype)
    gate_first = {"norm_before_gate": False}
    yield Sample((randn(4, 16), randn(4, 16), randn(16)), why="powers of two")
    yield Sample((randn(4, 16), randn(4, 16), randn(16)), gate_first, why="the gate first")
    yield Sample((randn(2, 3, 37), randn(2, 3, 37), randn(37), 1e-5), {"activation": "sigmoid"}, why="a sigmoid")
    yield Sample((randn(5, 40), randn(5, 40)), why="no weight")
    grouped = gate_first | {"group_size": 8}
    yield Sample((randn(5, 40), randn(5, 40), randn(40)), grouped, why="the gate first, groups of eight")
    yield Sample((randn(2, 3, 30), randn(2, 3, 30), randn(30)), {"group_size": 15}, why="groups of odd width")
    yield Sample((randn(33), randn(33), randn(33)), gate_first, why="one dimension, the gate first")
    yield Sample((randn(7, 1), randn(7, 1), randn(1)), why="one column")
    yield Sample((randn(7, 3), randn(7, 3), randn(3)), grouped | {"group_size": 1}, why="groups of one")
    yield Sample((randn(0, 16), randn(0, 16), randn(16)), why="no rows")
    yield Sample((randn(24, 6).t(), randn(6, 80)[:, 16:40], randn(24)), why="columns strided, a slice of a wider row")
    packed = randn(2, 3, 80)[..., 16:48].view(2, 3, 4, 8)
    yield Sample((packed, randn(2, 3, 4, 20)[..., :8], randn(8)), why="rows at two distances")
    yield Sample((randn(5, 16), randn(1, 16).expand(5, 16), randn(16)), gate_first, why="gate expanded")
    yield Sample((randn(300, 24), randn(300, 24), randn(24)), why="more rows than programs")
    yield Sample((1e4 * randn(3, 64), randn(3, 64), randn(64)), why="large values")
    yield Sample((randn(3, 10_003), randn(3, 10_003), randn(10_003)), why="10,003 columns")
    yield Sample((randn(3, 10_003), randn(3, 10_003), randn(10_003)), gate_first, why="10,003 columns, the gate first")


@public_op(
    reference=rms_norm_gated_reference,
    differentiable=("input", "gate", "weight"),
    kernel_ops=(rms_norm_gated_fwd, rms_norm_gated_bwd),
    samples=rms_norm_gated_samples,
    resized=normal_resized(lambda rows: ((rows, 48), (rows, 48), (48,))),
    workloads=normal_workloads([(524288, 128), (16384, 4096), (8192, 8192)], lambda M, N: ((M, N), (M, N), (N,))),
    cost=Cost.passes(3, 8),
    patterns=RMS_NORM_GATED,
)
def rms_norm_gated(
    input: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    activation: str = "silu",
    norm_before_gate: bool = True,
    group_size: int = 0,
) -> Tensor:
    """Root mean square normalization with a gate: `rms_norm(input) * weight * activation(gate)`.

    With `norm_before_gate=False` it is `rms_norm(input * activation(gate)) * weight`. Statistics, the gate's
    activation and all products are float32, with one rounding. Kernels hold groups of up to 16 KiB, of half as much
    where they are not aligned to 16 elements; wider ones go through plain PyTorch.

    Args:
        input: `[..., N]`, float32, float16 or bfloat16, any strides.
        gate: Shape and dtype of `input`, any strides.
        weight: `[N]`, any of these dtypes; None for no scale.
        eps: Added to the mean square, at least 0.
        activation: "silu" or "sigmoid".
        norm_before_gate: True as in Gated DeltaNet, Qwen3-Next and Kimi Linear; False as in Mamba-2.
        group_size: The last axis is normalized in groups of so many neighbours, a divisor of N; 0 for all of it.

    Returns:
        `[..., N]`, contiguous, in the dtype of `input`.

    Raises:
        TypeError: A tensor is not float32, float16 or bfloat16, or `gate` has not the dtype of `input`.
        ValueError: `input` has no axis, its last one is empty, `gate` has not its shape, `weight` is not `[N]`, they
            are not on one device, `activation` is neither, `group_size` does not divide N, or `eps` is out of range.

    Sources: Yang et al., 2024, https://arxiv.org/abs/2412.06464; Dao and Gu, 2024, https://arxiv.org/abs/2405.21060.
    """
    check_rows("input", input, "N")
    check_like("gate", gate, "input", input)
    N = input.shape[-1]
    check_parameter("weight", weight, input.shape[-1:], "the last axis of input", "input", input)
    check_not_negative("eps", eps)
    check_option("activation", activation, GATES)
    if group_size < 0 or (group_size and N % group_size):
        raise ValueError(f"group_size: expected 0 or a divisor of the last axis of input, {N}, got {group_size}")
    y, _ = rms_norm_gated_fwd(input, gate, weight, eps, activation, norm_before_gate, group_size or N)
    return y
