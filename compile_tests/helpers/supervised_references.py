"""The losses of `llmk.losses` of single tokens from whole logits, in plain PyTorch."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compile_tests.helpers.loss_references import LossOp, entropies_of, logps_of, loss_op, mean, token_scores
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


def teachers(models: tuple[Any, ...]) -> dict[str, list[Any]]:
    """Arguments of `distill`: a hidden state, weight and bias of each teacher, then each one's ids and numbers."""
    is_id = [each is not None and not each.is_floating_point() for each in models]
    first = is_id.index(True) if any(is_id) else len(models)
    names = "teacher_input", "teacher_linear_weight", "teacher_linear_bias"
    found = {name: list(models[i:first:3]) for i, name in enumerate(names)}
    classes = {"teacher_ids": list(models[first::2]), "teacher_logprobs": list(models[first + 1 :: 2])}
    return found | (classes if any(is_id) else {})


def several_teachers(input: Tensor, linear_weight: Tensor, target: Tensor, *models: Any, **options: Any) -> Any:
    return losses.distill(input, linear_weight, target, **teachers(models), **options)


def several_teachers_reference(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *models: Any,
    beta: float = 0.5,
    ce_weight: float = 0.0,
    add_tail: bool = True,
    token_weights: Tensor | None = None,
    num_items_in_batch: float | None = None,
    temperature: float = 1.0,
    teacher_temperature: Any = None,
    teacher_softcap: Any = 0.0,
    teacher_logit_scale: Any = 1.0,
    teacher_weight: Tensor | None = None,
    **kw: Any,
) -> Tensor:
    """The sum of the teachers' losses, times their weights, and the cross entropy; `kw` is of its scores alone."""
    student, counts, given = (input, linear_weight, target), target != -100, teachers(models)
    s = token_scores(input, linear_weight, temperature=temperature, **kw)
    tokens = torch.ones_like(s[..., 0]) if token_weights is None else token_weights.to(s.dtype)
    items, loss = num_items_in_batch or tokens[counts].sum(), torch.zeros_like(tokens).sum()
    count = len(given["teacher_input"])

    def at(value: Any, i: int) -> Any:
        return value[i] if isinstance(value, list) else value

    def weights(i: int) -> Tensor:
        return tokens if teacher_weight is None else teacher_weight[..., i].to(s.dtype) * tokens

    for i, (x, weight, bias) in enumerate(zip(*list(given.values())[:3], strict=True)):
        head = {"softcap": at(teacher_softcap, i), "logit_scale": at(teacher_logit_scale, i), "linear_bias": bias}
        own = temperature if teacher_temperature is None else at(teacher_temperature, i)
        t = token_scores(x.detach(), weight.detach(), temperature=own, **head)
        m = (beta * t.exp() + (1 - beta) * s.exp()).log()
        to_mixture = beta * t.exp() * (t - m) + (1 - beta) * s.exp() * (s - m)
        each = t.exp() * (t - s) if beta == 0 else s.exp() * (s - t) if beta == 1 else to_mixture
        loss = loss + (weights(i) * each.sum(-1))[counts].sum() / items
    options = {"beta": beta, "add_tail": add_tail, "temperature": temperature, **kw}
    for i, classes in enumerate(zip(*list(given.values())[3:], strict=True), count):
        mean = distill_topk_reference(*student, *classes, token_weights=weights(i), **options)
        loss = loss + mean * counts.sum() / items
    nll = -torch.cat(logps_of(*student, **kw)).sum()
    return loss + ce_weight * nll / (num_items_in_batch or counts.sum())


def distill_reference(*args: Any, **options: Any) -> Tensor:
    return several_teachers_reference(*args, None, **options)


class _Several(LossOp):
    """A loss whose arguments after the third have names by their places."""

    def argument_names(self) -> list[str]:
        return ["input", "linear_weight", "target", *(f"teacher_{i}" for i in range(10))]


SEVERAL_TEACHERS = _Several(**vars(loss_op(several_teachers, several_teachers_reference)))


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
