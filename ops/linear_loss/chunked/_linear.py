"""A linear layer over many classes, a chunk of tokens at a time, and the gradients of its input, weight and bias.

The products are cuBLAS's (or the CPU's BLAS). They read W twice for each chunk and walk over dW once, so chunks should
be large: LOGITS_BUDGET bounds them. dW is summed in float32 where there are more than ROUNDED_CHUNKS chunks. Up to
there it is summed in the weight's own dtype: each product adds its float32 result to what is there and rounds once, and
the error of three such roundings stays within the accuracy rule, at half the memory.

Where only the first rows count, and only the device knows how many, the products stop there (`_dynamic_rows.py`). They
are rounded before they are added, so dW is summed in its own dtype over DYNAMIC_ROUNDED_CHUNKS chunks at most.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from llmk.ops.linear_loss.chunked._dynamic_rows import add_where_any, input_gradient, outputs, weight_gradient
from llmk.registry import cdiv
from llmk.registry.backends import kernels_on_cpu

LOGITS_BUDGET = 4 * 2**30 // 3
"""Bytes of one chunk's logits on a GPU when `chunk_size` is 0."""
LOGITS_BUDGET_BESIDE_FLOAT32 = 2**30
"""The same where dW is summed in float32, which takes as much again as dW."""
REMADE_BUDGET = int(0.8 * 2**30)
"""The same where the backward pass makes the logits again, which then needs room for dW once: so three chunks, the most
that may be rounded, are enough for 8192 tokens of the largest vocabularies."""
CPU_LOGITS = 2**20
"""Elements of one chunk's logits on a CPU when `chunk_size` is 0: they stay in cache."""
ALIGNED = 16
"""The row stride of a chunk's logits is a multiple of this many elements, whatever V is."""
ROUNDED_CHUNKS = 3
"""The most chunks over which dW is summed in the weight's own dtype."""
DYNAMIC_ROUNDED_CHUNKS = 2
"""The same where each chunk's product is rounded first: the squares of the roundings of n equal products and their sums
add up to 2 for two, 2.7 for three, where one product's is 1 and the accuracy rule allows 1.5**2."""


