"""What the losses of pairs have in common after their log-probabilities."""

import torch
from torch import Tensor

from llmk.losses._sequences import Sequences, mean_of


def chosen_nll(token_logps: Tensor, sequences: Sequences) -> Tensor:
    """The negative log-likelihood of the chosen tokens, their mean."""
    chosen, _ = sequences.halves(sequences.sum(token_logps))
    lengths, _ = sequences.halves(sequences.lengths)
    return -chosen.sum() / lengths.sum().clamp(min=1.0)


def chosen_nll_weight(sequences: Sequences, coef: float) -> Tensor | None:
    """What makes `coef * chosen_nll` a sum over tokens `[B, S]`; of rows."""
    if coef == 0.0:
        return None
    (B, S), (lengths, _) = sequences.counts.shape, sequences.halves(sequences.lengths)
    weight = coef / lengths.sum().clamp(min=1.0)
    return torch.cat([weight.expand(B // 2, S), torch.zeros_like(weight).expand(B // 2, S)])


def reward_metrics(chosen: Tensor, rejected: Tensor, logps: Tensor, sequences: Sequences) -> dict[str, Tensor]:
    """Of the rewards of pairs `[P]` and the log-probabilities of sequences, under TRL's names."""
    chosen, rejected, exists = chosen.detach(), rejected.detach(), sequences.exists(in_pairs=True)
    chosen_logps, rejected_logps = sequences.halves(logps.detach())
    return {
        "rewards/chosen": mean_of(chosen, exists),
        "rewards/rejected": mean_of(rejected, exists),
        "rewards/accuracies": mean_of((chosen > rejected).float(), exists),
        "rewards/margins": mean_of(chosen - rejected, exists),
        "logps/chosen": mean_of(chosen_logps, exists),
        "logps/rejected": mean_of(rejected_logps, exists),
    }
