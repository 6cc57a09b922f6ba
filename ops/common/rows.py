"""What the row kernels share: tensors as rows, and the sum over programs of a weight gradient's partials."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmk.registry import cdiv, empty, num_programs, wrap_triton


def as_rows(x: Tensor) -> Tensor:
    """`[..., N]` as `[M, N]` with neighbouring columns side by side; copies only where strides leave no way."""
    x = x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
    return x if x.stride(-1) == 1 else x.contiguous()


def aligned(*rows: Tensor | None) -> bool:
    """Whether Triton knows that every row of `[M, N]` can be read 16 bytes at a time.

    What is not aligned takes an address for each element, and so several times the registers.
    """
    numbers: list[int] = []
    for x in rows:
        if x is not None:
            numbers += [x.storage_offset() * x.element_size(), x.stride(0), x.shape[-1]]
    return all(number % 16 == 0 for number in numbers)


Strides = tuple[int | None, int | None, int | None]
"""Where the rows of `[..., N]` begin, as `row_starts` takes it: row r is the (r % inner)-th of group r // inner.

The three are the distance between groups, inner, and the distance within a group; the last two are None where all rows
are equally far apart, which costs a kernel no more than a single stride.
"""


def strided_rows(x: Tensor) -> tuple[Tensor, Strides]:
    """`[..., N]` as a kernel reads it row by row, neighbouring columns side by side, and where its rows begin.

    Rows at two distances are read where they are: the heads `[B, S, H, D]` of a packed projection, for one. A copy is
    made only where columns or rows are laid out in yet another way.
    """
    N = x.shape[-1]
    if x.stride(-1) == 1 and x.dim() == 2:
        return x, (x.stride(0), None, None)
    if x.is_contiguous():
        return x, (N, None, None)
    levels = _levels(x)
    # row_starts divides 32-bit integers.
    if x.stride(-1) != 1 or len(levels) > 2 or x.numel() // N >= 2**30:
        return x.contiguous(), (N, None, None)
    if len(levels) < 2:
        return x, (levels[0][1] if levels else N, None, None)
    (_, stride), (inner, inner_stride) = levels
    return x, (stride, inner, inner_stride)


def _levels(x: Tensor) -> list[tuple[int, int]]:
    """Number and distance of what the axes before the last count, axes that run on into each other taken as one."""
    levels: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if levels and levels[-1][1] == stride * size:
            size *= levels.pop()[0]
        levels.append((size, stride))
    return levels


@triton.jit
def row_starts(rows, stride, inner, inner_stride):
    """Where rows begin, from the strides of `strided_rows`; rows are int64."""
    if inner is None:
        starts = rows * stride
    else:
        rows = tl.cast(rows, tl.int32)  # a division of 64-bit integers takes several times as long
        starts = (rows // inner).to(tl.int64) * stride + (rows % inner).to(tl.int64) * inner_stride
    return starts


# H200, bf16, rms_norm's backward pass, times the floor: 1.89 at 32,768 and at 262,144 columns, with 32 2.05 and 2.20,
# with a share for each multiprocessor at any width 2.05 and 2.88.
SHARES = 16
"""Programs on each multiprocessor that walk blocks of columns."""


def row_shares(blocks: int, device: torch.device) -> int:
    """Into how many the rows are divided where so many blocks of columns have programs of their own.

    One for each multiprocessor, but of very wide rows no more than fill it: each share costs a row of partials.
    """
    return cdiv(num_programs(device, SHARES), max(SHARES, blocks))


@triton.jit
def sum_partials_kernel(partial_ptr, out_ptr, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    cols = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_P, BLOCK_N), dtype=tl.float32)
    for start in range(0, P, BLOCK_P):
        rows = start + tl.arange(0, BLOCK_P)
        mask = (rows < P)[:, None] & (cols < N)[None, :]
        total += tl.load(partial_ptr + rows[:, None] * N + cols[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + cols, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=cols < N)


def sum_partials(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum float32 `[P, N]` over its rows in a fixed order and round once to `dtype`: `[N]`."""
    P, N = partials.shape
    out = empty((N,), dtype, partials.device)
    # Narrow blocks of columns make enough programs; wide rows have enough anyway and read longer stretches.
    block_p, block_n = (64, 32) if N <= 8192 else (8, 256)
    wrap_triton(sum_partials_kernel)[(cdiv(N, block_n),)](
        partials, out, P, N, BLOCK_P=block_p, BLOCK_N=block_n, num_warps=8
    )
    return out
