"""A call of `fused_linear_preference`, and its loss as a function of log-probabilities."""

from dataclasses import dataclass

import torch
from torch import Tensor

from llmk.ops.linear_loss._groups import GroupsCall
from llmk.ops.linear_loss.divergence_scores import DIVERGENCES
from llmk.ops.linear_loss.pair_losses import LOSSES, LossOptions


@dataclass(frozen=True)
class PreferenceCall(GroupsCall):
    """The tokens are `[G, M, S]`: G groups of M sequences."""

    ref_logps: Tensor | None  # [G, M]
    token_weight: Tensor | None  # [G, M, S]
    nll_weight: Tensor | None  # [G, M, S]
    group_weight: Tensor | None  # [G], or [types, G]
    loss_type: str  # names joined by "+"
    beta: float
    label_smoothing: float
    simpo_gamma: float
    discopop_tau: float
    f_divergence_type: str
    f_divergence_coef: float

    @property
    def group(self) -> torch.Size:
        return self.tokens[1:]

    def of_groups(self, groups: slice) -> "GroupTerms":
        """What the loss of these groups is a function of, besides log-probabilities."""
        counts = self.target[groups].long() != self.ignore_index  # int32 would wrap an index that it does not hold

        def of_tokens(weights: Tensor | None) -> Tensor:
            if weights is None:
                return counts.float()
            return torch.where(counts, weights[groups].float(), 0.0)

        names = self.loss_type.split("+")
        group_weight = None
        if self.group_weight is not None:
            group_weight = self.group_weight.reshape(len(names), -1)[:, groups].float()
        return GroupTerms(
            counts.sum(-1).clamp(min=1).float(),
            None if self.ref_logps is None else self.ref_logps[groups].float(),
            of_tokens(self.token_weight),
            None if self.nll_weight is None else of_tokens(self.nll_weight),
            group_weight,
            names,
            LossOptions(self.beta, self.label_smoothing, self.simpo_gamma, self.discopop_tau),
            self.f_divergence_type,
            self.f_divergence_coef,
        )


@dataclass(frozen=True)
class GroupTerms:
    lengths: Tensor  # [G, M], at least 1
    ref_logps: Tensor | None  # [G, M]
    token_weight: Tensor  # [G, M, S], 0 where a token does not count
    nll_weight: Tensor | None  # [G, M, S]
    group_weight: Tensor | None  # [types, G]
    names: list[str]
    options: LossOptions
    divergence: str
    coef: float

    def _logratios(self, logprobs: Tensor) -> Tensor:
        """`[G, M]`."""
        logps = (self.token_weight * logprobs).sum(-1)
        return logps if self.ref_logps is None else logps - self.ref_logps

    def _scores(self, scores: Tensor, name: str) -> tuple[Tensor, ...]:
        return ((scores / self.lengths) if LOSSES[name].averages else scores).unbind(-1)

    def _weighted(self, values: Tensor, place: int) -> Tensor:
        return values if self.group_weight is None else self.group_weight[place] * values

    def loss(self, logprobs: Tensor, entropy: Tensor) -> Tensor:
        """The sum over groups and tokens, of log-probabilities `[G, M, S]`; entropies are no part of it."""
        scores = DIVERGENCES[self.divergence][0](self._logratios(logprobs), self.coef)
        terms = [
            self._weighted(LOSSES[name].value(self.options, *self._scores(scores, name)), i).sum()
            for i, name in enumerate(self.names)
        ]
        if self.nll_weight is not None:
            terms.append(-(self.nll_weight * logprobs).sum())
        return torch.stack(terms).sum()

    def slopes(self, logprobs: Tensor) -> tuple[Tensor, None]:
        """The derivative of the loss by each log-probability, `[G, M, S]`."""
        score, score_slope = DIVERGENCES[self.divergence]
        logratios = self._logratios(logprobs)
        scores, total = score(logratios, self.coef), torch.zeros_like(logratios)
        for i, name in enumerate(self.names):
            loss = LOSSES[name]
            by_scores = loss.slopes(self.options, *self._scores(scores, name))
            slopes = torch.stack([self._weighted(slope, i) for slope in by_scores], -1)
            total = total + (slopes / self.lengths if loss.averages else slopes)
        by_logps = total * score_slope(logratios, self.coef)
        by_logprobs = self.token_weight * by_logps.unsqueeze(-1)
        return (by_logprobs if self.nll_weight is None else by_logprobs - self.nll_weight), None
