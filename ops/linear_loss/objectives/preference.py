"""Preference losses as functions of implicit rewards, by their names in TRL.

A group is a pair, the chosen completion and the rejected one, or a single completion. A reward is the logarithm of
policy / reference over a completion, or an f-divergence's transform of it, before the factor beta. Each loss is written
from its paper: x = beta * (reward of chosen - reward of rejected), sigma the logistic function.

Autograd differentiates the losses, in a kernel op too: each is written so that its derivative is exact for any reward.

Reference implementation: `trl.trainer.dpo_trainer`, https://github.com/huggingface/trl.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from llmk.registry import FromArguments, check_number


class LossOptions(NamedTuple):
    """The options of the losses, named as the operator's arguments; each uses some of them."""

    beta: float = 0.1
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.0
    discopop_tau: float = 0.05


class GroupLoss(NamedTuple):
    """`value(options, *rewards)` for rewards `[G]` of a group's sequences."""

    value: Callable[..., Tensor]
    length_normalized: bool = False  # True: rewards are means over a sequence's tokens
    sequences: int = 2
    smoothing: tuple[float, float, str] = (0.0, 1.0, "a number from 0 to 1")  # its range, and that in words


_HALF = -0.6931471805599453  # log of 1/2


def probability(x: Tensor) -> Tensor:
    """sigma(x), whose derivative sigma(x) sigma(-x) is accurate where sigma(x) is near 1 too, and the same for -x."""
    return torch.where(x < 0, torch.sigmoid(x.clamp(max=0)), 1 - torch.sigmoid(-x.clamp(min=0)))


def log1mexp(logp: Tensor) -> Tensor:
    """log(1 - exp(logp)) by whichever formula is accurate: Maechler, 2012, the note on log1mexp of R's `Rmpfr`.

    p is clamped to at most 1 - eps. Each formula is evaluated where it is accurate, so neither's derivative is ever
    infinite.
    """
    logp = logp.clamp(max=-torch.finfo(logp.dtype).eps)
    near_one = torch.log(-torch.expm1(logp.clamp(min=_HALF)))
    return torch.where(logp > _HALF, near_one, torch.log1p(-torch.exp(logp.clamp(max=_HALF))))


def _margin_loss(value: Callable[[LossOptions, Tensor], Tensor], length_normalized: bool = False) -> GroupLoss:
    """Return a loss that is a function of x alone."""

    def pair_value(options: LossOptions, chosen: Tensor, rejected: Tensor) -> Tensor:
        return value(options, options.beta * (chosen - rejected))

    return GroupLoss(pair_value, length_normalized)


def _logistic(options: LossOptions, x: Tensor) -> Tensor:
    """-log sigma(x): Rafailov et al., DPO, 2023, https://arxiv.org/abs/2305.18290, equation 7.

    With means over tokens: Lambert et al., Tulu 3, 2024, https://arxiv.org/abs/2411.15124, equation 6.
    """
    return -F.logsigmoid(x)


def _hinge(options: LossOptions, x: Tensor) -> Tensor:
    """max(0, 1 - x): Zhao et al., SLiC-HF, 2023, https://arxiv.org/abs/2305.10425, on DPO's margin."""
    return torch.relu(1 - x)


def _ipo(options: LossOptions, chosen: Tensor, rejected: Tensor) -> Tensor:
    """(margin - 1 / (2 beta))^2 with means over tokens: Azar et al., 2023, https://arxiv.org/abs/2310.12036."""
    return (chosen - rejected - 1 / (2 * options.beta)) ** 2


def _robust(options: LossOptions, x: Tensor) -> Tensor:
    """Unbiased where a fraction e of the labels is flipped: Chowdhury et al., 2024, https://arxiv.org/abs/2403.00409.

    ((1 - e) L(x) - e L(-x)) / (1 - 2e), with DPO's L.
    """
    e = options.label_smoothing
    return (e * F.logsigmoid(-x) - (1 - e) * F.logsigmoid(x)) / (1 - 2 * e)


def _exo_pair(options: LossOptions, x: Tensor) -> Tensor:
    """KL from the policy's choice of two to (1 - e, e): Ji et al., EXO, 2024, https://arxiv.org/abs/2402.00856."""
    e = options.label_smoothing
    chosen = probability(x) * (F.logsigmoid(x) - math.log1p(-e))
    return chosen + probability(-x) * (F.logsigmoid(-x) - math.log(e))


