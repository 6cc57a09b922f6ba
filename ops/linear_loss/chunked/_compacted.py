"""The tokens that count, before the others: how many they are only the device knows."""

import math
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from llmk.registry import cdiv, empty, jit, next_power_of_2, wrap_triton


@jit
def order_kernel(mask_ptr, place_ptr, count_ptr, N, segment, BLOCK_N: tl.constexpr):
    """List the rows of a segment: those that the mask says, in their order, before the others, and count them."""
    start = tl.program_id(0) * segment
    end = tl.minimum(start + segment, N)
    count = tl.zeros((1,), dtype=tl.int32)
    for first in range(start, end, BLOCK_N):
        rows = first + tl.arange(0, BLOCK_N)
        count += tl.sum((tl.load(mask_ptr + rows, mask=rows < end, other=0) != 0).to(tl.int32), axis=0)
    before = tl.zeros((1,), dtype=tl.int32)
    for first in range(start, end, BLOCK_N):
        rows = first + tl.arange(0, BLOCK_N)
        listed = tl.load(mask_ptr + rows, mask=rows < end, other=0) != 0
        number = before + tl.cumsum(listed.to(tl.int32), axis=0)  # of listed rows up to this one
        at = tl.where(listed, start + number - 1, rows + count - number)
        tl.store(place_ptr + at, rows.to(place_ptr.dtype.element_ty), mask=rows < end)
        before += tl.sum(listed.to(tl.int32), axis=0)
    tl.store(count_ptr + tl.program_id(0) + tl.arange(0, 1), count)


