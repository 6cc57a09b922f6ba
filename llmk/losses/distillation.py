"""Distillation from teachers' hidden states, from their top-k log-probabilities of each token, or from both."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llmk.losses._batch import (
    INTEGERS,
    NUMBERS,
    Batch,
    Sequences,
    VocabGroup,
    check_between,
    check_denominator,
    check_list,
    check_other_model,
    check_tensor,
    cross_entropy_sum,
    denominator_of,
    mean_over_tokens,
)
from llmk.losses._policy import token_denominator
from llmk.ops.linear_loss.chunked import VocabSlice
from llmk.ops.linear_loss.drivers.distillation_call import TEACHER
from llmk.ops.linear_loss.fused_linear_distill import fused_linear_distill
from llmk.ops.linear_loss.fused_linear_jsd import fused_linear_jsd
from llmk.ops.linear_loss.fused_linear_jsd_ce import fused_linear_jsd_ce
from llmk.ops.linear_loss.head import scaled
from llmk.ops.linear_loss.objectives.topk_divergence import NOT_THERE, topk_divergence
from llmk.registry import (
    check_finite,
    check_flag,
    check_not_negative,
    check_positive,
    check_same,
    is_sharded,
    with_arguments,
)


@with_arguments
def distill(
    arguments: dict[str, Any], /,
    input: Tensor, linear_weight: Tensor, target: Tensor, teacher_input: Tensor | Sequence[Tensor],
    teacher_linear_weight: Tensor | Sequence[Tensor], *, beta: float = 0.5, ce_weight: float = 0.0,
    token_weights: Tensor | None = None, num_items_in_batch: Tensor | float | None = None,
    teacher_weight: Tensor | None = None, teacher_linear_bias: Tensor | Sequence[Tensor | None] | None = None,
    teacher_temperature: float | Sequence[float] | None = None, teacher_logit_scale: float | Sequence[float] = 1.0,
    teacher_softcap: float | Sequence[float] = 0.0, vocab_map: Tensor | Sequence[Tensor | None] | None = None,
    teacher_ids: Tensor | Sequence[Tensor] | None = None, teacher_logprobs: Tensor | Sequence[Tensor] | None = None,
    add_tail: bool = True, linear_bias: Tensor | None = None, temperature: float = 1.0, logit_scale: float = 1.0,
    softcap: float = 0.0, ignore_index: int = -100, skip_ignored: bool = False, chunk_size: int = 0,
    logits_dtype: torch.dtype | None = None, group: Any = None, vocab_group: VocabGroup = None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Distillation from teachers: the mean over tokens of a generalized Jensen-Shannon divergence,

        beta * KL(t, m) + (1 - beta) * KL(s, m),    m = beta * t + (1 - beta) * s,

    KL(t, s) where beta is 0 and KL(s, t) where it is 1, with t and s the teacher's and the student's probabilities. The
    divergences of several teachers are added up with their weights.

    A teacher has hidden states and a projection, or log-probabilities of K classes of each token, from which its
    divergence is that of `distill_topk`. The D teachers are those with hidden states, and then the others.

    The mean has one rule for all teachers: each one's divergences are multiplied by `token_weights` and divided by
    their sum over the tokens that count, or by `num_items_in_batch`. `distill_topk` divides by the number of tokens
    instead; so do weights here that are given as a `teacher_weight` of each token, which no mean divides by.

    Args:
        input: The student's hidden states `[B, S, H]`, aligned with `target`.
        linear_weight: `[V, H]`.
        target: `[B, S]`, the mask of tokens that count and the targets of the cross entropy.
        teacher_input: `[B, S, H']`, or a list, one for each teacher that has hidden states, each with its own H'. It
            may be empty if there are `teacher_ids`.
        teacher_linear_weight: `[V, H']`, or a list, one for each. No tensor of a teacher gets a gradient.
        beta: From 0 to 1.
        ce_weight: Coefficient of the mean cross entropy with `target`, at temperature 1.
        token_weights: Weight `[B, S]` of each token's divergences; the mean divides by their sum. 1 if None.
        num_items_in_batch: Denominator of both sums in place of the batch's own, a scalar: the tokens that count in
            all batches of a step, for gradient accumulation.
        teacher_weight: Factor of each teacher's divergence, `[D]`, or `[B, S, D]` for one of each token; 1 if None.
        teacher_linear_bias: `[V]`, or a list as long as `teacher_input`, in which None is none.
        teacher_temperature: Temperature of the teacher, or such a list; that of the student if None.
        teacher_logit_scale, teacher_softcap: Scale and soft cap of the teacher's logits, or lists; 1 and 0 are off.
        vocab_map: The student's class of each of the teacher's, int64 `[V']`, all different, or such a list, in which
            None is for the same classes. For such a teacher the student's softmax is over these classes.
        teacher_ids, teacher_logprobs: `[B, S, K]` each, as in `distill_topk`, or lists, one for each teacher that is
            known by them, each with its own K, at most 1024 in all. The ids are the student's classes: map those of a
            teacher with others before. The temperature is the student's.
        add_tail: As in `distill_topk`, for all of these.
        logits_dtype: As in `llmk.functional.fused_linear_ce`.
        linear_bias, temperature, logit_scale, softcap, ignore_index, skip_ignored, chunk_size: As in `dpo`; the
            temperature is that of all models. Where a scale is not 1 the hidden states are multiplied by it.
        group: As in `sft`.
        vocab_group: As in `dpo`. Not with a list of teachers or `teacher_ids`, nor what is for several alone.

    Returns:
        The loss, a float32 scalar, 0 over no token, and the metrics "divergence", with a list of teachers or
        `teacher_ids` its terms "divergence/teacher_0" and so on, and, with `ce_weight`, "nll_loss".

    Raises:
        TypeError: An argument is not a tensor, or a dtype does not fit.
        ValueError: A shape, the length of a list or an option does not fit.

    Gradients are made in the forward pass: three products of the student and one of each teacher with hidden states.
    For `ce_weight` there are three more of the student with DTensors, and with `vocab_group` and `token_weights`.

    Sources: Agarwal et al., 2023, https://arxiv.org/abs/2306.13649. Reference implementation:
    `trl.DistillationTrainer`, whose default for `beta` is 1.
    """
    check_between("beta", beta, 0.0, 1.0)
    check_not_negative("ce_weight", ce_weight)
    check_denominator("num_items_in_batch", num_items_in_batch)
    check_positive("temperature", temperature)  # which may be the teachers'
    check_finite("logit_scale", logit_scale)
    check_flag("add_tail", add_tail)
    if teacher_weight is not None:
        check_tensor("teacher_weight", teacher_weight, NUMBERS, "numbers")
    is_one = isinstance(teacher_input, Tensor) and teacher_ids is None
    several = not is_one or any(each is not None for each in (teacher_weight, teacher_temperature, vocab_map))
    if several and vocab_group is not None:
        expected = "None with several teachers, or with weights, temperatures or a map"
        raise ValueError(f"vocab_group: expected {expected}, got {vocab_group!r}")
    batch = Batch.of(arguments)
    teachers, topk = _teachers(arguments), _topk_teachers(target, teacher_ids, teacher_logprobs)
    means = Means.of(batch.sequences, batch.per_token("token_weights"), num_items_in_batch)
    options = {"labels": target, "row_weight": means.row_weight, "beta": beta}
    head = batch.head
    is_split = vocab_group is not None or is_sharded(head.input, head.linear_weight, target, *teachers[0], *teachers[1])
    if several or (ce_weight > 0 and means.differ and not is_split):
        options |= {"add_tail": add_tail, "ce_weight": ce_weight}
        loss, divergences, nll = _of_several(batch, teachers, topk, teacher_weight, means, options)
        metrics = {"divergence": divergences.sum()} | ({"nll_loss": nll} if ce_weight > 0 else {})
        terms = () if is_one else divergences.unbind()
        return loss, metrics | {f"divergence/teacher_{i}": term for i, term in enumerate(terms)}
    options |= teachers.only() | head.arguments(without=("logit_scale",))
    if ce_weight == 0.0:
        loss = means.whole(fused_linear_jsd(**options))
        return loss, {"divergence": loss.detach()}
    if means.differ or is_sharded(head.input, head.linear_weight, target, *teachers[0], *teachers[1]):
        divergence = means.whole(fused_linear_jsd(**options))
        total = batch.sequences.total(cross_entropy_sum(head, target))
        nll = total / token_denominator(num_items_in_batch, batch.sequences)
        loss = divergence + ce_weight * nll
    else:
        parts = fused_linear_jsd_ce(ce_weight=ce_weight, **options)
        loss, divergence, nll = map(means.whole, parts)
    return loss, {"divergence": divergence.detach(), "nll_loss": nll.detach()}


