"""What layer_norm and group_norm share: the moments of a long row, and the sum of the affine gradients' partials."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmk.registry import cdiv, empty, wrap_triton
from llmk.registry.launch import INTERPRET


@triton.jit
def coarse_mean(mean, var):
    """The mean to about twelve binary digits of a deviation.

    x - mean rounds alike for every x of a binade, and a sum over thousands of places shows it; x minus this is exact.
    """
    grid = 2048.0 * tl.sqrt_rn(var)
    return (mean + grid) - grid


@triton.jit
def _add_pairs(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


_INTERPRET = tl.constexpr(INTERPRET)


@triton.jit
def sum_pair(a, b, axis: tl.constexpr):
    """The sums of a and of b, for which the warps of a program wait once and not twice."""
    if _INTERPRET:  # noqa: SIM108  it reduces pairs one after the other, with an error that no GPU's tree has
        sums = tl.sum(a, axis), tl.sum(b, axis)
    else:
        sums = tl.reduce((a, b), axis, _add_pairs)
    return sums


@triton.jit
def row_moments(x_ptr, N, BLOCK_N: tl.constexpr):
    """Mean and sum of squared deviations of x_ptr[:N], block after block, merged by Chan's formula."""
    # Means are kept as differences to the first block's, so that a large common offset costs no digits.
    pivot = tl.full((), 0.0, dtype=tl.float32)
    mean = tl.full((), 0.0, dtype=tl.float32)
    squares = tl.full((), 0.0, dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        before = tl.cast(start, tl.float32)
        count = tl.cast(tl.minimum(N - start, BLOCK_N), tl.float32)
        share = tl.div_rn(count, before + count)
        block_mean = tl.sum(x, axis=0) / count
        centered = tl.where(cols < N, x - block_mean, 0.0)
        near = coarse_mean(block_mean, tl.sum(centered * centered, axis=0) / count)
        # Corrected once it is the float nearest to the mean; of equal values it is that value.
        block_mean = near + tl.sum(tl.where(cols < N, x - near, 0.0), axis=0) / count
        centered = tl.where(cols < N, x - block_mean, 0.0)
        pivot = tl.where(start == 0, block_mean, pivot)
        delta = (block_mean - pivot) - mean
        mean += delta * share
        squares += tl.sum(centered * centered, axis=0) + delta * delta * (before * share)
    return pivot + mean, squares


@triton.jit
def sum_affine_kernel(partial_ptr, dw_ptr, db_ptr, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    part, parts = tl.program_id(1), tl.num_programs(1)
    cols = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    partial_ptr += part.to(tl.int64) * N
    total = tl.zeros((BLOCK_P, BLOCK_N), dtype=tl.float32)
    for start in range(0, P, BLOCK_P):
        rows = start + tl.arange(0, BLOCK_P).to(tl.int64)
        mask = (rows < P)[:, None] & (cols < N)[None, :]
        total += tl.load(partial_ptr + (rows * parts * N)[:, None] + cols[None, :], mask=mask, other=0.0)
    result = tl.sum(total, axis=0)
    if dw_ptr is not None:
        tl.store(dw_ptr + cols, result.to(dw_ptr.dtype.element_ty), mask=(cols < N) & (part == 0))
    if db_ptr is not None:
        tl.store(db_ptr + cols, result.to(db_ptr.dtype.element_ty), mask=(cols < N) & (part == parts - 1))


def sum_affine(partials: Tensor, dw: Tensor | None, db: Tensor | None) -> None:
    """Sum float32 `[P, K, N]` over P in a fixed order in one launch: the first of the K sums is dw's, the last db's."""
    P, K, N = partials.shape
    # As in sum_partials: narrow blocks of columns make enough programs, wide rows have enough anyway.
    block_p, block_n = (64, 32) if N <= 8192 else (8, 256)
    wrap_triton(sum_affine_kernel)[(cdiv(N, block_n), K)](
        partials, dw, db, P, N, BLOCK_P=block_p, BLOCK_N=block_n, num_warps=8
    )


def affine_gradient(like: Tensor | None, device: torch.device) -> Tensor:
    """Room for the gradient of a weight or bias; for None the empty tensor that an operator returns in its place."""
    if like is None:
        return empty((0,), torch.float32, device)
    return empty(like.shape, like.dtype, device)
