r"""Layer normalization.

Source: Ba, Kiros and Hinton, "Layer Normalization", 2016, https://arxiv.org/abs/1607.06450.
Forward, for each row x of N values:

    mean = sum(x) / N, corrected by rest = sum(x - mean) / N where that is more than the rounding of x - mean
    var  = sum((x - mean)^2) / N + eps, less rest^2 where mean is not corrected yet
    rstd = 1 / sqrt(var)
    y    = (x - mean) * rstd * weight + bias

Backward, given dy, with c = x - mean and g = dy * weight - mean(dy * weight):

    dx      = rstd * (g - c * mean(g * c) / var)
    dweight = sum over rows of dy * c * rstd
    dbias   = sum over rows of dy

The corrected mean is the float nearest to the mean: a large common offset costs no more digits than it must, and a row
of equal values has variance zero. mean and var are kept for the backward pass: dividing by var costs one rounding where
rstd^2 would cost three, which shows where the terms of dx nearly cancel, in rows of few values. In a row of one value
they cancel for good: dx = 0.

A row is held in registers, read once in either direction. Backward, past 8,192 columns, each half of them has a program
of its own, which reads the other half too, for the row's sums: the second reading of a value finds it in L2. The
gradients of weight and bias are summed in float32 by each program over its own rows, then over the programs in a fixed
order: no atomics. Only gradients that are wanted are computed. Wider rows go through plain PyTorch: past 16,384
columns, and backward past 4,096 where Triton cannot read 16 bytes at a time.
"""

from collections.abc import Iterator
from functools import partial

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.row_plan import RowKind, RowPlan
from llmk.ops.common.rows import as_rows, contiguous, rows_ahead, rows_aligned
from llmk.ops.common.samples import normal_resized, normal_workloads
from llmk.ops.common.sums import sum_affine, sum_pair
from llmk.ops.norm._moments import affine_gradient, centered, known_rest
from llmk.ops.norm._patterns import LAYER_NORM
from llmk.registry import (
    REPLICATE,
    Cost,
    KernelOp,
    Sample,
    cdiv,
    check_not_negative,
    check_parameter,
    check_rows,
    empty,
    grid_cap,
    jit,
    no_gradient,
    num_programs,
    or_no_gradient,
    public_op,
    row_axes,
    wrap_triton,
)