@jit
def gather_kernel(x_ptr, index_ptr, count_ptr, out_ptr, M, H, x_row, x_col, out_row, out_col, BLOCK: tl.constexpr):
    """Copy the rows of x at some places, one below the other: the first `count` of M, or all."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, col = at // H, at % H
    end = M
    if count_ptr is not None:
        end = tl.load(count_ptr)
    inside = row < end
    place = tl.load(index_ptr + row, mask=inside, other=0).to(tl.int64)
    x = tl.load(x_ptr + place * x_row + col * x_col, mask=inside, other=0)
    tl.store(out_ptr + row * out_row + col * out_col, x, mask=inside)


@jit
def scatter_kernel(
    x_ptr, index_ptr, count_ptr, out_ptr, M, H, segment, x_row, x_col, out_row, out_col, BLOCK: tl.constexpr
):  # fmt: skip
    """Copy the rows of x that count, the first of each segment, to their places, and zeros to those of the others."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, col = at // H, at % H
    inside = row < M
    count = tl.load(count_ptr + row // segment, mask=inside, other=0)
    place = tl.load(index_ptr + row, mask=inside, other=0).to(tl.int64)
    x = tl.load(x_ptr + row * x_row + col * x_col, mask=inside & (row % segment < count), other=0)
    tl.store(out_ptr + place * out_row + col * out_col, x, mask=inside)


BLOCK = 2048
"""Elements of a program that gathers or scatters."""


def gather_rows(x: Tensor, index: Tensor, out: Tensor, count: Tensor | None = None) -> None:
    """Copy the rows of x `[N, H]` at the places `[M]`, or at the first `count` of these, to out `[M, H]`."""
    M, H = out.shape
    if M * H > 0:
        wrap_triton(gather_kernel)[(cdiv(M * H, BLOCK),)](
            x, index, count, out, M, H, *x.stride(), *out.stride(), BLOCK=BLOCK, num_warps=4
        )


def ordered(mask: Tensor, dtype: torch.dtype, segment: int) -> tuple[Tensor, Tensor]:
    """List the rows of a mask `[N]`, in each segment of so many: their places `[N]`, and how many it says, int32."""
    N = mask.shape[0]
    segments = cdiv(max(N, 1), segment)
    place, count = empty((N,), dtype, mask.device), empty((segments,), torch.int32, mask.device)
    block = min(4096, next_power_of_2(segment))
    wrap_triton(order_kernel)[(segments,)](mask, place, count, N, segment, BLOCK_N=block, num_warps=8)
    return place, count


@dataclass(frozen=True)
class CompactedTokens:
    """The tokens that a loss is computed for, out of N tokens `[...]`: all of them, or those that count in their order.

    Where the host knows their number n only they are gathered, and `counts` is None. On a GPU, where the host would
    have to wait for it, the others follow them: n is N, and only the device knows how many count. There the tokens may
    be compacted within each segment of so many, which keeps a group in the rows of its segment.
    """

    shape: tuple[int, ...]
    index: Tensor | None = None  # [n], None for all tokens
    counts: Tensor | None = None  # int32 [segments], how many count, the first ones of each
    segment: int = 0

    @classmethod
    def of(cls, mask: Tensor, *, on_host: bool, segment: int | None = None) -> "CompactedTokens":
        """Compact tokens `[...]` by the mask of those that count; a segment of None is all of them."""
        shape, mask = tuple(mask.shape), mask.reshape(-1)
        if on_host:
            index = mask.nonzero().squeeze(-1)
            return cls(shape, None if index.shape == mask.shape else index)
        most = max(mask.shape[0], 1)  # no tokens are one segment of none that counts
        segment = most if segment is None else min(segment, most)
        index, counts = ordered(mask, torch.int64, segment)
        return cls(shape, index, counts, segment)

    def part(self, rows: slice) -> "CompactedTokens":
        """Return the tokens of a segment by themselves, `[rows]`."""
        shape = (rows.stop - rows.start,)
        if self.index is None:
            return CompactedTokens(shape)
        assert self.counts is not None
        i = rows.start // self.segment
        return CompactedTokens(shape, self.index[rows] - rows.start, self.counts[i : i + 1], *shape)

    def ends(self, counts: Tensor, rows: int) -> Tensor:
        """Return how many count of every so many rows, which are a segment, or a part where there is one segment."""
        if rows >= self.segment:
            return counts
        first = torch.arange(0, self.segment, rows, dtype=torch.int32, device=counts.device)
        return (counts - first).clamp_(0, rows)

    def past(self, counts: Tensor) -> Tensor:
        """Return the mask of the rows that do not count, and of those that fill up the last segment."""
        places = torch.arange(self.segment, dtype=torch.int32, device=counts.device)
        return (places >= counts.unsqueeze(-1)).view(-1)

    def gather(self, x: Tensor) -> Tensor:
        """Gather the rows of `[..., *rest]` of these tokens: `[n, *rest]`."""
        rows = x.reshape(math.prod(self.shape), *x.shape[len(self.shape) :])
        if self.index is None:
            return rows
        if self.counts is None:
            return rows[self.index]
        out = torch.empty((self.index.shape[0], *rows.shape[1:]), dtype=x.dtype, device=x.device)
        gather_rows(_matrix(rows), self.index, _matrix(out))
        return out

    def scatter(self, rows: Tensor) -> Tensor:
        """Scatter `[n, *rest]` to the tokens' positions in `[..., *rest]`, zero elsewhere."""
        shape = (*self.shape, *rows.shape[1:])
        if self.index is None:
            return rows.view(shape)
        if self.counts is None:
            out = torch.zeros((math.prod(self.shape), *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
            out[self.index] = rows
        else:
            out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
            x, y = _matrix(rows), _matrix(out)
            if x.numel() > 0:
                wrap_triton(scatter_kernel)[(cdiv(x.numel(), BLOCK),)](
                    x, self.index, self.counts, y, *x.shape, self.segment, *x.stride(), *y.stride(), BLOCK=BLOCK,
                    num_warps=4,
                )  # fmt: skip
        return out.view(shape)

    def scatter_output(self, rows: Tensor) -> Tensor:
        """Scatter what an operator returns, which shares memory with nothing else."""
        return self.scatter(rows.clone() if self.index is None else rows)

    def gather_statistics(self, stats: Tensor) -> Tensor:
        """Gather the columns of `[S, ...]` of these tokens: `[S, n]`."""
        return self.gather(stats.movedim(0, -1)).t().contiguous()

    def scatter_statistics(self, stats: Tensor) -> Tensor:
        """Scatter `[S, n]` to the tokens' positions in `[S, ...]`, zero elsewhere."""
        return self.scatter(stats.t()).movedim(-1, 0).contiguous()


def _matrix(rows: Tensor) -> Tensor:
    """Return rows `[n, *rest]` as a matrix."""
    return rows.reshape(rows.shape[0], math.prod(rows.shape[1:]))
