"""Every sum of more than one number: within a program, and of the partials that programs left behind.

Partials are float32 and are added up in a fixed order, one rounding at the end: the same inputs give the same bits.
"""

import math

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.math import everywhere
from llmk.registry import cdiv, empty, jit, wrap_triton
from llmk.registry.devices import INTERPRET


@jit
def _add_pairs(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


_INTERPRET = tl.constexpr(INTERPRET)


@jit
def sum_pair(a, b, axis: tl.constexpr):
    """The sums of a and of b, for which the warps of a program wait once and not twice."""
    if _INTERPRET:  # noqa: SIM108  it reduces pairs one after the other, with an error that no GPU's tree has
        sums = tl.sum(a, axis), tl.sum(b, axis)
    else:
        sums = tl.reduce((a, b), axis, _add_pairs)
    return sums


@jit
def sum_partials_kernel(partial_ptr, out_ptr, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    cols = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_P, BLOCK_N), dtype=tl.float32)
    for start in range(0, P, BLOCK_P):
        rows = start + tl.arange(0, BLOCK_P)
        mask = (rows < P)[:, None] & (cols < N)[None, :]
        total += tl.load(partial_ptr + rows[:, None] * N + cols[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + cols, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=cols < N)


WIDE = {"BLOCK_P": 8, "BLOCK_N": 256, "num_warps": 8}


def _tile(N: int) -> dict[str, int]:
    # Narrow blocks of columns make enough programs; wide rows have enough anyway and read longer runs.
    return {"BLOCK_P": 64, "BLOCK_N": 32, "num_warps": 8} if N <= 8192 else WIDE


def sum_partials(partials: Tensor, dtype: torch.dtype, *, of_tokens: bool = False) -> Tensor:
    """Sum float32 `[P, ...]` over its first axis in a fixed order and round once to `dtype`: `[...]`.

    Sums `of_tokens` take one tile for any number of them, which thus share a graph.
    """
    P, *shape = partials.shape
    N = math.prod(shape)
    out = empty(shape, dtype, partials.device)
    tile = WIDE if of_tokens else _tile(N)
    wrap_triton(sum_partials_kernel)[(cdiv(N, tile["BLOCK_N"]),)](partials, out, P, N, **tile)
    return out


@jit
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
        first = everywhere(part == 0, cols)
        tl.store(dw_ptr + cols, result.to(dw_ptr.dtype.element_ty), mask=(cols < N) & first)
    if db_ptr is not None:
        last = everywhere(part == parts - 1, cols)
        tl.store(db_ptr + cols, result.to(db_ptr.dtype.element_ty), mask=(cols < N) & last)


def sum_affine(partials: Tensor, dw: Tensor | None, db: Tensor | None) -> None:
    """Sum float32 `[P, K, N]` over P in a fixed order in one launch: the first of the K sums is dw's, the last db's."""
    P, K, N = partials.shape
    tile = _tile(N)
    wrap_triton(sum_affine_kernel)[(cdiv(N, tile["BLOCK_N"]), K)](partials, dw, db, P, N, **tile)


@jit
def _sum_features(partial_ptr, out_ptr, P, D, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr):
    cols = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_P, BLOCK_D), dtype=tl.float32)
    for start in range(0, P, BLOCK_P):
        rows = (start + tl.arange(0, BLOCK_P)).to(tl.int64)[:, None]
        total += tl.load(partial_ptr + rows * D + cols[None, :], mask=(rows < P) & (cols < D)[None, :], other=0.0)
    tl.store(out_ptr + cols, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=cols < D)


@jit
def sum_two_partials_kernel(
    q_partial_ptr, k_partial_ptr, q_out_ptr, k_out_ptr, P, D, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr
):
    if tl.program_id(1) == 0:
        if q_partial_ptr is not None:
            _sum_features(q_partial_ptr, q_out_ptr, P, D, BLOCK_P, BLOCK_D)
    else:
        if k_partial_ptr is not None:
            _sum_features(k_partial_ptr, k_out_ptr, P, D, BLOCK_P, BLOCK_D)


def sum_two_partials(q_partials: Tensor | None, k_partials: Tensor | None, q_out: Tensor, k_out: Tensor) -> None:
    """Sum float32 `[P, D]` over rows in a fixed order, of q, of k or of both in one launch, each into its `[D]`."""
    partials = q_partials if q_partials is not None else k_partials
    assert partials is not None
    P, D = partials.shape
    # A head is narrow: few columns to a program make enough programs.
    wrap_triton(sum_two_partials_kernel)[(cdiv(D, 8), 2)](
        q_partials, k_partials, q_out, k_out, P, D, BLOCK_P=512, BLOCK_D=8, num_warps=8
    )


SCALAR = {"BLOCK_P": 4096, "num_warps": 8}


@jit
def sum_to_scalar_kernel(partial_ptr, out_ptr, P, denominator, BLOCK_P: tl.constexpr):
    total = tl.zeros((BLOCK_P,), dtype=tl.float32)
    for start in range(0, P, BLOCK_P):
        index = start + tl.arange(0, BLOCK_P)
        total += tl.load(partial_ptr + index, mask=index < P, other=0.0)
    tl.store(out_ptr, tl.div_rn(tl.sum(total, axis=0), tl.cast(denominator, tl.float32)))


def sum_to_scalar(partials: Tensor, denominator: int = 1) -> Tensor:
    """`sum(partials) / denominator` of float32 `[...]` as a float32 scalar, by one program in a fixed order.

    The denominator is divided by here so that a mean costs no further launch; 0 of 0 is NaN.
    """
    out = empty((), torch.float32, partials.device)
    wrap_triton(sum_to_scalar_kernel)[(1,)](partials, out, partials.numel(), denominator, **SCALAR)
    return out


# One program sums much where short rows are many. H200, 262,144 rows: 0.038 ms, half as many at a time 0.134, which
# was half of what the loss of 256 classes took; 8192 rows 0.006 and 0.009.
MANY = {"BLOCK_P": 8192, "num_warps": 16}


@jit
def mean_of_rows_kernel(loss_ptr, count_ptr, mean_ptr, denominator_ptr, M, BLOCK_P: tl.constexpr):
    total = tl.zeros((BLOCK_P,), dtype=tl.float32)
    counts = tl.zeros((BLOCK_P,), dtype=tl.float32)
    for start in range(0, M, BLOCK_P):
        rows = start + tl.arange(0, BLOCK_P)
        total += tl.load(loss_ptr + rows, mask=rows < M, other=0.0)
        counts += tl.load(count_ptr + rows, mask=rows < M, other=0.0)
    denominator = tl.sum(counts, axis=0)
    tl.store(mean_ptr, tl.div_rn(tl.sum(total, axis=0), denominator))
    tl.store(denominator_ptr, denominator)


def mean_of_rows(loss: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """`sum(loss) / sum(count)` of float32 `[...]` and that denominator, as scalars; 0 of 0 is NaN."""
    mean, denominator = (empty((), torch.float32, loss.device) for _ in range(2))
    wrap_triton(mean_of_rows_kernel)[(1,)](loss, count, mean, denominator, loss.numel(), **MANY)
    return mean, denominator
