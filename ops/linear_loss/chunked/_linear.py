"""A linear layer over classes, a few tokens at a time, and the gradients of its tensors.

The products are cuBLAS's (or the CPU's BLAS), chosen in size by `_plan.py`. The logits are float32, as the tensor cores
made them, unless the input's dtype was asked for; their gradient is rounded once, to the dtype in which it is
multiplied. Where only the first rows count, and only the device knows how many, the products stop there
(`_dynamic_rows.py`).

Numbers below 6e-8 are 0 in float16, and those below 6e-5 have less than its 11 digits. Training in float16 scales the
loss for that reason, but a gradient that is made in the forward pass is made before its factor is known. So it is
scaled here by the power of two that takes the largest number it can have to the end of the range, and float32 sums of
its products are divided by that again. No number leaves the range: the largest is bounded by a formula, or measured.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from llmk.ops.linear_loss.chunked._compacted import CompactedTokens, RowCounts
from llmk.ops.linear_loss.chunked._dynamic_rows import (
    add_where_any,
    float32_outputs,
    input_gradient,
    outputs,
    weight_gradient,
)
from llmk.ops.linear_loss.chunked._plan import Plan
from llmk.registry import (
    cdiv,
)

ALIGNED = 16
"""The row stride of a chunk's logits is a multiple of this many elements, whatever V is."""

END = 15
"""Scaled numbers are at most 2**15, half of what float16 ends at, of which a rounding error is a small part."""
BIAS = 127
"""The bias of a float32's exponent."""
LARGEST_EXPONENT = 100
"""Beyond 2**100 gradients are not scaled further: float32's range ends."""


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


def aligned(V: Any) -> Any:
    """Return the elements from one row of V logits to the next, a multiple of ALIGNED; V may be 0, or symbolic."""
    columns: Any = torch.sym_max(V, 1)
    return cdiv(columns, ALIGNED) * ALIGNED


def aligned_parts(V: int) -> list[slice]:
    """Split V classes for two products: cuBLAS takes five times as long for one whose sizes are odd.

    The remainder's sums have another order. On a CPU all classes have one, so that equal rows of a weight have equal
    logits, as in PyTorch's composition.
    """
    whole = V // ALIGNED * ALIGNED
    return [part for part in (slice(whole, V), slice(0, whole)) if part.start < part.stop]


