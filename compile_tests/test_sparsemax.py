"""Sparsemax at the edges: rows that have no threshold, and places that are at it."""

import math

import pytest
import torch

from llmk.functional import sparsemax

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("width", [4, 9000])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rows_without_a_threshold_are_nan(value: float, width: int, device: torch.device) -> None:
    x = torch.zeros(2, width, device=device)
    x[0] = -math.inf
    x[0, 1] = value
    y = sparsemax(x)
    assert bool(y[0].isnan().all())
    torch.testing.assert_close(y[1], torch.full((width,), 1 / width, device=device))


def test_a_place_at_the_threshold_is_zero_and_has_no_gradient(device: torch.device) -> None:
    x = torch.tensor([[1.0, 0.0, -3.0]], device=device, requires_grad=True)
    y = sparsemax(x)
    assert y.tolist() == [[1.0, 0.0, 0.0]]
    y.backward(torch.tensor([[3.0, 2.0, 1.0]], device=device))
    assert x.grad is not None
    assert x.grad.tolist() == [[0.0, 0.0, 0.0]]
