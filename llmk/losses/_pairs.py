"""The losses of pairs that `dpo` has, in a table by their names in TRL, from what a batch says of its pairs.

Most are functions of each pair by itself, which `llmk.ops.linear_loss.pair_losses` has; those here are of the batch.

Reference implementation: `trl.trainer.dpo_trainer`, https://github.com/huggingface/trl.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from llmk.ops.linear_loss.pair_losses import LOSSES as GROUP_LOSSES
from llmk.ops.linear_loss.pair_losses import LossOptions


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
    def scores(self) -> tuple[Tensor, Tensor]:
        return self.chosen_scores, self.rejected_scores

    @property
    def average_scores(self) -> tuple[Tensor, Tensor]:
        chosen = self.chosen_scores / self.chosen_lengths.clamp(min=1.0)
        return chosen, self.rejected_scores / self.rejected_lengths.clamp(min=1.0)


def aot(pairs: Pairs, options: LossOptions) -> Tensor:
    """DPO on sorted margins of the policy and of the reference: Melnyk et al., 2024, https://arxiv.org/abs/2406.05882."""
    return _smoothed(_sorted(pairs.policy_margin, pairs) - _sorted(pairs.ref_margin, pairs), options)


def aot_unpaired(pairs: Pairs, options: LossOptions) -> Tensor:
    """DPO on sorted log ratios, chosen and rejected by themselves: the same paper."""
    return _smoothed(_sorted(pairs.chosen_logratios, pairs) - _sorted(pairs.rejected_logratios, pairs), options)


def _sorted(values: Tensor, pairs: Pairs) -> Tensor:
    if pairs.exists is not None:  # those that do not exist stay last
        values = values.masked_fill(~pairs.exists, torch.finfo(values.dtype).max)
    return values.sort().values


def _smoothed(margin: Tensor, options: LossOptions) -> Tensor:
    e, x = options.label_smoothing, options.beta * margin
    return -(1 - e) * F.logsigmoid(x) - e * F.logsigmoid(-x)


def sft(pairs: Pairs, options: LossOptions) -> Tensor:
    """The mean negative log-likelihood of the chosen tokens: the supervised term of a mixture."""
    return pairs.nll.expand(pairs.chosen_scores.shape)


OF_BATCHES = {"aot": aot, "aot_unpaired": aot_unpaired, "sft": sft}
OF_PAIRS = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero", "apo_down",
    "discopop", "sigmoid_norm",
)  # fmt: skip
TYPES = (*OF_PAIRS, *OF_BATCHES)


def loss_of_pairs(name: str, pairs: Pairs, options: LossOptions) -> Tensor:
    """A number of each pair, `[P]`, of which the loss is the mean."""
    if name in OF_BATCHES:
        return OF_BATCHES[name](pairs, options)
    loss = GROUP_LOSSES[name]
    return loss.value(options, *(pairs.average_scores if loss.averages else pairs.scores))
