"""Tensors as the kernels take them: as rows, side by side in memory, and what is known of where these begin."""

import torch
import triton.language as tl
from torch import Tensor

from llmk.registry import jit, max_warps, shared_memory


def contiguous(x: Tensor | None) -> Tensor | None:
    """`x.contiguous()`, of what may be left out."""
    return x.contiguous() if x is not None else None


def contiguous_last_dim(x: Tensor) -> Tensor:
    """x, or a copy where neighbours along its last axis are not neighbours in memory."""
    return x if x.stride(-1) == 1 else x.contiguous()


def swapped(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x with its axes 1 and 2 swapped, in `dtype`, in new memory where they lie as in a contiguous x.

    An operator may return it: it is no view, see `empty_in_order`.
    """
    return x.contiguous().transpose(1, 2).to(dtype, copy=True)


def as_rows(x: Tensor) -> Tensor:
    """`[..., N]` as `[M, N]` with neighbouring columns side by side; copies only where strides leave no way."""
    return contiguous_last_dim(x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0))


def as_long_rows(*tensors: Tensor) -> list[Tensor]:
    """All, of one shape, as `as_rows` has them; where each is contiguous as one long row `[1, M * N]`."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return [tensor.view(1, tensor.numel()) for tensor in tensors]
    return [as_rows(tensor) for tensor in tensors]


def aligned(*numbers: int | torch.SymInt | None) -> bool:
    """True if sizes, strides and offsets, of which None is none, are what Triton takes for aligned: multiples of 16.

    Then it knows that rows can be read 16 bytes at a time. What is not aligned takes an address for each element, and
    so several times the registers.
    """
    return all(number is None or number % 16 == 0 for number in numbers)


def byte_offset(x: Tensor) -> int | torch.SymInt:
    """Return the offset of a tensor in its storage, which is aligned."""
    return x.storage_offset() * x.element_size()


def rows_aligned(*rows: Tensor | None) -> bool:
    """Return True if every row of `[M, N]` is aligned."""
    return all(aligned(byte_offset(x), x.stride(0), x.shape[-1]) for x in rows if x is not None)


def matrices_aligned(x: Tensor) -> bool:
    """Return True if PyTorch's grouped products take `[M, N]` or `[E, M, N]` as it is.

    They want rows, or else columns, side by side in memory and not on top of each other, and each of them and each
    matrix to begin at a multiple of 16 bytes.
    """
    rows, columns = x.stride()[-2:]
    near, far, size = (columns, rows, x.shape[-1]) if columns == 1 else (rows, columns, x.shape[-2])
    begin = (x.storage_offset(), far, *x.stride()[:-2])
    return near == 1 and far >= size and all(n * x.element_size() % 16 == 0 for n in begin)


Strides = tuple[int | None, int | None, int | None]
"""The start of each row of `[..., N]`, as `row_starts` takes it: row r is the (r % inner)-th of group r // inner.

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


def strided_rows_aligned(N: int, *rows: tuple[Tensor | None, Strides]) -> bool:
    """Return True if all rows of N columns, with the strides of `strided_rows`, are aligned."""
    return aligned(N) and all(
        aligned(byte_offset(x), stride, inner_stride) for x, (stride, _, inner_stride) in rows if x is not None
    )


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


@jit
def row_starts(rows, stride, inner, inner_stride):
    """Return the offsets of rows by the strides of `strided_rows`; rows are int64."""
    if inner is None:
        starts = rows * stride
    else:
        rows = tl.cast(rows, tl.int32)  # a division of 64-bit integers takes several times as long
        starts = (rows // inner).to(tl.int64) * stride + (rows % inner).to(tl.int64) * inner_stride
    return starts


@jit
def row_and_columns(N, BLOCK_N: tl.constexpr):
    """A program's row and columns: neighbours in time are neighbours in memory."""
    program = tl.program_id(0)
    blocks = tl.cdiv(N, BLOCK_N)
    return (program // blocks).to(tl.int64), (program % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)


MOST_SHARED = 163 * 1024
"""An sm_80's shared memory of a block, for which stages were chosen: on one with more they are the same."""
SHARED_BY_SUMS = 1024
"""The bytes that a kernel needs there besides, to add up over its warps."""


def rows_ahead(row_bytes: int, device: torch.device, most: int = 2) -> int:
    """Return how many times so many bytes, of rows that are read before their turn, fit into a block's shared memory.

    A loop with so many rows ahead has one stage more. AMD's compiler keeps them in registers: there it is an sm_80's.
    """
    has_shared_rows = max_warps() == 32
    room = min(shared_memory(device), MOST_SHARED) if has_shared_rows else MOST_SHARED
    return min(most, (room - SHARED_BY_SUMS) // row_bytes)
