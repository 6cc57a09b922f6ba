"""`llmk.losses.grpo` and what differs from it: metrics, what is clipped, supports, and terms that verl has."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from compile_tests.helpers.loss_references import batch, packed
from compile_tests.helpers.loss_samples import (
    BY_TOKEN,
    GRPO,
    LENGTHS,
    OLD,
    ORDER,
    PPO,
    REF,
    REINFORCE,
    RLOO,
    VALUES,
    make_sample,
    of,
)
from compile_tests.helpers.right_calls import require_call
from llmk import losses
from llmk.functional import linear_logprobs
from llmk.losses._policy import largest_covariance
from llmk.ops.linear_loss.objectives.policy import PolicyOptions, PolicyTerms
from llmk.registry import Sample

CPU = torch.device("cpu")


def loss_of(sample: Sample, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    return losses.grpo(*sample.args, **sample.kwargs | options)


@pytest.mark.parametrize("of_sequences", [False, True])
def test_metrics_of_the_sampler(device: torch.device, of_sequences: bool) -> None:
    sample = make_sample(of(GRPO, OLD, "sampling_per_token_logps"), device)
    target, old, sampled = sample.args[2], sample.kwargs[OLD], sample.kwargs["sampling_per_token_logps"]
    counts = target != -100
    sampled[1][counts[1]] = float("nan")  # a sequence of one token that the sampler did not score
    ratio = torch.rand(len(target) if of_sequences else target.shape).to(device) + 0.5
    _, metrics = loss_of(sample, importance_sampling_ratio=ratio)
    ratios = ratio if of_sequences else ratio[counts]
    known = counts & ~sampled.isnan()
    assert 0 < known.sum() < counts.sum()
    difference = (old - sampled)[known].abs()
    wanted = {
        "importance_sampling_ratio/min": ratios.min(),
        "importance_sampling_ratio/mean": ratios.mean(),
        "importance_sampling_ratio/max": ratios.max(),
        "sampling_logp_difference/mean": difference.mean(),
        "sampling_logp_difference/max": difference.max(),
    }
    for name, value in wanted.items():
        torch.testing.assert_close(metrics[f"sampling/{name}"], value, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("bound", [1.05, 1.2])
def test_metrics_of_bounds(bound: float, device: torch.device) -> None:
    _, metrics = loss_of(make_sample(of(GRPO, OLD, BY_TOKEN, clip_ratio_c=bound), device))
    assert 0 < metrics["clip_ratio/dual_mean"] < 1
    sample = make_sample(of(PPO, OLD, *VALUES, clip_ratio_c=bound), device)
    assert 0 < losses.ppo(*sample.args, **sample.kwargs)[1]["policy/clipfrac_dual_avg"] < 1
    for name, epsilon in (("dppo_tv", 5e-4), ("dppo_kl", 5e-5)):
        bounds = {"loss_type": name, "epsilon": epsilon, "epsilon_high": epsilon / 10}
        assert 0 < loss_of(make_sample(of(GRPO, OLD, **bounds), device))[1]["dppo_clip_ratio"] < 0.8


def test_losses_that_are_one_another(device: torch.device) -> None:
    """Above the clip a dual bound is delta; an estimator's value is another's; GPG is REINFORCE over the batch."""
    sample = make_sample(of(GRPO, OLD, REF, beta=0.7), device)
    dual, delta = (loss_of(sample, **{name: 1.3})[0] for name in ("clip_ratio_c", "delta"))
    assert torch.equal(dual, delta)
    assert dual != loss_of(sample)[0]
    k3, corrected = (loss_of(sample, kl_estimator=name)[0] for name in ("k3", "k3+"))
    torch.testing.assert_close(k3, corrected)
    gpg = make_sample(of(GRPO, OLD, loss_type="gpg"), device)
    torch.testing.assert_close(loss_of(gpg)[0], losses.reinforce(*gpg.args)[0])


def test_gmpo_where_some_tokens_have_no_advantage(device: torch.device) -> None:
    """Their ratios have A's sign, which is 0, as a factor of their logarithms, and no part in the geometric mean."""
    sample = make_sample(of(GRPO, OLD, BY_TOKEN, loss_type="gmpo", epsilon=0.3, epsilon_high=0.5), device)
    sample.args[3][:, ::2] = 0.0
    for each in (sample, packed(sample, sample.args[2], (OLD,))):
        require_call(GRPO.op, each)


