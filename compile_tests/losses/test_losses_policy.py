"""`llmk.losses.grpo` and what differs from it, against compositions in float64 written from the papers."""

from typing import Any

import pytest
import torch
from torch import Tensor

from compile_tests.helpers.loss_ops import GRPO, PPO, REINFORCE, RLOO
from compile_tests.helpers.loss_references import batch, logps_of, packed
from llmk import losses
from llmk.losses._policy import AGGREGATIONS, TYPES
from llmk.opcheck.calls import call, require_accurate
from llmk.ops.linear_loss.objectives.policy import ESTIMATORS
from llmk.registry import Op, Sample

LENGTHS = [5, 1, 7, 3, 4, 6]
ORDER = [3, 1, 0, 5, 2, 4]
OF_TOKENS = ("old_per_token_logps", "ref_per_token_logps", "importance_sampling_ratio", "sampling_per_token_logps")


def require(op: Op, sample: Sample) -> None:
    """The rule of accuracy for the loss and its gradients."""
    require_accurate(op, sample, call(op, sample))


def near(x: Tensor, weight: Tensor, target: Tensor, scale: float) -> Tensor:
    """Log-probabilities of another policy, so that some ratios are clipped and others not."""
    scores = torch.nn.functional.linear(x.float(), weight.float()).log_softmax(-1)
    own = scores.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return own + scale * torch.randn(own.shape).to(own.device)


def of_grpo(device: torch.device, dtype: torch.dtype = torch.float32, **options: Any) -> Sample:
    x, weight, target = batch(LENGTHS, device, dtype)
    advantages = torch.randn(len(LENGTHS)).to(device)
    old = near(x, weight, target, 0.3)
    return Sample((x, weight, target, advantages), {"old_per_token_logps": old, **options}, why=f"grpo {options}")


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", TYPES)
def test_types(device: torch.device, loss_type: str, level: str) -> None:
    require(GRPO, of_grpo(device, torch.bfloat16, loss_type=loss_type, importance_sampling_level=level))


@pytest.mark.parametrize("loss_agg", AGGREGATIONS)
@pytest.mark.parametrize("loss_type", ["grpo", "cispo", "vespo"])
def test_any_sum_of_any_type(device: torch.device, loss_type: str, loss_agg: str) -> None:
    options = {"num_items_in_batch": 17.0, "max_completion_length": 11}
    sample = of_grpo(device, loss_type=loss_type, loss_agg=loss_agg, **options)
    require(GRPO, sample)
    x, weight, target, advantages = sample.args
    args = (x, weight, target, advantages[ORDER])
    require(GRPO, packed(Sample(args, sample.kwargs, why=sample.why), target, OF_TOKENS, ORDER))


@pytest.mark.parametrize("options", [{}, {"count_empty_sequences": False}, {"num_sequences_in_batch": 11}], ids=str)
@pytest.mark.parametrize("loss_agg", AGGREGATIONS)
def test_sums_with_empty_sequences(device: torch.device, loss_agg: str, options: dict[str, Any]) -> None:
    """Two of 6 sequences have no token: each of three losses, padded and packed."""
    lengths = [0, 4, 1, 0, 3, 2]
    x, weight, target = batch(lengths, device)
    rows, order = torch.randn(6).to(device), [0, 2, 1, 3, 5, 4]  # an empty one first
    others = {"loss_agg": loss_agg, "max_completion_length": 7, "num_items_in_batch": 13.0, **options}
    values = {name: torch.randn(target.shape).to(device) for name in ("values", "old_values", "returns")}
    old = {"old_per_token_logps": near(x, weight, target, 0.3)}
    for op, advantages, given in (
        (GRPO, rows, {"loss_type": "cispo", "importance_sampling_level": "sequence", **old}),
        (REINFORCE, rows, {}),
        (PPO, torch.randn(target.shape).to(device), {**values, **old}),
    ):
        padded = Sample((x, weight, target, advantages), given | others, why="empty sequences")
        require(op, padded)
        if advantages.dim() == 1:
            padded = Sample((x, weight, target, advantages[order]), padded.kwargs, why=padded.why)
        require(op, packed(padded, target, (*OF_TOKENS, *values), order))


