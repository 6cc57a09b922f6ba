"""The matrix products of a linear layer fused with its loss, and nothing else: no such operator can be faster.

Under sustained matrix work a chip is limited by its power and runs below the rate of a short burst, so that the time of
the products alone, in the same chunks, is the honest limit of an operator that is made of them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from llmk.ops.linear_loss._chunked_linear import ChunkedLinear, add_product


def linear_ce_products(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, chunk_size: int = 0, **options: Any
) -> tuple[Callable[[], None], Callable[[], None]]:
    """`fused_linear_ce`'s products by BLAS: those of a forward pass, and of both with dW in the inputs' dtype."""
    linear = ChunkedLinear(input.detach(), linear_weight.detach(), None, chunk_size)
    x, weight = linear.x, linear.weight

    def forward() -> None:
        for _ in linear.chunks():
            pass

    def full() -> None:
        dx, dw = torch.empty_like(x), torch.empty_like(weight)
        for rows, logits in linear.chunks():
            for i, part in enumerate(linear.class_parts):
                add_product(dx[rows], logits[:, part], weight[part], first=i == 0)
                add_product(dw[part], logits[:, part].t(), x[rows], first=rows.start == 0)

    return forward, full


PRODUCTS = {"fused_linear_ce": linear_ce_products}
"""By operator: what makes the two calls from a sample's arguments."""
