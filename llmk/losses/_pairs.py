"""The loss types of `dpo` by their names in TRL, and the supervised term and metrics that losses of pairs share.

`llmk.ops.linear_loss.objectives.preference` has those that are functions of one pair; those here depend on the batch.

Reference implementation: `trl.trainer.dpo_trainer`, https://github.com/huggingface/trl.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from llmk.losses._batch import Sequences, check_denominator, denominator_of
from llmk.losses._ranks import sum_over
from llmk.ops.linear_loss.objectives.preference import LOSSES as GROUP_LOSSES
from llmk.ops.linear_loss.objectives.preference import LossOptions
from llmk.registry import FromArguments


@dataclass(frozen=True)
class Pairs:
    """Inputs of the losses for each pair, `[P]` in float32; two are those of the chosen and of the rejected ones."""

    logratios: tuple[Tensor, Tensor]  # log of policy / reference over the completion
    rewards: tuple[Tensor, Tensor]
    lengths: tuple[Tensor, Tensor]
    policy_logps: tuple[Tensor, Tensor]
    ref_logps: tuple[Tensor, Tensor]
    nll: Tensor  # [], the mean negative log-likelihood of all chosen tokens
    exists: Tensor | None  # None if all do


def aot(pairs: Pairs, options: LossOptions) -> Tensor:
    """DPO on sorted margins of the policy and of the reference: Melnyk et al., 2024, https://arxiv.org/abs/2406.05882."""
    margins = (chosen - rejected for chosen, rejected in (pairs.policy_logps, pairs.ref_logps))
    return GROUP_LOSSES["cpo"].value(options, *(_sorted(margin, pairs) for margin in margins))


def aot_unpaired(pairs: Pairs, options: LossOptions) -> Tensor:
    """DPO on sorted log ratios, chosen and rejected by themselves: the same paper."""
    return GROUP_LOSSES["cpo"].value(options, *(_sorted(logratios, pairs) for logratios in pairs.logratios))


def _sorted(values: Tensor, pairs: Pairs) -> Tensor:
    if pairs.exists is not None:  # pairs that do not exist stay last
        values = values.masked_fill(~pairs.exists, torch.finfo(values.dtype).max)
    return values.sort().values


def sft(pairs: Pairs, options: LossOptions) -> Tensor:
    """The mean negative log-likelihood of the chosen tokens: the supervised term of a mixture."""
    return pairs.nll.expand(pairs.rewards[0].shape)


BATCH_LOSSES = {"aot": aot, "aot_unpaired": aot_unpaired, "sft": sft}
PAIR_LOSSES = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero", "apo_down",
    "discopop", "sigmoid_norm",
)  # fmt: skip
TYPES = (*PAIR_LOSSES, *BATCH_LOSSES)


def pair_losses(name: str, pairs: Pairs, options: LossOptions) -> Tensor:
    """Return the loss of each pair, `[P]`."""
    if name in BATCH_LOSSES:
        return BATCH_LOSSES[name](pairs, options)
    loss, rewards = GROUP_LOSSES[name], pairs.rewards
    if loss.length_normalized:
        rewards = (reward / length.clamp(min=1.0) for reward, length in zip(rewards, pairs.lengths, strict=True))
    return loss.value(options, *rewards)


@dataclass(frozen=True, kw_only=True)
class PairItems(FromArguments):
    """The numbers that means of pairs, and of their chosen tokens, divide by; None for the batch's own."""

    num_items_in_batch: Tensor | float | None
    num_chosen_tokens_in_batch: Tensor | float | None

    def __post_init__(self) -> None:
        check_denominator("num_items_in_batch", self.num_items_in_batch)
        check_denominator("num_chosen_tokens_in_batch", self.num_chosen_tokens_in_batch)

    def pairs(self, sequences: Sequences) -> Tensor | float:
        """Return the number of pairs, or 1 for 0."""
        return sequences.denominator(self.num_items_in_batch)

    def chosen_tokens(self, sequences: Sequences) -> Tensor | float:
        """Return the number of chosen tokens, or 1 for 0."""
        if self.num_chosen_tokens_in_batch is not None:
            return denominator_of(self.num_chosen_tokens_in_batch)
        lengths, _ = sequences.halves(sequences.lengths)
        return denominator_of(sum_over(sequences.ranks.sequences, lengths.sum()))


def chosen_nll(token_logps: Tensor, sequences: Sequences, items: PairItems) -> Tensor:
    """Return the mean negative log-likelihood of the chosen tokens."""
    chosen, _ = sequences.halves(sequences.sum(token_logps))
    return -sum_over(sequences.ranks.sequences, chosen.sum()) / items.chosen_tokens(sequences)


def chosen_nll_weight(sequences: Sequences, coef: float, items: PairItems) -> Tensor | None:
    """Return weights `[B, S]` of a padded batch with which `coef * chosen_nll` is a sum over tokens."""
    if coef == 0.0:
        return None
    weight = sequences.lengths.new_full((), coef) / items.chosen_tokens(sequences)
    each = weight.expand(sequences.slots // 2)
    return sequences.joined(each, torch.zeros_like(each)).unsqueeze(-1).expand(sequences.mask.shape)


def pair_weights(sequences: Sequences, coefs: list[float], items: PairItems) -> Tensor:
    """Return weights `[coefs, P]` of a padded batch, with which coefficients times means are a sum over pairs."""
    pairs = sequences.slots // 2
    return torch.stack([sequences.lengths.new_full((pairs,), coef) for coef in coefs]) / items.pairs(sequences)


def reward_metrics(chosen: Tensor, rejected: Tensor, logps: Tensor, sequences: Sequences) -> dict[str, Tensor]:
    """Return TRL's metrics of the rewards of pairs `[P]` and the log-probabilities of sequences."""
    chosen, rejected = chosen.detach(), rejected.detach()
    chosen_logps, rejected_logps = sequences.halves(logps.detach())
    metrics = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": (chosen > rejected).float(),
        "rewards/margins": chosen - rejected,
        "logps/chosen": chosen_logps,
        "logps/rejected": rejected_logps,
    }
    return dict(zip(metrics, sequences.means(*metrics.values()), strict=True))
