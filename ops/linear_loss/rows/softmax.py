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

The tail is all classes but those that are asked for, together. Its logit is the logsumexp of theirs, not what a sum
leaves, so that it loses nothing where its probability is small: `log_tail` is it without the reference. Given the
gradient r of its log-probability, others have r exp(y_v - reference - log_tail) more, and each class loses r p_v.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

STATISTICS = 5
"""The number of float32 values that are saved for a row, without that of the tail."""


@dataclass(frozen=True)
class Statistics:
    """The statistics of rows' softmax, float32 `[5, M]`, or 6 with a tail; the sums of all ranks together."""

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
        """The factor that makes stored exponentials relative to the reference."""
        return self.values[4]

    @property
    def log_tail(self) -> Tensor | None:
        """The logsumexp of the logits of the tail, relative to the reference; None where it is not asked for."""
        return self.values[STATISTICS] if self.values.shape[0] > STATISTICS else None

    def with_tail(self, log_tail: Tensor) -> "Statistics":
        return Statistics(torch.cat((self.values, log_tail.unsqueeze(0))))

    @property
    def total(self) -> Tensor:
        return self.own + self.rest

    @property
    def log_total(self) -> Tensor:
        return torch.where(self.own == 1, self.rest.log1p(), self.total.log())

    @property
    def logsumexp(self) -> Tensor:
        """The logsumexp of the row's logits; 0 of a row that does not count, as in `RowResults`."""
        return self.reference + self.log_total

    def of_rows(self, rows: slice) -> "Statistics":
        return Statistics(self.values[:, rows])

    def masked(self, mask: Tensor) -> "Statistics":
        """Return the same, and of rows that do not count those of a row with one class."""
        values = self.values.masked_fill(~mask, 0.0)
        values[2:STATISTICS:2].masked_fill_(~mask, 1.0)  # own and scale
        return Statistics(values)


class RowResults(NamedTuple):
    """The results of rows, float32, 0 where a row or class does not count; a loss is a function of these."""

    logprobs: Tensor  # [M, K]
    entropy: Tensor  # [M]
    logsumexp: Tensor  # [M]
    weighted: Tensor  # [M], the sum of the logits times the class weights; 0 where it is not asked for
    tail: Tensor | None = None  # [M], the log-probability of all other classes together; None if not asked for


class RowGradients(NamedTuple):
    """The gradients of the results, None for zeros."""

    logprobs: Tensor | None
    entropy: Tensor | None = None
    logsumexp: Tensor | None = None
    weighted: Tensor | None = None
    tail: Tensor | None = None

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
        return self.entropy is None and self.weighted is None and self.tail is None


def row_results(
    stats: Statistics, y: Tensor, weighted: Tensor, classes_count: Tensor, distinct: Tensor | None = None
) -> RowResults:  # fmt: skip
    """Return the results of rows from their statistics and the transformed logits `[M, K]` of their classes.

    With a tail `distinct` has each class once.
    """
    log_total, counts, tail = stats.log_total, classes_count.any(-1), None
    logprobs = (y - stats.reference.unsqueeze(-1)) - log_total.unsqueeze(-1)
    if stats.log_tail is not None and distinct is not None:
        p = logprobs.exp().masked_fill(~distinct, 0.0).sum(-1)
        # Neither a difference of numbers near each other.
        tail = torch.where(p < 0.5, (-p).log1p(), stats.log_tail - log_total).masked_fill(~counts, 0.0)
    return RowResults(
        logprobs.masked_fill(~classes_count, 0.0),
        (log_total - stats.moment / stats.total).masked_fill(~counts, 0.0),
        (stats.reference + log_total).masked_fill(~counts, 0.0),
        weighted.masked_fill(~counts, 0.0),
        tail,
    )


def relative_to(total: Tensor, moment: Tensor, m: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Return sums of exponentials, and of these times their logarithms, relative to a reference that were so to m."""
    shift = (m - reference).masked_fill(total == 0, 0.0)
    fade = shift.exp()
    return fade * total, fade * (moment + shift.masked_fill(fade == 0, 0.0) * total)  # 0 times infinity would be NaN


def with_classes(total: Tensor, moment: Tensor, m: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return sums of exponentials with those of some classes more, and their largest logit, which both are relative to.

    Args:
        total, moment: Sums of exponentials relative to m, and of these times their logarithms, `[M]`.
        m: The largest logit, `[M]`, -inf of none.
        y: The logits of the classes, `[M, K]`, -inf for none.
    """
    largest = torch.maximum(m, y.amax(-1))
    distance = y - largest.masked_fill(largest == float("-inf"), 0.0).unsqueeze(-1)
    e = distance.exp()
    total, moment = relative_to(total, moment, m, largest)
    return total + e.sum(-1), moment + torch.where(e > 0, e * distance, 0.0).sum(-1), largest


class Coefficients(NamedTuple):
    """A row's gradient: P's entries, relative to a reference, and those of its classes."""

    reference: Tensor  # [M]
    a: Tensor  # [M]
    b: Tensor  # [M]
    entries: Tensor  # [M, K], dy of the classes


def coefficients(
    stats: Statistics,
    y: Tensor,
    grads: RowGradients,
    ids: Tensor,
    is_own: Tensor,
    class_weight: Tensor | None,
    distinct: Tensor | None = None,
) -> Coefficients:
    """Return A, B, what their exponentials are relative to, and the gradients dy of the classes `[M, K]`.

    Args:
        stats: The rows' statistics.
        y: Transformed logits `[M, K]` of the classes.
        grads: Gradients of the results, 0 where they do not count.
        ids: The classes `[M, K]`.
        is_own: `[M, K]`, True for the row's own class.
        class_weight: The weights of the classes in `weighted`, `[M, K]`.
        distinct: With a tail a mask that has each class once, `[M, K]`.
    """
    total, zero = stats.total, torch.zeros_like(stats.rest)
    g = torch.zeros_like(y) if grads.logprobs is None else grads.logprobs
    f, h, tail = (zero if each is None else each for each in (grads.logsumexp, grads.entropy, grads.tail))
    mean = stats.moment / total
    reference, a, b = stats.reference, (f - g.sum(-1) + h * mean) / total, -h / total
    # A class that is there twice gets both gradients.
    alike = ((ids.unsqueeze(-1) == ids.unsqueeze(-2)) * g.unsqueeze(-2)).sum(-1) if ids.shape[1] > 1 else g
    distance = y - stats.reference.unsqueeze(-1)
    e = torch.where(is_own, stats.own.unsqueeze(-1), distance.exp())
    p = e / total.unsqueeze(-1)
    # 1 - p of the own class without a difference.
    others = torch.where(is_own, (stats.rest / total).unsqueeze(-1), 1 - p)
    different = (g.sum(-1) + tail).unsqueeze(-1) - alike
    entries = alike * others - p * different + p * f.unsqueeze(-1)
    if grads.entropy is not None:
        moved = torch.where(p > 0, p * (distance - mean.unsqueeze(-1)), 0.0)
        entries = entries - h.unsqueeze(-1) * moved
    if grads.weighted is not None and class_weight is not None:
        entries = entries + grads.weighted.unsqueeze(-1) * class_weight
    if stats.log_tail is not None and distinct is not None:
        moved = stats.log_tail.masked_fill(stats.log_tail == float("-inf"), 0.0)
        fade = moved.exp()
        of_tail = tail * p.masked_fill(~distinct, 0.0).sum(-1)  # less what the tail's own probability takes
        reference, a, b = reference + moved, fade * (a + b * moved) + of_tail, fade * b
    return Coefficients(reference, a, b, entries)
