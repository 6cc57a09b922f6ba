"""Policy losses as functions of a token's log-probability, and the divergence from a reference.

A token has the log-probability log pi, the advantage A and the ratio r of policy / old policy, its own or its
sequence's. Autograd differentiates the losses, in a kernel op too. A ratio may overflow where the derivative is a
constant times 0: each loss keeps it out of the graph there, so that no 0 is multiplied with infinity.

Reference implementation: `trl.trainer.grpo_trainer`, https://github.com/huggingface/trl.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llmk.ops.linear_loss.objectives.preference import probability
from llmk.registry import LARGEST, check_number

LEVELS = ("token", "sequence", "sequence_sum")
"""The levels of a ratio: the token's own, the geometric mean over its sequence, or the product over it."""


class PolicyOptions(NamedTuple):
    """The losses' options besides tensors, named as the operator's arguments."""

    loss_type: str = "clipped"
    importance_sampling_level: str = "token"
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    kl_estimator: str = "k3"
    use_bias_correction_kl: bool = False
    max_log_ratio: float | None = None
    clip_ratio_c: float | None = None


def check_above_one(name: str, value: Any) -> None:
    check_number(name, value, math.nextafter(1.0, 2.0), LARGEST, "a finite number above 1")


class PolicyLoss(NamedTuple):
    """`value(options, logps, log_ratio, advantages)` of tokens."""

    value: Callable[[PolicyOptions, Tensor, Tensor, Tensor], Tensor]
    clip: Callable[[PolicyOptions, Tensor, Tensor], Tensor] | None = None
    """`clip(options, log_ratio, advantages)` of the tokens' own log-ratios before their level is taken."""
    keeps: Callable[[PolicyOptions, Tensor, Tensor, Tensor], Tensor] | None = None
    """`keeps(options, logps, old_logps, advantages)`: the mask of tokens that have a loss; of all if None."""


