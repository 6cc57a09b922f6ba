r"""The softmax of a row of logits that are never stored: what the sums of its exponentials say, and its gradients.

A row has a reference, mostly its target's logit, and its exponentials E_v = exp(y_v - reference). Its own class t is
left out of the sums, so that a probability near 1 loses nothing:

    rest = sum of E_v, v != t     own = exp(y_t - reference)     T = own + rest
    moment = sum of E_v (y_v - reference), the own class among them
    log p_k = y_k - reference - log T        log T = log1p(rest) where own is 1
    entropy = log T - moment / T             logsumexp = reference + log T

Given the gradients g_k of log p_k, h of the entropy, f of the logsumexp and u of `weighted`, the sum of w_v y_v,

    dy_v = E_v (A + B (y_v - reference)) + u w_v,    A = (f - sum of g_k + h moment / T) / T,    B = -h / T

and an entry more for each class k: g_k. Where h and u are none and there is one class, dy_v is A E_v, and that of the
own class g rest / T + f own / T: the exponentials of the forward pass serve as they are, with A as the row's factor.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

STATISTICS = 5
"""The number of float32 values that are saved for a row."""


@dataclass(frozen=True)
class Statistics:
    """What a row's logits say of its softmax, float32 `[5, M]`; the sums of all ranks together."""

    values: Tensor

    @classmethod
    def of(cls, *values: Tensor) -> "Statistics":
        """Make them of reference, rest, own and moment, `[M]` each, for exponentials relative to the reference."""
        return cls(torch.stack((*values, torch.ones_like(values[0]))))

    @property
    def reference(self) -> Tensor:
        return self.values[0]

    @property
    def rest(self) -> Tensor:
        return self.values[1]

    @property
    def own(self) -> Tensor:
        return self.values[2]

    @property
    def moment(self) -> Tensor:
        return self.values[3]

    @property
    def scale(self) -> Tensor:
        """What exponentials that were stored are multiplied by to be relative to the reference."""
        return self.values[4]

    @property
    def total(self) -> Tensor:
        return self.own + self.rest

    @property
    def log_total(self) -> Tensor:
        return torch.where(self.own == 1, self.rest.log1p(), self.total.log())

    def of_rows(self, rows: slice) -> "Statistics":
        return Statistics(self.values[:, rows])

    def masked(self, mask: Tensor) -> "Statistics":
        """Return the same, and of rows that do not count those of a row with one class."""
        values = self.values.masked_fill(~mask, 0.0)
        values[2::2].masked_fill_(~mask, 1.0)  # own and scale
        return Statistics(values)


class RowResults(NamedTuple):
    """The results of rows, float32, 0 where a row or class does not count; a loss is a function of these."""

    logprobs: Tensor  # [M, K]
    entropy: Tensor  # [M]
    logsumexp: Tensor  # [M]
    weighted: Tensor  # [M], the sum of the logits times the class weights; 0 where it is not asked for


class RowGradients(NamedTuple):
    """The gradients of the results, None for zeros."""

    logprobs: Tensor | None
    entropy: Tensor | None = None
    logsumexp: Tensor | None = None
    weighted: Tensor | None = None

    def of(self, rows: slice) -> "RowGradients":
        """Return those of some rows."""
        return RowGradients(*(None if each is None else each[rows] for each in self))

    def masked(self, classes_count: Tensor) -> "RowGradients":
        """Return the same with 0 where a class `[M, K]`, or a row none of whose classes does, does not count."""
        counts = classes_count.any(-1)
        logprobs = None if self.logprobs is None else self.logprobs.masked_fill(~classes_count, 0.0)
        return RowGradients(logprobs, *(None if g is None else g.masked_fill(~counts, 0.0) for g in self[1:]))

    @property
    def is_scaled_exponentials(self) -> bool:
        """True if the exponentials, times a factor for each row, are the gradient at all classes but its own."""
        return self.entropy is None and self.weighted is None


def row_results(stats: Statistics, y: Tensor, weighted: Tensor, classes_count: Tensor) -> RowResults:
    """Return the results of rows from their statistics and the transformed logits `[M, K]` of their classes."""
    log_total, counts = stats.log_total, classes_count.any(-1)
    logprobs = (y - stats.reference.unsqueeze(-1)) - log_total.unsqueeze(-1)
    return RowResults(
        logprobs.masked_fill(~classes_count, 0.0),
        (log_total - stats.moment / stats.total).masked_fill(~counts, 0.0),
        (stats.reference + log_total).masked_fill(~counts, 0.0),
        weighted.masked_fill(~counts, 0.0),
    )


class Coefficients(NamedTuple):
    """A row's gradient: P's entries, what its rows are multiplied by, and those of its classes."""

    a: Tensor  # [M]
    b: Tensor  # [M]
    entries: Tensor  # [M, K], dy of the classes


def coefficients(
    stats: Statistics, y: Tensor, grads: RowGradients, ids: Tensor, is_own: Tensor, class_weight: Tensor | None
) -> Coefficients:
    """Return A, B and the gradients dy of the classes `[M, K]`.

    Args:
        stats: The rows' statistics.
        y: Transformed logits `[M, K]` of the classes.
        grads: Gradients of the results, 0 where they do not count.
        ids: The classes `[M, K]`.
        is_own: `[M, K]`, True for the row's own class.
        class_weight: The weights of the classes in `weighted`, `[M, K]`.
    """
    total, zero = stats.total, torch.zeros_like(stats.rest)
    g = torch.zeros_like(y) if grads.logprobs is None else grads.logprobs
    f, h = (zero if each is None else each for each in (grads.logsumexp, grads.entropy))
    mean = stats.moment / total
    a, b = (f - g.sum(-1) + h * mean) / total, -h / total
    # A class that is there twice gets both gradients.
    alike = ((ids.unsqueeze(-1) == ids.unsqueeze(-2)) * g.unsqueeze(-2)).sum(-1) if ids.shape[1] > 1 else g
    distance = y - stats.reference.unsqueeze(-1)
    e = torch.where(is_own, stats.own.unsqueeze(-1), distance.exp())
    p = e / total.unsqueeze(-1)
    # 1 - p of the own class without a difference.
    others = torch.where(is_own, (stats.rest / total).unsqueeze(-1), 1 - p)
    different = g.sum(-1, keepdim=True) - alike
    entries = alike * others - p * different + p * f.unsqueeze(-1)
    if grads.entropy is not None:
        moved = torch.where(p > 0, p * (distance - mean.unsqueeze(-1)), 0.0)
        entries = entries - h.unsqueeze(-1) * moved
    if grads.weighted is not None and class_weight is not None:
        entries = entries + grads.weighted.unsqueeze(-1) * class_weight
    return Coefficients(a, b, entries)
