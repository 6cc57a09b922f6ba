"""Terms of policy losses that verl has beside TRL's, against compositions in float64 written from the papers."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from compile_tests.helpers.loss_ops import GRPO, PPO
from compile_tests.helpers.loss_references import batch, packed
from llmk import losses
from llmk.functional import linear_logprobs
from llmk.losses._policy import largest_covariance
from llmk.opcheck.calls import call, require_accurate
from llmk.ops.linear_loss.objectives.policy import PolicyOptions, PolicyTerms
from llmk.registry import Op, Sample

LENGTHS = [5, 1, 7, 0, 4, 6]
ORDER = [3, 1, 0, 5, 2, 4]
OF_TOKENS = ("old_per_token_logps", "ref_per_token_logps", "values", "old_values", "returns")


def require(op: Op, sample: Sample, packs: bool = False) -> None:
    """The rule of accuracy for the loss and its gradients, of the batch or of the same one packed."""
    if packs:
        x, weight, target, advantages = sample.args
        rows = advantages[ORDER[: len(advantages)]] if advantages.dim() == 1 else advantages
        sample = packed(Sample((x, weight, target, rows), sample.kwargs, why=sample.why), target, OF_TOKENS, ORDER)
    require_accurate(op, sample, call(op, sample))


def others(logps: Tensor, scale: float) -> Tensor:
    """Log-probabilities of another policy."""
    return logps + scale * torch.randn(logps.shape).to(logps.device)


def given(
    device: torch.device, by_token: bool = False, lengths: list[int] = LENGTHS, seed: int = 0, **options: Any
) -> Sample:
    """A batch with an empty sequence, and log-probabilities of an old policy and of a reference that are near."""
    x, weight, target = batch(lengths, device, seed=seed)
    scores = torch.nn.functional.linear(x.float(), weight.float()).log_softmax(-1)
    own = scores.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    advantages = torch.randn(target.shape if by_token else len(target)).to(device)
    kwargs = {"old_per_token_logps": others(own, 0.4), **options}
    if "beta" in options:
        kwargs["ref_per_token_logps"] = others(own, 0.5)
    return Sample((x, weight, target, advantages), kwargs, why=str(options))


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("bound", [1.05, 1.4])
def test_dual_clip(device: torch.device, bound: float, packs: bool) -> None:
    """A bound below the clip's upper one, and one above, at both levels and for PPO."""
    ways: list[dict[str, Any]] = [{"importance_sampling_level": "sequence", "loss_type": "grpo"}, {"delta": 3.0}, {}]
    for options in ways:
        require(GRPO, given(device, by_token=not packs, clip_ratio_c=bound, **options), packs)
    sample = given(device, by_token=not packs, clip_ratio_c=bound)
    _, metrics = losses.grpo(*sample.args, **sample.kwargs)
    assert 0 < metrics["clip_ratio/dual_mean"] < 1
    sample = given(device, by_token=True, clip_ratio_c=bound)
    values = {name: torch.randn(sample.args[2].shape).to(device) for name in ("values", "old_values", "returns")}
    sample = Sample(sample.args, sample.kwargs | values, why="ppo")
    require(PPO, sample, packs)
    _, metrics = losses.ppo(*sample.args, **sample.kwargs)
    assert 0 < metrics["policy/clipfrac_dual_avg"] < 1


def test_dual_clip_is_delta_above_the_clip(device: torch.device) -> None:
    sample = given(device)
    dual, delta = (losses.grpo(*sample.args, **sample.kwargs, **{name: 1.3})[0] for name in ("clip_ratio_c", "delta"))
    assert torch.equal(dual, delta)
    assert dual != losses.grpo(*sample.args, **sample.kwargs)[0]


@pytest.mark.parametrize("corrected", [False, True])
def test_the_value_of_one_estimator_and_the_gradient_of_another(device: torch.device, corrected: bool) -> None:
    sample = given(device, beta=0.7, kl_estimator="k3+", use_bias_correction_kl=corrected)
    require(GRPO, sample, packs=corrected)
    value = losses.grpo(*sample.args, **sample.kwargs)[0]
    torch.testing.assert_close(value, losses.grpo(*sample.args, **sample.kwargs | {"kl_estimator": "k3"})[0])


