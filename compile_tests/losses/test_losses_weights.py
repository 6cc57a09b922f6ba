"""Every mean of `llmk.losses` has one denominator: over no token, and over tokens whose weights are all 0, it is 0."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compile_tests.helpers.loss_calls import LOSSES, given

WEIGHTED: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("sft", {"entropy_coef": 0.0}),
    "distill": ("distill", {"ce_weight": 0.0}),
    "distill and cross entropy": ("distill", {}),
    "distill_teachers": ("distill_teachers", {"num_items_in_batch": None, "ce_weight": 0.0}),
    "distill_both_kinds": ("distill_both_kinds", {}),
    "distill_topk": ("distill_topk", {"ce_weight": 0.0}),
    "draft": ("draft", {}),
    "draft of two steps": ("draft", {"steps": 2}),
}


def weighted(name: str, weights: Tensor | None, device: torch.device) -> tuple[Tensor, dict[str, Tensor], list[Tensor]]:
    """The loss and its metrics with these token weights, and its gradients."""
    loss_name, options = WEIGHTED[name]
    (x, weight, target), others = given(loss_name, [3, 2, 4, 1], device)
    others = {**others, "token_weights": weights, **options}
    x, weight = x.requires_grad_(), weight.requires_grad_()
    hidden: Any = [x] * others.pop("steps") if "steps" in others else x
    fn: Callable[..., Any] = LOSSES[loss_name][0]
    loss, metrics = fn(hidden, weight, target, **others)
    return loss.detach(), metrics, list(torch.autograd.grad(loss, (x, weight)))


@pytest.mark.parametrize("name", WEIGHTED)
def test_weights_of_zero(name: str, device: torch.device) -> None:
    """What has weights is 0, with a gradient of 0; the cross entropy beside it stays as it is."""
    shape = given(WEIGHTED[name][0], [3, 2, 4, 1], device)[0][2].shape
    loss, metrics, gradients = weighted(name, torch.zeros(shape, device=device), device)
    of_tokens = metrics.get("nll_loss")
    if of_tokens is None:
        assert loss == 0
        assert not any(gradient.any() for gradient in gradients)
    else:
        _, plain, _ = weighted(name, None, device)
        torch.testing.assert_close(of_tokens, plain["nll_loss"])
        torch.testing.assert_close(loss, 0.3 * of_tokens)
        assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients)
    terms = [value for metric, value in metrics.items() if metric.startswith(("divergence", "loss/"))]
    assert not any(term.any() for term in terms)


@pytest.mark.parametrize("name", ["distill", "distill and cross entropy", "draft"])
def test_weights_of_one_are_none(name: str, device: torch.device) -> None:
    shape = given(WEIGHTED[name][0], [3, 2, 4, 1], device)[0][2].shape
    loss, _, gradients = weighted(name, torch.ones(shape, device=device), device)
    plain, _, of_plain = weighted(name, None, device)
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(gradients, of_plain)