def _bounds(options: PolicyOptions, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bounds between which the loss depends on the ratio; its minimum removes one bound or both."""
    low, high = 1 - options.epsilon, 1 + options.epsilon_high
    most = float("inf") if options.delta is None else options.delta
    of_negative = max(high, most) if options.clip_ratio_c is None else min(max(high, most), options.clip_ratio_c)
    negative = advantages < 0
    lowest = torch.where(negative, torch.full_like(advantages, low), 0.0)
    return lowest, torch.where(negative, torch.full_like(advantages, of_negative), min(high, most))


def _clipped(options: PolicyOptions, logps: Tensor, log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """-min(r A, clip(r) A): Schulman et al., PPO, 2017, https://arxiv.org/abs/1707.06347, equation 7.

    With `delta` the first ratio is at most that: INTELLECT-2, 2025, https://arxiv.org/abs/2505.07291. With
    `clip_ratio_c` the loss of A < 0 is at most -c A, the dual clip: Ye et al., "Mastering Complex Control in MOBA Games
    with Deep Reinforcement Learning", 2019, https://arxiv.org/abs/1912.09729.
    """
    ratio, (low, high) = log_ratio.detach().exp(), _bounds(options, advantages)
    clips = (ratio < low) | (ratio > high)
    moving = torch.where(clips, 0.0, log_ratio).exp()
    return -torch.where(clips, ratio.clamp(low, high), moving) * advantages


def _cispo(options: PolicyOptions, logps: Tensor, log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """-min(r, epsilon_high) A log pi, the first a constant: MiniMax-M1, 2025, https://arxiv.org/abs/2506.13585."""
    return -log_ratio.detach().exp().clamp(max=options.epsilon_high) * advantages * logps


def _sapo(options: PolicyOptions, logps: Tensor, log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """-4 / t sigma(t (r - 1)) A, t by A's sign: Gao et al., SAPO, 2025, https://arxiv.org/abs/2511.20347."""
    # torch.where of two numbers has the default dtype.
    positive = torch.full_like(advantages, options.sapo_temperature_pos)
    t = torch.where(advantages > 0, positive, options.sapo_temperature_neg)
    ratio = log_ratio.clamp(max=88.0).exp()  # the sigmoid is 1 long before a ratio overflows
    return -probability(t * (ratio - 1)) * 4 / t * advantages


def _reinforce(options: PolicyOptions, logps: Tensor, log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """-A log pi: Williams, REINFORCE, 1992, https://doi.org/10.1007/BF00992696."""
    return -advantages * logps


def _dft(options: PolicyOptions, logps: Tensor, log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """-A pi log pi, pi a constant: Wu et al., 2025, https://arxiv.org/abs/2508.05629, equation 9."""
    return -advantages * logps.detach().exp() * logps


def _surrogate(options: PolicyOptions, logps: Tensor, log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """-r A."""
    return -log_ratio.exp() * advantages


def _log_clip(options: PolicyOptions, log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """Clip log r at epsilon_high where A > 0 and at -epsilon where A < 0; 0 where A is, whose sign is its factor.

    The ratio of GMPO is the geometric mean of what is clipped: Zhao et al., "Geometric-Mean Policy Optimization", 2025,
    https://arxiv.org/abs/2507.20673.
    """
    clipped_below = log_ratio.clamp(min=-options.epsilon)
    clipped = torch.where(advantages > 0, log_ratio.clamp(max=options.epsilon_high), clipped_below)
    return torch.where(advantages != 0, clipped, 0.0)


def _truncated(options: PolicyOptions, logps: Tensor, log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """-min(r, delta) A log pi, the first a constant, of the tokens that DPPO keeps.

    Qi et al., "Rethinking the Trust Region in LLM Reinforcement Learning", 2026, https://arxiv.org/abs/2602.04879, as
    verl has it, https://github.com/volcengine/verl.
    """
    most = float("inf") if options.delta is None else options.delta
    return -log_ratio.detach().exp().clamp(max=most) * advantages * logps


def _within_tv(options: PolicyOptions, logps: Tensor, old_logps: Tensor, advantages: Tensor) -> Tensor:
    """Keep a token unless A drives pi on from the old policy and the total variation of token or not is past epsilon.

    Between distributions of two classes, the token and the rest, it is |pi - old|.
    """
    moved = logps.exp() - old_logps.exp()
    return torch.where(advantages > 0, moved <= options.epsilon_high, moved >= -options.epsilon)


def _within_kl(options: PolicyOptions, logps: Tensor, old_logps: Tensor, advantages: Tensor) -> Tensor:
    """Keep a token unless A drives pi on from the old policy and KL(old, pi) of token or not is past epsilon."""
    rest, old_rest = (-torch.expm1(x.clamp(max=0.0)) for x in (logps, old_logps))  # 1 - pi, as exact as log pi
    kl = old_logps.exp() * (old_logps - logps)
    kl = kl + torch.where(old_rest > 0, old_rest * (old_rest.log() - rest.log()), 0.0)
    up = (kl <= options.epsilon_high) | (logps <= old_logps)
    return torch.where(advantages > 0, up, (kl <= options.epsilon) | (logps >= old_logps))


LOSSES = {
    "clipped": PolicyLoss(_clipped),
    "sapo": PolicyLoss(_sapo),
    "cispo": PolicyLoss(_cispo),
    "reinforce": PolicyLoss(_reinforce),
    "dft": PolicyLoss(_dft),
    "surrogate": PolicyLoss(_surrogate),
    "gmpo": PolicyLoss(_surrogate, clip=_log_clip),
    "dppo_tv": PolicyLoss(_truncated, keeps=_within_tv),
    "dppo_kl": PolicyLoss(_truncated, keeps=_within_kl),
}


def bounded(log_ratio: Tensor, bound: float | None) -> Tensor:
    """Clamp to [-bound, bound]; None is no bound."""
    return log_ratio if bound is None else log_ratio.clamp(-bound, bound)


def _straight_through(x: Tensor) -> Tensor:
    """The value of k3, which is unbiased, and the gradient of k2, whose expectation is the divergence's gradient."""
    return torch.expm1(-x.detach()) + x.detach() + x.detach() * (x - x.detach())


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda x: x,
    "k2": lambda x: 0.5 * x.square(),
    "k3": lambda x: torch.expm1(-x) + x,
    "k3+": _straight_through,
}
"""Estimators of KL(pi, ref) from x = log pi / ref of samples of pi: Schulman, 2020,
http://joschu.net/blog/kl-approx.html; "k3+" as in verl, https://github.com/volcengine/verl."""


PER_TOKEN = ("advantages", "token_weight", "old_logps", "ref_logps", "kl_weight", "entropy_weight")
"""The tensors of a policy loss with one value for each token."""


@dataclass(frozen=True, kw_only=True)
class PolicyTerms:
    """The per-token inputs of a policy loss besides log-probabilities, 0 where a token does not count.

        sum of token_weight * f(log pi, r, A) + kl_weight * KL [* r] - entropy_weight * entropy

    with r = exp(level(log pi / old)).

    `level` is a symmetric linear function: it maps tokens' values to themselves or their sequence's mean or sum. With
    `max_log_ratio` log r, and log pi / ref in the divergence, are clamped to that distance from 0: no gradient goes
    through a logarithm that is farther.
    """

    advantages: Tensor
    token_weight: Tensor
    old_logps: Tensor | None = None  # the detached log-probabilities themselves if None
    ref_logps: Tensor | None = None
    kl_weight: Tensor | None = None
    entropy_weight: Tensor | None = None
    options: PolicyOptions
    level: Callable[[Tensor], Tensor]

    @classmethod
    def of_rows(
        cls, options: PolicyOptions, counts: Tensor, given: Mapping[str, Tensor | None],
        dtype: torch.dtype = torch.float32,
    ) -> "PolicyTerms":  # fmt: skip
        """Return the terms of tokens `[..., S]` whose rows are sequences, of which those count that the mask says.

        `given` has the `PER_TOKEN` tensors, in which None is 1 for advantages and weights.
        """
        ones = {name: counts for name in ("advantages", "token_weight") if given[name] is None}
        tensors = {
            name: None if x is None else torch.where(counts, x.to(dtype), 0.0) for name, x in {**given, **ones}.items()
        }
        level = rowwise_level(options.importance_sampling_level, counts)
        return cls(**tensors, options=options, level=level)  # type: ignore[arg-type]

    def token_log_ratio(self, logps: Tensor) -> Tensor:
        return logps - (logps.detach() if self.old_logps is None else self.old_logps)

    def log_ratio(self, logps: Tensor) -> Tensor:
        return bounded(self.level(self.token_log_ratio(logps)), self.options.max_log_ratio)

    def ratio(self, logps: Tensor) -> Tensor:
        return self.log_ratio(logps).exp()

    def divergence(self, logps: Tensor, log_ratio: Tensor) -> Tensor:
        assert self.ref_logps is not None
        x = bounded(logps - self.ref_logps, self.options.max_log_ratio)
        kl = ESTIMATORS[self.options.kl_estimator](x)
        return kl * log_ratio.exp() if self.options.use_bias_correction_kl else kl

    def keeps(self, logps: Tensor) -> Tensor | None:
        """Return the mask of tokens that have a loss, None if all have one."""
        keeps = LOSSES[self.options.loss_type].keeps
        if keeps is None:
            return None
        logps = logps.detach()
        return keeps(self.options, logps, logps if self.old_logps is None else self.old_logps, self.advantages)

    def _kept_weight(self, logps: Tensor) -> Tensor:
        keeps = self.keeps(logps)
        return self.token_weight if keeps is None else torch.where(keeps, self.token_weight, 0.0)

    def _acting(self, log_ratio: Tensor, weight: Tensor) -> Tensor:
        """Zero the log-ratio where its factor is 0, so that no ratio overflows there."""
        return torch.where((weight != 0) & (self.advantages != 0), log_ratio, 0.0)

    def loss(self, logprobs: Tensor, entropy: Tensor) -> Tensor:
        return self.token_losses(logprobs, entropy).sum()

    def token_losses(self, logprobs: Tensor, entropy: Tensor) -> Tensor:
        loss, log_ratio = LOSSES[self.options.loss_type], self.log_ratio(logprobs)
        acting = log_ratio
        if loss.clip is not None:
            clipped = loss.clip(self.options, self.token_log_ratio(logprobs), self.advantages)
            acting = bounded(self.level(clipped), self.options.max_log_ratio)
        weight = self._kept_weight(logprobs)
        each = weight * loss.value(self.options, logprobs, self._acting(acting, weight), self.advantages)
        if self.kl_weight is not None:
            each = each + self.kl_weight * self.divergence(logprobs, log_ratio)
        return each if self.entropy_weight is None else each - self.entropy_weight * entropy


def rowwise_level(name: str, counts: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the `level` of tokens `[..., S]` whose rows are sequences, given the mask of those that count."""
    if name == "token":
        return lambda values: values

    def sequence_level(values: Tensor) -> Tensor:
        total = torch.where(counts, values, 0.0).sum(-1, keepdim=True)
        if name == "sequence":
            total = total / counts.sum(-1, keepdim=True).clamp(min=1)
        return torch.where(counts, total, 0.0)

    return sequence_level
