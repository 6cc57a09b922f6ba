"""The losses of a chosen and a rejected completion as functions of a pair, in a table by their names in TRL.

Each is written from its paper. The scores of a completion are f'(policy / reference), which is the logarithm of the
ratio for the reverse divergence; beta is the strength of the penalty, and sigma the logistic function.

Reference implementation: `trl.trainer.dpo_trainer`, https://github.com/huggingface/trl.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from llmk.losses._math import probability


@dataclass(frozen=True)
class Pairs:
    """Of each pair `[P]` in float32: what the losses are functions of."""

    chosen_logratios: Tensor  # log of policy / reference, over the completion
    rejected_logratios: Tensor
    chosen_scores: Tensor
    rejected_scores: Tensor
    chosen_lengths: Tensor
    rejected_lengths: Tensor
    policy_margin: Tensor  # the policy's log-probability of chosen less that of rejected
    ref_margin: Tensor
    nll: Tensor  # [], the negative log-likelihood of all chosen tokens, their mean
    exists: Tensor | None  # None if all do

    @property
    def margin(self) -> Tensor:
        return self.chosen_scores - self.rejected_scores

    @property
    def margin_of_averages(self) -> Tensor:
        chosen = self.chosen_scores / self.chosen_lengths.clamp(min=1.0)
        return chosen - self.rejected_scores / self.rejected_lengths.clamp(min=1.0)


@dataclass(frozen=True)
class PairOptions:
    beta: float
    label_smoothing: float
    discopop_tau: float


def sigmoid(pairs: Pairs, options: PairOptions) -> Tensor:
    """-log sigma(beta margin): Rafailov et al., DPO, 2023, https://arxiv.org/abs/2305.18290, equation 7."""
    return -F.logsigmoid(options.beta * pairs.margin)


def sigmoid_norm(pairs: Pairs, options: PairOptions) -> Tensor:
    """DPO with averages over tokens: Lambert et al., Tulu 3, 2024, https://arxiv.org/abs/2411.15124, equation 6."""
    return -F.logsigmoid(options.beta * pairs.margin_of_averages)


def hinge(pairs: Pairs, options: PairOptions) -> Tensor:
    """max(0, 1 - beta margin): Zhao et al., SLiC-HF, 2023, https://arxiv.org/abs/2305.10425, on DPO's margin."""
    return torch.relu(1 - options.beta * pairs.margin)


def ipo(pairs: Pairs, options: PairOptions) -> Tensor:
    """(margin - 1 / (2 beta))^2 of averages over tokens: Azar et al., 2023, https://arxiv.org/abs/2310.12036."""
    return (pairs.margin_of_averages - 1 / (2 * options.beta)) ** 2


def robust(pairs: Pairs, options: PairOptions) -> Tensor:
    """Unbiased where a share e of the labels is flipped: Chowdhury et al., 2024, https://arxiv.org/abs/2403.00409.

    ((1 - e) L(margin) - e L(-margin)) / (1 - 2e), with DPO's L.
    """
    e, x = options.label_smoothing, options.beta * pairs.margin
    return (e * F.logsigmoid(-x) - (1 - e) * F.logsigmoid(x)) / (1 - 2 * e)


def exo_pair(pairs: Pairs, options: PairOptions) -> Tensor:
    """KL from the policy's choice of two to (1 - e, e): Ji et al., EXO, 2024, https://arxiv.org/abs/2402.00856."""
    e, x = options.label_smoothing, options.beta * pairs.margin
    chosen = probability(x) * (F.logsigmoid(x) - math.log1p(-e))
    return chosen + probability(-x) * (F.logsigmoid(-x) - math.log(e))


def nca_pair(pairs: Pairs, options: PairOptions) -> Tensor:
    """-log sigma(r_c) - (log sigma(-r_c) + log sigma(-r_r)) / 2: Chen et al., 2024, https://arxiv.org/abs/2402.05369."""
    chosen, rejected = options.beta * pairs.chosen_logratios, options.beta * pairs.rejected_logratios
    return -F.logsigmoid(chosen) - 0.5 * (F.logsigmoid(-chosen) + F.logsigmoid(-rejected))


def bco_pair(pairs: Pairs, options: PairOptions) -> Tensor:
    """-log sigma(r_c) - log sigma(-r_r): Jung et al., BCO, 2024, https://arxiv.org/abs/2404.04656, not shifted."""
    chosen, rejected = options.beta * pairs.chosen_logratios, options.beta * pairs.rejected_logratios
    return -F.logsigmoid(chosen) - F.logsigmoid(-rejected)


