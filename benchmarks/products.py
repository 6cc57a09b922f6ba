"""The matrix products of a linear layer fused with its loss, and nothing else: no such operator can be faster.

Under sustained matrix work a chip is limited by its power and runs below the rate of a short burst, so that the time of
the products alone, in the same chunks, is the honest limit of an operator that is made of them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from llmk.ops.linear_loss.chunked import Plan
from llmk.ops.linear_loss.chunked import plan as plan_of_logits
from llmk.ops.linear_loss.chunked._linear import ChunkedLinear, add_product
from llmk.ops.linear_loss.rows.plan import plan

Call = Callable[[], None]


def _chunked(input: Tensor, linear_weight: Tensor, chunk_rows: int) -> ChunkedLinear:
    """The layer in chunks of so many rows, with logits of the input's dtype."""
    chunks = Plan(chunk_rows, chunk_rows, True)
    return ChunkedLinear(input.detach(), linear_weight.detach(), None, chunks, float32_logits=False)


def _as_planned(input: Tensor, linear_weight: Tensor, chunk_size: int) -> ChunkedLinear:
    """The layer in the chunks of the losses that have no logits."""
    sizes = input.shape[:-1].numel(), input.shape[-1], linear_weight.shape[0]
    chosen = plan(*sizes, input.dtype, on_host=input.is_cpu, chunk_size=chunk_size)
    return _chunked(input, linear_weight, chosen.chunk_rows)


class _Products:
    """Those of a linear layer in chunks, with the gradients in the inputs' dtype."""

    def __init__(self, linear: ChunkedLinear) -> None:
        self.linear = linear

    def forward(self) -> None:
        for _ in self.linear.blocks():
            pass

    def full(self) -> None:
        linear = self.linear
        x, weight = linear.x, linear.weight
        dx, dw = torch.empty_like(x), torch.empty_like(weight)
        for rows, logits in linear.blocks():
            for i, part in enumerate(linear.class_parts):
                add_product(dx[rows], logits[:, part], weight[part], first=i == 0)
                add_product(dw[part], logits[:, part].t(), x[rows], first=rows.start == 0)


def linear_ce_products(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, chunk_size: int = 0, **options: Any
) -> tuple[Call, Call]:
    """`fused_linear_ce`'s products by BLAS: those of a forward pass, and of both."""
    products = _Products(_as_planned(input, linear_weight, chunk_size))
    return products.forward, products.full


def linear_logprobs_products(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, chunk_size: int = 0, **options: Any
) -> tuple[Call, Call]:
    """`linear_logprobs`' four: the backward pass makes the logits again."""
    products = _Products(_as_planned(input, linear_weight, chunk_size))

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
    chosen = plan_of_logits(
        input.shape[:-1].numel(), input.shape[-1], linear_weight.shape[0], input.dtype, float32_logits=False,
        on_host=input.is_cpu, chunk_size=chunk_size, layers=2,
    )  # fmt: skip
    student = _Products(_chunked(input, linear_weight, chosen.chunk_rows))
    teacher = _Products(_chunked(teacher_input, teacher_linear_weight, chosen.chunk_rows))

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
