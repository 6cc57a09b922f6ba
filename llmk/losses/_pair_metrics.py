"""What the losses of pairs have in common after their log-probabilities."""

from torch import Tensor

from llmk.losses._sequences import Sequences, mean_of


def chosen_nll(token_logps: Tensor, sequences: Sequences) -> Tensor:
    """The negative log-likelihood of the chosen tokens, their mean."""
    chosen, _ = sequences.halves(sequences.sum(token_logps))
    lengths, _ = sequences.halves(sequences.lengths)
    return -chosen.sum() / lengths.sum().clamp(min=1.0)


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
