"""Policy losses as functions of a token's log-probability, their derivatives, and the divergence from a reference.

Of a token: log pi its log-probability, A its advantage, r the ratio of policy / old policy, its own or its sequence's.
The derivatives are written out, because a kernel op in which gradients are made cannot ask autograd for them.

Reference implementation: `trl.trainer.grpo_trainer`, https://github.com/huggingface/trl.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

LEVELS = ("token", "sequence", "sequence_sum")
"""What the ratio is of: a token, the geometric mean over its sequence, or the product over it."""


class PolicyOptions(NamedTuple):
    """What the losses are given besides tensors, by the names that the operator has for them."""

    loss_type: str = "clipped"
    importance_sampling_level: str = "token"
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    kl_estimator: str = "k3"
    use_bias_correction_kl: bool = False

    def arguments(self) -> dict[str, Any]:
        return dict(zip(PolicyOptions.__annotations__, self, strict=True))


class PolicyLoss(NamedTuple):
    """`value(options, logps, ratio, advantages)` of tokens, and `slope`: by the ratio, or else by log pi."""

    value: Callable[[PolicyOptions, Tensor, Tensor, Tensor], Tensor]
    slope: Callable[[PolicyOptions, Tensor, Tensor, Tensor], Tensor]
    of_ratio: bool


def _clipped(options: PolicyOptions, logps: Tensor, ratio: Tensor, advantages: Tensor) -> Tensor:
    """-min(r A, clip(r) A): Schulman et al., PPO, 2017, https://arxiv.org/abs/1707.06347, equation 7.

    With `delta` the first ratio is at most that: INTELLECT-2, 2025, https://arxiv.org/abs/2505.07291.
    """
    first = ratio if options.delta is None else ratio.clamp(max=options.delta)
    return -torch.minimum(first * advantages, ratio.clamp(1 - options.epsilon, 1 + options.epsilon_high) * advantages)


def _clipped_slope(options: PolicyOptions, logps: Tensor, ratio: Tensor, advantages: Tensor) -> Tensor:
    low, high = 1 - options.epsilon, 1 + options.epsilon_high
    first, moves = ratio * advantages, torch.ones_like(ratio)
    if options.delta is not None:
        first, moves = ratio.clamp(max=options.delta) * advantages, (ratio <= options.delta).to(ratio.dtype)
    second, inside = ratio.clamp(low, high) * advantages, ((ratio >= low) & (ratio <= high)).to(ratio.dtype)
    half_of_each = 0.5 * (moves + inside)
    return -advantages * torch.where(first < second, moves, torch.where(first > second, inside, half_of_each))


def _cispo(options: PolicyOptions, logps: Tensor, ratio: Tensor, advantages: Tensor) -> Tensor:
    """-min(r, epsilon_high) A log pi, the first a constant: MiniMax-M1, 2025, https://arxiv.org/abs/2506.13585."""
    return _cispo_slope(options, logps, ratio.detach(), advantages) * logps


def _cispo_slope(options: PolicyOptions, logps: Tensor, ratio: Tensor, advantages: Tensor) -> Tensor:
    return -ratio.clamp(max=options.epsilon_high) * advantages


def _gate(options: PolicyOptions, advantages: Tensor) -> Tensor:
    # Of two numbers it would be of the default dtype.
    positive = torch.full_like(advantages, options.sapo_temperature_pos)
    return torch.where(advantages > 0, positive, options.sapo_temperature_neg)


def _sapo(options: PolicyOptions, logps: Tensor, ratio: Tensor, advantages: Tensor) -> Tensor:
    """-4 / t sigma(t (r - 1)) A, t by A's sign: Gao et al., SAPO, 2025, https://arxiv.org/abs/2511.20347."""
    t = _gate(options, advantages)
    return -torch.sigmoid(t * (ratio - 1)) * 4 / t * advantages


def _sapo_slope(options: PolicyOptions, logps: Tensor, ratio: Tensor, advantages: Tensor) -> Tensor:
    x = _gate(options, advantages) * (ratio - 1)
    return -4 * torch.sigmoid(x) * torch.sigmoid(-x) * advantages


def _reinforce(options: PolicyOptions, logps: Tensor, ratio: Tensor, advantages: Tensor) -> Tensor:
    """-A log pi: Williams, REINFORCE, 1992, https://doi.org/10.1007/BF00992696."""
    return -advantages * logps


