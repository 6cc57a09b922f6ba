"""The losses of `llmk.losses` of single tokens from whole logits, in plain PyTorch."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compile_tests.helpers.loss_references import entropies_of, logps_of, mean, token_scores
from llmk import losses


def sft_reference(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    token_weights: Tensor | None = None,
    entropy_coef: float = 0.0,
    num_items_in_batch: float | None = None,
    **kw: Any,
) -> Tensor:
    logps, counts = torch.cat(logps_of(input, linear_weight, target, **kw)), target != -100
    weights = torch.ones_like(logps) if token_weights is None else token_weights[counts]
    entropies = torch.cat(entropies_of(input, linear_weight, target, **kw))
    return -(weights * logps).sum() / (num_items_in_batch or len(logps)) - entropy_coef * entropies.mean()


def dft_reference(input: Tensor, linear_weight: Tensor, target: Tensor, **kw: Any) -> Tensor:
    logps = torch.cat(logps_of(input, linear_weight, target, **kw))
    return -(logps.exp().detach() * logps).mean()


def distill_topk_reference(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    teacher_ids: Tensor,
    teacher_logprobs: Tensor,
    *,
    beta: float = 0.5,
    ce_weight: float = 0.0,
    add_tail: bool = True,
    token_weights: Tensor | None = None,
    temperature: float = 1.0,
    **kw: Any,
) -> Tensor:
    scores, total = token_scores(input, linear_weight, temperature=temperature, **kw), input.new_zeros(())
    for b, s in (target != -100).nonzero().tolist():
        kept = (teacher_ids[b, s] >= 0) & (teacher_logprobs[b, s] > float("-inf"))
        if not kept.any():
            continue
        p, q = scores[b, s, teacher_ids[b, s][kept]].exp(), teacher_logprobs[b, s][kept].to(scores.dtype).exp()
        if add_tail:
            p, q = (torch.cat([x, 1 - x.sum(0, keepdim=True)]) for x in (p, q))
        else:
            p, q = p / p.sum(), q / q.sum()
        m = beta * q + (1 - beta) * p
        to_mixture = (beta * q * (q / m).log() + (1 - beta) * p * (p / m).log()).sum()
        each = (q * (q / p).log()).sum() if beta == 0 else (p * (p / q).log()).sum() if beta == 1 else to_mixture
        total = total + (each if token_weights is None else token_weights[b, s] * each)
    total = total / (target != -100).sum()
    return total - ce_weight * torch.cat(logps_of(input, linear_weight, target, **kw)).mean() if ce_weight else total


def distill_reference(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    teacher_input: Tensor,
    teacher_linear_weight: Tensor,
    *,
    beta: float = 0.5,
    ce_weight: float = 0.0,
    token_weights: Tensor | None = None,
    temperature: float = 1.0,
    **kw: Any,
) -> Tensor:
    """What only the student's scores take is in `kw`."""
    s = token_scores(input, linear_weight, temperature=temperature, **kw)
    t = token_scores(teacher_input.detach(), teacher_linear_weight.detach(), temperature=temperature)
    m = (beta * t.exp() + (1 - beta) * s.exp()).log()
    to_mixture = beta * t.exp() * (t - m) + (1 - beta) * s.exp() * (s - m)
    each = t.exp() * (t - s) if beta == 0 else s.exp() * (s - t) if beta == 1 else to_mixture
    counts = target != -100
    weights = torch.ones_like(each[..., 0]) if token_weights is None else token_weights
    loss = (weights * each.sum(-1))[counts].sum() / weights[counts].sum()
    return loss - ce_weight * torch.cat(logps_of(input, linear_weight, target, **kw)).mean()


def multi_token_reference(
    x: Tensor,
    y: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    head_weights: list[float],
    z_loss: float,
    num_items_in_batch: Any = None,
) -> Tensor:
    losses, each = [], target
    items = num_items_in_batch if isinstance(num_items_in_batch, list) else [num_items_in_batch] * 2
    for input, num_items in zip((x, y), items, strict=True):
        logits = F.linear(input, linear_weight)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))[each != -100]
        z = logits.logsumexp(-1).square()
        losses.append(mean(F.cross_entropy(logits, each[each != -100], reduction="none") + z_loss * z, num_items))
        each = F.pad(each[:, 1:], (0, 1), value=-100)
    return sum(w * loss for w, loss in zip(head_weights, losses, strict=True))  # type: ignore[return-value]


def two_heads(x: Tensor, y: Tensor, linear_weight: Tensor, target: Tensor, **options: Any) -> tuple[Tensor, Any]:
    return losses.multi_token([x, y], linear_weight, [target, F.pad(target[:, 1:], (0, 1), value=-100)], **options)