def _smoothed(options: LossOptions, x: Tensor) -> Tensor:
    """-(1 - e) log sigma(x - gamma) - e log sigma(gamma - x), the loss of "cpo" and "simpo"."""
    e, x = options.label_smoothing, x - options.simpo_gamma
    return -(1 - e) * F.logsigmoid(x) - e * F.logsigmoid(-x)


def _discopop(options: LossOptions, x: Tensor) -> Tensor:
    """A mixture of the logistic and the exponential loss by sigma(x / tau).

    Lu et al., DiscoPOP, 2024, https://arxiv.org/abs/2406.08414, equation 5.
    """
    y = x / options.discopop_tau
    return probability(-y) * -F.logsigmoid(x) + torch.exp(F.logsigmoid(y) - x)


def _nca_pair(options: LossOptions, chosen: Tensor, rejected: Tensor) -> Tensor:
    """-log sigma(r_c) - (log sigma(-r_c) + log sigma(-r_r)) / 2: Chen et al., 2024, https://arxiv.org/abs/2402.05369."""
    chosen, rejected = options.beta * chosen, options.beta * rejected
    return -F.logsigmoid(chosen) - 0.5 * (F.logsigmoid(-chosen) + F.logsigmoid(-rejected))


def _bco_pair(options: LossOptions, chosen: Tensor, rejected: Tensor) -> Tensor:
    """-log sigma(r_c) - log sigma(-r_r): Jung et al., BCO, 2024, https://arxiv.org/abs/2404.04656, not shifted."""
    return -F.logsigmoid(options.beta * chosen) - F.logsigmoid(-options.beta * rejected)


def _sppo_hard(options: LossOptions, chosen: Tensor, rejected: Tensor) -> Tensor:
    """(log ratio -+ 1 / (2 beta))^2: Wu et al., SPPO, 2024, https://arxiv.org/abs/2405.00675, equation 4.7.

    Its P is 1 of the chosen completion and 0 of the rejected one.
    """
    half = 0.5 / options.beta
    return (chosen - half) ** 2 + (rejected + half) ** 2


def _apo_zero(options: LossOptions, chosen: Tensor, rejected: Tensor) -> Tensor:
    """1 - sigma(r_c) + sigma(r_r): D'Oosterlinck et al., APO, 2024, https://arxiv.org/abs/2408.06266, equation 7."""
    return probability(-options.beta * chosen) + probability(options.beta * rejected)


def _apo_down(options: LossOptions, chosen: Tensor, rejected: Tensor) -> Tensor:
    """sigma(r_c) + 1 - sigma(r_c - r_r): the same paper, equation 8."""
    return probability(options.beta * chosen) + probability(options.beta * (rejected - chosen))


def log_odds(chosen: Tensor, rejected: Tensor) -> Tensor:
    """The logarithm of odds(chosen) / odds(rejected), odds(p) = p / (1 - p)."""
    return (chosen - rejected) - (log1mexp(chosen) - log1mexp(rejected))


def _orpo(options: LossOptions, chosen: Tensor, rejected: Tensor) -> Tensor:
    """-log sigma(log odds(chosen) / odds(rejected)) with means over tokens.

    Hong et al., ORPO, 2024, https://arxiv.org/abs/2403.07691, equation 7.
    """
    return -F.logsigmoid(log_odds(chosen, rejected))


def _kto(options: LossOptions, gain: Tensor) -> Tensor:
    """1 - sigma(beta gain) of a completion by itself, the gain with the sign of its label.

    Ethayarajh et al., KTO, 2024, https://arxiv.org/abs/2402.01306, equation 7.
    """
    return probability(-options.beta * gain)


LOSSES: dict[str, GroupLoss] = {
    "sigmoid": _margin_loss(_logistic),
    "sigmoid_norm": _margin_loss(_logistic, length_normalized=True),
    "hinge": _margin_loss(_hinge),
    "ipo": GroupLoss(_ipo, length_normalized=True),
    "robust": _margin_loss(_robust)._replace(smoothing=(0.0, math.nextafter(0.5, 0.0), "a number from 0 to below 0.5")),
    "exo_pair": _margin_loss(_exo_pair)._replace(
        smoothing=(math.nextafter(0.0, 1.0), math.nextafter(1.0, 0.0), "a number between 0 and 1")
    ),
    "discopop": _margin_loss(_discopop),
    "nca_pair": GroupLoss(_nca_pair),
    "bco_pair": GroupLoss(_bco_pair),
    "sppo_hard": GroupLoss(_sppo_hard),
    "apo_zero": GroupLoss(_apo_zero),
    "apo_down": GroupLoss(_apo_down),
    "cpo": _margin_loss(_smoothed),
    "orpo": GroupLoss(_orpo, length_normalized=True),
    "simpo": _margin_loss(_smoothed, length_normalized=True),
    "kto": GroupLoss(_kto, sequences=1),
}

