"""Attention residuals of vectors that one program cannot hold: each direction reads them twice.

First a program walks each vector for its sums, then another each block of columns for what follows from these.
"""

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.math import exp
from llmk.ops.common.rows import row_shares
from llmk.ops.common.sums import sum_pair
from llmk.registry import cdiv, empty, grid_cap, jit, wrap_triton


@jit
def weigh(s, da, largest, total, origin, sum_da):
    """Take one more weight exp(s) into a sum of them and into the weighted sum of da - origin.

    Both are relative to exp(largest), and the origin is the da of the largest s.
    """
    larger, before, origin_before = s > largest, largest, origin
    largest, origin = tl.where(larger, s, largest), tl.where(larger, da, origin)
    shrink, share = exp(before - largest), exp(s - largest)
    sum_da = (sum_da + total * (origin_before - origin)) * shrink + share * (da - origin)
    return largest, total * shrink + share, origin, sum_da


@jit
def attention_residual_scores_kernel(
    v_ptr, q_ptr, w_ptr, s_ptr, ms_ptr, M, H, block_stride, row_stride, eps, BLOCK_H: tl.constexpr
):
    eps = tl.cast(eps, tl.float32)
    vector = tl.program_id(0).to(tl.int64)
    v_ptr += vector // M * block_stride + vector % M * row_stride
    squares = tl.zeros((BLOCK_H,), dtype=tl.float32)
    dots = tl.zeros((BLOCK_H,), dtype=tl.float32)
    for start in range(0, H, BLOCK_H):
        cols = start + tl.arange(0, BLOCK_H)
        v = tl.load(v_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)
        q = tl.load(q_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)
        squares += v * v
        dots += v * (q * tl.load(w_ptr + cols, mask=cols < H, other=0.0).to(tl.float32))
    square, dot = sum_pair(squares, dots, 0)
    ms = square / H + eps
    tl.store(s_ptr + vector, tl.div_rn(dot, tl.sqrt_rn(ms)))
    tl.store(ms_ptr + vector, ms)


