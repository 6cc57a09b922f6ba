"""The supervised term and the metrics that losses of pairs share."""

import torch
from torch import Tensor

from llmk.losses._sequences import Sequences, masked_mean


def chosen_nll(token_logps: Tensor, sequences: Sequences) -> Tensor:
    """Return the mean negative log-likelihood of the chosen tokens."""
    chosen, _ = sequences.halves(sequences.sum(token_logps))
    lengths, _ = sequences.halves(sequences.lengths)
    return -chosen.sum() / lengths.sum().clamp(min=1.0)


def chosen_nll_weight(sequences: Sequences, coef: float) -> Tensor | None:
    """Return weights `[B, S]` of a padded batch with which `coef * chosen_nll` is a sum over tokens."""
    if coef == 0.0:
        return None
    (B, S), (lengths, _) = sequences.mask.shape, sequences.halves(sequences.lengths)
    weight = coef / lengths.sum().clamp(min=1.0)
    return torch.cat([weight.expand(B // 2, S), torch.zeros_like(weight).expand(B // 2, S)])


def reward_metrics(chosen: Tensor, rejected: Tensor, logps: Tensor, sequences: Sequences) -> dict[str, Tensor]:
    """Return TRL's metrics of the rewards of pairs `[P]` and the log-probabilities of sequences."""
    chosen, rejected, exists = chosen.detach(), rejected.detach(), sequences.exists(in_pairs=True)
    chosen_logps, rejected_logps = sequences.halves(logps.detach())
    return {
        "rewards/chosen": masked_mean(chosen, exists),
        "rewards/rejected": masked_mean(rejected, exists),
        "rewards/accuracies": masked_mean((chosen > rejected).float(), exists),
        "rewards/margins": masked_mean(chosen - rejected, exists),
        "logps/chosen": masked_mean(chosen_logps, exists),
        "logps/rejected": masked_mean(rejected_logps, exists),
    }
