"""The losses of GRPO by their names in TRL: the term of a token, and what it is multiplied by in a sum over the batch.

Reference implementation: `trl.trainer.grpo_trainer`, https://github.com/huggingface/trl.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from llmk.losses._sequences import Sequences
from llmk.ops.linear_loss.policy_losses import PolicyOptions, PolicyTerms


class Totals(NamedTuple):
    """What the sums of losses are divided by."""

    num_items: Tensor | float | None
    max_completion_length: int | None


def number_of_items(num_items: Tensor | float | None, sequences: Sequences) -> Tensor | float:
    """At least 1; the tokens that count where it is not given."""
    if num_items is None:
        return sequences.counts.sum().clamp(min=1)
    return num_items.detach().reshape(()).clamp(min=1) if isinstance(num_items, Tensor) else max(num_items, 1)


def _mean_of_means(sequences: Sequences, totals: Totals) -> Tensor:
    """A mean over each sequence, and over those: Shao et al., GRPO, 2024, https://arxiv.org/abs/2402.03300, eq. 3."""
    return sequences.spread(1.0 / sequences.lengths.clamp(min=1.0)) / sequences.number()


def _mean_of_sums(sequences: Sequences, totals: Totals) -> Tensor:
    """Sums over sequences, and their mean: LUSPO, 2026."""
    return sequences.counts.float() / sequences.number()


def _mean_over_batch(sequences: Sequences, totals: Totals) -> Tensor:
    """Over the batch's tokens that count: TRL's BNPO."""
    return sequences.counts.float() / number_of_items(None, sequences)


def _over_constant_length(sequences: Sequences, totals: Totals) -> Tensor:
    """A length that is not the data's: Liu et al., Dr. GRPO, 2025, https://arxiv.org/abs/2503.20783."""
    length = totals.max_completion_length
    return sequences.counts.float() / (sequences.number() * (sequences.counts.shape[1] if length is None else length))


def _over_all_items(sequences: Sequences, totals: Totals) -> Tensor:
    """Over the tokens of all batches of a step: Yu et al., DAPO, 2025, https://arxiv.org/abs/2503.14476, eq. 8."""
    return sequences.counts.float() / number_of_items(totals.num_items, sequences)


class PolicyType(NamedTuple):
    term: str
    """Its name in `fused_linear_policy`."""
    weights: Callable[[Sequences, Totals], Tensor]
    """Of tokens `[B, S]`: what makes a sum of the terms what the type divides."""


TYPES = {
    "grpo": PolicyType("clipped", _mean_of_means),
    "bnpo": PolicyType("clipped", _mean_over_batch),
    "dr_grpo": PolicyType("clipped", _over_constant_length),
    "dapo": PolicyType("clipped", _over_all_items),
    "luspo": PolicyType("clipped", _mean_of_sums),
    "cispo": PolicyType("cispo", _over_all_items),
    "sapo": PolicyType("sapo", _mean_of_means),
    "vespo": PolicyType("reinforce", _over_all_items),  # times `vespo_weight`
}


class VespoOptions(NamedTuple):
    k_pos: float
    lambda_pos: float
    k_neg: float
    lambda_neg: float


_LEAST_LOG_RATIO, _LARGEST_LOG_RATIO = math.log(1e-8), 20.0


def vespo_weight(
    log_ratio: Tensor, advantages: Tensor, correction: Tensor | None, sequences: Sequences, options: VespoOptions
) -> Tensor:
    """phi(w) = e^lambda w^k e^(-lambda w) of tokens `[B, S]`, constants, w the ratio of the whole sequence.

    VESPO, 2026, as TRL has it: logarithms are held within limits, and a correction of the sampler is part of w.
    """
    log_w = sequences.sum(log_ratio.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO))
    if correction is not None:
        log_w = log_w + sequences.sum(correction.log().clamp(_LEAST_LOG_RATIO, _LARGEST_LOG_RATIO))
    log_w = sequences.spread(log_w.clamp(_LEAST_LOG_RATIO, _LARGEST_LOG_RATIO))
    positive = advantages >= 0
    k = torch.where(positive, torch.full_like(advantages, options.k_pos), options.k_neg)
    scale = torch.where(positive, torch.full_like(advantages, options.lambda_pos), options.lambda_neg).clamp(min=1e-4)
    return torch.exp(scale + k * log_w - scale * log_w.exp()).nan_to_num(0.0, 0.0, 0.0)


def level_of(name: str, sequences: Sequences) -> Callable[[Tensor], Tensor]:
    """Of tokens `[B, S]`, 0 where one does not count: what they have themselves, or their sequence's mean or sum."""
    if name == "token":
        return lambda values: values
    reduced = sequences.averages if name == "sequence" else sequences.sum
    return lambda values: torch.where(sequences.counts, sequences.spread(reduced(values)), 0.0)


def policy_terms(
    options: PolicyOptions, advantages: Tensor, weight: Tensor, sequences: Sequences, old_logps: Tensor | None = None
) -> PolicyTerms:
    """Without a reference and entropies, of tokens `[B, S]`."""
    level = level_of(options.importance_sampling_level, sequences)
    return PolicyTerms(advantages, weight, old_logps, None, None, None, options, level)