class ChunkedLinear:
    """`x @ weight.t() + bias` in chunks and blocks of rows: x `[N, H]` is the input `[..., H]` flattened.

    The weight is `[V, H]`. With a `count` only so many rows of each segment have outputs, and the others are undefined.
    Products read the first rows of a chunk: it is within a segment, and one block unless the segment is all rows.
    With `stored=False` no outputs are made, for kernels that make them from x and the weight: blocks have none.
    """

    def __init__(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plan: Plan,
        *,
        float32_logits: bool,
        count: RowCounts | None = None,
        stored: bool = True,
    ) -> None:
        self.shape, self.stored = input.shape, stored
        self.x = input.reshape(-1, input.shape[-1])
        self.weight, self.bias, self.plan, self.count = weight, bias, plan, count
        self.logits_dtype = torch.float32 if float32_logits else self.x.dtype
        if self.logits_dtype != self.x.dtype and not self.x.is_cuda:
            self.factor = weight.float()  # a CPU has no product of 16-bit matrices to float32
        else:
            self.factor = weight
        self.class_parts = aligned_parts(weight.shape[0]) if self.x.is_cuda else [slice(0, weight.shape[0])]

    @property
    def has_wider_logits(self) -> bool:
        """True if the logits have another dtype than their gradient, which has that of x."""
        return self.logits_dtype != self.x.dtype

    @property
    def has_separate_gradients(self) -> bool:
        """True if the gradient of the logits does not overwrite them."""
        return self.has_wider_logits or not self.stored

    def end(self, rows: slice) -> Tensor:
        """Return the number of some rows that count, int32 `[1]`; needs a `count`."""
        assert self.count is not None
        return self.count.end(rows)

    def chunk_of(self, rows: slice) -> slice:
        """Return the rows of the chunk that a block is in."""
        start = rows.start // self.plan.chunk_rows * self.plan.chunk_rows
        return slice(start, min(start + self.plan.chunk_rows, self.x.shape[0]))

    def buffer(self, rows: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized `[rows, V]` whose rows begin at aligned addresses."""
        V = self.weight.shape[0]
        size = min(rows, self.x.shape[0]), aligned(V)
        whole = torch.empty(size, dtype=dtype, device=self.x.device)
        if whole.is_cpu:
            # oneDNN's products of bfloat16, on a CPU with AMX, multiply an element behind a row of odd length by 0.
            whole[:, V:] = 0
        return whole[:, :V]

    @property
    def allocates(self) -> bool:
        """True if a product allocates its result."""
        return self.count is not None and not self.has_wider_logits

    def block_buffer(self) -> Tensor:
        """Return an uninitialized buffer for the outputs of a block, of no rows where products allocate them."""
        return self.buffer(self.plan.block_rows if self.stored and not self.allocates else 0, self.logits_dtype)

    def outputs(self, rows: slice, buffer: Tensor) -> Tensor:
        """Return the outputs of a block's rows, written to a `block_buffer` with as many columns or more."""
        if self.allocates:
            return self._counted_product(rows)
        return self._product(rows, buffer[: rows.stop - rows.start, : self.weight.shape[0]])

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield each block's rows and outputs, which the next block overwrites and the end frees."""
        buffer = self.block_buffer()
        for rows in self._block_rows():
            logits = self.outputs(rows, buffer) if self.stored else buffer
            yield rows, logits
            if self.allocates:  # the product allocates its result: two would exist at once
                logits.untyped_storage().resize_(0)
        buffer.untyped_storage().resize_(0)  # the caller's loop still holds the last one

    def _block_rows(self) -> Iterator[slice]:
        """Yield the rows of each block, at least one: a block ends where its chunk does."""
        N, start = self.x.shape[0], 0
        while True:
            stop = min(start + self.plan.block_rows, self.chunk_of(slice(start, start)).stop)
            yield slice(start, stop)
            if stop >= N:
                return
            start = stop

    def _counted_product(self, rows: slice) -> Tensor:
        logits = outputs(self.x[rows], self.weight, self.end(rows))
        return logits if self.bias is None else logits.add_(self.bias)

    def _product(self, rows: slice, logits: Tensor) -> Tensor:
        """Write the outputs of some rows."""
        x, add_bias = self.x[rows], self.has_wider_logits
        if self.count is not None:
            float32_outputs(x, self.weight, self.end(rows), logits)
        else:
            for part in self.class_parts:
                if self.bias is None or add_bias:
                    add_product(logits[:, part], x, self.factor[part].t(), first=True)
                else:
                    torch.addmm(self.bias[part], x, self.weight[part].t(), out=logits[:, part])
        if self.bias is not None and add_bias:
            logits += self.bias
        return logits


class LinearGradients:
    """The gradients of x, W and b that are needed, as sums over the chunks; the others are empty.

    They are rounded to `dtypes`; that of x is the dtype of x or float32. With a `scale` (`float16_scale`) the
    logits' gradient is `scale` times what it is, and these are divided by it before they are rounded.
    """

    def __init__(
        self,
        linear: ChunkedLinear,
        need: tuple[bool, bool, bool],
        dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
        scale: Tensor | None = None,
    ) -> None:
        self.linear, self.need, self.dtypes, self.scale = linear, need, dtypes, scale
        assert linear.has_separate_gradients or linear.plan.block_rows == linear.plan.chunk_rows
        x, (V, H) = linear.x, linear.weight.shape
        buffers = [
            (tuple(linear.shape), dtypes[0] if scale is None else torch.float32, need[0]),
            # Where only the device knows the number of rows the first product is the sum.
            ((V, H), x.dtype if linear.plan.rounded_sums else torch.float32, need[1] and linear.count is None),
            ((V,), torch.float32, need[2]),
        ]
        self.dx, self.dw, self.db = (
            torch.empty(shape if wanted else (0,), dtype=dtype, device=x.device) for shape, dtype, wanted in buffers
        )
        self.dx_rows = self.dx.view(x.shape) if need[0] else self.dx

    def blocks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield each block's rows, logits, and where to write their gradient, which may be the logits.

        After the last block of a chunk the gradients that are needed are accumulated; without any nothing need be
        written.
        """
        linear, needed = self.linear, any(self.need)
        separate = needed and linear.has_separate_gradients
        buffer = linear.buffer(linear.plan.chunk_rows, linear.x.dtype) if separate else None
        for rows, logits in linear.blocks():
            chunk = linear.chunk_of(rows)
            dlogits = logits if buffer is None else buffer[rows.start - chunk.start : rows.stop - chunk.start]
            yield rows, logits, dlogits
            if needed and rows.stop == chunk.stop:
                self._add(chunk, dlogits if buffer is None else buffer[: chunk.stop - chunk.start])
        if buffer is not None:
            buffer.untyped_storage().resize_(0)

    def results(self, compacted: CompactedTokens) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients; that of the input is scattered to all tokens."""
        if self.scale is not None:
            for total in (self.dx, self.dw, self.db):
                total.div_(self.scale)
        dx = compacted.scatter(self.dx_rows) if self.need[0] else self.dx
        return dx.to(self.dtypes[0]), self.dw.to(self.dtypes[1]), self.db.to(self.dtypes[2])

    def _add(self, rows: slice, dlogits: Tensor) -> None:
        """Accumulate the gradients of a chunk; the first one overwrites."""
        need_dx, need_dw, need_db = self.need
        if dlogits.shape[1] == 0:  # without classes
            if need_dx:
                self.dx_rows[rows].zero_()
            return
        first = rows.start == 0
        if self.linear.count is not None:
            self._add_counted(rows, dlogits, first)
            return
        for i, part in enumerate(self.linear.class_parts):
            if need_dx:  # the few left-over classes first: the others' product rounds their sum
                add_product(self.dx_rows[rows], dlogits[:, part], self.linear.weight[part], first=i == 0)
            if need_dw:
                add_product(self.dw[part], dlogits[:, part].t(), self.linear.x[rows], first)
        if need_db:
            self._add_bias_gradient(dlogits, first)

    def _add_counted(self, rows: slice, dlogits: Tensor, first: bool) -> None:
        need_dx, need_dw, need_db = self.need
        weight, end = self.linear.weight, self.linear.end(rows)
        if need_dx:
            if self.dx.dtype == weight.dtype:
                self.dx_rows[rows] = input_gradient(dlogits, weight, end)
            else:  # the float32 dx, which is summed over ranks before it is rounded
                add_product(self.dx_rows[rows], dlogits, weight, first=True)
        if need_dw:
            part = weight_gradient(dlogits, self.linear.x[rows], end)
            if first:
                self.dw = part.to(self.dw.dtype)
            else:
                add_where_any(self.dw, part, end)
        if need_db:
            self._add_bias_gradient(dlogits, first)

    def _add_bias_gradient(self, dlogits: Tensor, first: bool) -> None:
        total = dlogits.sum(0, dtype=torch.float32)
        self.db = total if first else self.db.add_(total)


def add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """Compute total += a @ b, in float32 within the product, rounded once to total's dtype."""
    options: dict[str, Any] = {}
    if total.dtype != a.dtype and a.device.type == "cuda":
        options["out_dtype"] = total.dtype
    else:
        a, b = a.to(total.dtype), b.to(total.dtype)
    if first:
        torch.mm(a, b, out=total, **options)
    else:
        torch.addmm(total, a, b, out=total, **options)