def layer_norm_reference(
    input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    # PyTorch asks for one dtype.
    weight, bias = (None if t is None else t.to(input.dtype) for t in (weight, bias))
    return torch.nn.functional.layer_norm(input, input.shape[-1:], weight, bias, eps)


@jit
def layer_norm_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, stats_ptr, M, N, x_stride, eps, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    eps = tl.cast(eps, tl.float32)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=1) / N  # [BLOCK_M]
    c = tl.where(mask, x - mean[:, None], 0.0)
    rest, squares = sum_pair(c, c * c, 1)
    rest = known_rest(rest / N, squares / N)
    mean += rest
    c -= rest[:, None]  # from c, not from x: two copies of a wide row in registers take half of the time again
    var = tl.maximum(squares / N - rest * rest, 0.0) + eps
    y = c * tl.div_rn(1.0, tl.sqrt_rn(var))[:, None]
    if w_ptr is not None:
        y *= tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    if b_ptr is not None:
        y += tl.load(b_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + rows[:, None] * N + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(stats_ptr + rows, mean, mask=rows < M)
    tl.store(stats_ptr + M + rows, var, mask=rows < M)


@jit
def layer_norm_backward_kernel(
    dy_ptr,
    x_ptr,
    w_ptr,
    stats_ptr,
    dx_ptr,
    partial_ptr,
    M,
    N,
    dy_stride,
    x_stride,
    HAS_DW: tl.constexpr,
    HAS_DB: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_N)
    if w_ptr is not None:
        w = tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    dw = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    db = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    # Persistent: the next rows are prefetched while these are computed, and dw and db stay in registers.
    for start in tl.range(program * BLOCK_M, M, tl.num_programs(0) * BLOCK_M, num_stages=NUM_STAGES):
        rows = start + tl.arange(0, BLOCK_M)
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        dy = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if HAS_DB:
            db += dy
        if x_ptr is not None:
            x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
            mean = tl.load(stats_ptr + rows, mask=rows < M, other=0.0)
            var = tl.load(stats_ptr + M + rows, mask=rows < M, other=1.0)
            rstd = tl.div_rn(1.0, tl.sqrt_rn(var))[:, None]
            c = tl.where(mask, x - mean[:, None], 0.0)
            if HAS_DW:
                dw += dy * (c * rstd)
            if dx_ptr is not None:
                if w_ptr is not None:
                    dy *= w
                if BLOCK_N == 1:  # constant, unlike N: a branch in the loop would cost 50 registers
                    dx = dy * c  # zero, and NaN where PyTorch's is
                else:
                    if BLOCK_N <= 512:  # corrected like mean where the terms of dx nearly cancel: in short rows
                        total = tl.sum(dy, axis=1) / N
                        total += tl.sum(tl.where(mask, dy - total[:, None], 0.0), axis=1) / N
                        dot = tl.sum((dy - total[:, None]) * c, axis=1)
                    else:
                        total, dot = sum_pair(dy, dy * c, 1)
                        total /= N
                    dx = rstd * (dy - total[:, None] - c * tl.div_rn(dot / N, var)[:, None])
                tl.store(dx_ptr + rows[:, None] * N + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if HAS_DW or HAS_DB:
        partial_ptr += program * (HAS_DW + HAS_DB) * N + cols
    if HAS_DW:
        tl.store(partial_ptr, tl.sum(dw, axis=0), mask=cols < N)
    if HAS_DB:
        tl.store(partial_ptr + HAS_DW * N, tl.sum(db, axis=0), mask=cols < N)


# 32 elements a thread, for threads wait for each other three times a row. H200, bf16, times the floor: 1.09 at
# 32768x4096, with twice the warps 1.14; 1.18 and 1.32 at 8192x8192; 1.13 and 1.19 at 65536x1024; 1.33 at 4096x16384.
FORWARD = RowKind({2048: (1, 2), 4096: (1, 4), 8192: (1, 8), 16384: (1, 16)})
"""The program holds x."""

# rms_norm's: 16 elements a thread take 128 registers on sm_90, which two programs of 8 warps share, or four of 4.
# H200, bf16, times the floor: 1.10 at 32768x4096, 1.26 at 8192x4096; 1.13 at 65536x1024, where 8 warps gave 1.22.
BACKWARD = RowKind({1024: (2, 4), 2048: (2, 8), 4096: (1, 8), 8192: (1, 16)})
"""It holds x, dy, the weight and two gradients."""


@jit
def layer_norm_halves_backward_kernel(
    dy_ptr, x_ptr, w_ptr, stats_ptr, dx_ptr, partial_ptr, M, N, dy_stride, x_stride,
    HAS_DW: tl.constexpr, HAS_DB: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Make the gradients in one half of some rows. The other is read from L2, where its own program has it."""
    program, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = block * BLOCK_N + tl.arange(0, BLOCK_N)
    others = (1 - block) * BLOCK_N + tl.arange(0, BLOCK_N)
    if w_ptr is not None:
        w = tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK_N,), dtype=tl.float32)
    db = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for row in tl.range(program, M, tl.num_programs(0), num_stages=NUM_STAGES):
        dy = tl.load(dy_ptr + row * dy_stride + cols, mask=cols < N, other=0.0).to(tl.float32)
        if HAS_DB:
            db += dy
        if x_ptr is not None:
            x = tl.load(x_ptr + row * x_stride + cols, mask=cols < N, other=0.0).to(tl.float32)
            mean = tl.load(stats_ptr + row)
            var = tl.load(stats_ptr + M + row)
            rstd = tl.div_rn(1.0, tl.sqrt_rn(var))
            c = x - mean
            if HAS_DW:
                dw += dy * (c * rstd)
            if dx_ptr is not None:
                h = tl.load(dy_ptr + row * dy_stride + others, mask=others < N, other=0.0).to(tl.float32)
                if w_ptr is not None:
                    dy *= w
                    h *= tl.load(w_ptr + others, mask=others < N, other=0.0).to(tl.float32)
                e = tl.load(x_ptr + row * x_stride + others, mask=others < N, other=0.0).to(tl.float32) - mean
                total, dot = sum_pair(dy + h, dy * c + h * e, 0)  # dy and h are zero past the row's end
                dx = rstd * (dy - total / N - c * tl.div_rn(dot / N, var))
                tl.store(dx_ptr + row * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < N)
    if HAS_DW or HAS_DB:
        partial_ptr += program * (HAS_DW + HAS_DB) * N + cols
    if HAS_DW:
        tl.store(partial_ptr, dw, mask=cols < N)
    if HAS_DB:
        tl.store(partial_ptr + HAS_DW * N, db, mask=cols < N)


HALF = 8192
"""The largest half that does not spill."""


def _halves_plan(dy: Tensor, weight: Tensor | None) -> RowPlan | None:
    """Return the plan of pairs of programs; None where rows do not fit.

    As often as both halves of x and dy, and the weight's other one, fit into shared memory they are read ahead, up to
    twice. H200, bf16, 4096x16384, times the floor of forward and backward: 1.38; one row ahead 1.88, twice the warps
    1.56.
    """
    columns = 4 * dy.element_size() + (weight.element_size() if weight is not None else 0)
    ahead = rows_ahead(HALF * columns, dy.device)
    if ahead == 0:
        return None
    tile = {"BLOCK_N": HALF, "num_warps": 16, "NUM_STAGES": 1 + ahead}
    return RowPlan(tile, grid_cap(dy.shape[0], cdiv(num_programs(dy.device, 1), 2)))


def _backward_plan(dy: Tensor, x: Tensor | None, weight: Tensor | None) -> RowPlan | None:
    """Return the plan for a program to hold a row, or a pair of programs; None where neither can."""
    M, N = dy.shape
    if BACKWARD.holds(N, dy.dtype, lambda: rows_aligned(dy, x)):
        stage = 2 * BACKWARD.elements(N) * dy.element_size()
        return RowPlan.of(BACKWARD, M, N, dy.device, NUM_STAGES=1 + rows_ahead(stage, dy.device))
    return _halves_plan(dy, weight) if N <= 2 * HALF and rows_aligned(dy, x) else None


def _layer_norm_fwd(input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    x = as_rows(input)
    M, N = x.shape
    if not FORWARD.holds(N, x.dtype):
        return _forward_plain(input, weight, bias, eps)
    y = empty(input.shape, input.dtype, input.device)
    stats = empty((2, *input.shape[:-1]), torch.float32, input.device)
    tile = FORWARD.tile(N)
    wrap_triton(layer_norm_kernel)[(cdiv(M, tile["BLOCK_M"]),)](
        x, contiguous(weight), contiguous(bias), y, stats, M, N, x.stride(0), eps, **tile
    )
    return y, stats


def _layer_norm_bwd(
    grad: Tensor,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    stats: Tensor,
    need_input: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dy, x = as_rows(grad), as_rows(input) if need_input or need_weight else None
    w = weight.contiguous() if need_input and weight is not None else None
    (M, N), device = dy.shape, input.device
    plan = _backward_plan(dy, x, w)
    if plan is None:
        return _backward_plain(grad, input, weight, bias, stats, need_input, need_weight, need_bias)
    tile, programs = plan
    dx = empty(input.shape, input.dtype, device) if need_input else None
    dw, db = affine_gradient(weight, need_weight, grad), affine_gradient(bias, need_bias, grad)
    partials = None
    if need_weight or need_bias:
        partials = empty((programs, need_weight + need_bias, N), torch.float32, device)
    kernel, grid = layer_norm_backward_kernel, (programs,)
    if "BLOCK_M" not in tile:
        kernel, grid = layer_norm_halves_backward_kernel, (programs, 2)
    sizes = M, N, dy.stride(0), x.stride(0) if x is not None else 0
    wrap_triton(kernel)[grid](
        dy, x, w, stats.contiguous(), dx, partials, *sizes, HAS_DW=need_weight, HAS_DB=need_bias, **tile
    )
    if partials is not None:
        sum_affine(partials, dw if need_weight else None, db if need_bias else None)
    return or_no_gradient(dx, grad), dw, db


def _forward_plain(input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    c, mean = centered(input.float())
    var = c.square().mean(-1, keepdim=True) + eps
    y = c * torch.rsqrt(var)
    if weight is not None:
        y = y * weight.float()
    if bias is not None:
        y = y + bias.float()
    return y.to(input.dtype).contiguous(), torch.stack([mean.squeeze(-1), var.squeeze(-1)]).contiguous()


def _backward_plain(
    grad: Tensor,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    stats: Tensor,
    need_input: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dy = grad.float()
    mean, var = stats.unsqueeze(-1).unbind()
    rstd = torch.rsqrt(var)
    dx, dw, db = (no_gradient(grad) for _ in range(3))
    if need_bias and bias is not None:
        db = dy.reshape(-1, dy.shape[-1]).sum(0).to(bias.dtype)
    if need_input or need_weight:
        c = input.float() - mean
        if need_weight and weight is not None:
            dw = (dy * (c * rstd)).reshape(-1, dy.shape[-1]).sum(0).to(weight.dtype)
        if need_input:
            g = dy if weight is None else dy * weight.float()
            g, _ = centered(g)  # of equal values nothing is left
            dx = (g - c * ((g * c).mean(-1, keepdim=True) / var)) / var.sqrt()
            dx = dx.to(input.dtype).contiguous()
    return dx, dw, db


layer_norm_fwd = KernelOp(_layer_norm_fwd, launch_cached=True)
layer_norm_bwd = KernelOp(_layer_norm_bwd, launch_cached=True)
layer_norm_fwd.register_kernel("cpu")(_forward_plain)
layer_norm_bwd.register_kernel("cpu")(_backward_plain)


@layer_norm_fwd.register_fake
def _(input):
    return input.new_empty(input.shape), input.new_empty((2, *input.shape[:-1]), dtype=torch.float32)


layer_norm_fwd.register_backward(layer_norm_bwd, outputs=("output", "stats"))


@layer_norm_fwd.register_sharding
def _(input):
    return [([axis, 1 + axis], [axis, REPLICATE, REPLICATE]) for axis in row_axes(input)]


def layer_norm_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    randn = partial(torch.randn, device=device, dtype=dtype)
    yield Sample((randn(4, 16), randn(16), randn(16)), why="powers of two")
    yield Sample((randn(2, 3, 37), randn(37), randn(37), 1e-3), why="three dimensions, odd width, another eps")
    yield Sample((randn(5, 40),), why="neither weight nor bias")
    yield Sample((randn(33), randn(33, dtype=torch.float32)), why="one dimension, no bias, a float32 weight")
    yield Sample((randn(6, 80)[:, 16:48], None, randn(32)), why="a slice of a wider row, a bias alone")
    yield Sample((randn(7, 1), randn(1), randn(1)), why="one column")
    yield Sample((randn(0, 16), randn(16), randn(16)), why="no rows")
    yield Sample((randn(24, 6).t(), randn(24), randn(24)), why="columns strided")
    yield Sample((randn(1, 16).expand(5, 16), randn(16), randn(16)), why="one row expanded")
    yield Sample((randn(300, 24), randn(24), randn(24)), why="more rows than programs")
    yield Sample((1e4 * randn(3, 64) + 1e4, randn(64), randn(64)), why="large values about a large offset")
    yield Sample((randn(2, 9001), randn(9001), randn(9001)), why="a row that backward splits in two")
    yield Sample((randn(2, 100_003), randn(100_003), randn(100_003)), why="100,003 columns")


@public_op(
    reference=layer_norm_reference,
    differentiable=("input", "weight", "bias"),
    kernel_ops=(layer_norm_fwd, layer_norm_bwd),
    samples=layer_norm_samples,
    resized=normal_resized(lambda rows: ((rows, 48), (48,), (48,))),
    workloads=normal_workloads(
        [(32768, 4096), (8192, 4096), (8192, 8192), (4096, 16384), (65536, 1024)], lambda M, N: ((M, N), (N,), (N,))
    ),
    cost=Cost.passes(2, 5),
    patterns=LAYER_NORM,
    choices=(
        "backward at 16,384 columns a pair of programs shares a row, and each reads the other's half from L2: x, dy"
        " and two gradients in float32 do not fit into one program's registers without spills. 1.38 times the "
        "floor, forward and backward, in a run on an H200",
    ),
)
def layer_norm(input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Layer normalization over the last axis: `(input - mean) / sqrt(var + eps) * weight + bias`.

    Like `torch.nn.functional.layer_norm` over the last axis, with statistics and products in float32 and one rounding.
    Kernels hold rows of up to 16,384 columns, backward of 4,096 where they are not aligned to 16 elements; wider ones
    go through plain PyTorch.

    Args:
        input: `[..., N]`, float32, float16 or bfloat16, any strides.
        weight: `[N]`, any of these dtypes; None for no scale.
        bias: `[N]`, any of these dtypes; None for no shift.
        eps: Added to the variance, at least 0.

    Returns:
        `[..., N]`, contiguous, in the dtype of `input`.

    Raises:
        TypeError: A tensor is not float32, float16 or bfloat16.
        ValueError: `input` has no axis, its last one is empty, `weight` or `bias` is not `[N]` on the same device, or
            `eps` is out of range.

    Source: Ba, Kiros and Hinton, 2016, https://arxiv.org/abs/1607.06450.
    """
    check_rows("input", input, "N")
    for name, tensor in (("weight", weight), ("bias", bias)):
        check_parameter(name, tensor, input.shape[-1:], "the last axis of input", "input", input)
    check_not_negative("eps", eps)
    y, _ = layer_norm_fwd(input, weight, bias, eps)
    return y