@pytest.mark.parametrize(("level", "packs"), [("token", False), ("sequence", True)])
@pytest.mark.parametrize("loss_type", TYPES)
def test_every_option_packed_and_padded(device: torch.device, loss_type: str, level: str, packs: bool) -> None:
    x, weight, target = batch(LENGTHS, device)
    options = {
        "ref_per_token_logps": near(x, weight, target, 0.5),
        "beta": 0.2,
        "epsilon": 0.1,
        "epsilon_high": 0.28,
        "delta": 1.5,
        "importance_sampling_ratio": torch.rand(target.shape).to(device) + 0.5,
        "entropy_coef": 0.3,
        "num_items_in_batch": 17.0,
        "max_completion_length": 11,
        "off_policy_mask_threshold": 0.05,
        "sampling_per_token_logps": near(x, weight, target, 0.2),
        "temperature": 0.8,
        "skip_ignored": True,
    }
    sample = of_grpo(device, loss_type=loss_type, importance_sampling_level=level, **options)
    if packs:
        args = (x, weight, target, sample.args[3][ORDER])  # in the order of the sequences' numbers
        sample = packed(Sample(args, sample.kwargs, why=sample.why), target, OF_TOKENS, ORDER)
    require(GRPO, sample)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("corrected", [False, True])
def test_divergence_from_the_reference(device: torch.device, estimator: str, corrected: bool) -> None:
    sample = of_grpo(device, beta=0.7, kl_estimator=estimator, use_bias_correction_kl=corrected)
    x, weight, target, _ = sample.args
    kwargs = sample.kwargs | {"ref_per_token_logps": near(x, weight, target, 0.5)}
    require(GRPO, Sample(sample.args, kwargs, why=f"kl {estimator}"))


@pytest.mark.parametrize(("level", "packs"), [("token", False), ("sequence", True)])
@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "sapo", "vespo"])
def test_log_ratios_with_a_bound(device: torch.device, loss_type: str, level: str, packs: bool) -> None:
    """Only the bound acts, with a wide clip: of the ratio, and of the divergence times it."""
    x, weight, target = batch(LENGTHS, device)
    bound = 0.1 if level == "sequence" else 0.3
    options = {"max_log_ratio": bound, "epsilon": 0.9, "epsilon_high": 9.0, "beta": 0.7, "loss_type": loss_type}
    options |= {"importance_sampling_level": level, "ref_per_token_logps": near(x, weight, target, 0.5)}
    sample = of_grpo(device, **options)
    if packs:
        args = (x, weight, target, sample.args[3][ORDER])
        sample = packed(Sample(args, sample.kwargs, why=sample.why), target, OF_TOKENS, ORDER)
    require(GRPO, sample)
    without = {name: value for name, value in sample.kwargs.items() if name != "max_log_ratio"}
    assert losses.grpo(*sample.args, **sample.kwargs)[0] != losses.grpo(*sample.args, **without)[0]


@pytest.mark.parametrize("loss_type", TYPES)
def test_first_step_and_advantages_of_tokens(device: torch.device, loss_type: str) -> None:
    """The ratio is 1 without the old policy, and its gradient that of log pi."""
    x, weight, target = batch(LENGTHS, device)
    require(
        GRPO, Sample((x, weight, target, torch.randn(target.shape).to(device)), {"loss_type": loss_type}, why="first")
    )


@pytest.mark.parametrize("share", [0.2, 0.5, 0.999])
def test_tokens_of_high_entropy(device: torch.device, share: float) -> None:
    require(GRPO, of_grpo(device, top_entropy_quantile=share, entropy_coef=0.3))
    require(GRPO, of_grpo(device, top_entropy_quantile=share, loss_type="luspo", importance_sampling_level="sequence"))


@pytest.mark.parametrize("of_sequences", [False, True])
def test_metrics_of_the_sampler(device: torch.device, of_sequences: bool) -> None:
    sample = of_grpo(device)
    x, weight, target, _ = sample.args
    counts, old = target != -100, sample.kwargs["old_per_token_logps"]
    sampled = near(x, weight, target, 0.2)
    sampled[1][counts[1]] = float("nan")  # a sequence of one token that the sampler did not score
    ratio = torch.rand(len(target) if of_sequences else target.shape).to(device) + 0.5
    given = {"importance_sampling_ratio": ratio, "sampling_per_token_logps": sampled}
    _, metrics = losses.grpo(*sample.args, **sample.kwargs, **given)
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


