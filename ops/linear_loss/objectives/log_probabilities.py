"""Functions of log-probabilities that are accurate at both ends, and their derivatives with them."""

import torch
import torch.nn.functional as F
from torch import Tensor

_HALF = -0.6931471805599453  # log of 1/2


def probability(x: Tensor) -> Tensor:
    """sigma(x), whose derivative sigma(x) sigma(-x) is accurate where sigma(x) is near 1 too."""
    return torch.exp(F.logsigmoid(x))


def log1mexp(logp: Tensor) -> Tensor:
    """log(1 - exp(logp)) by whichever formula is accurate: Maechler, 2012, the note on log1mexp of R's `Rmpfr`.

    p is clamped to at most 1 - eps. Each formula is evaluated where it is accurate, so neither's derivative is ever
    infinite.
    """
    logp = logp.clamp(max=-torch.finfo(logp.dtype).eps)
    near_one = torch.log(-torch.expm1(logp.clamp(min=_HALF)))
    return torch.where(logp > _HALF, near_one, torch.log1p(-torch.exp(logp.clamp(max=_HALF))))