def _reinforce_slope(options: PolicyOptions, logps: Tensor, ratio: Tensor, advantages: Tensor) -> Tensor:
    return -advantages


def _dft(options: PolicyOptions, logps: Tensor, ratio: Tensor, advantages: Tensor) -> Tensor:
    """-A pi log pi, pi a constant: Wu et al., 2025, https://arxiv.org/abs/2508.05629, equation 9."""
    return _dft_slope(options, logps.detach(), ratio, advantages) * logps


def _dft_slope(options: PolicyOptions, logps: Tensor, ratio: Tensor, advantages: Tensor) -> Tensor:
    return -advantages * logps.exp()


LOSSES = {
    "clipped": PolicyLoss(_clipped, _clipped_slope, of_ratio=True),
    "sapo": PolicyLoss(_sapo, _sapo_slope, of_ratio=True),
    "cispo": PolicyLoss(_cispo, _cispo_slope, of_ratio=False),
    "reinforce": PolicyLoss(_reinforce, _reinforce_slope, of_ratio=False),
    "dft": PolicyLoss(_dft, _dft_slope, of_ratio=False),
}


class Estimator(NamedTuple):
    """Of KL(pi, ref), from x = log pi / ref of samples of pi, and its derivative by x."""

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


ESTIMATORS = {
    "k1": Estimator(lambda x: x, torch.ones_like),
    "k2": Estimator(lambda x: 0.5 * x.square(), lambda x: x),
    "k3": Estimator(lambda x: torch.expm1(-x) + x, lambda x: -torch.expm1(-x)),
}
"""Schulman, 2020, http://joschu.net/blog/kl-approx.html."""


@dataclass(frozen=True)
class PolicyTerms:
    """What a policy's loss is a function of besides log-probabilities: of tokens, 0 where one does not count.

        sum of weight * f(log pi, r, A) + kl_weight * KL [* r] - entropy_weight * entropy,  r = exp(level(log pi / old))

    `level` is a symmetric linear function of tokens: what they have themselves, or their sequence's mean or sum.
    """

    advantages: Tensor
    weight: Tensor
    old_logps: Tensor | None  # the log-probabilities themselves, as constants, if None
    ref_logps: Tensor | None
    kl_weight: Tensor | None
    entropy_weight: Tensor | None
    options: PolicyOptions
    level: Callable[[Tensor], Tensor]

    def ratio(self, logps: Tensor) -> Tensor:
        return self.level(logps - (logps.detach() if self.old_logps is None else self.old_logps)).exp()

    def divergence(self, logps: Tensor, ratio: Tensor) -> Tensor:
        assert self.ref_logps is not None
        kl = ESTIMATORS[self.options.kl_estimator].value(logps - self.ref_logps)
        return kl * ratio if self.options.use_bias_correction_kl else kl

    def loss(self, logprobs: Tensor, entropy: Tensor) -> Tensor:
        ratio = self.ratio(logprobs)
        each = self.weight * LOSSES[self.options.loss_type].value(self.options, logprobs, ratio, self.advantages)
        if self.kl_weight is not None:
            each = each + self.kl_weight * self.divergence(logprobs, ratio)
        return (each if self.entropy_weight is None else each - self.entropy_weight * entropy).sum()

    def slopes(self, logprobs: Tensor) -> tuple[Tensor, Tensor | None]:
        """The derivative of the loss by each log-probability, and by each entropy."""
        ratio, (_, slope_of, of_ratio) = self.ratio(logprobs), LOSSES[self.options.loss_type]
        slope = self.weight * slope_of(self.options, logprobs, ratio, self.advantages)
        by_logps, by_ratio = (torch.zeros_like(slope), slope) if of_ratio else (slope, torch.zeros_like(slope))
        if self.kl_weight is not None:
            assert self.ref_logps is not None
            estimator, x = ESTIMATORS[self.options.kl_estimator], logprobs - self.ref_logps
            corrected = self.options.use_bias_correction_kl
            by_logps = by_logps + self.kl_weight * (estimator.slope(x) * ratio if corrected else estimator.slope(x))
            by_ratio = by_ratio + self.kl_weight * estimator.value(x) if corrected else by_ratio
        by_logps = by_logps + self.level(by_ratio * ratio)
        return by_logps, None if self.entropy_weight is None else -self.entropy_weight
