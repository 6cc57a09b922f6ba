"""Tensors past 2**31 elements: the last rows are as right as the first."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from llmk.opcheck import accuracy_violation
from llmk.opcheck.calls import as_list
from llmk.registry import OPS

ROWS, COLUMNS, TAIL = 2**31 // 4096 + 100, 4096, 8
MEMORY = 60 * 2**30

Arguments = tuple[list[Any], dict[str, Any]]


def _parameter(x: Tensor, *shape: int) -> Tensor:
    """The same bfloat16 numbers for whatever rows x has."""
    numbers = torch.linspace(-1, 1, math.prod(shape), device=x.device)
    return numbers.bfloat16().to(x.dtype).view(shape)


def _row_op(*parameters: int) -> Callable[[Tensor], Arguments]:
    return lambda x: ([x, *(_parameter(x, size) for size in parameters)], {})


def _targets(x: Tensor) -> Tensor:
    return (1e3 * x.detach()[:, 0].float().abs()).long() % COLUMNS


def _turned(*parameters: int) -> Callable[[Tensor], Arguments]:
    """The rows of x as tokens of 32 heads."""

    def call(x: Tensor) -> Arguments:
        q = x.view(1, len(x), 32, 128).transpose(1, 2)  # [1, H, S, D]
        k = x.detach()[:, :128].view(1, len(x), 1, 128).transpose(1, 2)
        angles = x.detach()[:, 128:256].bfloat16().float().unsqueeze(0)
        return [q, k, *(_parameter(x, size) for size in parameters), angles.cos(), angles.sin()], {}

    return call


CALLS: dict[str, Callable[[Tensor], Arguments]] = {
    "add": lambda x: ([x, x.detach()], {}),
    "add_rms_norm": lambda x: ([x, x.detach(), _parameter(x, COLUMNS)], {}),
    "cross_entropy": lambda x: ([x, _targets(x)], {"reduction": "none"}),
    "geglu": _row_op(),
    "giou_loss": lambda x: ([x.view(-1, 4), x.detach().flip(1).view(-1, 4)], {"reduction": "none"}),
    "group_norm": lambda x: ([x, 32, _parameter(x, COLUMNS), _parameter(x, COLUMNS)], {}),
    "kl_div": lambda x: ([x, x.detach().abs()], {"reduction": "none"}),
    "layer_norm": _row_op(COLUMNS, COLUMNS),
    "linear_act": lambda x: ([x[:, :16], _parameter(x, COLUMNS, 16)], {}),
    "qk_norm_rope": _turned(128, 128),
    "relu_squared": _row_op(),
    "rms_norm": _row_op(COLUMNS),
    "rope": _turned(),
    "softmax": _row_op(),
    "swiglu": _row_op(),
}
"""A call of each operator that treats rows alike, made of x `[M, COLUMNS]` alone: its last rows are their own call."""


def _first_output(fn: Callable[..., Any], name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result of a call, and the gradient of its sum."""
    args, kwargs = CALLS[name](x)
    output = as_list(fn(*args, **kwargs))[0]
    one = torch.ones((), device=x.device, dtype=output.dtype).expand(output.shape)
    return output.detach(), torch.autograd.grad(output, x, one)[0]


def _end(tensor: Tensor, shape: torch.Size) -> Tensor:
    """The last part, of the shape that a few rows give."""
    axis = next(axis for axis, size in enumerate(shape) if size != tensor.shape[axis])
    return tensor.narrow(axis, tensor.shape[axis] - shape[axis], shape[axis])


@pytest.mark.parametrize("name", CALLS)
def test_past_two_to_the_31(name: str, device: torch.device) -> None:
    op, rows = OPS[name], ROWS
    if device.type == "cpu":
        rows = 64  # the same calls, small: that the test itself is right
    elif torch.cuda.get_device_properties(device).total_memory < MEMORY:
        pytest.skip("needs a GPU with 60 GiB")
    x = torch.randn(rows, COLUMNS, device=device, dtype=torch.bfloat16)
    tail = x[-TAIL:].clone()
    ours = _first_output(op.overload, name, x.requires_grad_())
    composition = _first_output(op.reference, name, tail.clone().requires_grad_())
    exact = _first_output(op.reference, name, tail.double().requires_grad_())
    for actual, baseline, expected in zip(ours, composition, exact, strict=True):
        violation = accuracy_violation(_end(actual, expected.shape), baseline, expected)
        assert violation is None, str(violation)