MARGIN_LOSSES = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "cpo", "simpo")
"""The losses of a difference of rewards, in which the unknown normalization of an f-divergence cancels."""


def check_label_smoothing(names: Sequence[str], label_smoothing: float) -> None:
    for name in names:
        low, high, expected = LOSSES[name].smoothing
        check_number("label_smoothing", label_smoothing, low, high, f"{expected} with loss_type {name!r}")


# The f-divergences: f'(t) as a function of log t, t = policy / reference.
# Source: Wang et al., f-DPO, 2023, https://arxiv.org/abs/2309.16240.

_LARGEST_EXPONENT = 80.0  # e^80 is a finite float32


def _reverse_kl(logratios: Tensor, coef: float) -> Tensor:
    return logratios


def _expm1(x: Tensor) -> Tensor:
    """exp(x) - 1 of x up to the largest exponent, by the formula whose derivative is accurate where exp(x) is small."""
    x = x.clamp(max=_LARGEST_EXPONENT)
    return torch.where(x < -1, torch.exp(x) - 1, torch.expm1(x.clamp(min=-1)))


def _forward_kl(logratios: Tensor, coef: float) -> Tensor:
    return -_expm1(-logratios)


def _js_divergence(logratios: Tensor, coef: float) -> Tensor:
    return math.log(2) + F.logsigmoid(logratios)


def _alpha_divergence(logratios: Tensor, coef: float) -> Tensor:
    if abs(coef - 1.0) < 1e-6:
        return logratios  # its limit
    return _expm1((coef - 1.0) * logratios) / (coef - 1.0)


F_DIVERGENCES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "reverse_kl": _reverse_kl,  # f'(t) = log t
    "forward_kl": _forward_kl,  # 1 - 1 / t
    "js_divergence": _js_divergence,  # log(2t / (t + 1))
    "alpha_divergence": _alpha_divergence,  # (t^(coef - 1) - 1) / (coef - 1)
}
"""The rewards as functions of log-ratios and the alpha divergence's coefficient."""


@dataclass(frozen=True, kw_only=True)
class PreferenceTerms(FromArguments):
    """The operator's arguments beside the projection, for G groups of M sequences of S tokens."""

    ref_logps: Tensor | None  # [G, M]
    token_weight: Tensor | None  # [G, M, S]
    nll_weight: Tensor | None  # [G, M, S]
    group_weight: Tensor | None  # [G], or [types, G]
    loss_type: str  # names joined by "+"
    options: LossOptions
    f_divergence_type: str
    f_divergence_coef: float

    def loss(self, logprobs: Tensor, counts: Tensor, groups: slice = slice(None)) -> Tensor:
        """Sum the loss over some groups, given log-probabilities `[G, M, S]` and the mask of those that count."""
        names, dtype = self.loss_type.split("+"), logprobs.dtype

        def weighted(weight: Tensor | None) -> Tensor:
            mask = counts.to(dtype) if weight is None else torch.where(counts, weight[groups].to(dtype), 0.0)
            return mask * logprobs

        logratios = weighted(self.token_weight).sum(-1)
        if self.ref_logps is not None:
            logratios = logratios - self.ref_logps[groups].to(dtype)
        rewards = F_DIVERGENCES[self.f_divergence_type](logratios, self.f_divergence_coef)
        means = rewards / counts.sum(-1).clamp(min=1).to(dtype)
        terms = []
        for i, name in enumerate(names):
            loss = LOSSES[name]
            values = loss.value(self.options, *(means if loss.length_normalized else rewards).unbind(-1))
            if self.group_weight is not None:
                values = self.group_weight.reshape(len(names), -1)[i, groups].to(dtype) * values
            terms.append(values.sum())
        if self.nll_weight is not None:
            terms.append(-weighted(self.nll_weight).sum())
        return torch.stack(terms).sum()
