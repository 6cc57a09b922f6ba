r"""Root mean square normalization of rows: the kernels that `rms_norm` and `add_rms_norm` share.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, https://arxiv.org/abs/1910.07467.
The offset is Gemma's, whose weight is stored minus one: https://arxiv.org/abs/2403.08295.

Forward, for each row h of N values, with w = weight + offset:

    ms   = mean(h^2) + eps
    rstd = 1 / sqrt(ms)
    y    = h * rstd * w

where h is the input or, given a residual, the sum of the two, rounded to their dtype: what the backward pass will find.

Backward, given dy, and dh where h was an output too:

    dx = rstd * (dy * w - h * mean(dy * w * h) / ms) + dh
    dw = sum over rows of dy * h * rstd

ms is what is kept for the backward pass: dividing by it costs one rounding where rstd^2 would cost three, which shows
where the two terms of dx nearly cancel, in rows of few values. In a row of one value they cancel to eps:
dx = rstd * dy * w * eps / ms + dh.

A row is held in registers, read once in either direction. The weight's gradient is summed in float32 by each program
over its own rows, then over the programs in a fixed order: no atomics. Wider rows go through plain PyTorch: unless
Triton can read 16 bytes at a time, past 16,384 columns forward and 16 KiB backward, else past twice that.
"""

from collections.abc import Callable

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.row_plan import RowKind, RowPlan
from llmk.ops.common.rows import Strides, contiguous, row_starts, rows_ahead, strided_rows, strided_rows_aligned
from llmk.ops.common.sums import sum_partials
from llmk.registry import cdiv, empty, jit, no_gradient, recomputed_in_backward, wrap_triton


