"""The losses of `llmk.losses` where batches are empty, ratios overflow, logits are scaled and items are counted."""

from typing import Any

import pytest
import torch
from torch import Tensor

from compile_tests.helpers.loss_calls import LOSSES, given, gradients
from compile_tests.helpers.loss_references import batch
from compile_tests.helpers.policy_references import grpo_reference, rloo_reference
from llmk import losses

FAR: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    **{name: (losses.grpo, grpo_reference, {"loss_type": name}) for name in ("dapo", "cispo", "sapo")},
    "delta": (losses.grpo, grpo_reference, {"delta": 3.0}),
    "gspo": (losses.grpo, grpo_reference, {"importance_sampling_level": "sequence"}),
    "ppo": (losses.ppo, grpo_reference, {}),
    "rloo": (losses.rloo, rloo_reference, {}),
}
"""Losses with a ratio, what they are in float64, and options."""


@pytest.mark.parametrize("in_forward", [True, False])
@pytest.mark.parametrize("name", FAR)
def test_a_finite_loss_has_finite_gradients(device: torch.device, name: str, in_forward: bool) -> None:
    """The old policy gave some tokens, or a sequence, e**-200 times the probability."""
    loss_of, reference, options = FAR[name]
    x, weight, target = batch([5, 3, 4, 6], device)
    if name == "rloo":
        old = torch.tensor([-15.0, -10.0, -300.0, -18.0], device=device)
    else:
        old = torch.full(target.shape, -3.0, device=device)
        old[2] = -300.0
    advantages = torch.tensor([1.0, -1.0, 2.0, 0.0], device=device)
    options = options | {"old_logps" if name == "rloo" else "old_per_token_logps": old}
    if not in_forward and loss_of is losses.grpo:  # made in the backward pass
        options |= {"off_policy_mask_threshold": 1e9}
    got = gradients(loss_of, (x, weight, target), {"advantages": advantages, **options})
    exact = [t.double().requires_grad_() for t in (x, weight)]
    doubles = {k: v.double() if isinstance(v, Tensor) else v for k, v in options.items()}
    want = reference(*exact, target, advantages.double(), **doubles)
    for a, b in zip(got, [want, *torch.autograd.grad(want, exact)], strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a.double(), b.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("by_sequence", [False, True])
def test_a_bound_keeps_a_ratio_that_overflows_finite(device: torch.device, by_sequence: bool) -> None:
    """Nothing else bounds the ratio of a negative advantage; past the bound it has no gradient."""
    x, weight, target = batch([5, 3, 4, 6], device)
    old = torch.full(target.shape, -3.0, device=device)
    old[1] = -300.0
    options: dict[str, Any] = {"importance_sampling_level": "sequence"} if by_sequence else {}
    others = {"advantages": torch.tensor([1.0, -1.0, 2.0, 0.0], device=device), "old_per_token_logps": old}
    loss, _ = losses.grpo(x, weight, target, **others, **options)
    assert loss == float("inf")
    loss, dx, dw = gradients(losses.grpo, (x, weight, target), others | options | {"max_log_ratio": 20.0})
    assert loss.isfinite()
    assert loss > 1e6
    assert dx[0].any()
    assert not dx[1].any()
    assert dw.isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
def test_no_sequence_at_all(device: torch.device, name: str) -> None:
    """A rank whose groups were all filtered out has none."""
    (x, weight, target), others = given(name, [4, 2], device)

    def none_of(value: Any) -> Any:
        if isinstance(value, list):
            return [none_of(each) for each in value]
        return value[:0] if isinstance(value, Tensor) and value.shape[:1] == (2,) else value

    others = {key: none_of(value) for key, value in others.items()}
    loss, dx, dw = gradients(LOSSES[name][0], (x[:0], weight, target[:0]), others)
    assert loss == 0.0
    assert dx.shape[0] == 0
    assert not dw.any()


@pytest.mark.parametrize("name", LOSSES)
def test_logits_are_scaled(device: torch.device, name: str) -> None:
    inputs, others = given(name, [3, 4, 2, 5], device)
    options = {"softcap": 3.0, "linear_bias": torch.randn(37).to(device)}
    scaled = gradients(LOSSES[name][0], inputs, others | options | {"logit_scale": 0.25})
    x, weight, target = inputs
    others |= {"ref_linear_weight": 0.25 * others["ref_linear_weight"]} if "ref_input" in others else {}
    options["linear_bias"] = 0.25 * options["linear_bias"]
    loss, dx, dw = gradients(LOSSES[name][0], (x, 0.25 * weight, target), others | options)
    for ours, want in zip(scaled, (loss, dx, 0.25 * dw), strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ce_weight", [0.0, 0.3])
def test_distillation_in_parts_is_that_of_the_whole(device: torch.device, weighted: bool, ce_weight: float) -> None:
    """The parts of a batch add up to it with the step's items, as TRL's accumulation has it."""
    x, weight, target = batch([5, 1, 4, 6], device)
    tensors = {"teacher_input": torch.randn(*target.shape, 9), "token_weights": torch.rand(target.shape)}
    others = {key: v.to(device) for key, v in tensors.items() if weighted or key != "token_weights"}
    options = {"teacher_linear_weight": torch.randn(37, 9).to(device), "ce_weight": ce_weight, "beta": 1.0}
    options |= {"teacher_logit_scale": 0.5, "num_items_in_batch": int((target != -100).sum())}
    whole = gradients(losses.distill, (x, weight, target), others | options)
    parts = []
    for rows in (slice(0, 1), slice(1, 4)):
        of_part = {key: v[rows] for key, v in others.items()}
        parts.append(gradients(losses.distill, (x[rows], weight, target[rows]), of_part | options))
    found = parts[0][0] + parts[1][0], torch.cat([parts[0][1], parts[1][1]]), parts[0][2] + parts[1][2]
    for ours, want in zip(found, whole, strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-5, atol=1e-6)
    if not weighted:
        del options["num_items_in_batch"]
        torch.testing.assert_close(whole[0], gradients(losses.distill, (x, weight, target), others | options)[0])


def test_the_shapes_and_numbers_of_trl(device: torch.device) -> None:
    x, weight, target = batch([5, 1, 4, 6], device)
    advantages, label = torch.randn(4).to(device), torch.tensor([True, False, False, True], device=device)
    for loss_of in (losses.grpo, losses.ppo, losses.rloo, losses.reinforce):
        want = gradients(loss_of, (x, weight, target), {"advantages": advantages})
        got = gradients(loss_of, (x, weight, target), {"advantages": advantages.unsqueeze(1)})
        assert all(map(torch.equal, got, want)), loss_of.__name__
    given = {"ref_logps": torch.randn(4).to(device) - 9}
    want = gradients(losses.kto, (x, weight, target), {"label": label, "kl": torch.tensor(0.3).to(device), **given})
    for dtype in (torch.int64, torch.int8):
        got = gradients(losses.kto, (x, weight, target), {"label": label.to(dtype), "kl": 0.3, **given})
        assert all(map(torch.equal, got, want)), dtype
    signs = 2 * label.long() - 1
    assert losses.kto(x, weight, target, signs, **given)[0].isnan()


def test_nan_in_an_ignored_token_reaches_no_gradient(device: torch.device) -> None:
    """A row that does not count is left out of products, whether it is skipped or not."""
    x, weight, target = batch([5, 1, 4, 6], device)
    x[tuple((target == -100).nonzero()[0])] = torch.nan
    assert x.isnan().any()
    for skips in (False, True):
        options = {"advantages": torch.ones(4, device=device), "skip_ignored": skips}
        loss, dx, dw = gradients(losses.grpo, (x, weight, target), options)
        assert loss.isfinite()
        assert dx.isfinite().all()
        assert dw.isfinite().all()


def test_what_is_clipped(device: torch.device) -> None:
    """A token is clipped where the clipped term is the larger, which A's sign decides; over no token metrics are 0."""
    x, weight, target = batch([4, 4], device)
    logps = (
        torch.log_softmax(x.float() @ weight.float().T, -1).gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    )
    advantages = torch.tensor([1.0, -1.0], device=device)
    _, metrics = losses.ppo(x, weight, target, advantages, old_per_token_logps=logps - 1.0)  # a ratio of e
    assert metrics["policy/clipfrac_avg"] == 0.5
    _, metrics = losses.ppo(x, weight, target, 0 * advantages, old_per_token_logps=logps - 1.0)
    assert metrics["policy/clipfrac_avg"] == 0.0
    _, metrics = losses.grpo(x, weight, torch.full_like(target, -100), advantages)
    assert not any(value.any() for value in metrics.values()), metrics