def _of_several(
    batch: Batch, teachers: "_Teachers", topk: "_TopkTeachers", weight: Tensor | None, means: "Means",
    options: dict[str, Any],
) -> Iterator[Tensor]:  # fmt: skip
    """Return the loss, the teachers' divergences and the cross entropy, whose means have one share in the whole."""
    if means.differ and options["ce_weight"] > 0:
        ones = torch.ones(len(teachers[0]) + len(topk[0]), dtype=torch.float32, device=batch.target.device)
        weight = (ones if weight is None else weight.float()) * means.ratio()
        means = replace(means, share=means.nll_share)
    head = batch.head.arguments(without=("logit_scale", *VocabSlice.__annotations__))
    weight = None if weight is None else weight.detach()
    parts = fused_linear_distill(teacher_weight=weight, **teachers._asdict(), **topk._asdict(), **options, **head)
    return (means.whole(part) for part in parts)


@dataclass(frozen=True)
class Means:
    """The means that an operator takes of this rank's tokens, as parts of those of the whole batch."""

    sequences: Sequences
    share: Tensor | None  # of the divergences in the whole, 0 where all weights are 0; None for all
    nll_share: Tensor | None  # the same of the cross entropies
    row_weight: Tensor | None  # the weights of divergences that the operator takes

    @classmethod
    def of(cls, sequences: Sequences, weights: Tensor | None, num_items: Tensor | float | None) -> "Means":
        """Return those of divergences with weights of tokens, divided by `num_items` or by the sum of the weights."""
        if num_items is None and weights is None and not sequences.ranks.tokens:
            return cls(sequences, None, None, None)
        items = token_denominator(num_items, sequences)
        nll_share = sequences.mask.sum() / items
        if weights is None:
            return cls(sequences, nll_share, nll_share, None)
        weight = torch.where(sequences.mask, weights, 0.0).sum()
        if num_items is None:
            items = denominator_of(sequences.total(weight))
        share = weight / items  # the operators' mean over weights of 0 is NaN
        return cls(sequences, share, nll_share, torch.where(share != 0, weights, 1.0))

    @property
    def differ(self) -> bool:
        """True if divergences and cross entropies may have other shares."""
        return self.row_weight is not None

    def ratio(self) -> Tensor:
        """Return the share of the divergences by that of the cross entropies, 1 over no token."""
        assert self.share is not None
        assert self.nll_share is not None
        return torch.where(self.sequences.mask.any(), self.share / self.nll_share, 1.0)

    def whole(self, mean: Tensor) -> Tensor:
        """Return the mean over the tokens of all ranks, or of the items, from that on this rank; 0 over no token."""
        if self.share is None:
            return torch.where(self.sequences.mask.any(), mean, 0.0)
        return self.sequences.total(torch.where(self.sequences.mask.any(), self.share * mean, 0.0))


