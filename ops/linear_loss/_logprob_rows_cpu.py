"""What `_logprob_rows.py` computes of rows of logits, in plain PyTorch, and what both are given."""

from typing import NamedTuple

import torch
from torch import Tensor

STATISTICS = 3
"""Numbers of a row that are kept, in float32: m, s, e / s."""


class Scores(NamedTuple):
    """How logits become what the softmax is taken of, and which of all classes the columns are."""

    ignore_index: int
    scale: float
    softcap: float
    temperature: float
    first_class: int
    num_classes: int
    leave_ignored: bool = False  # the gradients of rows that do not count are not written

    def factors(self) -> tuple[float, float]:
        """What the logits are multiplied by before the cap and after it; without a cap at once."""
        if self.softcap:
            return self.scale, 1.0 / self.temperature
        return self.scale / self.temperature, 1.0


def _scores_cpu(logits: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    inner, outer = scores.factors()
    u = logits.float() * inner
    if scores.softcap:
        u = scores.softcap * torch.tanh(u / scores.softcap)
    return u * outer, u


def _candidates_cpu(target: Tensor, scores: Scores, V: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which candidates count, which are among the columns, and their column, 0 of others; one that is no class raises.

    Of a fake tensor that is not known.
    """
    target = target.long()  # int32 would wrap an ignore_index that it does not hold
    counts = target != scores.ignore_index
    valid = (target >= 0) & (target < scores.num_classes)
    if type(target) is Tensor and bool((counts & ~valid).any()):
        bad = int(target[counts & ~valid][0])
        raise IndexError(
            f"target: expected class indices in [0, {scores.num_classes}) or ignore_index {scores.ignore_index}, "
            f"got {bad}"
        )
    here = counts & valid & (target >= scores.first_class) & (target - scores.first_class < V)
    return counts, here, torch.where(here, target - scores.first_class, 0)


def statistics_cpu(logits: Tensor, target: Tensor, scores: Scores) -> Tensor:
    """`statistics` in plain PyTorch."""
    M, V = logits.shape
    _, here, column = _candidates_cpu(target, scores, V)
    if V == 0:
        shape = (STATISTICS + target.shape[1], M)
        nothing = torch.full(shape, float("-inf"), dtype=torch.float32, device=logits.device)
        nothing[1:STATISTICS] = 0.0
        return nothing
    y, _ = _scores_cpu(logits, scores)
    m = y.amax(-1)
    d = y - torch.where(m == float("-inf"), 0.0, m).unsqueeze(-1)
    w = d.exp()
    e = (w * d.masked_fill_(y == float("-inf"), 0.0)).sum(-1)
    y_t = torch.where(here, y.gather(-1, column), float("-inf"))
    return torch.cat((torch.stack((m, w.sum(-1), e)), y_t.t()))


def combine_cpu(parts: Tensor, target: Tensor, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
    """`combine` in plain PyTorch."""
    M, K = target.shape
    counts = target.long() != scores.ignore_index
    parts = parts.view(parts.shape[0] // (STATISTICS + K), STATISTICS + K, M)
    m_r, s_r, e_r = parts[:, 0], parts[:, 1], parts[:, 2]
    m = m_r.amax(0)
    shift = torch.where(m_r == float("-inf"), 0.0, m_r - torch.where(m == float("-inf"), 0.0, m))
    fade = shift.exp()
    s = (fade * s_r).sum(0)
    mean = (fade * (e_r + s_r * shift)).sum(0) / s
    logsum = s.log()
    logprobs = torch.where(counts, (parts[:, STATISTICS:].amax(0) - m - logsum).t(), 0.0).contiguous()
    return logprobs, torch.where(counts.any(-1), logsum - mean, 0.0), torch.stack((m, s, mean))


def gradients_cpu(
    grad: Tensor | None, entropy_grad: Tensor | None, logits: Tensor, target: Tensor, stats: Tensor, scores: Scores
) -> None:
    """`gradients` in plain PyTorch."""
    counts, here, column = _candidates_cpu(target, scores, logits.shape[1])
    y, u = _scores_cpu(logits, scores)
    m, s, mean = (x.unsqueeze(-1) for x in stats.unbind())
    d = (y - m).masked_fill_(y == float("-inf"), 0.0)
    p = (y - m).exp_().div_(s)
    total = torch.zeros_like(m) if grad is None else torch.where(counts, grad, 0.0).sum(-1, keepdim=True)
    factor = total if entropy_grad is None else total + entropy_grad.unsqueeze(-1) * (d - mean)
    dy = -p * factor
    if grad is not None:
        of_candidates = torch.where(here, grad, 0.0)
        # Of a class that is certain the two nearly cancel: their difference first.
        alike = (target.unsqueeze(-1) == target.unsqueeze(-2)).float() @ of_candidates.unsqueeze(-1)
        of_p = p.gather(-1, column) * factor.expand_as(p).gather(-1, column)
        values = torch.where(here, alike.squeeze(-1) - of_p, dy.gather(-1, column))
        for k in range(target.shape[1]):  # a candidate that is elsewhere keeps what is in column 0
            keep = dy.gather(-1, column[:, k : k + 1])
            dy.scatter_(-1, column[:, k : k + 1], torch.where(here[:, k : k + 1], values[:, k : k + 1], keep))
    inner, outer = scores.factors()
    dy.mul_(inner * outer)
    if scores.softcap:
        dy.mul_(1 - (u / scores.softcap).square())
    logits.copy_(dy.masked_fill_(~counts.any(-1, keepdim=True), 0.0))  # whatever a row holds that does not count
