"""Losses of groups of sequences as functions of their scores, and the derivatives, in tables by their names in TRL.

A group is a pair, the chosen completion and the rejected one, or a single completion. A score is the logarithm of
policy / reference over a completion, or what a divergence makes of it. Each loss is written from its paper: beta is the
strength of the penalty, x = beta * (score of chosen - score of rejected), sigma the logistic function.

The derivatives are written out, because a kernel op in which gradients are made cannot ask autograd for them.

Reference implementation: `trl.trainer.dpo_trainer`, https://github.com/huggingface/trl.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from llmk.ops.linear_loss.log_probabilities import log_of_the_rest, probability


class LossOptions(NamedTuple):
    """What the losses are given besides scores; each uses some of them."""

    beta: float = 0.1
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.0
    discopop_tau: float = 0.05

    def arguments(self) -> dict[str, Any]:
        """By the names that the operator has for them."""
        return {
            "beta": self.beta, "label_smoothing": self.label_smoothing, "simpo_gamma": self.simpo_gamma,
            "discopop_tau": self.discopop_tau,
        }  # fmt: skip


class GroupLoss(NamedTuple):
    """`value(options, *scores)` of scores `[G]`, one for each sequence of a group, and `slopes`: by each of them."""

    value: Callable[..., Tensor]
    slopes: Callable[..., tuple[Tensor, ...]]
    averages: bool = False  # whether scores are divided by the number of a sequence's tokens first
    sequences: int = 2


def _sigma(x: Tensor) -> Tensor:
    """Of which none of the smallest numbers is lost, as they are where exp(-x) overflows."""
    e = torch.exp(-x.abs())
    return torch.where(x < 0, e, 1.0) / (1 + e)


def _bump(x: Tensor) -> Tensor:
    """sigma(x) sigma(-x), the derivative of sigma."""
    return _sigma(x) * _sigma(-x)


_OfMargin = Callable[[LossOptions, Tensor], Tensor]


def _of_margin(value: _OfMargin, slope: _OfMargin, averages: bool = False) -> GroupLoss:
    """A loss that is a function of x alone."""

    def value_of(options: LossOptions, chosen: Tensor, rejected: Tensor) -> Tensor:
        return value(options, options.beta * (chosen - rejected))

    def slopes_of(options: LossOptions, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, ...]:
        by_chosen = options.beta * slope(options, options.beta * (chosen - rejected))
        return by_chosen, -by_chosen

    return GroupLoss(value_of, slopes_of, averages)


def _sigmoid(options: LossOptions, x: Tensor) -> Tensor:
    """-log sigma(x): Rafailov et al., DPO, 2023, https://arxiv.org/abs/2305.18290, equation 7.

    Of averages over tokens: Lambert et al., Tulu 3, 2024, https://arxiv.org/abs/2411.15124, equation 6.
    """
    return -F.logsigmoid(x)


def _sigmoid_slope(options: LossOptions, x: Tensor) -> Tensor:
    return -_sigma(-x)


def _hinge(options: LossOptions, x: Tensor) -> Tensor:
    """max(0, 1 - x): Zhao et al., SLiC-HF, 2023, https://arxiv.org/abs/2305.10425, on DPO's margin."""
    return torch.relu(1 - x)


def _hinge_slope(options: LossOptions, x: Tensor) -> Tensor:
    return torch.where(x >= 1, 0.0, -torch.ones_like(x))


def _ipo(options: LossOptions, chosen: Tensor, rejected: Tensor) -> Tensor:
    """(margin - 1 / (2 beta))^2 of averages over tokens: Azar et al., 2023, https://arxiv.org/abs/2310.12036."""
    return (chosen - rejected - 1 / (2 * options.beta)) ** 2


def _ipo_slopes(options: LossOptions, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, ...]:
    by_chosen = 2 * (chosen - rejected - 1 / (2 * options.beta))
    return by_chosen, -by_chosen


def _robust(options: LossOptions, x: Tensor) -> Tensor:
    """Unbiased where a share e of the labels is flipped: Chowdhury et al., 2024, https://arxiv.org/abs/2403.00409.

    ((1 - e) L(x) - e L(-x)) / (1 - 2e), with DPO's L.
    """
    e = options.label_smoothing
    return (e * F.logsigmoid(-x) - (1 - e) * F.logsigmoid(x)) / (1 - 2 * e)