class _Teachers(NamedTuple):
    """The linear layers of D teachers, detached, and their options, as `fused_linear_distill` takes them."""

    teacher_input: list[Tensor]
    teacher_linear_weight: list[Tensor]
    teacher_linear_bias: list[Tensor]  # of all, or none
    vocab_map: list[Tensor]  # of all, or none
    teacher_temperature: list[float]
    teacher_softcap: list[float]

    def only(self) -> dict[str, Any]:
        """Return the arguments of an operator for a single teacher at the student's temperature."""
        names = "teacher_input", "teacher_linear_weight", "teacher_linear_bias", "teacher_softcap"
        return {name: (getattr(self, name) or [None])[0] for name in names}


def _teachers(arguments: Mapping[str, Any]) -> _Teachers:
    """Check the teachers' arguments, single ones or lists of D, and return the lists."""
    given = {name: arguments[name] for name in (*_Teachers.__annotations__, "teacher_logit_scale")}
    one = isinstance(given["teacher_input"], Tensor)
    if not one:
        check_list("teacher_input", given["teacher_input"], "tensors, or a tensor")
    if given["teacher_temperature"] is None:
        temperature = arguments["temperature"]
        given["teacher_temperature"] = temperature if one else [temperature] * len(given["teacher_input"])
    lists = {name: _one_for_each(name, value, given["teacher_input"]) for name, value in given.items()}
    inputs, weights, biases, maps, temperatures, softcaps, scales = lists.values()
    for i, (x, weight, bias, scale) in enumerate(zip(inputs, weights, biases, scales, strict=True)):
        place = "" if one else f"[{i}]"
        check_other_model(arguments["input"], x, weight, bias, [f"{name}{place}" for name in TEACHER])
        check_finite(f"teacher_logit_scale{place}", scale)
    if any(bias is not None for bias in biases):
        biases = [w.new_zeros(w.shape[0]) if bias is None else bias for w, bias in zip(weights, biases, strict=True)]
    layers = [scaled(*each) for each in zip(scales, inputs, biases, strict=True)]
    return _Teachers(
        [x.detach() for x, _ in layers],
        [weight.detach() for weight in weights],
        [bias.detach() for _, bias in layers if bias is not None],
        [] if all(ids is None for ids in maps) else [inputs[0].new_zeros(0).long() if m is None else m for m in maps],
        temperatures,
        softcaps,
    )


