"""layer_norm of rows that are too long for one program's registers; layer_norm.py has the formulas.

Forward walks a row in blocks, twice: moments by Chan's formula, then the output. Backward of up to twice what fits
gives each half of the columns a program of its own, which reads the other half too, for the row's sums: the second
reading of a value finds it in L2. Longer rows are read twice: for the sums, then in blocks of columns.
"""

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.rows import row_shares
from llmk.ops.common.sums import sum_pair
from llmk.ops.norm._moments import lane_moments, normalize_if_huge, share_and_rstd
from llmk.registry import cdiv, empty, jit, num_programs, wrap_triton


@jit
def layer_norm_long_kernel(x_ptr, w_ptr, b_ptr, y_ptr, stats_ptr, M, N, x_stride, eps, BLOCK_N: tl.constexpr):
    eps = tl.cast(eps, tl.float32)
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    y_ptr += row * N
    mean, squares = lane_moments(x_ptr, N, 1.0, BLOCK_N, 1)
    var = squares / N + eps
    tl.store(stats_ptr + row, mean)
    tl.store(stats_ptr + M + row, var)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(var))
    for start in range(0, N, BLOCK_N):  # the second pass finds the row in L2
        cols = start + tl.arange(0, BLOCK_N)
        y = (tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) - mean) * rstd
        if w_ptr is not None:
            y *= tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        if b_ptr is not None:
            y += tl.load(b_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        tl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty), mask=cols < N)
    if (squares < float("inf")) == 0:
        tl.debug_barrier()  # another thread may have written the same place
        normalize_if_huge(x_ptr, w_ptr, b_ptr, y_ptr, stats_ptr + row, stats_ptr + M + row, None, N, 1, eps)


@jit
def layer_norm_wide_backward_kernel(
    dy_ptr, x_ptr, w_ptr, stats_ptr, dx_ptr, partial_ptr, M, N, dy_stride, x_stride,
    HAS_DW: tl.constexpr, HAS_DB: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One half of the columns: the other half is read for its sums only, from L2, where this half's neighbour is."""
    program = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    others = (1 - tl.program_id(1)) * BLOCK_N + tl.arange(0, BLOCK_N)
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
            share, rstd = share_and_rstd(var)
            c = x * share - mean
            if HAS_DW:
                dw += dy * (c * rstd)
            if dx_ptr is not None:
                h = tl.load(dy_ptr + row * dy_stride + others, mask=others < N, other=0.0).to(tl.float32)
                if w_ptr is not None:
                    dy *= w
                    h *= tl.load(w_ptr + others, mask=others < N, other=0.0).to(tl.float32)
                e = tl.load(x_ptr + row * x_stride + others, mask=others < N, other=0.0).to(tl.float32) * share - mean
                # dy and h are zero past the row's end.
                total, dot = sum_pair(dy + h, dy * c + h * e, 0)
                dx = share * rstd * (dy - total / N - c * tl.div_rn(dot / N, tl.abs(var)))
                tl.store(dx_ptr + row * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < N)
    if HAS_DW or HAS_DB:
        partial_ptr += program * (HAS_DW + HAS_DB) * N + cols
    if HAS_DW:
        tl.store(partial_ptr, dw, mask=cols < N)
    if HAS_DB:
        tl.store(partial_ptr + HAS_DW * N, db, mask=cols < N)


@jit
def layer_norm_long_backward_means_kernel(
    dy_ptr, x_ptr, w_ptr, stats_ptr, means_ptr, M, N, dy_stride, x_stride, BLOCK_N: tl.constexpr
):
    """mean(dy * weight) and mean(dy * weight * c) / var of each row."""
    row = tl.program_id(0).to(tl.int64)
    mean, var = tl.load(stats_ptr + row), tl.load(stats_ptr + M + row)
    share, _ = share_and_rstd(var)
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    dot = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + row * x_stride + cols, mask=cols < N, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_stride + cols, mask=cols < N, other=0.0).to(tl.float32)
        if w_ptr is not None:
            dy *= tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        total += dy
        dot += dy * (x * share - mean)  # dy is zero past the row's end
    tl.store(means_ptr + row, tl.sum(total, axis=0) / N)
    tl.store(means_ptr + M + row, tl.div_rn(tl.sum(dot, axis=0) / N, tl.abs(var)))