def sppo_hard(pairs: Pairs, options: PairOptions) -> Tensor:
    """(log ratio -+ 1 / (2 beta))^2: Wu et al., SPPO, 2024, https://arxiv.org/abs/2405.00675, equation 4.7.

    Its P is 1 of the chosen completion and 0 of the rejected one.
    """
    half = 0.5 / options.beta
    return (pairs.chosen_logratios - half) ** 2 + (pairs.rejected_logratios + half) ** 2


def aot(pairs: Pairs, options: PairOptions) -> Tensor:
    """DPO on sorted margins of the policy and of the reference: Melnyk et al., 2024, https://arxiv.org/abs/2406.05882."""
    return _smoothed(_sorted(pairs.policy_margin, pairs) - _sorted(pairs.ref_margin, pairs), options)


def aot_unpaired(pairs: Pairs, options: PairOptions) -> Tensor:
    """DPO on sorted log ratios, chosen and rejected by themselves: the same paper."""
    return _smoothed(_sorted(pairs.chosen_logratios, pairs) - _sorted(pairs.rejected_logratios, pairs), options)


def _sorted(values: Tensor, pairs: Pairs) -> Tensor:
    if pairs.exists is not None:  # those that do not exist stay last
        values = values.masked_fill(~pairs.exists, torch.finfo(values.dtype).max)
    return values.sort().values


def _smoothed(margin: Tensor, options: PairOptions) -> Tensor:
    e, x = options.label_smoothing, options.beta * margin
    return -(1 - e) * F.logsigmoid(x) - e * F.logsigmoid(-x)


def apo_zero(pairs: Pairs, options: PairOptions) -> Tensor:
    """1 - sigma(r_c) + sigma(r_r): D'Oosterlinck et al., APO, 2024, https://arxiv.org/abs/2408.06266, equation 7."""
    chosen, rejected = options.beta * pairs.chosen_logratios, options.beta * pairs.rejected_logratios
    return probability(-chosen) + probability(rejected)


def apo_down(pairs: Pairs, options: PairOptions) -> Tensor:
    """sigma(r_c) + 1 - sigma(r_c - r_r): the same paper, equation 8."""
    chosen, rejected = options.beta * pairs.chosen_logratios, options.beta * pairs.rejected_logratios
    return probability(chosen) + probability(rejected - chosen)


def discopop(pairs: Pairs, options: PairOptions) -> Tensor:
    """A mixture of the logistic and the exponential loss by sigma(x / tau), x = beta margin.

    Lu et al., DiscoPOP, 2024, https://arxiv.org/abs/2406.08414, equation 5.
    """
    x = options.beta * pairs.margin
    y = x / options.discopop_tau
    return probability(-y) * -F.logsigmoid(x) + probability(y) * torch.exp(-x)


def sft(pairs: Pairs, options: PairOptions) -> Tensor:
    """The mean negative log-likelihood of the chosen tokens: the supervised term of a mixture."""
    return pairs.nll.expand(pairs.margin.shape)


PairLoss = Callable[[Pairs, PairOptions], Tensor]
"""Each gives a number of each pair, `[P]`, of which the loss is the mean."""

LOSSES: dict[str, PairLoss] = {
    "sigmoid": sigmoid,
    "hinge": hinge,
    "ipo": ipo,
    "exo_pair": exo_pair,
    "nca_pair": nca_pair,
    "robust": robust,
    "bco_pair": bco_pair,
    "sppo_hard": sppo_hard,
    "aot": aot,
    "aot_unpaired": aot_unpaired,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "discopop": discopop,
    "sft": sft,
    "sigmoid_norm": sigmoid_norm,
}

OF_SCORES = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft")
"""Those that use scores only in a difference, where the unknown normalization of an f-divergence cancels."""

_LARGEST_EXPONENT = 80.0  # e^80 is a finite float32


def _reverse_kl(logratios: Tensor, coef: float) -> Tensor:
    return logratios


def _forward_kl(logratios: Tensor, coef: float) -> Tensor:
    return -torch.expm1((-logratios).clamp(max=_LARGEST_EXPONENT))


def _js_divergence(logratios: Tensor, coef: float) -> Tensor:
    return math.log(2) + F.logsigmoid(logratios)


def _alpha_divergence(logratios: Tensor, coef: float) -> Tensor:
    if abs(coef - 1.0) < 1e-6:
        return logratios  # its limit
    return torch.expm1(((coef - 1.0) * logratios).clamp(max=_LARGEST_EXPONENT)) / (coef - 1.0)


DIVERGENCES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "reverse_kl": _reverse_kl,  # f'(t) = log t
    "forward_kl": _forward_kl,  # 1 - 1 / t
    "js_divergence": _js_divergence,  # log(2t / (t + 1))
    "alpha_divergence": _alpha_divergence,  # (t^(coef - 1) - 1) / (coef - 1)
}
"""f' of the logarithm of t = policy / reference: Wang et al., f-DPO, 2023, https://arxiv.org/abs/2309.16240."""