class _TopkTeachers(NamedTuple):
    """The classes and log-probabilities of the teachers that are known by these."""

    teacher_ids: list[Tensor]
    teacher_logprobs: list[Tensor]


def _topk_teachers(target: Tensor, teacher_ids: Any, teacher_logprobs: Any) -> _TopkTeachers:
    """Check the arguments of teachers with top-k classes, single ones or lists or None, and return the lists."""
    if teacher_ids is None:
        if teacher_logprobs is not None:
            raise ValueError("teacher_ids: expected the classes of teacher_logprobs, got None")
        return _TopkTeachers([], [])
    if not isinstance(teacher_ids, Tensor | list | tuple):
        raise TypeError(f"teacher_ids: expected a tensor or a list of tensors, got {type(teacher_ids).__name__}")
    ids, logprobs = (
        _one_for_each(name, value, teacher_ids, "teacher_ids")
        for name, value in (("teacher_ids", teacher_ids), ("teacher_logprobs", teacher_logprobs))
    )
    for i, each in enumerate(zip(ids, logprobs, strict=True)):
        _check_topk(*each, target, "" if isinstance(teacher_ids, Tensor) else f"[{i}]")
    return _TopkTeachers(ids, [each.detach().float() for each in logprobs])


def _one_for_each(name: str, value: Any, teachers: Tensor | Sequence[Tensor], like: str = "teacher_input") -> list[Any]:
    """Return a list with a value for each teacher of an argument; a number is that of all, as is None."""
    if isinstance(teachers, Tensor):
        if isinstance(value, list | tuple):
            raise TypeError(f"{name}: expected a single one for a single {like}, got {len(value)}")
        return [value]
    D = len(teachers)
    if value is None or isinstance(value, int | float):
        return [value] * D
    if not isinstance(value, list | tuple):
        raise TypeError(f"{name}: expected a list, one for each of {like}, got {type(value).__name__}")
    if len(value) != D:
        raise ValueError(f"{name}: expected {D}, one for each of {like}, got {len(value)}")
    return list(value)


