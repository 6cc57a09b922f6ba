"""Distillation from a teacher's hidden states, or from its log-probabilities of a few classes of each token."""

import math

import torch
from torch import Tensor

from llmk.losses._checks import INTEGERS, NUMBERS, check_between, check_is_tensor, check_of_tokens, check_tensor
from llmk.losses._head import Head, mean_over_tokens
from llmk.losses._policy import number_of_items
from llmk.losses._sequences import sequences_of
from llmk.ops.linear_loss.fused_linear_ce import fused_linear_ce
from llmk.ops.linear_loss.fused_linear_jsd import fused_linear_jsd
from llmk.ops.linear_loss.fused_linear_jsd_ce import fused_linear_jsd_ce
from llmk.ops.linear_loss.log_probabilities import log_of_the_rest
from llmk.registry import check_not_negative, check_same, is_sharded


def distill(
    input: Tensor, linear_weight: Tensor, target: Tensor, teacher_input: Tensor, teacher_linear_weight: Tensor, *,
    beta: float = 0.5, ce_weight: float = 0.0, token_weights: Tensor | None = None,
    teacher_linear_bias: Tensor | None = None, teacher_softcap: float = 0.0, linear_bias: Tensor | None = None,
    temperature: float = 1.0, softcap: float = 0.0, ignore_index: int = -100, skip_ignored: bool = False,
    chunk_size: int = 0,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Distillation from a teacher's hidden states: the mean over tokens of a generalized Jensen-Shannon divergence,

        beta * KL(t, m) + (1 - beta) * KL(s, m),    m = beta * t + (1 - beta) * s,

    KL(t, s) where beta is 0 and KL(s, t) where it is 1, with t and s the teacher's and the student's probabilities.

    Args:
        input: The student's hidden states `[B, S, H]`, aligned with `target`.
        linear_weight: `[V, H]`.
        target: `[B, S]`, which tokens count, and the classes of `ce_weight`.
        teacher_input: `[B, S, H']`.
        teacher_linear_weight: `[V, H']`. No tensor of the teacher gets a gradient.
        beta: From 0 to 1.
        ce_weight: What the mean cross entropy of `target`, at temperature 1, is multiplied by and added.
        token_weights: `[B, S]`, what the divergence of each token is multiplied by; the mean divides by their sum.
        teacher_linear_bias: `[V]`.
        teacher_softcap: Of the teacher's logits; 0 is off.
        linear_bias, temperature, softcap, ignore_index, skip_ignored, chunk_size: As in `dpo`; the temperature is that
            of both models.

    Returns:
        The loss, a float32 scalar, 0 over no token, and the metrics "divergence" and, with `ce_weight`, "nll_loss".

    Raises:
        TypeError: An argument is not a tensor, or a dtype does not fit.
        ValueError: A shape or an option does not fit.

    Gradients are made in the forward pass: three products of the student and one of the teacher; with DTensors three
    more of the student for `ce_weight`.

    Sources: Agarwal et al., 2023, https://arxiv.org/abs/2306.13649. Reference: `trl.DistillationTrainer`.
    """
    check_between("beta", beta, 0.0, 1.0)
    check_not_negative("ce_weight", ce_weight)
    sequences = sequences_of(input, linear_weight, target, ignore_index, None)
    check_is_tensor("teacher_input", teacher_input)
    check_is_tensor("teacher_linear_weight", teacher_linear_weight)
    if teacher_input.dim() != 3 or teacher_input.shape[:2] != target.shape:
        expected = f"({target.shape[0]}, {target.shape[1]}, H)"
        raise ValueError(f"teacher_input: expected shape {expected} like input, got {tuple(teacher_input.shape)}")
    if token_weights is not None:
        check_of_tokens("token_weights", token_weights, target)
        token_weights = token_weights.detach().float()
    models = input, linear_weight, teacher_input.detach(), teacher_linear_weight.detach()
    options = {
        "linear_bias": linear_bias, "beta": beta, "temperature": temperature, "softcap": softcap,
        "teacher_softcap": teacher_softcap, "row_weight": token_weights, "ignore_index": ignore_index,
        "teacher_linear_bias": None if teacher_linear_bias is None else teacher_linear_bias.detach(),
        "skip_ignored": skip_ignored, "chunk_size": chunk_size,
    }  # fmt: skip
    any_counts = sequences.counts.any()
    if ce_weight == 0.0:
        loss = torch.where(any_counts, fused_linear_jsd(*models, labels=target, **options), 0.0)
        return loss, {"divergence": loss.detach()}
    if is_sharded(*models, target):
        divergence = fused_linear_jsd(*models, labels=target, **options)
        head = Head(linear_weight, linear_bias, 1.0, softcap, ignore_index, skip_ignored, chunk_size)
        nll = _cross_entropy(head, input, target) / number_of_items(None, sequences)
        loss = divergence + ce_weight * nll
    else:
        loss, divergence, nll = fused_linear_jsd_ce(*models, target, ce_weight=ce_weight, **options)
    loss, divergence, nll = (torch.where(any_counts, each, 0.0) for each in (loss, divergence, nll))
    return loss, {"divergence": divergence.detach(), "nll_loss": nll.detach()}


def _cross_entropy(head: Head, input: Tensor, target: Tensor) -> Tensor:
    """The sum over tokens, at temperature 1."""
    return fused_linear_ce(
        input, head.linear_weight, target, linear_bias=head.linear_bias, ignore_index=head.ignore_index,
        reduction="sum", softcap=head.softcap, skip_ignored=head.skip_ignored, chunk_size=head.chunk_size,
    )  # fmt: skip


def distill_topk(
    input: Tensor, linear_weight: Tensor, target: Tensor, teacher_ids: Tensor, teacher_logprobs: Tensor, *,
    beta: float = 0.5, ce_weight: float = 0.0, add_tail: bool = True, token_weights: Tensor | None = None,
    num_items_in_batch: Tensor | float | None = None, linear_bias: Tensor | None = None, temperature: float = 1.0,
    softcap: float = 0.0, ignore_index: int = -100, skip_ignored: bool = False, chunk_size: int = 0,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Distillation from K classes a token: the generalized Jensen-Shannon divergence on these and on the rest.

    With t and s the teacher's and the student's probabilities and m = beta * t + (1 - beta) * s,

        beta * KL(t, m) + (1 - beta) * KL(s, m),    KL(t, s) where beta is 0 and KL(s, t) where it is 1

    Of what is left of the mass both have one class more, the tail, with the probability 1 - the sum of the others; with
    `add_tail=False` both are divided by their sums over the K classes instead.

    Args:
        input: The student's hidden states `[B, S, H]`, aligned with `target`.
        linear_weight: `[V, H]`.
        target: `[B, S]`, which tokens count, and the classes of `ce_weight`.
        teacher_ids: `[B, S, K]`, int64 or int32, different classes of each token; `ignore_index` for one that is not
            there, whose log-probability is not read; -inf says the same.
        teacher_logprobs: `[B, S, K]`, at the temperature `temperature`. They get no gradient.
        beta: From 0 to 1.
        ce_weight: What the mean cross entropy of `target`, at temperature 1, is multiplied by and added.
        add_tail: What becomes of the rest of the mass.
        token_weights: `[B, S]`, what the divergence of each token is multiplied by; 1 if None.
        num_items_in_batch: What both sums are divided by, a scalar; the tokens that count if None.
        linear_bias, temperature, softcap, ignore_index, skip_ignored, chunk_size: As in `dpo`.

    Returns:
        The loss, a float32 scalar, 0 over no token, and the metrics "entropy", "divergence" and, with `ce_weight`,
        "nll_loss". A token without a teacher's class has divergence 0.

    Raises:
        TypeError: An argument is not a tensor, or a dtype does not fit.
        ValueError: A shape or an option does not fit.

    Four products, and three more with `ce_weight`.

    Sources: Agarwal et al., 2023, https://arxiv.org/abs/2306.13649. Reference implementation:
    `trl.experimental.server_distillation`, `loss_add_tail`.
    """
    check_between("beta", beta, 0.0, 1.0)
    check_not_negative("ce_weight", ce_weight)
    sequences = sequences_of(input, linear_weight, target, ignore_index, None)
    _check_teacher(teacher_ids, teacher_logprobs, target)
    if token_weights is not None:
        check_of_tokens("token_weights", token_weights, target)

    head = Head(linear_weight, linear_bias, temperature, softcap, ignore_index, skip_ignored, chunk_size)
    there = (teacher_ids.long() != ignore_index) & sequences.counts.unsqueeze(-1)
    there = there & (teacher_logprobs != float("-inf"))
    student, entropy = head.logprobs(input, teacher_ids.masked_fill(~there, ignore_index))
    student, teacher = (_of_all(x, there, add_tail) for x in (student, teacher_logprobs.detach().float()))
    inside = torch.cat([there, there.any(-1, keepdim=True)], -1) if add_tail else there
    each = torch.where(inside, _divergence(student, teacher, beta), 0.0).sum(-1)
    if token_weights is not None:
        each = each * torch.where(sequences.counts, token_weights.detach().float(), 0.0)
    items = number_of_items(num_items_in_batch, sequences)
    loss = each.sum() / items
    metrics = {"entropy": mean_over_tokens(entropy.detach(), sequences), "divergence": loss.detach()}
    if ce_weight != 0.0:
        nll = _cross_entropy(head, input, target) / items
        metrics["nll_loss"] = nll.detach()
        loss = loss + ce_weight * nll
    return loss, metrics


def _check_teacher(teacher_ids: Tensor, teacher_logprobs: Tensor, target: Tensor) -> None:
    check_tensor("teacher_ids", teacher_ids, INTEGERS, "integers")
    check_tensor("teacher_logprobs", teacher_logprobs, NUMBERS, "numbers")
    if teacher_ids.dim() != 3 or teacher_ids.shape[:2] != target.shape or teacher_ids.shape[2] == 0:
        expected = f"({target.shape[0]}, {target.shape[1]}, K)"
        raise ValueError(f"teacher_ids: expected shape {expected} with K at least 1, got {tuple(teacher_ids.shape)}")
    if teacher_logprobs.shape != teacher_ids.shape:
        expected, got = tuple(teacher_ids.shape), tuple(teacher_logprobs.shape)
        raise ValueError(f"teacher_logprobs: expected shape {expected} (that of teacher_ids), got {got}")
    check_same("teacher_ids", teacher_ids, "target", target)
    check_same("teacher_logprobs", teacher_logprobs, "target", target)


_LEAST = -80.0  # the log of a probability that is as good as 0, for a class that is not there


def _of_all(logprobs: Tensor, there: Tensor, add_tail: bool) -> Tensor:
    """Log-probabilities `[..., K]` as those of a distribution: with the tail, `[..., K + 1]`, or normalized."""
    logprobs = torch.where(there, logprobs, _LEAST)
    if not add_tail:
        return logprobs.log_softmax(-1)
    total = logprobs.logsumexp(-1, keepdim=True)
    return torch.cat([logprobs, log_of_the_rest(total)], -1)


def _divergence(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """The terms of each class, from log-probabilities."""
    if beta == 0.0:
        return teacher.exp() * (teacher - student)
    if beta == 1.0:
        return student.exp() * (student - teacher)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * teacher.exp() * (teacher - mixture) + (1 - beta) * student.exp() * (student - mixture)
