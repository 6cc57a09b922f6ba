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
