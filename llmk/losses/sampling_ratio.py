"""Importance sampling ratios between the policy that is trained and the sampler that generated its tokens."""

from typing import Any

import torch
from torch import Tensor

from llmk.losses._batch import (
    MASKS,
    NUMBERS,
    Sequences,
    check_is_tensor,
    check_per_token,
    check_tensor,
    make_sequences,
    mean_over_tokens,
    resolve_num_sequences,
)
from llmk.losses._ranks import Ranks, make_ranks
from llmk.losses._sampling import difference_metrics, masked_mean, ratio_metrics
from llmk.registry import check_not_negative, check_option

LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "mask", "icepop")


def sampling_ratio(
    logps: Tensor,
    sampler_logps: Tensor,
    mask: Tensor,
    *,
    level: str = "token",
    mode: str = "truncate",
    low: float | None = None,
    high: float | None = 3.0,
    sequence_ids: Tensor | None = None,
    num_sequences: int | None = None,
    group: Any = None,
    context_group: Any = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The ratio pi / mu of the policy's probability to the sampler's, bounded, as a factor of a token's loss.

    An inference engine computes other log-probabilities than the trainer, from the same weights too. The ratio corrects
    the expectation for it, and the bounds keep its variance finite. It is what `importance_sampling_ratio` of
    `llmk.losses.grpo` takes, and a constant: no gradient goes through it.

    Args:
        logps: Log-probabilities `[B, S]` of the tokens under the policy that generated them, as the trainer has them.
        sampler_logps: Those of the sampler, `[B, S]`; NaN where it has none, which counts as no difference.
        mask: `[B, S]`, True or 1 where a token counts.
        level: What the ratio is of: "token", each token by itself; "sequence", the product over a sequence's tokens;
            "geometric", the geometric mean over them, which does not shrink or grow with their number.
        mode: What becomes of a ratio outside the bounds: "truncate", the nearer bound; "mask", 0; "icepop", 0, of
            tokens alone and with both bounds.
        low: The lower bound; none if None.
        high: The upper bound; none if None.
        sequence_ids: `[1, T]`, for a packed batch: each token's sequence, from 0 on.
        num_sequences: How many sequences a packed batch holds; T, and one more where T is odd, if None.
        group, context_group: The ranks that have other sequences of the batch, or other tokens of the same, as in
            `grpo`. Ratios of sequences are over their tokens on all ranks, and metrics over the whole batch.

    Returns:
        The ratio in float32: `[B, S]` for "token", 1 where a token does not count; else one for each sequence, 1 over
        no token. And metrics, under TRL's names where it has them: smallest, mean and largest ratio, mean and largest
        difference of the log-probabilities, the fractions of ratios below and above the bounds, and
        `sampling/kl`, the mean of exp(r) - 1 - r with r = log pi - log mu, an estimate of KL(mu, pi).

    Raises:
        TypeError: An argument is not a tensor, or a dtype does not fit.
        ValueError: A shape or an option does not fit.

    Sources: truncated: Yao et al., 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training";
    masked: "IcePop" in Ling Team, 2025, https://arxiv.org/abs/2510.18855, with bounds 0.5 and 5; the geometric mean:
    Zheng et al., 2025, https://arxiv.org/abs/2507.18071. Reference implementation: `trl.GRPOTrainer`, by its options
    `vllm_importance_sampling_mode`, `_clip_min` and `_clip_max`.
    """
    check_option("level", level, LEVELS)
    check_option("mode", mode, MODES)
    _check_bounds(level, mode, low, high)
    ranks = make_ranks(group, context_group)
    sequences = _sequences(logps, sampler_logps, mask, sequence_ids, num_sequences, ranks)
    policy, sampler, counts = logps.detach().float(), sampler_logps.detach().float(), sequences.mask
    difference = torch.where(counts & ~sampler.isnan(), policy - sampler, 0.0)
    exact = _log_ratio(level, difference, sequences).exp()
    below = exact < (0.0 if low is None else low)
    above = exact > (float("inf") if high is None else high)
    ratio = exact.clamp(low, high) if mode == "truncate" else torch.where(below | above, 0.0, exact)

    compared = counts if level == "token" else sequences.exists
    compared = torch.ones_like(below) if compared is None else compared
    groups = ranks.tokens if level == "token" else ranks.sequences
    name = "sampling/importance_sampling_ratio"
    metrics = ratio_metrics(ratio, compared, groups) | difference_metrics(policy, sampler, sequences)
    for kind, each in (("below", below), ("above", above)):
        metrics[f"{name}/{kind}"] = masked_mean(each.float(), compared, groups)
    metrics["sampling/kl"] = mean_over_tokens(difference.expm1() - difference, sequences)
    return ratio, metrics


def _check_bounds(level: str, mode: str, low: float | None, high: float | None) -> None:
    for name, bound in (("low", low), ("high", high)):
        if bound is not None:
            check_not_negative(name, bound)
        elif mode == "icepop":
            raise ValueError(f"{name}: expected a number with mode 'icepop' (its paper has 0.5 and 5), got None")
    if low is not None and high is not None and low > high:
        raise ValueError(f"low: expected at most high ({high:g}), got {low:g}")
    if mode == "truncate" and low is None and high is None:
        raise ValueError("high: expected a number with mode 'truncate' where low is None, got None")
    if mode == "icepop" and level != "token":
        raise ValueError(f"level: expected 'token' with mode 'icepop', got {level!r}; mode 'mask' takes any level")


def _sequences(
    logps: Any, sampler_logps: Any, mask: Any, sequence_ids: Any, num_sequences: int | None, ranks: Ranks
) -> Sequences:
    """Check what has one value for each token, and return whose tokens they are."""
    check_is_tensor("logps", logps)
    if logps.dim() != 2:
        raise ValueError(f"logps: expected shape [B, S], got {tuple(logps.shape)}")
    check_tensor("logps", logps, NUMBERS, "numbers")
    check_per_token("sampler_logps", sampler_logps, logps, like="logps")
    check_per_token("mask", mask, logps, MASKS, like="logps")
    count = resolve_num_sequences(num_sequences, "num_sequences", None)
    return make_sequences(mask.bool(), sequence_ids, count, None, ranks, logps, ("logps", "logps"))


def _log_ratio(level: str, difference: Tensor, sequences: Sequences) -> Tensor:
    if level == "token":
        return difference
    return sequences.sum(difference) if level == "sequence" else sequences.token_means(difference)