def chunk_rows(x: Tensor, V: int, chunk_size: int, budget: int = LOGITS_BUDGET) -> int:
    """Return the tokens in a chunk: as given, or on a GPU the fewest chunks of equal size that fit the budget.

    One chunk is enough where its logits take no more than dW: the backward pass, when there are no logits, needs room
    for dW twice.
    """
    N, H = x.shape
    if chunk_size > 0:
        return chunk_size
    if x.device.type == "cpu" and not kernels_on_cpu():
        return max(64, CPU_LOGITS // V)
    logits = N * V * x.element_size()
    chunks = cdiv(logits, budget)
    if chunks > ROUNDED_CHUNKS:
        chunks = cdiv(logits, min(budget, LOGITS_BUDGET_BESIDE_FLOAT32))
    chunks = max(2 if N > H else 1, chunks)
    return max(1, cdiv(N, 128 * chunks)) * 128  # a multiple of 128 rows keeps the products' tiles whole


class ChunkedLinear:
    """`x @ weight.t() + bias` in chunks of rows: x `[N, H]` is the input `[..., H]` flattened, weight is `[V, H]`.

    The rows of a chunk are chosen for `classes` outputs a row, by default V. With a `count`, int32 `[]`, only so many
    rows have outputs, and the rows past them are undefined.
    """

    def __init__(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        chunk_size: int,
        classes: int | None = None,
        budget: int = LOGITS_BUDGET,
        count: Tensor | None = None,
    ) -> None:
        self.shape = input.shape
        self.x = input.reshape(-1, input.shape[-1])
        self.weight, self.bias = weight, bias
        V = weight.shape[0]
        self.chunk_rows = chunk_rows(self.x, V if classes is None else classes, chunk_size, budget)
        self.ends = None if count is None else self._ends(count)
        # cuBLAS takes five times as long for a product whose sizes are odd: the remainder has a product of its own.
        whole = V // ALIGNED * ALIGNED
        self.class_parts = [part for part in (slice(whole, V), slice(0, whole)) if part.start < part.stop]

    @property
    def num_chunks(self) -> int:
        return cdiv(self.x.shape[0], self.chunk_rows)

    def _ends(self, count: Tensor) -> Tensor:
        """Return the number of rows of each chunk that count, int32."""
        starts = torch.arange(0, self.x.shape[0], self.chunk_rows, dtype=torch.int32, device=count.device)
        return (count - starts).clamp_(0, self.chunk_rows)

    @property
    def leaves_rows_past_count(self) -> bool:
        """True if nothing reads outputs past the count, or their gradients: the sum for a bias does."""
        return self.ends is not None and self.bias is None

    def end(self, rows: slice) -> Tensor:
        """Return the number of rows of a chunk that count, `[1]`; needs a `count`."""
        assert self.ends is not None
        chunk = rows.start // self.chunk_rows
        return self.ends[chunk : chunk + 1]

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield each chunk's rows and outputs, which the next chunk overwrites and the end frees."""
        return self._whole_chunks() if self.ends is None else self._counted_chunks()

    def _counted_chunks(self) -> Iterator[tuple[slice, Tensor]]:
        N = self.x.shape[0]
        for start in range(0, N, self.chunk_rows):
            rows = slice(start, min(start + self.chunk_rows, N))
            logits = outputs(self.x[rows], self.weight, self.end(rows))
            if self.bias is not None:
                logits += self.bias
            yield rows, logits
            logits.untyped_storage().resize_(0)  # the product allocates its result: two would exist at once

    def _whole_chunks(self) -> Iterator[tuple[slice, Tensor]]:
        N, V = self.x.shape[0], self.weight.shape[0]
        size = (min(self.chunk_rows, N), cdiv(V, ALIGNED) * ALIGNED)  # rows that begin at aligned addresses
        buffer = torch.empty(size, dtype=self.x.dtype, device=self.x.device)[:, :V]
        for start in range(0, max(N, 1), self.chunk_rows):  # at least one: the gradients over no token are zeros
            rows = slice(start, min(start + self.chunk_rows, N))
            outputs = buffer[: rows.stop - rows.start]
            for part in self.class_parts:
                if self.bias is None:
                    torch.mm(self.x[rows], self.weight[part].t(), out=outputs[:, part])
                else:
                    torch.addmm(self.bias[part], self.x[rows], self.weight[part].t(), out=outputs[:, part])
            yield rows, outputs
        buffer.untyped_storage().resize_(0)  # the caller's loop still holds the last one


class LinearGradients:
    """The gradients of x, W and b that are needed, as sums over the chunks; the others are empty.

    The gradient of x is rounded to `dx_dtype`, which is the dtype of x or float32.
    """

    def __init__(self, linear: ChunkedLinear, need: tuple[bool, bool, bool], dx_dtype: torch.dtype) -> None:
        self.linear, self.need = linear, need
        x, (V, H) = linear.x, linear.weight.shape
        chunks = ROUNDED_CHUNKS if linear.ends is None else DYNAMIC_ROUNDED_CHUNKS
        # The range of float16 does not hold sums that are not scaled yet.
        rounded = x.dtype != torch.float16 and linear.num_chunks <= chunks
        buffers = [
            (tuple(linear.shape), dx_dtype, need[0]),
            ((V, H), x.dtype if rounded else torch.float32, need[1] and linear.ends is None),  # else the first product
            ((V,), torch.float32, need[2]),
        ]
        self.dx, self.dw, self.db = (
            torch.empty(shape if wanted else (0,), dtype=dtype, device=x.device) for shape, dtype, wanted in buffers
        )
        self.dx_rows = self.dx.view(x.shape) if need[0] else self.dx

    def add(self, rows: slice, dlogits: Tensor) -> None:
        """Accumulate the gradients of a chunk; the first one overwrites."""
        need_dx, need_dw, need_db = self.need
        if dlogits.shape[1] == 0:  # without classes
            if need_dx:
                self.dx_rows[rows].zero_()
            return
        first = rows.start == 0
        if self.linear.ends is not None:
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
