"""`llmk.losses` of single tokens, against compositions in float64 written from the papers."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compile_tests.helpers.loss_references import LossOp, batch, entropies_of, logps_of, loss_op, mean, token_scores
from llmk import losses
from llmk.opcheck.calls import call, require_accurate
from llmk.registry import Op, Sample

LENGTHS = [5, 1, 7, 0, 4]


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
        kept = (teacher_ids[b, s] != -100) & (teacher_logprobs[b, s] > float("-inf"))
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
) -> Tensor:
    s = token_scores(input, linear_weight, temperature=temperature)
    t = token_scores(teacher_input.detach(), teacher_linear_weight.detach(), temperature=temperature)
    m = (beta * t.exp() + (1 - beta) * s.exp()).log()
    to_mixture = beta * t.exp() * (t - m) + (1 - beta) * s.exp() * (s - m)
    each = t.exp() * (t - s) if beta == 0 else s.exp() * (s - t) if beta == 1 else to_mixture
    counts = target != -100
    weights = torch.ones_like(each[..., 0]) if token_weights is None else token_weights
    loss = (weights * each.sum(-1))[counts].sum() / weights[counts].sum()
    return loss - ce_weight * torch.cat(logps_of(input, linear_weight, target)).mean()


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


SFT = loss_op(losses.sft, sft_reference)
DFT = loss_op(losses.dft, dft_reference)
DISTILL = loss_op(losses.distill, distill_reference)
TOPK = loss_op(losses.distill_topk, distill_topk_reference)


def require(op: Op, sample: Sample) -> None:
    """The rule of accuracy for the loss and its gradients."""
    require_accurate(op, sample, call(op, sample))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sft(device: torch.device, dtype: torch.dtype) -> None:
    x, weight, target = batch(LENGTHS, device, dtype)
    require(SFT, Sample((x, weight, target), {}, why="plain"))
    kwargs = {"token_weights": torch.rand(target.shape).to(device), "entropy_coef": 0.2, "num_items_in_batch": 7.0}
    require(SFT, Sample((x, weight, target), kwargs, why="everything"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dft(device: torch.device, dtype: torch.dtype) -> None:
    require(DFT, Sample(batch(LENGTHS, device, dtype), {"temperature": 0.7}, why="dft"))


@pytest.mark.parametrize("add_tail", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_distill_topk(device: torch.device, beta: float, add_tail: bool) -> None:
    x, weight, target = batch(LENGTHS, device)
    teacher = torch.randn(*target.shape, 37).log_softmax(-1).topk(4)
    ids, logprobs = teacher.indices.to(device), teacher.values.to(device)
    ids[0, :, 2:], logprobs[2, :, 3], ids[4] = -100, float("-inf"), -100
    kwargs = {"beta": beta, "add_tail": add_tail, "token_weights": torch.rand(target.shape).to(device)}
    require(TOPK, Sample((x, weight, target, ids, logprobs), kwargs, why="weights"))
    kwargs = {"beta": beta, "add_tail": add_tail, "ce_weight": 0.4, "temperature": 1.7}
    require(TOPK, Sample((x, weight, target, ids, logprobs), kwargs, why="with cross entropy"))


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_distill(device: torch.device, beta: float) -> None:
    x, weight, target = batch(LENGTHS, device)
    args = (x, weight, target, torch.randn(*target.shape, 7).to(device), torch.randn(37, 7).to(device))
    require(DISTILL, Sample(args, {"beta": beta, "ce_weight": 0.4, "temperature": 1.7}, why="with cross entropy"))
    weights = torch.rand(target.shape).to(device)
    require(DISTILL, Sample(args, {"beta": beta, "token_weights": weights}, why="weights"))


def test_several_heads(device: torch.device) -> None:
    op = loss_op(two_heads, multi_token_reference)
    op = LossOp(**{**vars(op), "differentiable": ("x", "y", "linear_weight")})
    x, weight, target = batch(LENGTHS, device)
    options = {"head_weights": [1.0, 0.3], "z_loss": 1e-2}
    y = torch.randn_like(x)
    require(op, Sample((x, y, weight, target), options, why="two heads"))
    for num_items in (41.0, [41.0, torch.tensor(37, device=device)]):
        require(op, Sample((x, y, weight, target), options | {"num_items_in_batch": num_items}, why="items of a step"))


def test_no_token_gives_zero(device: torch.device) -> None:
    x, weight, target = batch([0, 0], device)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    ids = torch.zeros(*target.shape, 2, dtype=torch.int64, device=device)
    for loss, _ in (
        losses.sft(x, weight, target, entropy_coef=0.1),
        losses.dft(x, weight, target),
        losses.distill(x, weight, target, x.detach(), weight.detach() + 1, ce_weight=0.5),
        losses.distill_topk(x, weight, target, ids, ids - 1.0, ce_weight=0.5),
        losses.multi_token([x], weight, [target]),
    ):
        assert loss == 0
        assert not any(of.any() for of in torch.autograd.grad(loss, (x, weight)))
