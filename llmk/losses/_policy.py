"""The losses of GRPO by their names in TRL: the loss of a token and its weight in a sum over the batch.

Reference implementation: `trl.trainer.grpo_trainer`, https://github.com/huggingface/trl.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llmk.losses._batch import Sequences, check_denominator, denominator_of
from llmk.losses._ranks import sum_over
from llmk.registry import LARGEST, FromArguments, check_flag, check_number


@dataclass(frozen=True, kw_only=True)
class Totals(FromArguments):
    """Denominators of the losses, None for those of the batch."""

    num_items_in_batch: Tensor | float | None = None
    max_completion_length: int | None = None
    num_sequences_in_batch: Tensor | float | None = None
    count_empty_sequences: bool = True


def token_denominator(num_items: Tensor | float | None, sequences: Sequences) -> Tensor | float:
    """Return `num_items`, or the number of tokens that count, or 1 for 0."""
    return denominator_of(sequences.num_tokens if num_items is None else num_items)


def _sequence_denominator(sequences: Sequences, totals: Totals) -> Tensor | float:
    """Return the number of sequences, or of those with a token that counts, or 1 for 0."""
    if totals.num_sequences_in_batch is not None or totals.count_empty_sequences:
        return sequences.denominator(totals.num_sequences_in_batch)
    return denominator_of(sum_over(sequences.ranks.sequences, (sequences.lengths > 0).sum()))


def _mean_of_means(sequences: Sequences, totals: Totals) -> Tensor:
    """Mean over sequences of means over tokens: Shao et al., GRPO, 2024, https://arxiv.org/abs/2402.03300, eq. 3."""
    return sequences.expand_to_tokens(1.0 / sequences.lengths.clamp(min=1.0)) / _sequence_denominator(sequences, totals)


def _mean_of_sums(sequences: Sequences, totals: Totals) -> Tensor:
    """Mean over sequences of sums over tokens: LUSPO, 2026."""
    return sequences.mask.float() / _sequence_denominator(sequences, totals)


def _mean_over_batch(sequences: Sequences, totals: Totals) -> Tensor:
    """Mean over the batch's tokens that count: TRL's BNPO."""
    return sequences.mask.float() / token_denominator(None, sequences)


def _over_constant_length(sequences: Sequences, totals: Totals) -> Tensor:
    """Sum divided by a constant length: Liu et al., Dr. GRPO, 2025, https://arxiv.org/abs/2503.20783."""
    length = totals.max_completion_length
    length = sequences.mask.shape[1] if length is None else length
    return sequences.mask.float() / (_sequence_denominator(sequences, totals) * length)


def _over_all_items(sequences: Sequences, totals: Totals) -> Tensor:
    """Mean over the tokens of all batches of a step: Yu et al., DAPO, 2025, https://arxiv.org/abs/2503.14476, eq. 8."""
    return sequences.mask.float() / token_denominator(totals.num_items_in_batch, sequences)


class PolicyType(NamedTuple):
    term: str
    """The loss type of `fused_linear_policy`."""
    weights: Callable[[Sequences, Totals], Tensor]
    """Return weights `[B, S]` of the tokens, with which the sum of the losses is the reduced loss."""


TYPES = {
    "grpo": PolicyType("clipped", _mean_of_means),
    "bnpo": PolicyType("clipped", _mean_over_batch),
    "dr_grpo": PolicyType("clipped", _over_constant_length),
    "dapo": PolicyType("clipped", _over_all_items),
    "luspo": PolicyType("clipped", _mean_of_sums),
    "cispo": PolicyType("cispo", _over_all_items),
    "sapo": PolicyType("sapo", _mean_of_means),
    "vespo": PolicyType("reinforce", _over_all_items),  # times `vespo_weight`
    "gpg": PolicyType("reinforce", _over_all_items),
    "gmpo": PolicyType("gmpo", _mean_of_means),
    "dppo_tv": PolicyType("dppo_tv", _over_all_items),
    "dppo_kl": PolicyType("dppo_kl", _over_all_items),
    "kl_cov": PolicyType("surrogate", _over_all_items),  # and a penalty of the tokens of `largest_covariance`
}
"""GPG: Chu et al., "GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning", 2025,
https://arxiv.org/abs/2504.02546."""


AGGREGATIONS = {
    "token": _over_all_items,
    "sequence_mean": _mean_of_means,
    "sequence_sum": _mean_of_sums,
    "constant": _over_constant_length,
}
"""The ways in which the losses of tokens become one, whatever the loss type."""


