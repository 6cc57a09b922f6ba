"""Policy losses as functions of a token, and how they are summed, in tables by their names in TRL.

Reference implementation: `trl.trainer.grpo_trainer`, https://github.com/huggingface/trl.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from llmk.losses._sequences import Sequences


@dataclass(frozen=True)
class Tokens:
    """Of each token `[B, S]` in float32, 0 where it does not count: what the losses are functions of."""

    logps: Tensor
    log_ratio: Tensor  # of policy / old policy, a token's own
    ratio: Tensor  # policy / old policy, the token's or its sequence's
    advantages: Tensor
    correction: Tensor | None  # old policy / sampler
    sequences: Sequences


@dataclass(frozen=True)
class PolicyOptions:
    epsilon_low: float
    epsilon_high: float
    delta: float | None
    sapo_temperature_pos: float
    sapo_temperature_neg: float
    vespo_k_pos: float
    vespo_lambda_pos: float
    vespo_k_neg: float
    vespo_lambda_neg: float


def clipped(tokens: Tokens, options: PolicyOptions) -> Tensor:
    """-min(ratio A, clip(ratio) A): Schulman et al., PPO, 2017, https://arxiv.org/abs/1707.06347, equation 7.

    With `delta` the first ratio is at most that: INTELLECT-2, 2025, https://arxiv.org/abs/2505.07291.
    """
    inside = tokens.ratio.clamp(1 - options.epsilon_low, 1 + options.epsilon_high)
    ratio = tokens.ratio if options.delta is None else tokens.ratio.clamp(max=options.delta)
    return -torch.minimum(ratio * tokens.advantages, inside * tokens.advantages)


def cispo(tokens: Tokens, options: PolicyOptions) -> Tensor:
    """-min(ratio, epsilon_high) A log pi, the first a constant: MiniMax-M1, 2025, https://arxiv.org/abs/2506.13585."""
    return -tokens.ratio.clamp(max=options.epsilon_high).detach() * tokens.advantages * tokens.logps


def sapo(tokens: Tokens, options: PolicyOptions) -> Tensor:
    """-4 / t sigma(t (ratio - 1)) A, t by A's sign: Gao et al., SAPO, 2025, https://arxiv.org/abs/2511.20347."""
    positive = tokens.advantages > 0
    t = torch.where(positive, options.sapo_temperature_pos, options.sapo_temperature_neg)
    return -torch.sigmoid(t * (tokens.ratio - 1)) * 4 / t * tokens.advantages


_LEAST_LOG_RATIO, _LARGEST_LOG_RATIO = math.log(1e-8), 20.0


def vespo(tokens: Tokens, options: PolicyOptions) -> Tensor:
    """-phi(w) A log pi, phi(w) = e^lambda w^k e^(-lambda w) a constant, w the ratio of the whole sequence.

    VESPO, 2026, as TRL has it: logarithms are held within limits, and a correction of the sampler is part of w.
    """
    return -vespo_weight(tokens, options) * tokens.advantages * tokens.logps


def vespo_weight(tokens: Tokens, options: PolicyOptions) -> Tensor:
    """phi(w), `[B, S]`."""
    log_w = tokens.sequences.sum(tokens.log_ratio.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO))
    if tokens.correction is not None:
        log_w = log_w + tokens.sequences.sum(tokens.correction.log().clamp(_LEAST_LOG_RATIO, _LARGEST_LOG_RATIO))
    log_w = tokens.sequences.spread(log_w.clamp(_LEAST_LOG_RATIO, _LARGEST_LOG_RATIO))
    positive = tokens.advantages >= 0
    k = torch.where(positive, options.vespo_k_pos, options.vespo_k_neg)
    scale = torch.where(positive, options.vespo_lambda_pos, options.vespo_lambda_neg).clamp(min=1e-4)
    return torch.exp(scale + k * log_w - scale * log_w.exp()).nan_to_num(0.0, 0.0, 0.0).detach()


LOSSES: dict[str, Callable[[Tokens, PolicyOptions], Tensor]] = {
    "grpo": clipped,
    "bnpo": clipped,
    "dr_grpo": clipped,
    "dapo": clipped,
    "luspo": clipped,
    "cispo": cispo,
    "sapo": sapo,
    "vespo": vespo,
}


@dataclass(frozen=True)
class Totals:
    """What the sums of losses are divided by."""

    num_items: Tensor | float | None
    max_completion_length: int | None


def mean_of_means(values: Tensor, sequences: Sequences, totals: Totals) -> Tensor:
    """A mean over each sequence, and over those: Shao et al., GRPO, 2024, https://arxiv.org/abs/2402.03300, eq. 3."""
    return sequences.mean(sequences.averages(values))


def mean_of_sums(values: Tensor, sequences: Sequences, totals: Totals) -> Tensor:
    """Sums over sequences, and their mean: LUSPO, 2026."""
    return sequences.mean(sequences.sum(values))


def mean_over_batch(values: Tensor, sequences: Sequences, totals: Totals) -> Tensor:
    """Over the batch's tokens that count: TRL's BNPO."""
    return values.sum() / sequences.counts.sum().clamp(min=1)


def over_constant_length(values: Tensor, sequences: Sequences, totals: Totals) -> Tensor:
    """A length that is not the data's: Liu et al., Dr. GRPO, 2025, https://arxiv.org/abs/2503.20783."""
    length = values.shape[1] if totals.max_completion_length is None else totals.max_completion_length
    return sequences.mean(sequences.sum(values)) / length


def over_all_items(values: Tensor, sequences: Sequences, totals: Totals) -> Tensor:
    """Over the tokens of all batches of a step: Yu et al., DAPO, 2025, https://arxiv.org/abs/2503.14476, eq. 8."""
    if totals.num_items is None:
        return mean_over_batch(values, sequences, totals)
    if isinstance(totals.num_items, Tensor):
        return values.sum() / totals.num_items.detach().reshape(()).clamp(min=1)
    return values.sum() / max(totals.num_items, 1)


REDUCTIONS: dict[str, Callable[[Tensor, Sequences, Totals], Tensor]] = {
    "grpo": mean_of_means,
    "sapo": mean_of_means,
    "bnpo": mean_over_batch,
    "dr_grpo": over_constant_length,
    "dapo": over_all_items,
    "cispo": over_all_items,
    "vespo": over_all_items,
    "luspo": mean_of_sums,
}


def _k1(log_ratio: Tensor) -> Tensor:
    return log_ratio


def _k2(log_ratio: Tensor) -> Tensor:
    return 0.5 * log_ratio.square()


def _k3(log_ratio: Tensor) -> Tensor:
    return torch.expm1(-log_ratio) + log_ratio


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": _k1, "k2": _k2, "k3": _k3}
"""Of KL(pi, ref) from log pi / ref of samples of pi: Schulman, 2020, http://joschu.net/blog/kl-approx.html."""