def test_gpg_is_reinforce(device: torch.device) -> None:
    """Chu et al. sum -A log pi over the batch's tokens and divide by their number."""
    sample = given(device, loss_type="gpg")
    want = losses.reinforce(*sample.args)[0]
    torch.testing.assert_close(losses.grpo(*sample.args, **sample.kwargs)[0], want)


@pytest.mark.parametrize("loss_of", [losses.grpo, losses.ppo])
@pytest.mark.parametrize("bound", [1.0, 0.2, float("nan"), float("inf")])
def test_dual_clips_that_are_refused(loss_of: Any, bound: float) -> None:
    sample = given(torch.device("cpu"))
    with pytest.raises(ValueError, match=f"clip_ratio_c: expected a finite number above 1, got {bound}"):
        loss_of(*sample.args, **sample.kwargs, clip_ratio_c=bound)


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("by_token", [False, True])
def test_gmpo(device: torch.device, by_token: bool, packs: bool) -> None:
    """Advantages of tokens are averaged over the sequence; a divergence with the ratio before it is clipped."""
    options = {"loss_type": "gmpo", "epsilon": 0.3, "epsilon_high": 0.5, "beta": 0.7}
    require(GRPO, given(device, by_token, **options), packs)
    require(GRPO, given(device, by_token, max_log_ratio=0.05, entropy_coef=0.2, loss_agg="token", **options), packs)


@pytest.mark.parametrize("packs", [False, True])
def test_gmpo_where_some_tokens_have_no_advantage(device: torch.device, packs: bool) -> None:
    """Their ratios have A's sign, which is 0, as a factor of their logarithms, and no part in the geometric mean."""
    sample = given(device, by_token=True, loss_type="gmpo", epsilon=0.3, epsilon_high=0.5)
    x, weight, target, advantages = sample.args
    advantages[:, ::2] = 0.0
    require(GRPO, Sample((x, weight, target, advantages), sample.kwargs), packs)


def test_what_gmpo_clips(device: torch.device) -> None:
    """No gradient goes through a token that is clipped, and all through the others of its sequence."""
    sample = given(device, loss_type="gmpo", epsilon=0.3, epsilon_high=0.3)
    x, weight, target, _ = sample.args
    x, old = x.requires_grad_(), sample.kwargs["old_per_token_logps"]
    own, _ = linear_logprobs(x.detach(), weight, target)
    advantages = torch.tensor([1.0, -1.0, -2.0, 1.0, 1.0, -1.0], device=device)
    loss, metrics = losses.grpo(x, weight, target, advantages, **sample.kwargs)
    (grad,) = torch.autograd.grad(loss, x)
    sign = advantages.sign().unsqueeze(1)
    clips = (sign * (own - old) > 0.3) & (target != -100)
    assert torch.equal(grad.any(-1), (target != -100) & ~clips)
    torch.testing.assert_close(metrics["clip_ratio/region_mean"], clips.sum() / (target != -100).sum())
    assert 0 < metrics["clip_ratio/region_mean"] < 1


def test_gmpo_without_tokens_of_low_entropy_is_refused() -> None:
    sample = given(torch.device("cpu"), loss_type="gmpo", top_entropy_quantile=0.5)
    with pytest.raises(ValueError, match="top_entropy_quantile: expected 1 with loss_type 'gmpo'"):
        losses.grpo(*sample.args, **sample.kwargs)


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize(("loss_type", "epsilon"), [("dppo_tv", 5e-4), ("dppo_kl", 5e-5)])
def test_dppo(device: torch.device, loss_type: str, epsilon: float, packs: bool) -> None:
    """Some tokens are past the bound; the ratio has a bound of its own, or none."""
    options: dict[str, Any] = {"loss_type": loss_type, "epsilon": epsilon, "epsilon_high": epsilon / 10}
    for delta in (None, 1.2):
        sample = given(device, by_token=not packs, beta=0.7, delta=delta, **options)
        require(GRPO, sample, packs)
        _, metrics = losses.grpo(*sample.args, **sample.kwargs)
        assert 0 < metrics["dppo_clip_ratio"] < 0.8


