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

from typing import NamedTuple

import torch
from torch import Tensor

STATISTICS = 5
"""The number of float32 values that are saved for a row, without that of the tail: reference, rest, own, moment, and
the factor that makes stored exponentials relative to the reference."""


def statistics(
    reference: Tensor, rest: Tensor, own: Tensor, moment: Tensor, mask: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Return the statistics `[5, M]` of rows whose exponentials are relative to the reference.

    Those of rows that do not count, which a mask says, are of a row with one class.
    """
    stats = torch.stack((reference, rest, own, moment, torch.ones_like(rest)))
    if mask is not None:
        stats.masked_fill_(~mask, 0.0)[2::2].masked_fill_(~mask, 1.0)  # own and the factor
    return stats


def with_tail(stats: Tensor, log_tail: Tensor) -> Tensor:
    return torch.cat((stats, log_tail.unsqueeze(0)))


def log_total_of(stats: Tensor) -> Tensor:
    """Return log T."""
    rest, own = stats[1], stats[2]
    return torch.where(own == 1, rest.log1p(), (own + rest).log())


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
        return RowGradients(*[None if each is None else each[rows] for each in self])

    def masked(self, classes_count: Tensor) -> "RowGradients":
        """Return the same with 0 where a class `[M, K]`, or a row none of whose classes does, does not count."""
        counts = classes_count.any(-1)
        logprobs = None if self.logprobs is None else self.logprobs.masked_fill(~classes_count, 0.0)
        return RowGradients(logprobs, *[None if g is None else g.masked_fill(~counts, 0.0) for g in self[1:]])

    @property
    def is_scaled_exponentials(self) -> bool:
        """True if the exponentials, times a factor for each row, are the gradient at all classes but its own."""
        return self.entropy is None and self.weighted is None and self.tail is None


def row_results(
    stats: Tensor, y: Tensor, weighted: Tensor, classes_count: Tensor, distinct: Tensor | None = None
) -> RowResults:  # fmt: skip
    """Return the results of rows from their statistics and the transformed logits `[M, K]` of their classes.

    With a tail `distinct` has each class once.
    """
    (reference, rest, own, moment, _), counts, tail = stats[:STATISTICS].unbind(), classes_count.any(-1), None
    log_total = log_total_of(stats)
    logprobs = (y - reference.unsqueeze(-1)) - log_total.unsqueeze(-1)
    if stats.shape[0] > STATISTICS and distinct is not None:
        p = logprobs.exp().masked_fill(~distinct, 0.0).sum(-1)
        # Neither a difference of numbers near each other.
        tail = torch.where(p < 0.5, (-p).log1p(), stats[STATISTICS] - log_total).masked_fill(~counts, 0.0)
    return RowResults(
        logprobs.masked_fill(~classes_count, 0.0),
        (log_total - moment / (own + rest)).masked_fill(~counts, 0.0),
        (reference + log_total).masked_fill(~counts, 0.0),
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
    stats: Tensor,
    y: Tensor,
    grads: RowGradients,
    ids: Tensor,
    is_own: Tensor,
    class_weight: Tensor | None,
    distinct: Tensor | None = None,
) -> Coefficients:
    """Return A, B, what their exponentials are relative to, and the gradients dy of the classes `[M, K]`.

    Args:
        stats: The rows' statistics, `[5, M]`, or `[6, M]` with a tail.
        y: Transformed logits `[M, K]` of the classes.
        grads: Gradients of the results, 0 where they do not count.
        ids: The classes `[M, K]`.
        is_own: `[M, K]`, True for the row's own class.
        class_weight: The weights of the classes in `weighted`, `[M, K]`.
        distinct: With a tail a mask that has each class once, `[M, K]`.
    """
    start, rest, of_own, moment, _ = stats[:STATISTICS].unbind()
    total, zero = of_own + rest, torch.zeros_like(rest)
    g = torch.zeros_like(y) if grads.logprobs is None else grads.logprobs
    f, h, tail = (zero if each is None else each for each in (grads.logsumexp, grads.entropy, grads.tail))
    mean = moment / total
    reference, a, b = start, (f - g.sum(-1) + h * mean) / total, -h / total
    # A class that is there twice gets both gradients.
    alike = ((ids.unsqueeze(-1) == ids.unsqueeze(-2)) * g.unsqueeze(-2)).sum(-1) if ids.shape[1] > 1 else g
    distance = y - start.unsqueeze(-1)
    e = torch.where(is_own, of_own.unsqueeze(-1), distance.exp())
    p = e / total.unsqueeze(-1)
    # 1 - p of the own class without a difference.
    others = torch.where(is_own, (rest / total).unsqueeze(-1), 1 - p)
    different = (g.sum(-1) + tail).unsqueeze(-1) - alike
    entries = alike * others - p * different + p * f.unsqueeze(-1)
    if grads.entropy is not None:
        moved = torch.where(p > 0, p * (distance - mean.unsqueeze(-1)), 0.0)
        entries = entries - h.unsqueeze(-1) * moved
    if grads.weighted is not None and class_weight is not None:
        entries = entries + grads.weighted.unsqueeze(-1) * class_weight
    if stats.shape[0] > STATISTICS and distinct is not None:
        log_tail = stats[STATISTICS]
        moved = log_tail.masked_fill(log_tail == float("-inf"), 0.0)
        fade = moved.exp()
        of_tail = tail * p.masked_fill(~distinct, 0.0).sum(-1)  # less what the tail's own probability takes
        reference, a, b = reference + moved, fade * (a + b * moved) + of_tail, fade * b
    return Coefficients(reference, a, b, entries)
