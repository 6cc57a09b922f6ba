"""The matrix products of a linear layer fused with its loss, and nothing else: no such operator can be faster.

Under sustained matrix work a chip is limited by its power and runs below the rate of a short burst, so that the time of
the products alone, in the same chunks, is the honest limit of an operator that is made of them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from llmk.ops.linear_loss.chunked._linear import ChunkedLinear, add_product
from llmk.ops.linear_loss.chunked._plan import plan

Call = Callable[[], None]


def _chunked(input: Tensor, linear_weight: Tensor, chunk_size: int, **options: Any) -> ChunkedLinear:
    """The layer in the chunks that logits of the input's dtype would have, which are the largest."""
    input, linear_weight = input.detach(), linear_weight.detach()
    chosen = plan(
        input.shape[:-1].numel(), input.shape[-1], linear_weight.shape[0], input.dtype, float32_logits=False,
        on_host=input.is_cpu, chunk_size=chunk_size, **options,
    )  # fmt: skip
    return ChunkedLinear(input, linear_weight, None, chosen, float32_logits=False)


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
    products = _Products(_chunked(input, linear_weight, chunk_size))
    return products.forward, products.full


def linear_logprobs_products(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, chunk_size: int = 0, **options: Any
) -> tuple[Call, Call]:
    """`linear_logprobs`' four: the backward pass makes the logits again."""
    products = _Products(_chunked(input, linear_weight, chunk_size, remade=True))

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
    student = _Products(_chunked(input, linear_weight, chunk_size, layers=2))
    teacher = _Products(_chunked(teacher_input, teacher_linear_weight, student.linear.plan.chunk_rows))

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
"""By operator: what makes the two calls from a sample's arguments."""