def aggregation_weights(name: str, sequences: Sequences, arguments: Mapping[str, Any]) -> Tensor:
    """Return weights `[B, S]` of the tokens by an aggregation or loss type, with the totals of these arguments."""
    totals = Totals.of(arguments)
    check_denominator("num_items_in_batch", totals.num_items_in_batch)
    check_denominator("num_sequences_in_batch", totals.num_sequences_in_batch)
    length = totals.max_completion_length
    if length is not None:
        check_number("max_completion_length", length, 1, LARGEST, "a number of at least 1")
    check_flag("count_empty_sequences", totals.count_empty_sequences)
    by = "sequence_ids" if sequences.ids is not None else "a group of ranks" if sequences.ranks.tokens else ""
    if length is None and by and name in ("constant", "dr_grpo"):
        raise ValueError(f"max_completion_length: expected a number with {name!r} and {by}, got None")
    weights = AGGREGATIONS[name] if name in AGGREGATIONS else TYPES[name].weights
    return weights(sequences, totals)


class VespoOptions(NamedTuple):
    vespo_k_pos: float
    vespo_lambda_pos: float
    vespo_k_neg: float
    vespo_lambda_neg: float
    max_log_ratio: float | None
    """The bound of a token's log-ratio, `MAX_LOG_RATIO` at most."""


_MIN_LOG_RATIO, MAX_LOG_RATIO = math.log(1e-8), 20.0


def vespo_weight(
    log_ratio: Tensor, advantages: Tensor, correction: Tensor | None, sequences: Sequences, options: VespoOptions
) -> Tensor:
    """Return phi(w) = e^lambda w^k e^(-lambda w) `[B, S]`, detached, with w the ratio of the whole sequence.

    VESPO, 2026, as TRL has it: logarithms are clamped, and a correction for the sampler is part of w.
    """
    bound = MAX_LOG_RATIO if options.max_log_ratio is None else min(options.max_log_ratio, MAX_LOG_RATIO)
    log_w = sequences.sum(log_ratio.clamp(-bound, bound))
    if correction is not None:
        log_w = log_w + sequences.sum(correction.log().clamp(_MIN_LOG_RATIO, MAX_LOG_RATIO))
    log_w = sequences.expand_to_tokens(log_w.clamp(_MIN_LOG_RATIO, MAX_LOG_RATIO))
    positive = advantages >= 0
    k = torch.where(positive, torch.full_like(advantages, options.vespo_k_pos), options.vespo_k_neg)
    scale = torch.where(positive, torch.full_like(advantages, options.vespo_lambda_pos), options.vespo_lambda_neg)
    scale = scale.clamp(min=1e-4)
    return torch.exp(scale + k * log_w - scale * log_w.exp()).nan_to_num(0.0, 0.0, 0.0)


def largest_covariance(logps: Tensor, advantages: Tensor, mask: Tensor, fraction: float) -> Tensor:
    """Return the mask of the `fraction` of tokens, at least one, with the largest (log pi - mean) (A - mean).

    The first of equal ones are taken. KL-Cov: Cui et al., "The Entropy Mechanism of Reinforcement Learning for
    Reasoning Language Models", 2025, https://arxiv.org/abs/2505.22617.
    """
    count = mask.sum()
    means = [torch.where(mask, values, 0.0).sum() / denominator_of(count) for values in (logps, advantages)]
    centered = [values - mean for values, mean in zip((logps, advantages), means, strict=True)]
    covariance = torch.where(mask, centered[0] * centered[1], float("-inf")).flatten()
    order = covariance.sort(descending=True, stable=True).indices
    places = torch.arange(order.shape[0], device=order.device, dtype=order.dtype)
    rank = torch.empty_like(order).scatter(0, order, places).view(mask.shape)
    return mask & (rank < (fraction * count.double()).long().clamp(min=1))


def ratio_level(name: str, sequences: Sequences) -> Callable[[Tensor], Tensor]:
    """Return a function that maps tokens `[B, S]`, 0 if ignored, to themselves or their sequence's mean or sum."""
    if name == "token":
        return lambda values: values
    reduced = sequences.token_means if name == "sequence" else sequences.sum
    return lambda values: torch.where(sequences.mask, sequences.expand_to_tokens(reduced(values)), 0.0)
