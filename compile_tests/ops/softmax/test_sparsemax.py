"""Sparsemax at the edges: rows that have no threshold, rows of no length, and places that are at the threshold."""

import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from llmk.functional import sparsemax
from llmk.ops.softmax.sparsemax import sparsemax_reference

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


@pytest.mark.parametrize("width", [4, 9000])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_gradient_of_a_row_without_a_threshold_is_nan(value: float, width: int, device: torch.device) -> None:
    x = torch.zeros(2, width, device=device)
    x[0, 1] = value
    x.requires_grad_()
    sparsemax(x).sum().backward()
    assert x.grad is not None
    assert bool(x.grad[0].isnan().all())
    assert not x.grad[1].any()


def test_a_place_at_the_threshold_is_zero_and_has_no_gradient(device: torch.device) -> None:
    x = torch.tensor([[1.0, 0.0, -3.0]], device=device, requires_grad=True)
    y = sparsemax(x)
    assert y.tolist() == [[1.0, 0.0, 0.0]]
    y.backward(torch.tensor([[3.0, 2.0, 1.0]], device=device))
    assert x.grad is not None
    assert x.grad.tolist() == [[0.0, 0.0, 0.0]]


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Interrupt what runs longer: a loop of the interpreter is Python's own."""

    def interrupt(*_: object) -> None:
        raise TimeoutError(f"still running after {seconds} s")

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


AT_THE_THRESHOLD = [
    ["0x0.0p+0", "-0x1.1866040000000p-1", "-0x1.8c33000000000p-1"],
    ["0x0.0p+0", "-0x1.4a28de0000000p-6", "-0x1.0528a20000000p-1"],
    ["0x0.0p+0", "-0x1.f542ac0000000p-2", "-0x1.7d50aa0000000p-1"],
]
"""The last value is above the threshold of the first two alone and at that of all three, as both are rounded."""


@pytest.mark.parametrize("width", [3, 9000])
@pytest.mark.parametrize("row", AT_THE_THRESHOLD, ids=["-0.774", "-0.510", "-0.745"])
def test_a_place_that_leaves_and_comes_back(row: list[str], width: int, device: torch.device) -> None:
    """Two nonzero values: their sum is the same in whichever order a kernel adds."""
    x = torch.full((1, width), -2.0, device=device)
    x[0, :3] = torch.tensor([float.fromhex(value) for value in row], device=device)
    x.requires_grad_()
    with at_most(20.0):
        y = sparsemax(x)
    torch.testing.assert_close(y.double(), sparsemax_reference(x.double()), rtol=0.0, atol=torch.finfo(x.dtype).eps)
    dy = torch.zeros_like(y)
    dy[0, :3] = torch.tensor([3.0, -1.0, 4.0], device=device)
    y.backward(dy)
    inside = y != 0
    expected = torch.where(inside, dy - dy[inside].mean(), 0.0)
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.usefixtures("no_cpp")
@pytest.mark.parametrize("shape", [(3, 0), (0, 3), (0,)])
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_nothing_gives_nothing(shape: tuple[int, ...], dim: int, compiled: bool, device: torch.device) -> None:
    x = torch.zeros(shape, device=device, requires_grad=True)
    function = torch.compile(sparsemax, fullgraph=True) if compiled else sparsemax
    y = function(x, dim)
    y.backward(torch.zeros_like(y))
    assert x.grad is not None
    assert y.shape == x.grad.shape == shape
    assert sparsemax_reference(x, dim).shape == shape
