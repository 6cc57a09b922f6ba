"""The router's gradient where the scores that may be chosen are as small as what is added to their sum."""

from typing import Any

import pytest
import torch
from torch import Tensor

from llmk.functional import router_topk
from llmk.ops.experts.router_topk import router_topk_reference

pytestmark = pytest.mark.kernels

EPS = torch.finfo(torch.float32).eps
WEIGHTS = 86 * EPS
"""Relative: the exponential of a difference of up to 70, which is rounded, and 16 roundings of sum, quotient, scale."""
GRADIENTS = 2 * WEIGHTS
"""Relative: a gradient is a product of two weights."""
CANCELLED = 8 * EPS
"""A share of a row's largest gradient: each is a difference of two sums of at most four products."""
SMALLEST = 2 * 2.5 * torch.finfo(torch.float64).eps
"""Absolute: what the float64 reference loses of a gradient, which is 2.5 times what a weight lacks of 1."""


def behind_a_leader(gap: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Logits of which the first is larger than all others by at least `gap`, and a bias that leaves it out."""
    logits = torch.tensor([[0.0, -0.5, -1.0, -2.0], [0.0, 0.0, 0.0, -3.0], [0.0, -0.1, -0.2, -0.3]], device=device)
    logits = torch.cat((torch.full_like(logits[:, :1], gap), logits), dim=-1)
    bias = torch.zeros(5, device=device)
    bias[0] = -torch.inf
    return logits, bias


@pytest.mark.usefixtures("no_cpp")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("gap", [0.0, 20.0, 40.0, 44.0, 46.0, 50.0, 70.0])
def test_gradients_behind_a_leader(gap: float, scoring: str, compiled: bool, device: torch.device) -> None:
    logits, bias = behind_a_leader(gap, device)
    if scoring == "sigmoid":  # whose scores do not depend on the leader's
        logits = logits - gap
    options: dict[str, Any] = {"scoring": scoring, "scale": 2.5}
    function = torch.compile(router_topk, fullgraph=True, dynamic=False) if compiled else router_topk
    for top_k, dw in [(1, [[1.0]] * 3), (2, [[1.0, 1.0], [0.3, -2.0], [0.0, 1.0]]), (4, [[1.0, -1.0, 0.5, 2.0]] * 3)]:
        x, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
        weights, indices = function(x, top_k, bias=bias, **options)
        expected, chosen = router_topk_reference(exact, top_k, bias=bias.double(), **options)
        assert torch.equal(indices, chosen)
        torch.testing.assert_close(weights.double(), expected, rtol=WEIGHTS, atol=0.0)
        grad = torch.tensor(dw, device=device)
        weights.backward(grad)
        expected.backward(grad.double())
        assert x.grad is not None
        assert exact.grad is not None
        for row, right in zip(x.grad.double(), exact.grad, strict=True):
            torch.testing.assert_close(
                row, right, rtol=GRADIENTS, atol=CANCELLED * float(right.abs().amax()) + SMALLEST
            )


@pytest.mark.usefixtures("no_cpp")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_logits_decide_between_equal_scores(scoring: str, compiled: bool, device: torch.device) -> None:
    """A GPU has 0 of a score of 1e-43, and float32 one number of scores that differ by 1e-9 of themselves."""
    rows = [[0.0, 1.0, -0.0, 100.0], [-300.0, -200.0, -250.0, 0.0], [0.0, 2e-9, 1e-9, -1.0]]
    right = [[3, 1, 0, 2], [3, 1, 2, 0], [1, 2, 0, 3]]
    torch.compiler.reset()  # each shape and each option is a graph
    function = torch.compile(router_topk, fullgraph=True, dynamic=False) if compiled else router_topk
    for options in ({}, {"num_groups": 2, "topk_groups": 2}):
        logits = torch.tensor(rows, device=device, requires_grad=True)
        weights, indices = function(logits, 4, scoring=scoring, **options)
        assert indices.tolist() == right
        weights.sum().backward()
        assert logits.grad is not None
        assert bool(logits.grad.isfinite().all())


def test_without_numbers_the_first_experts_are_chosen(device: torch.device) -> None:
    """A softmax that is NaN throughout, as in torch.topk of it."""
    logits = torch.tensor([[0.0, torch.nan, 1.0, 2.0], [0.0, 1.0, torch.inf, 2.0]], device=device)
    assert router_topk(logits, 2)[1].tolist() == [[0, 1], [0, 1]]