@jit
def attention_residual_mix_kernel(v_ptr, s_ptr, y_ptr, N, M, H, block_stride, row_stride, BLOCK_H: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    largest, total = _softmax_over_depth(s_ptr + row, N, M)
    y = tl.zeros((BLOCK_H,), dtype=tl.float32)
    for i in range(0, N):
        start = tl.cast(i, tl.int64) * block_stride + row * row_stride
        v = tl.load(v_ptr + start + cols, mask=cols < H, other=0.0).to(tl.float32)
        y += v * exp(tl.load(s_ptr + tl.cast(i, tl.int64) * M + row) - largest)
    tl.store(y_ptr + row * H + cols, (y * tl.div_rn(1.0, total)).to(y_ptr.dtype.element_ty), mask=cols < H)


@jit
def _softmax_over_depth(s_ptr, N, M):
    """The largest of a token's scores, and the sum of the exponentials."""
    largest = tl.load(s_ptr)
    total = tl.cast(1.0, tl.float32)
    for i in range(1, N):
        s = tl.load(s_ptr + tl.cast(i, tl.int64) * M)
        before, largest = largest, tl.maximum(largest, s)
        total = total * exp(before - largest) + exp(s - largest)
    return largest, total


@jit
def attention_residual_dots_kernel(
    dy_ptr, v_ptr, da_ptr, M, H, dy_stride, block_stride, row_stride, BLOCK_H: tl.constexpr
):
    """The gradient of each weight of the softmax, sum(dy * v_i)."""
    vector = tl.program_id(0).to(tl.int64)
    v_ptr += vector // M * block_stride + vector % M * row_stride
    dy_ptr += vector % M * dy_stride
    dots = tl.zeros((BLOCK_H,), dtype=tl.float32)
    for start in range(0, H, BLOCK_H):
        cols = start + tl.arange(0, BLOCK_H)
        v = tl.load(v_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)
        dots += v * tl.load(dy_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)
    tl.store(da_ptr + vector, tl.sum(dots, axis=0))


@jit
def attention_residual_long_backward_kernel(
    dy_ptr, v_ptr, q_ptr, w_ptr, s_ptr, ms_ptr, da_ptr, dv_ptr, partial_ptr, N, M, H,
    dy_stride, block_stride, row_stride, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One block of columns, a share of the tokens."""
    program = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    q = tl.load(q_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)
    dk = tl.zeros((BLOCK_H,), dtype=tl.float32)
    for row in range(program, M, tl.num_programs(0)):
        largest = tl.load(s_ptr + row)
        origin = tl.load(da_ptr + row)
        total = tl.cast(1.0, tl.float32)
        sum_da = tl.cast(0.0, tl.float32)
        for i in range(1, N):
            place = tl.cast(i, tl.int64) * M + row
            s, da = tl.load(s_ptr + place), tl.load(da_ptr + place)
            largest, total, origin, sum_da = weigh(s, da, largest, total, origin, sum_da)
        mean = tl.div_rn(sum_da, total)
        dy = tl.load(dy_ptr + row * dy_stride + cols, mask=cols < H, other=0.0).to(tl.float32)
        for i in range(0, N):
            place = tl.cast(i, tl.int64) * M + row
            s, ms = tl.load(s_ptr + place), tl.load(ms_ptr + place)
            a = tl.div_rn(exp(s - largest), total)
            ds = a * (tl.load(da_ptr + place) - origin - mean)
            slope = tl.div_rn(ds, tl.sqrt_rn(ms))
            start = tl.cast(i, tl.int64) * block_stride + row * row_stride
            v = tl.load(v_ptr + start + cols, mask=cols < H, other=0.0).to(tl.float32)
            dk += v * slope
            dv = dy * a + ((q * w) * slope - v * tl.div_rn(ds * s, ms * H))
            tl.store(dv_ptr + place * H + cols, dv.to(dv_ptr.dtype.element_ty), mask=cols < H)
    if partial_ptr is not None:
        tl.store(partial_ptr + program * 2 * H + cols, dk * w, mask=cols < H)
        tl.store(partial_ptr + (program * 2 + 1) * H + cols, dk * q, mask=cols < H)


WALK = {"BLOCK_H": 4096, "num_warps": 8}
"""How a vector is walked."""

PART = {"BLOCK_H": 1024, "num_warps": 4}
"""The columns of a token's vectors that one program holds."""


def long_programs(M: int, H: int, device: torch.device) -> int:
    """Into how many shares the backward pass divides M tokens, each of which leaves a row of partials."""
    return grid_cap(M, row_shares(cdiv(H, PART["BLOCK_H"]), device))


def long_forward(v: Tensor, query: Tensor, weight: Tensor, y: Tensor, scores: Tensor, ms: Tensor, eps: float) -> None:
    """Fill y, scores and ms, given `[N, M, H]`."""
    N, M, H = v.shape
    strides = v.stride(0), v.stride(1)
    wrap_triton(attention_residual_scores_kernel)[(N * M,)](v, query, weight, scores, ms, M, H, *strides, eps, **WALK)
    wrap_triton(attention_residual_mix_kernel)[(M, cdiv(H, PART["BLOCK_H"]))](v, scores, y, N, M, H, *strides, **PART)


def long_backward(
    dy: Tensor, v: Tensor, query: Tensor, weight: Tensor, scores: Tensor, ms: Tensor, dv: Tensor,
    partials: Tensor | None, programs: int,
) -> None:  # fmt: skip
    """Fill dv and the partials, of which each program leaves two rows."""
    N, M, H = v.shape
    strides = dy.stride(0), v.stride(0), v.stride(1)
    da = empty((N, M), torch.float32, v.device)
    wrap_triton(attention_residual_dots_kernel)[(N * M,)](dy, v, da, M, H, *strides, **WALK)
    wrap_triton(attention_residual_long_backward_kernel)[(programs, cdiv(H, PART["BLOCK_H"]))](
        dy, v, query, weight, scores, ms, da, dv, partials, N, M, H, *strides, **PART
    )