@jit
def rms_norm_kernel(
    x_ptr, residual_ptr, w_ptr, y_ptr, h_ptr, ms_ptr, M, N,
    x_stride, x_inner, x_inner_stride, residual_stride, residual_inner, residual_inner_stride, eps, offset,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    eps = tl.cast(eps, tl.float32)
    offset = tl.cast(offset, tl.float32)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    x_starts = row_starts(rows, x_stride, x_inner, x_inner_stride)[:, None]
    h = tl.load(x_ptr + x_starts + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual_starts = row_starts(rows, residual_stride, residual_inner, residual_inner_stride)[:, None]
        h += tl.load(residual_ptr + residual_starts + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        rounded = h.to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + rows[:, None] * N + cols[None, :], rounded, mask=mask)
        h = rounded.to(tl.float32)
    ms = tl.sum(h * h, axis=1) / N + eps  # [BLOCK_M]
    y = h * tl.div_rn(1.0, tl.sqrt_rn(ms))[:, None]
    if w_ptr is not None:
        y *= (tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) + offset)[None, :]
    tl.store(y_ptr + rows[:, None] * N + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(ms_ptr + rows, ms, mask=rows < M)


@jit
def rms_norm_backward_kernel(
    dy_ptr, dh_ptr, h_ptr, w_ptr, ms_ptr, dx_ptr, dw_ptr, M, N,
    dy_stride, dy_inner, dy_inner_stride, dh_stride, dh_inner, dh_inner_stride, h_stride, h_inner, h_inner_stride,
    eps, offset, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HOLD_WEIGHT: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    eps = tl.cast(eps, tl.float32)
    offset = tl.cast(offset, tl.float32)
    program = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_N)
    if w_ptr is not None and HOLD_WEIGHT:
        w = (tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) + offset)[None, :]
    dw = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    # Persistent: the next rows are prefetched while these are computed, and dw stays in registers.
    for start in tl.range(program * BLOCK_M, M, tl.num_programs(0) * BLOCK_M, num_stages=NUM_STAGES):
        rows = start + tl.arange(0, BLOCK_M)
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        h_starts = row_starts(rows, h_stride, h_inner, h_inner_stride)[:, None]
        h = tl.load(h_ptr + h_starts + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dy_starts = row_starts(rows, dy_stride, dy_inner, dy_inner_stride)[:, None]
        dy = tl.load(dy_ptr + dy_starts + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        ms = tl.load(ms_ptr + rows, mask=rows < M, other=1.0)
        rstd = tl.div_rn(1.0, tl.sqrt_rn(ms))[:, None]
        wdy = dy
        if w_ptr is not None:
            if not HOLD_WEIGHT:
                w = (tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) + offset)[None, :]
            wdy = dy * w
        dot = tl.sum(wdy * h, axis=1)
        if dw_ptr is not None:
            dw += dy * (h * rstd)
        if BLOCK_N == 1:
            dx = rstd * wdy * tl.div_rn(eps, ms)[:, None]
        else:
            dx = rstd * (wdy - h * tl.div_rn(dot / N, ms)[:, None])
        if dh_ptr is not None:
            dh_starts = row_starts(rows, dh_stride, dh_inner, dh_inner_stride)[:, None]
            dx += tl.load(dh_ptr + dh_starts + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + rows[:, None] * N + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if dw_ptr is not None:
        tl.store(dw_ptr + program * N + cols, tl.sum(dw, axis=0), mask=cols < N)


NO_STRIDES: Strides = (None, None, None)

FORWARD = RowKind({2048: (1, 4), 4096: (1, 8), 8192: (1, 8), 16384: (1, 16), 32768: (1, 16)})
"""The program holds h."""
# H200, bf16, times the floor: 1.08 at 32768x4096, 1.14 at 8192x8192, 1.14 at 4096x16384, 1.11 at 65536x1024, 1.17 at
# 262144x128. 8 warps instead of 16 where 8192 elements hold a row: at 5120 columns 1.22, not 1.38.

BACKWARD = RowKind({1024: (2, 4), 2048: (2, 8), 4096: (1, 8), 8192: (1, 8), 16384: (1, 16)}, row_bytes=32768)
"""It holds h, dy, and in float32 the weight's gradient."""
# H200, bf16, times the floor: 1.08 at 32768x4096, 1.15 at 8192x8192, 1.33 at 262144x128, each with three stages of
# prefetch; one stage costs 0.1 more. Forward and backward, 65536x1024: 1.09, with 8 warps 1.11; 4096x16384: 1.25, where
# 16 warps can have 128 registers, which take no weight besides h, dy and dw; where shared memory does not take two more
# rows, one more is worse than none: 1.37.


def _backward_plan(h: Tensor, tensors: int, is_aligned: Callable[[], bool]) -> RowPlan | None:
    """Return the plan for reading so many tensors, h, dy and perhaps dh; None where rows are not held."""
    N = h.shape[-1]
    if not BACKWARD.holds(N, h.dtype, is_aligned):
        return None
    hold = N <= 8192
    stage = BACKWARD.elements(N) * h.element_size() * (tensors if hold else tensors + 1)
    ahead = rows_ahead(stage, h.device)
    if ahead == 0 and tensors == 3:  # with dh and no prefetch registers spill
        return None
    stages = 3 if ahead == 2 else 1 if tensors == 2 else 2
    return RowPlan.of(BACKWARD, h.numel() // N, N, h.device, HOLD_WEIGHT=hold, NUM_STAGES=stages)


def _optional_rows(x: Tensor | None) -> tuple[Tensor | None, Strides]:
    return (None, NO_STRIDES) if x is None else strided_rows(x)


def forward(
    input: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    """y, h if there is a residual, and ms `[...]`, one for each row."""
    x, x_strides = strided_rows(input)
    added, added_strides = _optional_rows(residual)
    w, N = contiguous(weight), x.shape[-1]
    M, device = x.numel() // N, x.device
    rows = (x, x_strides), (added, added_strides), (w, NO_STRIDES)
    if not FORWARD.holds(N, x.dtype, lambda: strided_rows_aligned(N, *rows)):
        return forward_plain(input, residual, weight, eps, offset)
    y = empty(input.shape, input.dtype, device)
    h = empty(input.shape, input.dtype, device) if residual is not None else None
    ms = empty(input.shape[:-1], torch.float32, device)
    tile = FORWARD.tile(N)
    wrap_triton(rms_norm_kernel)[(cdiv(M, tile["BLOCK_M"]),)](
        x, added, w, y, h, ms, M, N, *x_strides, *added_strides, eps, offset, **tile
    )
    return y, h, ms


def backward(
    grad: Tensor,
    grad_h: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    ms: Tensor,
    eps: float,
    offset: float,
    need_weight: bool,
) -> tuple[Tensor, Tensor]:
    """dx, and dw or `no_gradient`."""
    dy, dy_strides = strided_rows(grad)
    dh, dh_strides = _optional_rows(grad_h)
    x, x_strides = strided_rows(h)
    w, N = contiguous(weight), x.shape[-1]
    rows = (dy, dy_strides), (dh, dh_strides), (x, x_strides), (w, NO_STRIDES)
    plan = _backward_plan(x, 2 if dh is None else 3, lambda: strided_rows_aligned(N, *rows))
    if plan is None:
        return backward_plain(grad, grad_h, h, weight, ms, eps, offset, need_weight)
    tile, programs = plan
    dx = empty(h.shape, h.dtype, h.device)
    partials = empty((programs, N), torch.float32, h.device) if need_weight else None
    sizes = x.numel() // N, N
    wrap_triton(rms_norm_backward_kernel)[(programs,)](
        dy, dh, x, w, ms.contiguous(), dx, partials, *sizes, *dy_strides, *dh_strides, *x_strides, eps, offset, **tile
    )
    if weight is None or partials is None:
        return dx, no_gradient(grad)
    return dx, sum_partials(partials, weight.dtype)


CHOICES = (
    "under Inductor the forward pass of rows up to 16,384 columns is PyTorch's own operations, fused with the sums "
    "around them: in a Llama layer of hidden size 2048 a graph keeps 8,192 bytes of each token less for the backward "
    "pass (55,432, not 63,624), which computes the outputs of its two norms again",
    "alone in a graph that form takes 1.11 times the floor at 32768x4096 on an H200, forward and backward, the kernel "
    "1.07",
    "the backward pass is the kernel. Inductor's own makes a training step of Llama-3.2-1B's shape 0.6% faster (228.8 "
    "ms, not 230.1), as it takes in sums of gradients, but alone it takes 1.31 times the floor at 32768x4096 and 1.98 "
    "at 8192x8192",
    "in one compiled Llama layer with its loss, 8192 tokens, all kernels but products and attention take 1.25 and 1.27 "
    "ms in two runs in the chosen forms at hidden size 2048, 1.42 and 1.15 with llmk's kernels alone, 1.88 and 1.71 in "
    "plain PyTorch; at 4096 1.94, 1.79 and 2.35 (`python -m benchmarks.layer`): the choice is one for memory",
)


def inductor_reads_once(input: Tensor, *_: object) -> bool:
    """Return True if Inductor's forward pass is as fast as ours: its second reading of a row comes from the cache."""
    # H200, bf16, rms_norm, times the floor, Inductor's and ours: 1.15 and 1.07 at 32768x4096, 1.07 and 1.12 at
    # 8192x8192, 1.12 and 1.14 at 4096x16384.
    return input.shape[-1] <= 16384


def forward_plain(
    input: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    """`forward` in plain PyTorch."""
    h = None if residual is None else (input + residual).contiguous()
    x = (input if h is None else h).float()
    ms = x.square().mean(-1, keepdim=True) + eps
    with recomputed_in_backward(x):
        y = x * torch.rsqrt(ms)
        if weight is not None:
            y = y * (weight.float() + offset)
        y = y.to(input.dtype).contiguous()
    return y, h, ms.squeeze(-1).contiguous()


def backward_plain(
    grad: Tensor,
    grad_h: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    ms: Tensor,
    eps: float,
    offset: float,
    need_weight: bool,
) -> tuple[Tensor, Tensor]:
    """`backward` in plain PyTorch."""
    dtype, ms = h.dtype, ms.unsqueeze(-1)
    rstd = torch.rsqrt(ms)
    h, dy = h.float(), grad.float()
    wdy = dy if weight is None else dy * (weight.float() + offset)
    rest = wdy * (eps / ms) if h.shape[-1] == 1 else wdy - h * ((wdy * h).mean(-1, keepdim=True) / ms)
    dx = rstd * rest
    if grad_h is not None:
        dx = dx + grad_h.float()
    if weight is None or not need_weight:
        dw = no_gradient(grad)
    else:
        dw = (dy * (h * rstd)).flatten(0, -2).sum(0) if h.dim() > 1 else dy * (h * rstd)
        dw = dw.to(weight.dtype)
    return dx.to(dtype).contiguous(), dw