def _robust_slope(options: LossOptions, x: Tensor) -> Tensor:
    e = options.label_smoothing
    return -(e * _sigma(x) + (1 - e) * _sigma(-x)) / (1 - 2 * e)


def _exo_pair(options: LossOptions, x: Tensor) -> Tensor:
    """KL from the policy's choice of two to (1 - e, e): Ji et al., EXO, 2024, https://arxiv.org/abs/2402.00856."""
    e = options.label_smoothing
    chosen = probability(x) * (F.logsigmoid(x) - math.log1p(-e))
    return chosen + probability(-x) * (F.logsigmoid(-x) - math.log(e))


def _exo_pair_slope(options: LossOptions, x: Tensor) -> Tensor:
    e = options.label_smoothing
    return _bump(x) * (x + (math.log(e) - math.log1p(-e)))


def _smoothed(options: LossOptions, x: Tensor) -> Tensor:
    """-(1 - e) log sigma(x - gamma) - e log sigma(gamma - x), of which "cpo" and "simpo" are made."""
    e, x = options.label_smoothing, x - options.simpo_gamma
    return -(1 - e) * F.logsigmoid(x) - e * F.logsigmoid(-x)


def _smoothed_slope(options: LossOptions, x: Tensor) -> Tensor:
    e, x = options.label_smoothing, x - options.simpo_gamma
    return e * _sigma(x) - (1 - e) * _sigma(-x)


def _discopop(options: LossOptions, x: Tensor) -> Tensor:
    """A mixture of the logistic and the exponential loss by sigma(x / tau).

    Lu et al., DiscoPOP, 2024, https://arxiv.org/abs/2406.08414, equation 5.
    """
    y = x / options.discopop_tau
    return probability(-y) * -F.logsigmoid(x) + torch.exp(F.logsigmoid(y) - x)


def _discopop_slope(options: LossOptions, x: Tensor) -> Tensor:
    y = x / options.discopop_tau
    logistic = _bump(y) / options.discopop_tau * F.logsigmoid(x) - _sigma(-y) * _sigma(-x)
    return logistic + torch.exp(F.logsigmoid(y) - x) * (_sigma(-y) / options.discopop_tau - 1)


def _nca_pair(options: LossOptions, chosen: Tensor, rejected: Tensor) -> Tensor:
    """-log sigma(r_c) - (log sigma(-r_c) + log sigma(-r_r)) / 2: Chen et al., 2024, https://arxiv.org/abs/2402.05369."""
    chosen, rejected = options.beta * chosen, options.beta * rejected
    return -F.logsigmoid(chosen) - 0.5 * (F.logsigmoid(-chosen) + F.logsigmoid(-rejected))


def _nca_pair_slopes(options: LossOptions, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, ...]:
    beta, chosen, rejected = options.beta, options.beta * chosen, options.beta * rejected
    return beta * (0.5 * _sigma(chosen) - _sigma(-chosen)), 0.5 * beta * _sigma(rejected)


def _bco_pair(options: LossOptions, chosen: Tensor, rejected: Tensor) -> Tensor:
    """-log sigma(r_c) - log sigma(-r_r): Jung et al., BCO, 2024, https://arxiv.org/abs/2404.04656, not shifted."""
    return -F.logsigmoid(options.beta * chosen) - F.logsigmoid(-options.beta * rejected)


def _bco_pair_slopes(options: LossOptions, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, ...]:
    beta = options.beta
    return -beta * _sigma(-beta * chosen), beta * _sigma(beta * rejected)


def _sppo_hard(options: LossOptions, chosen: Tensor, rejected: Tensor) -> Tensor:
    """(log ratio -+ 1 / (2 beta))^2: Wu et al., SPPO, 2024, https://arxiv.org/abs/2405.00675, equation 4.7.

    Its P is 1 of the chosen completion and 0 of the rejected one.
    """
    half = 0.5 / options.beta
    return (chosen - half) ** 2 + (rejected + half) ** 2


def _sppo_hard_slopes(options: LossOptions, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, ...]:
    half = 0.5 / options.beta
    return 2 * (chosen - half), 2 * (rejected + half)