def test_dppo_of_probabilities_0_and_1(device: torch.device) -> None:
    """KL(old, pi) is infinite where pi has no probability for what old has, and 0 where both are the same."""
    logps = torch.tensor([0.0, 0.0, -1e-9, -0.1, 0.0, -200.0, -1.0], device=device)
    old = torch.tensor([0.0, -0.1, 0.0, 0.0, -1e-9, -1.0, -200.0], device=device)
    options = PolicyOptions("dppo_kl", epsilon=0.05, epsilon_high=0.05)
    ones = torch.ones_like(old)
    kept = {}
    for sign in (1.0, -1.0):
        terms = PolicyTerms(
            advantages=sign * ones, token_weight=ones, old_logps=old, options=options, level=lambda values: values
        )
        mask = terms.keeps(logps)
        assert mask is not None
        kept[sign] = mask.tolist()
    assert kept[1.0] == [True, False, True, True, False, True, False]
    assert kept[-1.0] == [True, True, True, False, True, False, True]


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("fraction", [0.0, 0.2, 0.5, 1.0])
def test_kl_cov(device: torch.device, fraction: float, packs: bool) -> None:
    """No token, a few, and all of them have a penalty."""
    options = {"loss_type": "kl_cov", "kl_cov_ratio": fraction, "ppo_kl_coef": 3.0}
    require(GRPO, given(device, by_token=not packs, **options), packs)
    require(GRPO, given(device, beta=0.7, max_log_ratio=0.3, **options), packs)


def test_how_many_have_the_largest_covariance(device: torch.device) -> None:
    """There is at least one, of equal ones the first, and none of those that do not count."""
    logps = torch.tensor([[3.0, -3.0, 3.0, 0.0], [9.0, -3.0, -3.0, 3.0]], device=device)
    mask = torch.tensor([[True, True, True, True], [False, True, True, True]], device=device)
    advantages = logps.clamp(-3.0, 3.0)
    for fraction, count in ((0.0, 1), (0.28, 1), (0.3, 2), (0.9, 6), (1.0, 7)):
        selected = largest_covariance(logps, advantages, mask, fraction)
        equal, last = [0, 1, 2, 5, 6, 7], [3]  # the product is 9, and 0 for the last
        assert selected.flatten().nonzero().flatten().tolist() == sorted([*equal, *last][:count])
    assert not largest_covariance(logps, advantages, torch.zeros_like(mask), 0.5).any()
    assert largest_covariance(logps[:0], advantages[:0], mask[:0], 0.5).shape == (0, 4)


NEW: list[dict[str, Any]] = [
    {"loss_type": "gmpo", "epsilon": 0.2, "beta": 0.5, "max_log_ratio": 0.2, "count_empty_sequences": False},
    {"loss_type": "kl_cov", "kl_cov_ratio": 1.0, "loss_agg": "sequence_mean"},  # of two tokens both products are equal
    {"loss_type": "dppo_kl", "epsilon": 1e-3, "beta": 0.5, "kl_estimator": "k3+", "num_sequences_in_batch": 4},
    {"loss_type": "grpo", "clip_ratio_c": 1.1, "importance_sampling_level": "sequence", "max_log_ratio": 0.1},
    {"loss_type": "gpg", "loss_agg": "sequence_sum", "count_empty_sequences": False},
]


@pytest.mark.parametrize("options", NEW[:3], ids=lambda options: options["loss_type"])
def test_one_graph(device: torch.device, options: dict[str, Any]) -> None:
    """No wait for the device and no graph for each size."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(losses.grpo, fullgraph=True, dynamic=True, backend=counter)
    for lengths in ([3, 4, 2, 5], [2, 0, 1]):
        sample = given(device, lengths=lengths, **options)
        for ours, eager in zip(gradients(compiled, sample), gradients(losses.grpo, sample), strict=True):
            torch.testing.assert_close(ours, eager)
    assert counter.frame_count == 1


def gradients(fn: Any, sample: Sample) -> list[Tensor]:
    """The loss, and the gradients of the hidden states and of the projection."""
    x, weight = (of.clone().requires_grad_() for of in sample.args[:2])
    loss, _ = fn(x, weight, *sample.args[2:], **sample.kwargs)
    return [loss.detach(), *torch.autograd.grad(loss, (x, weight))]
