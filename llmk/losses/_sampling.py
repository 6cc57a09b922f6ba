"""What a policy's tokens are chosen by, and what is told of the sampler that is not quite the policy."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from llmk.losses._sequences import Sequences


def of_high_entropy(entropy: Tensor, counts: Tensor, share: float) -> Tensor:
    """Which tokens `[B, S]` have an entropy of at least the quantile `1 - share` of those that count.

    The quantile is interpolated linearly between two entropies, as in `torch.quantile`.
    """
    # One more than there are tokens, so that there is a place to look at where there are none.
    ordered = F.pad(torch.where(counts, entropy, float("inf")).flatten(), (0, 1), value=float("inf")).sort().values
    rank = (1.0 - share) * (counts.sum().double() - 1).clamp(min=0.0)
    below = rank.floor()
    low, high = (ordered.index_select(0, at.long().view(1)) for at in (below, rank.ceil()))
    return counts & (entropy >= torch.lerp(low, high, (rank - below).to(low.dtype)))


def ratio_metrics(ratio: Tensor, counts: Tensor | None) -> dict[str, Tensor]:
    """Of the weights that correct for the sampler: of tokens that count, or of sequences where that is None."""
    counts = torch.ones_like(ratio, dtype=torch.bool) if counts is None else counts
    least = torch.where(counts, ratio, math.inf).amin()
    name = "sampling/importance_sampling_ratio"
    return {
        f"{name}/min": torch.where(counts.any(), least, 0.0),
        f"{name}/mean": torch.where(counts, ratio, 0.0).sum() / counts.sum().clamp(min=1),
        f"{name}/max": _largest(ratio, counts),
    }


def difference_metrics(old: Tensor, sampled: Tensor, sequences: Sequences) -> dict[str, Tensor]:
    """How far the old policy's log-probabilities `[B, S]` are from the sampler's, where it could score a token."""
    difference = (old - sampled).abs()
    known = sequences.counts & ~difference.isnan()
    name = "sampling/sampling_logp_difference"
    return {
        f"{name}/mean": torch.where(known, difference, 0.0).sum() / known.sum().clamp(min=1),
        f"{name}/max": _largest(difference, known),
    }


def _largest(values: Tensor, counts: Tensor) -> Tensor:
    return torch.where(counts.any(), torch.where(counts, values, -math.inf).amax(), 0.0)