@jit
def layer_norm_long_backward_kernel(
    dy_ptr, x_ptr, w_ptr, stats_ptr, means_ptr, dx_ptr, partial_ptr, M, N, dy_stride, x_stride,
    HAS_DW: tl.constexpr, HAS_DB: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One block of columns, a share of the rows."""
    program = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    if w_ptr is not None:
        w = tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK_N,), dtype=tl.float32)
    db = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for row in range(program, M, tl.num_programs(0)):
        dy = tl.load(dy_ptr + row * dy_stride + cols, mask=cols < N, other=0.0).to(tl.float32)
        if HAS_DB:
            db += dy
        if x_ptr is not None:
            share, rstd = share_and_rstd(tl.load(stats_ptr + M + row))
            x = tl.load(x_ptr + row * x_stride + cols, mask=cols < N, other=0.0).to(tl.float32)
            c = x * share - tl.load(stats_ptr + row)
            if HAS_DW:
                dw += dy * (c * rstd)
            if dx_ptr is not None:
                if w_ptr is not None:
                    dy *= w
                dx = share * rstd * (dy - tl.load(means_ptr + row) - c * tl.load(means_ptr + M + row))
                tl.store(dx_ptr + row * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < N)
    if HAS_DW or HAS_DB:
        partial_ptr += program * (HAS_DW + HAS_DB) * N + cols
    if HAS_DW:
        tl.store(partial_ptr, dw, mask=cols < N)
    if HAS_DB:
        tl.store(partial_ptr + HAS_DW * N, db, mask=cols < N)


# Wide: the largest half that does not spill.
WIDE_BLOCK, WIDE_WARPS = 8192, 16
LONG_FORWARD = {"BLOCK_N": 4096, "num_warps": 8}
LONG_BACKWARD = {"BLOCK_N": 1024, "num_warps": 4}


def _wide_tile(dy: Tensor, weight: Tensor | None) -> dict[str, int]:
    # Two rows ahead, if both halves of x and dy and the weight's other one fit twice into an sm_80's shared memory.
    # H200, bf16, 4096x16384, times the floor of forward and backward: 1.38; one row ahead 1.88, twice the warps 1.56.
    stage = WIDE_BLOCK * (4 * dy.element_size() + (weight.element_size() if weight is not None else 0))
    return {"BLOCK_N": WIDE_BLOCK, "num_warps": WIDE_WARPS, "NUM_STAGES": 3 if 2 * stage <= 160 * 1024 else 2}


def long_programs(N: int, wide: int, device: torch.device) -> int:
    """Programs of the backward pass for each block of columns: pairs for rows of up to `wide` columns."""
    return cdiv(num_programs(device, 1), 2) if wide >= N else row_shares(cdiv(N, LONG_BACKWARD["BLOCK_N"]), device)


def long_forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, y: Tensor, stats: Tensor, eps: float) -> None:
    """Fill y and stats; rows of any length."""
    M, N = x.shape
    wrap_triton(layer_norm_long_kernel)[(M,)](x, weight, bias, y, stats, M, N, x.stride(0), eps, **LONG_FORWARD)


def wide_backward(
    dy: Tensor, x: Tensor | None, weight: Tensor | None, stats: Tensor, dx: Tensor | None, partials: Tensor | None,
    programs: int, need_dw: bool, need_db: bool,
) -> None:  # fmt: skip
    """Fill dx and partials where given; rows of at most two halves of WIDE_BLOCK."""
    M, N = dy.shape
    wrap_triton(layer_norm_wide_backward_kernel)[(programs, 2)](
        dy, x, weight, stats, dx, partials, M, N, dy.stride(0), x.stride(0) if x is not None else 0,
        HAS_DW=need_dw, HAS_DB=need_db, **_wide_tile(dy, weight),
    )  # fmt: skip


def long_backward(
    dy: Tensor, x: Tensor | None, weight: Tensor | None, stats: Tensor, dx: Tensor | None, partials: Tensor | None,
    programs: int, need_dw: bool, need_db: bool,
) -> None:  # fmt: skip
    """Fill dx and partials where given; rows of any length."""
    M, N = dy.shape
    means = None
    x_stride = x.stride(0) if x is not None else 0
    if dx is not None:
        means = empty((2, M), torch.float32, dy.device)
        wrap_triton(layer_norm_long_backward_means_kernel)[(M,)](
            dy, x, weight, stats, means, M, N, dy.stride(0), x_stride, **LONG_FORWARD
        )
    wrap_triton(layer_norm_long_backward_kernel)[(programs, cdiv(N, LONG_BACKWARD["BLOCK_N"]))](
        dy, x, weight, stats, means, dx, partials, M, N, dy.stride(0), x_stride,
        HAS_DW=need_dw, HAS_DB=need_db, **LONG_BACKWARD,
    )  # fmt: skip
