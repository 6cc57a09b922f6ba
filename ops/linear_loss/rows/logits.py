"""Logits in memory, a block of rows at a time: for what reads differences of probabilities, or the largest ones.

The gradient of a chunk's logits is what P is of losses without logits: rounded once, to the dtype in which it is
multiplied. It is made from the float32 logits of one block of rows after the other.

Numbers below 6e-8 are 0 in float16, and those below 6e-5 have less than its 11 digits. Training in float16 scales the
loss for that reason, but a gradient that is made in the forward pass is made before its factor is known. So it is
scaled here by the power of two that takes the largest number it can have to the end of the range, and the rows' factors
take that off the products again. No number leaves the range: the largest is bounded by a formula, or measured.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from llmk.ops.linear_loss.rows.products import FLOAT16_SCALE
from llmk.ops.linear_loss.rows.projection import LARGEST_EXPONENT, ChunkedRows, Gradients, RowMatrix

END = 15
"""Scaled numbers are at most 2**15, half of what float16 ends at, of which a rounding error is a small part."""
BIAS = 127
"""The bias of a float32's exponent."""


def largest(numbers: Tensor) -> Tensor:
    """Return the largest size of the numbers, float32 `[]`; of none it is 0."""
    return torch.nn.functional.pad(numbers.detach().reshape(-1).float().abs(), (0, 1)).amax()


def float16_scale(dtype: torch.dtype, need: Sequence[bool], bound: Callable[[], Tensor]) -> Tensor | None:
    """Return the power of two for a gradient of logits that `bound()`, float32 `[]`, bounds; None outside of float16.

    It is 1 where the bound is not finite, as gradients then are not. Its bits are made from the bound's: no rounding
    of an exponential is in it.
    """
    if dtype != torch.float16 or not any(need):
        return None
    size = bound()
    exponent = (size.view(torch.int32) >> 23) - (BIAS - 1)  # size < 2**exponent
    exponent = torch.where(size.isfinite(), (END - exponent).clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT), 0)
    return ((exponent + BIAS) << 23).view(torch.float32)


def scaled(grad: Tensor, scale: Tensor | None) -> Tensor:
    return grad if scale is None else grad * scale


class Block(NamedTuple):
    """A block of rows."""

    rows: slice
    end: Tensor  # int32 [1], how many of them count
    logits: Tensor | None  # float32 [M, V], None where the plan has none
    gradient: Tensor | None  # [M, V], where to write that of the logits: over these if it is not to be added


class LogitRows(ChunkedRows):
    """The rows of a linear layer whose logits exist a block at a time, which the next block overwrites."""

    def logits(self, rows: slice, count: Tensor, buffer: Tensor) -> Tensor:
        """Return the logits of a block, written to a buffer with as many columns or more."""
        z = buffer[: rows.stop - rows.start, : self.projection.V]
        self.projection.logits(rows, count, z)
        return z

    def chunks(self) -> list[slice]:
        """Return the rows of each chunk, one at least."""
        return super().chunks() or [slice(0, 0)]

    def slices(self, chunk: slice) -> Iterator[slice]:
        """Yield the rows of each block of a chunk, one at least."""
        step = self.plan.block_rows or self.plan.chunk_rows
        for start in range(chunk.start, max(chunk.stop, 1), step):
            yield slice(start, min(start + step, chunk.stop))

    def blocks(
        self, gradients: Gradients | None = None, counts: Tensor | None = None, scale: Tensor | None = None
    ) -> Iterator[Block]:
        """Yield each block; after the last one of a chunk the gradient of its logits is added to the gradients.

        That has no rows but those with a 1 among `counts`, float32 `[N]`, and is `scale` times what it is.
        """
        buffer = self.buffer(self.plan.block_rows) if self.plan.block_rows else None
        p = None if gradients is None else self.buffer(self.plan.chunk_rows, self.projection.p_dtype)
        factor = counts if counts is None or scale is None else counts * (FLOAT16_SCALE / scale)
        for chunk in self.chunks():
            for rows in self.slices(chunk):
                count = self.end(rows)
                z = None if buffer is None else self.logits(rows, count, buffer)
                yield Block(rows, count, z, z if p is None else p[rows.start - chunk.start : rows.stop - chunk.start])
            if gradients is not None and p is not None and factor is not None and self.x.shape[0] > 0:
                of_chunk = RowMatrix(p[: chunk.stop - chunk.start], factor[chunk].unsqueeze(0))
                gradients.add(chunk, self.end(chunk), of_chunk)
