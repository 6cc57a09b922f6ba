"""A linear layer over many classes, a chunk of tokens at a time: what every loss fused with its projection shares.

The products are cuBLAS's (or the CPU's BLAS). They read W twice for each chunk and walk over dW once, so chunks should
be large: LOGITS_BUDGET bounds them. dW is summed in float32 where there are more than ROUNDED_CHUNKS chunks. Up to
there it is summed in the weight's own dtype: each product adds its float32 result to what is there and rounds once, and
the error of three such roundings stays within the accuracy rule, at half the memory.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmk.registry import PARTIAL, REPLICATE, KernelOp, axes, cdiv, empty, wrap_triton
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
"""Elements that the rows of a chunk's logits are apart from each other, or a multiple of it, whatever V is."""
ROUNDED_CHUNKS = 3
"""The most chunks over which dW is summed in the weight's own dtype."""


def chunk_rows(x: Tensor, V: int, chunk_size: int, budget: int = LOGITS_BUDGET) -> int:
    """Tokens in a chunk: as given, or on a GPU the fewest chunks of equal size that fit the budget.

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
    """`x @ weight.t() + bias`, so many rows at a time: x `[N, H]` is the input `[..., H]` as rows, weight `[V, H]`.

    The rows of a chunk are chosen for `classes` outputs a row, by default V.
    """

    def __init__(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        chunk_size: int,
        classes: int | None = None,
        budget: int = LOGITS_BUDGET,
    ) -> None:
        self.shape = input.shape
        self.x = input.reshape(-1, input.shape[-1])
        self.weight, self.bias = weight, bias
        V = weight.shape[0]
        self.chunk_rows = chunk_rows(self.x, V if classes is None else classes, chunk_size, budget)
        # cuBLAS takes five times as long for a product whose sizes are odd: what is left over has one of its own.
        whole = V // ALIGNED * ALIGNED
        self.class_parts = [part for part in (slice(whole, V), slice(0, whole)) if part.start < part.stop]

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield each chunk's rows and outputs; the next chunk's take their place."""
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


class LinearGradients:
    """The gradients of x, W and b that are wanted, as sums over the chunks; an empty tensor for each other.

    That of x is rounded to `dx_dtype`, which is that of x or float32.
    """

    def __init__(self, linear: ChunkedLinear, need: tuple[bool, bool, bool], dx_dtype: torch.dtype) -> None:
        self.linear, self.need = linear, need
        x, (V, H) = linear.x, linear.weight.shape
        # float16 has no room for sums that are not scaled yet.
        rounded = x.dtype != torch.float16 and cdiv(x.shape[0], linear.chunk_rows) <= ROUNDED_CHUNKS
        buffers = [
            (tuple(linear.shape), dx_dtype),
            ((V, H), x.dtype if rounded else torch.float32),
            ((V,), torch.float32),
        ]
        self.dx, self.dw, self.db = (
            torch.empty(shape if wanted else (0,), dtype=dtype, device=x.device)
            for (shape, dtype), wanted in zip(buffers, need, strict=True)
        )
        self.dx_rows = self.dx.view(x.shape) if need[0] else self.dx

    def add(self, rows: slice, dlogits: Tensor) -> None:
        """Add a chunk's share; the first one overwrites."""
        need_dx, need_dw, need_db = self.need
        if dlogits.shape[1] == 0:  # without classes
            if need_dx:
                self.dx_rows[rows].zero_()
            return
        first = rows.start == 0
        for i, part in enumerate(self.linear.class_parts):
            if need_dx:  # the few left-over classes first: the others' product rounds their sum
                add_product(self.dx_rows[rows], dlogits[:, part], self.linear.weight[part], first=i == 0)
            if need_dw:
                add_product(self.dw[part], dlogits[:, part].t(), self.linear.x[rows], first)
        if need_db:
            total = dlogits.sum(0, dtype=torch.float32)
            self.db = total if first else self.db.add_(total)


def add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """total += a @ b, in float32 within the product, rounded once to total's dtype."""
    options: dict[str, Any] = {}
    if total.dtype != a.dtype and a.device.type == "cuda":
        options["out_dtype"] = total.dtype
    else:
        a, b = a.to(total.dtype), b.to(total.dtype)
    if first:
        torch.mm(a, b, out=total, **options)
    else:
        torch.addmm(total, a, b, out=total, **options)


@triton.jit
def scale_kernel(x_ptr, grad_ptr, divisor_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    grad, divisor = tl.load(grad_ptr), tl.load(divisor_ptr)
    factor = tl.where(divisor == 0.0, grad, grad / divisor)
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + offsets, mask=offsets < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + offsets, (x * factor).to(y_ptr.dtype.element_ty), mask=offsets < N)


def _scale(input: Tensor, grad: Tensor, divisor: Tensor, dtype: torch.dtype) -> Tensor:
    """input * grad / divisor, both float32 scalars, rounded once to `dtype`; input * grad where the divisor is zero."""
    y = empty(input.shape, dtype, input.device)
    wrap_triton(scale_kernel)[(cdiv(input.numel(), 4096),)](
        input, grad, divisor, y, input.numel(), BLOCK_N=4096, num_warps=8
    )
    return y


def scale_op(name: str) -> KernelOp:
    """`_scale` as a kernel op of one operator's own."""
    scale = KernelOp(_scale, name=name, replayed=True)
    scale.register_kernel("cpu")(_scale_on_cpu)
    scale.register_fake(lambda input, grad, divisor, dtype: input.new_empty(input.shape, dtype=dtype))
    scale.register_sharding(
        lambda input, *_: [([split], [split, REPLICATE, REPLICATE]) for split in (*axes(input), PARTIAL)]
    )
    return scale


def _scale_on_cpu(input: Tensor, grad: Tensor, divisor: Tensor, dtype: torch.dtype) -> Tensor:
    factor = torch.where(divisor == 0, grad, grad / divisor)
    return torch.mul(input.float(), factor).to(dtype)
