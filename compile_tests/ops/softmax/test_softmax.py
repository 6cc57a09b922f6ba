"""Softmax at the edges: rows whose probabilities do not sum to one."""

import pytest
import torch

from llmk.functional import softmax

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("width", [47, 109, 617, 1331])
def test_a_constant_gradient_of_equal_values_is_zero(width: int, dim: int, device: torch.device) -> None:
    """Their probabilities sum to 1 - 2^-24, and a large gradient shows what is left."""
    shape = (width, 2) if dim == 0 else (2, width)
    x = torch.zeros(shape, device=device, requires_grad=True)
    y = softmax(x, dim)
    y.backward(torch.full_like(y, 2.0**100))
    assert x.grad is not None
    assert float(x.grad.abs().max()) <= 2.0 ** (100 - 46)


@pytest.mark.parametrize("dim", [0, 1])
def test_an_infinite_gradient_is_what_pytorch_gives(dim: int, device: torch.device) -> None:
    x = torch.randn(4, 4, device=device, requires_grad=True)
    dy = torch.ones_like(x)
    dy[1, 2] = torch.inf
    (got,) = torch.autograd.grad(softmax(x, dim), x, dy)
    (right,) = torch.autograd.grad(torch.softmax(x, dim), x, dy)
    torch.testing.assert_close(got, right, equal_nan=True)