def test_what_gmpo_clips(device: torch.device) -> None:
    """No gradient goes through a token that is clipped, and all through the others of its sequence."""
    sample = make_sample(of(GRPO, OLD, loss_type="gmpo", epsilon=0.3, epsilon_high=0.3), device)
    x, weight, target, advantages = sample.args
    advantages.copy_(torch.tensor([1.0, -1.0, -2.0, 1.0, 1.0, -1.0]))
    own, _ = linear_logprobs(x, weight, target)
    loss, metrics = loss_of(Sample((x.requires_grad_(), *sample.args[1:]), sample.kwargs))
    (grad,) = torch.autograd.grad(loss, x)
    clips = (advantages.sign().unsqueeze(1) * (own - sample.kwargs[OLD]) > 0.3) & (target != -100)
    assert torch.equal(grad.any(-1), (target != -100) & ~clips)
    torch.testing.assert_close(metrics["clip_ratio/region_mean"], clips.sum() / (target != -100).sum())
    assert 0 < metrics["clip_ratio/region_mean"] < 1


def test_gmpo_without_tokens_of_low_entropy_is_refused() -> None:
    with pytest.raises(ValueError, match="top_entropy_quantile: expected 1 with loss_type 'gmpo'"):
        loss_of(make_sample(of(GRPO, OLD, loss_type="gmpo", top_entropy_quantile=0.5), CPU))


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
]


@pytest.mark.parametrize("options", NEW, ids=lambda options: options["loss_type"])
def test_one_graph(options: dict[str, Any], device: torch.device) -> None:
    """No wait for the device and no graph for each size."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(losses.grpo, fullgraph=True, dynamic=True, backend=counter)
    for lengths in ([3, 4, 2, 5], [2, 0, 1]):
        x, weight, target = batch(lengths, device)
        near = {name: torch.randn(target.shape, device=device) - 3 for name in (OLD, REF)}
        arguments = x.requires_grad_(), weight.requires_grad_(), target, torch.randn(len(lengths), device=device)
        found, eager = (fn(*arguments, **near, **options)[0] for fn in (compiled, losses.grpo))
        torch.testing.assert_close(found, eager)
        torch.testing.assert_close(*(torch.autograd.grad(loss, arguments[:2]) for loss in (found, eager)))
    assert counter.frame_count == 1


def of_supports(device: torch.device) -> tuple[Sample, float]:
    """Supports of which some do not hold the target, one holds no id; and the fraction of those that do not."""
    sample = make_sample(of(GRPO, OLD, epsilon=0.1, epsilon_high=0.28), device)
    target = sample.args[2]
    support = torch.randint(-4, 37, (*target.shape, 9)).to(device)
    support[..., 3] = support[..., 5] = target.clamp(min=0)
    first, second, third = (target != -100).nonzero()[[0, 7, 20]].tolist()
    support[first[0], first[1]] = -1
    for row, token in (second, third):
        support[row, token] = (target[row, token] + 1 + torch.arange(9).to(device)) % 37
    return Sample(sample.args, sample.kwargs | {"support": support}, why="supports"), 2 / sum(LENGTHS)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "vespo"])
def test_supports_packed_and_padded(device: torch.device, loss_type: str) -> None:
    sample, outside = of_supports(device)
    options = {"loss_type": loss_type, "entropy_coef": 0.3, "skip_ignored": loss_type == "grpo"}
    sample = Sample(sample.args, sample.kwargs | options, why=sample.why)
    args = (*sample.args[:3], sample.args[3][ORDER])
    rows = packed(Sample(args, sample.kwargs, why=sample.why), sample.args[2], (OLD, "support"), ORDER)
    for each in (sample, rows):
        require_call(GRPO.op, each)
    found, expected = loss_of(rows), loss_of(sample)
    torch.testing.assert_close(found, expected)
    assert found[1]["outside_support"].item() == pytest.approx(outside)


def test_supports_of_the_other_policies(device: torch.device) -> None:
    given, outside = of_supports(device)
    for loss, *tensors in ((REINFORCE,), (RLOO, "old_logps"), (PPO, OLD, *VALUES)):
        sample = make_sample(of(loss, *tensors), device)
        _, metrics = loss.fn(*given.args[:3], *sample.args[3:], **sample.kwargs, support=given.kwargs["support"])
        assert metrics["outside_support"].item() == pytest.approx(outside)


def test_tokens_outside_of_their_supports_have_no_part(device: torch.device) -> None:
    """The loss is the one without them, and their hidden states have no gradient."""
    sample, _ = of_supports(device)
    x, weight, target, advantages = sample.args
    support = sample.kwargs["support"]
    outside = (target != -100) & ~(support == target.unsqueeze(-1)).any(-1) & (support >= 0).any(-1)
    found, expected = (
        losses.grpo(x.requires_grad_(), weight, labels, advantages, **sample.kwargs)
        for labels in (target, target.masked_fill(outside, -100))
    )
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0)
    assert not torch.autograd.grad(found[0], x)[0][outside].any()
    with pytest.raises(ValueError, match=r"support: expected shape \(6, 9, L\) .* got \(6, 9\)"):
        losses.grpo(x, weight, target, advantages, support=support[..., 0])
    with pytest.raises(TypeError, match="support: expected a tensor of integers"):
        losses.reinforce(x, weight, target, advantages, support=support.float())
