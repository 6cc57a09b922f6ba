"""The matrix products of a linear layer fused with its loss, and nothing else: no such operator can be faster.

Under sustained matrix work a chip is limited by its power and runs below the rate of a short burst, so that the time of
the products alone, in the same chunks, is the honest limit of an operator that is made of them.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from llmk.ops.linear_loss.chunked.plan import plan

Call = Callable[[], None]
ALIGNED = 16
"""cuBLAS takes five times as long for a product whose sizes are odd: the classes past a multiple of it are one more."""


class _Products:
    """Those of a linear layer in chunks of rows, with logits and gradients of the inputs' dtype."""

    def __init__(self, input: Tensor, linear_weight: Tensor, chunk_rows: int) -> None:
        self.x, self.weight = input.detach().reshape(-1, input.shape[-1]), linear_weight.detach()
        self.rows, V = min(chunk_rows, len(self.x)), len(self.weight)
        whole = V // ALIGNED * ALIGNED
        self.parts = [part for part in (slice(0, whole), slice(whole, V)) if part.start < part.stop]

    def _logits(self) -> Iterator[tuple[slice, Tensor]]:
        V = len(self.weight)
        buffer = torch.empty((self.rows, -(-V // ALIGNED) * ALIGNED), dtype=self.x.dtype, device=self.x.device)
        for start in range(0, len(self.x), self.rows):
            rows = slice(start, min(start + self.rows, len(self.x)))
            logits = buffer[: rows.stop - start, :V]
            for part in self.parts:
                torch.mm(self.x[rows], self.weight[part].t(), out=logits[:, part])
            yield rows, logits

    def forward(self) -> None:
        for _ in self._logits():
            pass

    def full(self) -> None:
        dx, dw = torch.empty_like(self.x), torch.empty_like(self.weight)
        for rows, logits in self._logits():
            for i, part in enumerate(self.parts):
                _add(dx[rows], logits[:, part], self.weight[part], first=i == 0)
                _add(dw[part], logits[:, part].t(), self.x[rows], first=rows.start == 0)


def _add(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    if first:
        torch.mm(a, b, out=total)
    else:
        torch.addmm(total, a, b, out=total)


def _as_planned(input: Tensor, linear_weight: Tensor, chunk_size: int, matrices: int = 0) -> int:
    """Return the rows of a chunk."""
    sizes = input.shape[:-1].numel(), input.shape[-1], linear_weight.shape[0]
    chosen = plan(sizes, input.dtype, on_host=input.is_cpu, chunk_size=chunk_size, matrices=matrices)
    return chosen.chunk_rows


def linear_ce_products(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, chunk_size: int = 0, **options: Any
) -> tuple[Call, Call]:
    """`fused_linear_ce`'s products by BLAS: those of a forward pass, and of both."""
    products = _Products(input, linear_weight, _as_planned(input, linear_weight, chunk_size))
    return products.forward, products.full


def linear_logprobs_products(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, chunk_size: int = 0, **options: Any
) -> tuple[Call, Call]:
    """`linear_logprobs`' four: the backward pass makes the logits again."""
    products = _Products(input, linear_weight, _as_planned(input, linear_weight, chunk_size))

    def full() -> None:
        products.forward()
        products.full()

    return products.forward, full


def linear_jsd_products(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor,
    teacher_linear_weight: Tensor,
    *,
    chunk_size: int = 0,
    **options: Any,
) -> tuple[Call, Call]:
    """`fused_linear_jsd`'s: the student's three and the teacher's one, in chunks that fit both logits."""
    rows = _as_planned(input, linear_weight, chunk_size, matrices=2)
    student, teacher = _Products(input, linear_weight, rows), _Products(teacher_input, teacher_linear_weight, rows)

    def forward() -> None:
        student.forward()
        teacher.forward()

    def full() -> None:
        student.full()
        teacher.forward()

    return forward, full


PRODUCTS = {
    "fused_linear_ce": linear_ce_products,
    "linear_logprobs": linear_logprobs_products,
    "fused_linear_jsd": linear_jsd_products,
}
"""The functions that make the two calls from a sample's arguments, by operator."""
