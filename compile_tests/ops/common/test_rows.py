"""Tests of the known alignment of tensors."""

import pytest
import torch
from torch import Tensor

from llmk.ops.common.rows import matrices_aligned


def bfloat16(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("matrices", "aligned"),
    [
        (bfloat16(4, 16), True),
        (bfloat16(16, 4).t(), False),  # columns 8 bytes apart
        (bfloat16(8, 16).t(), True),
        (bfloat16(4, 12), False),
        (bfloat16(4, 12).float(), True),
        (bfloat16(4, 32)[:, 8:24], True),
        (bfloat16(4, 32)[:, 4:20], False),  # begins at 8 bytes
        (bfloat16(4, 32)[:, ::2], False),
        (bfloat16(1, 16).expand(4, 16), False),  # rows on top of each other
        (bfloat16(3, 4, 16), True),
        (bfloat16(3, 16, 8).transpose(1, 2), True),
        (bfloat16(200).as_strided((3, 4, 16), (68, 16, 1)), False),  # matrices 136 bytes apart
    ],
)
def test_matrices_that_grouped_products_take(matrices: Tensor, aligned: bool) -> None:
    assert matrices_aligned(matrices) == aligned
