"""Hyper-connections' operators beside definitions in float64 that say what each number is."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from compile_tests.helpers.breadth import some_of
from llmk import functional
from llmk.opcheck import accuracy_violation
from llmk.registry import OPS

pytestmark = pytest.mark.kernels

T, N, H, EPS = 5, 3, 21, 1e-6
SHAPES = {
    "sinkhorn": [(T, N, N)],
    "rms_linear": [(T, H), (4, H)],
    "read_streams": [(T, N, H), (T, N)],
    "write_streams": [(T, N, H), (T, H), (T, N), (T, N, N)],
}


def sinkhorn(x: Tensor) -> Tensor:
    a = x.exp() / x.exp().sum(-1, keepdim=True) + EPS
    for turn in range(2 * 20 - 1):
        over = "tij->tj" if turn % 2 == 0 else "tij->ti"
        total = torch.einsum(over, a) + EPS
        a = a / (total.unsqueeze(1) if turn % 2 == 0 else total.unsqueeze(2))
    return a


def rms_linear(x: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("tk,pk->tp", x, weight) / (torch.einsum("tk,tk->t", x, x) / H + EPS).sqrt().unsqueeze(1)


def read_streams(x: Tensor, p: Tensor) -> Tensor:
    return torch.einsum("tih,ti->th", x, p)


def write_streams(x: Tensor, f: Tensor, q: Tensor, mix: Tensor) -> Tensor:
    return torch.einsum("th,tj->tjh", f, q) + torch.einsum("tij,tih->tjh", mix, x)


DEFINITIONS: list[Callable[..., Tensor]] = [sinkhorn, rms_linear, read_streams, write_streams]


WAYS = list(product((torch.float32, torch.float16, torch.bfloat16), (None, torch.float32), (False, True)))
"""Dtypes of the first tensor and of the others, if another, and whether the call is compiled."""
KEPT = [way for way in WAYS if not way[2] or way[:2] in ((torch.float32, None), (torch.bfloat16, torch.float32))]


def results(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    inputs = [x.detach().requires_grad_() for x in inputs]
    y = function(*inputs)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.device, torch.bfloat16)
    return [y, *torch.autograd.grad(y, inputs, grad.to(y.dtype))]


@pytest.mark.usefixtures("no_cpp")
@pytest.mark.parametrize("way", some_of(WAYS, KEPT), ids=str)
@pytest.mark.parametrize("definition", DEFINITIONS)
def test_values_and_gradients(
    definition: Callable[..., Tensor], way: tuple[torch.dtype, torch.dtype | None, bool], device: torch.device
) -> None:
    dtype, of_weights, compiled = way
    torch.manual_seed(0)
    torch._dynamo.reset()
    name = definition.__name__
    first, *others = (torch.randn(shape).to(device, dtype) for shape in SHAPES[name])
    inputs = [first, *(x.to(of_weights or dtype) for x in others)]
    own = getattr(functional, name)
    function = torch.compile(own, fullgraph=True) if compiled else own
    got, composition = (results(f, inputs) for f in (function, OPS[name].reference))
    right = results(definition, [x.double() for x in inputs])
    for actual, baseline, expected in zip(got, composition, right, strict=True):
        assert actual.shape == expected.shape
        assert (violation := accuracy_violation(actual, baseline, expected)) is None, str(violation)