def _apo_zero(options: LossOptions, chosen: Tensor, rejected: Tensor) -> Tensor:
    """1 - sigma(r_c) + sigma(r_r): D'Oosterlinck et al., APO, 2024, https://arxiv.org/abs/2408.06266, equation 7."""
    return probability(-options.beta * chosen) + probability(options.beta * rejected)


def _apo_zero_slopes(options: LossOptions, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, ...]:
    beta = options.beta
    return -beta * _bump(beta * chosen), beta * _bump(beta * rejected)


def _apo_down(options: LossOptions, chosen: Tensor, rejected: Tensor) -> Tensor:
    """sigma(r_c) + 1 - sigma(r_c - r_r): the same paper, equation 8."""
    return probability(options.beta * chosen) + probability(options.beta * (rejected - chosen))


def _apo_down_slopes(options: LossOptions, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, ...]:
    by_rejected = options.beta * _bump(options.beta * (rejected - chosen))
    return options.beta * _bump(options.beta * chosen) - by_rejected, by_rejected


def log_odds(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Of chosen and rejected, the logarithm of odds(chosen) / odds(rejected), odds(p) = p / (1 - p)."""
    return (chosen - rejected) - (log_of_the_rest(chosen) - log_of_the_rest(rejected))


def _orpo(options: LossOptions, chosen: Tensor, rejected: Tensor) -> Tensor:
    """-log sigma(log odds(chosen) / odds(rejected)) of averages over tokens.

    Hong et al., ORPO, 2024, https://arxiv.org/abs/2403.07691, equation 7.
    """
    return -F.logsigmoid(log_odds(chosen, rejected))


def _orpo_slopes(options: LossOptions, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, ...]:
    slope = -_sigma(-log_odds(chosen, rejected))
    return slope * _log_odds_slope(chosen), -slope * _log_odds_slope(rejected)


def _log_odds_slope(logp: Tensor) -> Tensor:
    """1 / (1 - p), or 1 where p falls short of 1 by no more than a unit: see `log_of_the_rest`."""
    certain = logp > -torch.finfo(logp.dtype).eps
    return torch.where(certain, 1.0, -1 / torch.expm1(torch.where(certain, -1.0, logp)))


def _kto(options: LossOptions, gain: Tensor) -> Tensor:
    """1 - sigma(beta gain) of a completion by itself, the gain with the sign of its label.

    Ethayarajh et al., KTO, 2024, https://arxiv.org/abs/2402.01306, equation 7.
    """
    return probability(-options.beta * gain)


def _kto_slopes(options: LossOptions, gain: Tensor) -> tuple[Tensor, ...]:
    return (-options.beta * _bump(options.beta * gain),)


LOSSES: dict[str, GroupLoss] = {
    "sigmoid": _of_margin(_sigmoid, _sigmoid_slope),
    "sigmoid_norm": _of_margin(_sigmoid, _sigmoid_slope, averages=True),
    "hinge": _of_margin(_hinge, _hinge_slope),
    "ipo": GroupLoss(_ipo, _ipo_slopes, averages=True),
    "robust": _of_margin(_robust, _robust_slope),
    "exo_pair": _of_margin(_exo_pair, _exo_pair_slope),
    "discopop": _of_margin(_discopop, _discopop_slope),
    "nca_pair": GroupLoss(_nca_pair, _nca_pair_slopes),
    "bco_pair": GroupLoss(_bco_pair, _bco_pair_slopes),
    "sppo_hard": GroupLoss(_sppo_hard, _sppo_hard_slopes),
    "apo_zero": GroupLoss(_apo_zero, _apo_zero_slopes),
    "apo_down": GroupLoss(_apo_down, _apo_down_slopes),
    "cpo": _of_margin(_smoothed, _smoothed_slope),
    "orpo": GroupLoss(_orpo, _orpo_slopes, averages=True),
    "simpo": _of_margin(_smoothed, _smoothed_slope, averages=True),
    "kto": GroupLoss(_kto, _kto_slopes, sequences=1),
}

OF_SCORES = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "cpo", "simpo")
"""Those that use scores only in a difference, where the unknown normalization of an f-divergence cancels."""
