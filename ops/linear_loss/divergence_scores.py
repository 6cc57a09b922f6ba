"""f' of the logarithm of t = policy / reference, for the f-divergences, and its derivative by that logarithm.

Source: Wang et al., f-DPO, 2023, https://arxiv.org/abs/2309.16240.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_LARGEST_EXPONENT = 80.0  # e^80 is a finite float32


def _reverse_kl(logratios: Tensor, coef: float) -> Tensor:
    return logratios


def _reverse_kl_slope(logratios: Tensor, coef: float) -> Tensor:
    return torch.ones_like(logratios)


def _forward_kl(logratios: Tensor, coef: float) -> Tensor:
    return -torch.expm1((-logratios).clamp(max=_LARGEST_EXPONENT))


def _forward_kl_slope(logratios: Tensor, coef: float) -> Tensor:
    return _exp_within(-logratios)


def _js_divergence(logratios: Tensor, coef: float) -> Tensor:
    return math.log(2) + F.logsigmoid(logratios)


def _js_divergence_slope(logratios: Tensor, coef: float) -> Tensor:
    return torch.exp(F.logsigmoid(-logratios))


def _alpha_divergence(logratios: Tensor, coef: float) -> Tensor:
    if abs(coef - 1.0) < 1e-6:
        return logratios  # its limit
    return torch.expm1(((coef - 1.0) * logratios).clamp(max=_LARGEST_EXPONENT)) / (coef - 1.0)


def _alpha_divergence_slope(logratios: Tensor, coef: float) -> Tensor:
    if abs(coef - 1.0) < 1e-6:
        return torch.ones_like(logratios)
    return _exp_within((coef - 1.0) * logratios)


def _exp_within(x: Tensor) -> Tensor:
    """The derivative of expm1(x) where x is held at the largest exponent."""
    return torch.where(x > _LARGEST_EXPONENT, 0.0, torch.exp(x.clamp(max=_LARGEST_EXPONENT)))


Score = Callable[[Tensor, float], Tensor]

DIVERGENCES: dict[str, tuple[Score, Score]] = {
    "reverse_kl": (_reverse_kl, _reverse_kl_slope),  # f'(t) = log t
    "forward_kl": (_forward_kl, _forward_kl_slope),  # 1 - 1 / t
    "js_divergence": (_js_divergence, _js_divergence_slope),  # log(2t / (t + 1))
    "alpha_divergence": (_alpha_divergence, _alpha_divergence_slope),  # (t^(coef - 1) - 1) / (coef - 1)
}
"""The score and its derivative, given the coefficient of the last."""