@with_arguments
def distill_topk(
    arguments: dict[str, Any], /,
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
        teacher_ids: `[B, S, K]`, int64 or int32, different classes of each token. A negative one, such as -1, is not
            there, and its log-probability is not read; -inf says the same.
        teacher_logprobs: `[B, S, K]`, at the temperature `temperature`. They get no gradient.
        beta: From 0 to 1.
        ce_weight: Coefficient of the mean cross entropy with `target`, at temperature 1.
        add_tail: Add the tail as a class.
        token_weights: Weight `[B, S]` of each token's divergence, by which the mean does not divide; 1 if None.
        num_items_in_batch: Denominator of both sums, a scalar; the tokens that count if None.
        linear_bias, temperature, logit_scale, softcap, ignore_index, skip_ignored, chunk_size: As in `dpo`.
        group: As in `sft`.
        logits_dtype, vocab_group: As in `dpo`.

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
    batch = Batch.of(arguments)
    sequences = batch.sequences
    _check_topk(teacher_ids, teacher_logprobs, target)
    check_flag("add_tail", add_tail)
    weights = batch.per_token("token_weights")
    present = (teacher_ids >= 0) & sequences.mask.unsqueeze(-1)
    present = present & (teacher_logprobs != float("-inf"))
    _check_classes(teacher_ids, present, batch.head.all_classes)
    classes = teacher_ids.masked_fill(~present, NOT_THERE)  # `ignore_index` itself may be a class
    student, entropy = batch.with_head(ignore_index=NOT_THERE).logprobs(classes, add_tail)
    tail = student[..., -1] if add_tail else None
    student = student[..., : classes.shape[-1]]
    each = topk_divergence(student, teacher_logprobs.detach().float(), present, beta, tail)
    if weights is not None:
        each = each * weights
    items = token_denominator(num_items_in_batch, sequences)
    loss = sequences.total(each.sum()) / items
    metrics = {"entropy": mean_over_tokens(entropy.detach(), sequences), "divergence": loss.detach()}
    if ce_weight != 0.0:
        nll = sequences.total(cross_entropy_sum(batch.head, target)) / items
        metrics["nll_loss"] = nll.detach()
        loss = loss + ce_weight * nll
    return loss, metrics


def _check_classes(teacher_ids: Tensor, present: Tensor, num_classes: int) -> None:
    """Check on the host, where it need not wait for them, that the ids are classes."""
    if type(teacher_ids) is Tensor and teacher_ids.is_cpu and not torch.compiler.is_compiling():
        wrong = present & (teacher_ids >= num_classes)
        if wrong.any():
            expected = f"classes in [0, {num_classes}), or -1 for none"
            raise IndexError(f"teacher_ids: expected {expected}, got {int(teacher_ids[wrong][0])}")


def _check_topk(teacher_ids: Any, teacher_logprobs: Any, target: Tensor, place: str = "") -> None:
    """Check the classes and log-probabilities of one teacher; `place` is its index in lists."""
    names = f"teacher_ids{place}", f"teacher_logprobs{place}"
    check_tensor(names[0], teacher_ids, INTEGERS, "integers")
    check_tensor(names[1], teacher_logprobs, NUMBERS, "numbers")
    if teacher_ids.dim() != 3 or teacher_ids.shape[:2] != target.shape or teacher_ids.shape[2] == 0:
        expected = f"({target.shape[0]}, {target.shape[1]}, K)"
        raise ValueError(f"{names[0]}: expected shape {expected} with K at least 1, got {tuple(teacher_ids.shape)}")
    if teacher_logprobs.shape != teacher_ids.shape:
        expected, got = tuple(teacher_ids.shape), tuple(teacher_logprobs.shape)
        raise ValueError(f"{names[1]}: expected shape {expected} (that of {names[0]}), got {got}")
    check_same(names[0], teacher_ids, "target", target)
    check_same(names[1], teacher_logprobs, "target", target)
