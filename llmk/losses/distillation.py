"""Distillation from a teacher's hidden states, or from its top-k log-probabilities of each token."""

import math
from typing import Any

import torch
from torch import Tensor

from llmk.losses._batch import (
    INTEGERS,
    NUMBERS,
    Head,
    Sequences,
    VocabGroup,
    check_between,
    check_denominator,
    check_is_tensor,
    check_per_token,
    check_tensor,
    cross_entropy_sum,
    make_sequences,
    mean_over_tokens,
    own_classes,
    scaled,
)
from llmk.losses._policy import token_denominator
from llmk.losses._ranks import make_ranks
from llmk.ops.linear_loss.fused_linear_jsd import fused_linear_jsd
from llmk.ops.linear_loss.fused_linear_jsd_ce import fused_linear_jsd_ce
from llmk.ops.linear_loss.objectives.preference import log1mexp
from llmk.registry import check_not_negative, check_same, is_sharded


def distill(
    input: Tensor, linear_weight: Tensor, target: Tensor, teacher_input: Tensor, teacher_linear_weight: Tensor, *,
    beta: float = 0.5, ce_weight: float = 0.0, token_weights: Tensor | None = None,
    num_items_in_batch: Tensor | float | None = None, teacher_linear_bias: Tensor | None = None,
    teacher_logit_scale: float = 1.0, teacher_softcap: float = 0.0, linear_bias: Tensor | None = None,
    temperature: float = 1.0, logit_scale: float = 1.0, softcap: float = 0.0, ignore_index: int = -100,
    skip_ignored: bool = False, chunk_size: int = 0, logits_dtype: torch.dtype | None = None, group: Any = None,
    vocab_group: VocabGroup = None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Distillation from a teacher's hidden states: the mean over tokens of a generalized Jensen-Shannon divergence,

        beta * KL(t, m) + (1 - beta) * KL(s, m),    m = beta * t + (1 - beta) * s,

    KL(t, s) where beta is 0 and KL(s, t) where it is 1, with t and s the teacher's and the student's probabilities.

    Args:
        input: The student's hidden states `[B, S, H]`, aligned with `target`.
        linear_weight: `[V, H]`.
        target: `[B, S]`, the mask of tokens that count and the targets of the cross entropy.
        teacher_input: `[B, S, H']`.
        teacher_linear_weight: `[V, H']`. No tensor of the teacher gets a gradient.
        beta: From 0 to 1.
        ce_weight: Coefficient of the mean cross entropy with `target`, at temperature 1.
        token_weights: Weight `[B, S]` of each token's divergence; the mean divides by their sum.
        num_items_in_batch: Denominator of both sums in place of the batch's own, a scalar: the tokens that count in
            all batches of a step, for gradient accumulation.
        teacher_linear_bias: `[V]`.
        teacher_logit_scale, teacher_softcap: Scale and soft cap of the teacher's logits; 1 and 0 are off.
        logits_dtype: As in `llmk.functional.fused_linear_ce`.
        linear_bias, temperature, logit_scale, softcap, ignore_index, skip_ignored, chunk_size: As in `dpo`; the
            temperature is that of both models. Where a scale is not 1 the hidden states are multiplied by it.
        group: As in `sft`.
        vocab_group: As in `dpo`.

    Returns:
        The loss, a float32 scalar, 0 over no token, and the metrics "divergence" and, with `ce_weight`, "nll_loss".

    Raises:
        TypeError: An argument is not a tensor, or a dtype does not fit.
        ValueError: A shape or an option does not fit.

    Gradients are made in the forward pass: three products of the student and one of the teacher; for `ce_weight` three
    more of the student with DTensors, and with `token_weights` beside `num_items_in_batch` or `group`.

    Sources: Agarwal et al., 2023, https://arxiv.org/abs/2306.13649. Reference implementation:
    `trl.DistillationTrainer`, whose default for `beta` is 1.
    """
    check_between("beta", beta, 0.0, 1.0)
    check_not_negative("ce_weight", ce_weight)
    check_denominator("num_items_in_batch", num_items_in_batch)
    sequences = make_sequences(input, linear_weight, target, ignore_index, None, ranks=make_ranks(group))
    check_is_tensor("teacher_input", teacher_input)
    check_is_tensor("teacher_linear_weight", teacher_linear_weight)
    if teacher_input.dim() != 3 or teacher_input.shape[:2] != target.shape:
        expected = f"({target.shape[0]}, {target.shape[1]}, H)"
        raise ValueError(f"teacher_input: expected shape {expected} like input, got {tuple(teacher_input.shape)}")
    if token_weights is not None:
        check_per_token("token_weights", token_weights, target)
        token_weights = token_weights.detach().float()
    head = Head(
        linear_weight, linear_bias, 1.0, logit_scale, softcap, ignore_index, skip_ignored, chunk_size, logits_dtype,
        vocab_group,
    )  # fmt: skip
    x, bias = head.scaled(input)
    teacher_x, teacher_bias = scaled(teacher_logit_scale, teacher_input.detach(), teacher_linear_bias)
    models = x, linear_weight, teacher_x, teacher_linear_weight.detach()
    options = {
        "linear_bias": bias, "beta": beta, "temperature": temperature, "softcap": softcap,
        "teacher_softcap": teacher_softcap, "row_weight": token_weights, "ignore_index": ignore_index,
        "teacher_linear_bias": None if teacher_bias is None else teacher_bias.detach(),
        "skip_ignored": skip_ignored, "chunk_size": chunk_size, "logits_dtype": logits_dtype,
        **own_classes(linear_weight, vocab_group),
    }  # fmt: skip
    own_mean = num_items_in_batch is None and not sequences.ranks.tokens

    def over_batch(mean: Tensor) -> Tensor:
        if own_mean:
            return torch.where(sequences.mask.any(), mean, 0.0)
        return _over_items(mean, token_weights, num_items_in_batch, sequences)

    if ce_weight == 0.0:
        loss = over_batch(fused_linear_jsd(*models, labels=target, **options))
        return loss, {"divergence": loss.detach()}
    if is_sharded(*models, target) or not (own_mean or token_weights is None):
        divergence = over_batch(fused_linear_jsd(*models, labels=target, **options))
        nll = sequences.total(_cross_entropy(head, input, target)) / token_denominator(num_items_in_batch, sequences)
        loss = divergence + ce_weight * nll
    else:
        parts = fused_linear_jsd_ce(*models, target, ce_weight=ce_weight, **options)
        loss, divergence, nll = (over_batch(part) for part in parts)
    return loss, {"divergence": divergence.detach(), "nll_loss": nll.detach()}


def _over_items(
    mean: Tensor, token_weights: Tensor | None, num_items: Tensor | float | None, sequences: Sequences
) -> Tensor:
    """Return the sum over all ranks divided by `num_items`, or by the tokens' weights, from the mean on this rank."""
    weights = sequences.mask if token_weights is None else torch.where(sequences.mask, token_weights, 0.0)
    own = weights.sum()
    total = sequences.total(torch.where(own != 0, own * mean, 0.0))
    if num_items is not None or token_weights is None:
        return total / token_denominator(num_items, sequences)
    return total / torch.where(sequences.num_tokens() > 0, sequences.total(own), 1.0)


def _cross_entropy(head: Head, input: Tensor, target: Tensor) -> Tensor:
    """Return the cross entropy at temperature 1, summed over tokens."""
    x, bias = head.scaled(input)
    return cross_entropy_sum(
        x, head.linear_weight, target, head.vocab_group, linear_bias=bias, ignore_index=head.ignore_index,
        softcap=head.softcap, skip_ignored=head.skip_ignored, chunk_size=head.chunk_size,
        logits_dtype=head.logits_dtype,
    )  # fmt: skip


def distill_topk(
    input: Tensor, linear_weight: Tensor, target: Tensor, teacher_ids: Tensor, teacher_logprobs: Tensor, *,
    beta: float = 0.5, ce_weight: float = 0.0, add_tail: bool = True, token_weights: Tensor | None = None,
    num_items_in_batch: Tensor | float | None = None, linear_bias: Tensor | None = None, temperature: float = 1.0,
    logit_scale: float = 1.0, softcap: float = 0.0, ignore_index: int = -100, skip_ignored: bool = False,
    chunk_size: int = 0, logits_dtype: torch.dtype | None = None, group: Any = None,
    vocab_group: VocabGroup = None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Distillation from K classes a token: the generalized Jensen-Shannon divergence on these and on the rest.

    With t and s the teacher's and the student's probabilities and m = beta * t + (1 - beta) * s,

        beta * KL(t, m) + (1 - beta) * KL(s, m),    KL(t, s) where beta is 0 and KL(s, t) where it is 1

    The remaining probability mass of each, 1 - the sum over the K classes, is one class more, the tail; with
    `add_tail=False` both are normalized over the K classes instead.

    Args:
        input: The student's hidden states `[B, S, H]`, aligned with `target`.
        linear_weight: `[V, H]`.
        target: `[B, S]`, the mask of tokens that count and the targets of the cross entropy.
        teacher_ids: `[B, S, K]`, int64 or int32, different classes of each token; `ignore_index` for one that is not
            there, whose log-probability is not read; -inf says the same.
        teacher_logprobs: `[B, S, K]`, at the temperature `temperature`. They get no gradient.
        beta: From 0 to 1.
        ce_weight: Coefficient of the mean cross entropy with `target`, at temperature 1.
        add_tail: Add the tail as a class.
        token_weights: Weight `[B, S]` of each token's divergence; 1 if None.
        num_items_in_batch: Denominator of both sums, a scalar; the tokens that count if None.
        logits_dtype: As in `llmk.functional.fused_linear_ce`.
        linear_bias, temperature, logit_scale, softcap, ignore_index, skip_ignored, chunk_size: As in `dpo`.
        group: As in `sft`.
        vocab_group: As in `dpo`.

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
    check_denominator("num_items_in_batch", num_items_in_batch)
    sequences = make_sequences(input, linear_weight, target, ignore_index, None, ranks=make_ranks(group))
    _check_teacher(teacher_ids, teacher_logprobs, target)
    if token_weights is not None:
        check_per_token("token_weights", token_weights, target)

    head = Head(
        linear_weight,
        linear_bias,
        temperature,
        logit_scale,
        softcap,
        ignore_index,
        skip_ignored,
        chunk_size,
        logits_dtype,
        vocab_group,
    )
    present = (teacher_ids.long() != ignore_index) & sequences.mask.unsqueeze(-1)
    present = present & (teacher_logprobs != float("-inf"))
    student, entropy = head.logprobs(input, teacher_ids.masked_fill(~present, ignore_index))
    student, teacher = (_distribution(x, present, add_tail) for x in (student, teacher_logprobs.detach().float()))
    in_support = torch.cat([present, present.any(-1, keepdim=True)], -1) if add_tail else present
    each = torch.where(in_support, _divergence(student, teacher, beta), 0.0).sum(-1)
    if token_weights is not None:
        each = each * torch.where(sequences.mask, token_weights.detach().float(), 0.0)
    items = token_denominator(num_items_in_batch, sequences)
    loss = sequences.total(each.sum()) / items
    metrics = {"entropy": mean_over_tokens(entropy.detach(), sequences), "divergence": loss.detach()}
    if ce_weight != 0.0:
        nll = sequences.total(_cross_entropy(head, input, target)) / items
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


_MIN_LOGPROB = -80.0  # the log of a negligible probability, for a class that is absent


def _distribution(logprobs: Tensor, present: Tensor, add_tail: bool) -> Tensor:
    """Complete log-probabilities `[..., K]` to a distribution, with the tail `[..., K + 1]` or normalized."""
    logprobs = torch.where(present, logprobs, _MIN_LOGPROB)
    if not add_tail:
        return logprobs.log_softmax(-1)
    total = logprobs.logsumexp(-1, keepdim=True)
    return torch.cat([logprobs, log1mexp(total)], -1)


def _divergence(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return the divergence's term of each class, from log-probabilities."""
    if beta == 0.0:
        return teacher.exp() * (teacher - student)
    if beta == 1.0:
        return student.exp() * (student - teacher)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * teacher.exp() * (teacher - mixture) + (1 - beta) * student.exp() * (student - mixture)
