"""Selection of tokens by entropy, and metrics of a sampler that differs from the policy."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from llmk.losses._batch import Sequences, denominator_of
from llmk.losses._ranks import Groups, max_over, sum_over


def high_entropy_mask(entropy: Tensor, mask: Tensor, fraction: float) -> Tensor:
    """Return the mask of tokens `[B, S]` with an entropy of at least the quantile `1 - fraction` of those that count.

    The quantile is interpolated linearly between two entropies, as in `torch.quantile`.
    """
    # One element more than tokens, so that an index is valid where there are none.
    ordered = F.pad(torch.where(mask, entropy, float("inf")).flatten(), (0, 1), value=float("inf")).sort().values
    rank = (1.0 - fraction) * (mask.sum().double() - 1).clamp(min=0.0)
    below = rank.floor()
    low, high = (ordered.index_select(0, at.long().view(1)) for at in (below, rank.ceil()))
    return mask & (entropy >= torch.lerp(low, high, (rank - below).to(low.dtype)))


def ratio_metrics(ratio: Tensor, mask: Tensor | None, groups: Groups) -> dict[str, Tensor]:
    """Return metrics of importance sampling ratios over the mask, where None is all True, and over ranks."""
    mask = torch.ones_like(ratio, dtype=torch.bool) if mask is None else mask
    name = "sampling/importance_sampling_ratio"
    return {
        f"{name}/min": masked_min(ratio, mask, groups),
        f"{name}/mean": masked_mean(ratio, mask, groups),
        f"{name}/max": masked_max(ratio, mask, groups),
    }


def difference_metrics(old: Tensor, sampled: Tensor, sequences: Sequences) -> dict[str, Tensor]:
    """Return metrics of the difference of old and sampler log-probabilities `[B, S]`, where the latter are not NaN."""
    difference = (old - sampled).abs()
    known = sequences.mask & ~difference.isnan()
    name = "sampling/sampling_logp_difference"
    groups = sequences.ranks.tokens
    return {
        f"{name}/mean": masked_mean(difference, known, groups),
        f"{name}/max": masked_max(difference, known, groups),
    }


def masked_mean(values: Tensor, mask: Tensor, groups: Groups) -> Tensor:
    total = sum_over(groups, torch.where(mask, values, 0.0).sum())
    return total / denominator_of(sum_over(groups, mask.sum()))


def masked_min(values: Tensor, mask: Tensor, groups: Groups) -> Tensor:
    """Return the minimum over the mask and over ranks, 0 over none."""
    return -masked_max(-values, mask, groups)


def masked_max(values: Tensor, mask: Tensor, groups: Groups) -> Tensor:
    """Return the maximum over the mask and over ranks, 0 over none."""
    # One element more, so that amax is defined where there are none.
    largest = F.pad(torch.where(mask, values, -math.inf).flatten(), (0, 1), value=-math.inf).amax()
    return torch.where(max_over(groups, mask.any()), max_over(groups, largest), 0.0)