def test_metrics(device: torch.device) -> None:
    sample = of_grpo(device)
    _, metrics = losses.grpo(*sample.args, **sample.kwargs)
    x, weight, target, advantages = sample.args
    old = sample.kwargs["old_per_token_logps"]
    low, high = [], []
    for i, logp in enumerate(logps_of(x, weight, target)):
        ratio = (logp - old[i][target[i] != -100]).exp()
        low.append((ratio < 0.8) & (advantages[i] < 0))
        high.append((ratio > 1.2) & (advantages[i] > 0))
    wanted = {
        "clip_ratio/low_mean": torch.cat(low).float().mean(),
        "clip_ratio/high_mean": torch.cat(high).float().mean(),
        "clip_ratio/region_mean": torch.cat(low + high).float().sum() / sum(LENGTHS),
        "clip_ratio/low_min": min(x.float().mean() for x in low),
        "clip_ratio/high_max": max(x.float().mean() for x in high),
    }
    assert 0 < wanted["clip_ratio/region_mean"] < 1
    for name, value in wanted.items():
        torch.testing.assert_close(metrics[name], value, msg=lambda text, name=name: f"{name}: {text}")
    assert not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 9.0}], ids=str)
def test_reinforce(device: torch.device, options: dict[str, Any]) -> None:
    x, weight, target = batch(LENGTHS, device)
    require(REINFORCE, Sample((x, weight, target, torch.randn(len(LENGTHS)).to(device)), options, why="reinforce"))
    require(REINFORCE, Sample((x, weight, target, torch.randn(target.shape).to(device)), options, why="of tokens"))


@pytest.mark.parametrize("packs", [False, True])
def test_rloo(device: torch.device, packs: bool) -> None:
    """An empty completion has a loss too, though no token has it."""
    x, weight, target = batch([5, 1, 7, 0, 4, 6], device)
    old = torch.stack([logp.sum() for logp in logps_of(x, weight, target)]) + 0.3 * torch.randn(len(LENGTHS)).to(device)
    advantages = torch.randn(len(LENGTHS)).to(device)
    if packs:
        old, advantages = old[ORDER], advantages[ORDER]
    options = {"old_logps": old, "epsilon_high": 0.28, "max_log_ratio": 0.2, "num_items_in_batch": 11}
    sample = Sample((x, weight, target, advantages), options, why="rloo")
    require(RLOO, packed(sample, target, (), ORDER) if packs else sample)


@pytest.mark.parametrize("packs", [False, True])
def test_ppo(device: torch.device, packs: bool) -> None:
    x, weight, target = batch(LENGTHS, device)
    advantages, values, old_values, returns = (torch.randn(target.shape).to(device) for _ in range(4))
    old_values = values + 0.3 * old_values
    kwargs = {
        "old_per_token_logps": near(x, weight, target, 0.3),
        "values": values,
        "old_values": old_values,
        "returns": returns,
        "vf_coef": 0.7,
        "max_log_ratio": 0.2,
    }
    sample = Sample((x, weight, target, advantages), kwargs, why="ppo")
    require(PPO, packed(sample, target, tuple(kwargs)[:4], ORDER) if packs else sample)


def of_supports(device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Sample, float]:
    """Supports of which some do not hold the target, one holds no id; and the fraction of those that do not."""
    sample = of_grpo(device, dtype, epsilon=0.1, epsilon_high=0.28)
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
    x, weight, target, advantages = sample.args
    options = {"loss_type": loss_type, "entropy_coef": 0.3, "skip_ignored": loss_type == "grpo"}
    sample = Sample(sample.args, sample.kwargs | options, why=sample.why)
    require(GRPO, sample)
    args = (x, weight, target, advantages[ORDER])
    names = (*OF_TOKENS, "support")
    rows = packed(Sample(args, sample.kwargs, why=sample.why), target, names, ORDER)
    require(GRPO, rows)
    found, expected = (losses.grpo(*each.args, **each.kwargs) for each in (rows, sample))
    torch.testing.assert_close(found, expected)
    assert found[1]["outside_support"].item() == pytest.approx(outside)


def test_supports_of_the_other_policies(device: torch.device) -> None:
    sample, outside = of_supports(device, torch.bfloat16)
    old, support = sample.kwargs["old_per_token_logps"], sample.kwargs["support"]
    sums = torch.where(sample.args[2] != -100, old, 0.0).sum(-1)
    values = {name: torch.randn(old.shape).to(device) for name in ("values", "old_values", "returns")}
    calls: list[tuple[Op, dict[str, Tensor]]] = [(REINFORCE, {}), (RLOO, {"old_logps": sums})]
    for op, given in (*calls, (PPO, {"old_per_token_logps": old, **values})):
        advantages = old - old.mean() if op is PPO else sample.args[3]
        args = (*sample.args[:3], advantages)
        require(op, Sample(args, given | {"support": support}, why=op.name))
        _, metrics = getattr(losses, op.name)(*args, **given, support=support)
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
