"""A call of `fused_linear_policy`, and what its loss is a function of."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from llmk.ops.linear_loss._groups import GroupsCall
from llmk.ops.linear_loss._ignored import Kept
from llmk.ops.linear_loss.policy_losses import PolicyOptions, PolicyTerms

OF_TOKENS = ("advantages", "token_weight", "old_logps", "ref_logps", "kl_weight", "entropy_weight")
"""The call's tensors that have a number for each token."""


@dataclass(frozen=True)
class PolicyCall(GroupsCall):
    """The tokens are `[..., S]`, rows of which are sequences where the ratio is that of a whole one."""

    advantages: Tensor | None  # [..., S]
    token_weight: Tensor | None  # [..., S]
    old_logps: Tensor | None  # [..., S]
    ref_logps: Tensor | None  # [..., S]
    kl_weight: Tensor | None  # [..., S]
    entropy_weight: Tensor | None  # [..., S]
    loss_type: str
    importance_sampling_level: str
    epsilon: float
    epsilon_high: float
    delta: float | None
    sapo_temperature_pos: float
    sapo_temperature_neg: float
    kl_estimator: str
    use_bias_correction_kl: bool

    @property
    def group(self) -> torch.Size:
        return torch.Size(()) if self.importance_sampling_level == "token" else self.tokens[-1:]

    def of_kept(self, kept: Kept | None) -> Self:
        if kept is None:
            return self
        of_tokens = OF_TOKENS if self.tokens_are_groups else ()
        return kept.call(self, "input", "target", *of_tokens)

    def of_groups(self, groups: slice) -> PolicyTerms:
        counts = self.grouped(self.target)[groups].long() != self.ignore_index  # int32 would wrap what it does not hold

        def of_tokens(values: Tensor) -> Tensor:
            return torch.where(counts, self.grouped(values)[groups].float(), 0.0)

        def given(values: Tensor | None) -> Tensor | None:
            return None if values is None else of_tokens(values)

        return PolicyTerms(
            counts.float() if self.advantages is None else of_tokens(self.advantages),
            counts.float() if self.token_weight is None else of_tokens(self.token_weight),
            given(self.old_logps),
            given(self.ref_logps),
            given(self.kl_weight),
            given(self.entropy_weight),
            PolicyOptions(
                self.loss_type, self.importance_sampling_level, self.epsilon, self.epsilon_high, self.delta,
                self.sapo_temperature_pos, self.sapo_temperature_neg, self.kl_estimator, self.use_bias_correction_kl,
            ),
            level_of_rows(self.importance_sampling_level, counts),
        )  # fmt: skip


def level_of_rows(name: str, counts: Tensor) -> Callable[[Tensor], Tensor]:
    """Of tokens `[..., S]`, of each whether it counts, whose rows are sequences: what it has of the row."""
    if name == "token":
        return lambda values: values

    def of_sequence(values: Tensor) -> Tensor:
        total = torch.where(counts, values, 0.0).sum(-1, keepdim=True)
        if name == "sequence":
            total = total / counts.sum(-1, keepdim=True).clamp(min=1)
        return torch.where(counts, total, 0.0)

    return of_sequence
