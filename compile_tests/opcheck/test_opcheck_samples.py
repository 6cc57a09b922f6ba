"""Samples that a program's own calls give."""

import dataclasses

import pytest
import torch
from torch import Tensor

from compile_tests.helpers import strangers
from llmk.opcheck import check, record

LINEAR = dataclasses.replace(strangers.LINEAR, dtypes=(torch.float32,))


def rows(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float32, device="cpu")


def test_calls_are_recorded_by_operator_each_kind_once() -> None:
    x, weight = rows(5, 12).requires_grad_(), rows(7, 12)
    with record() as samples:
        for _ in range(3):
            strangers.linear(x, weight).sum().backward()
        torch.ops.strangers.linear(x, weight, rows(7))
        torch.ops.strangers.linear.default(x, weight.T.contiguous().T)  # other strides
        strangers.concat([x, x], 0)
        torch.relu(x)
    assert {name: len(calls) for name, calls in samples.items()} == {"strangers::linear": 3, "strangers::concat": 1}
    first = samples["strangers::linear"][0]
    assert str(first) == "recorded call 0 [(5, 12), (7, 12)]"
    assert not first.args[0].requires_grad
    assert first.args[0].data_ptr() != x.data_ptr()


def test_recorded_calls_are_samples() -> None:
    with record() as samples:
        strangers.linear(rows(2, 3), rows(4, 3))
    (result,) = check(LINEAR, samples, only=["values_and_gradients"])
    assert result.passed
    assert result.calls >= 1
    wrong = dataclasses.replace(LINEAR, reference=lambda x, weight, bias=None: 2 * x @ weight.T)
    (result,) = check(wrong, samples, only=["values_and_gradients"])
    assert result.message.startswith("recorded call 0 [(2, 3), (4, 3)]: output 0")


def test_an_operator_that_was_not_called_is_named() -> None:
    with record() as samples:
        strangers.concat([rows(2, 3), rows(2, 3)], 0)
    with pytest.raises(ValueError, match="no call of strangers::linear was recorded; there are strangers::concat"):
        check(LINEAR, samples)
