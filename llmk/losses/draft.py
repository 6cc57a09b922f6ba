"""Drafts for speculative decoding: the soft cross entropy of several steps with the target model's distributions."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llmk.losses._batch import (
    INTEGERS,
    Batch,
    Sequences,
    check_between,
    check_denominator,
    check_list,
    check_other_model,
    check_tensor,
    denominator_of,
)
from llmk.losses.distillation import Means
from llmk.ops.linear_loss.drivers.distillation_call import TEACHER
from llmk.ops.linear_loss.fused_linear_jsd import fused_linear_jsd
from llmk.ops.linear_loss.head import Head, scaled
from llmk.ops.linear_loss.linear_logprobs import linear_logprobs
from llmk.registry import check_finite, check_same, check_switch, with_arguments


@with_arguments
def draft(
    arguments: dict[str, Any], /,
    input: Tensor | Sequence[Tensor], linear_weight: Tensor, target: Tensor, teacher_input: Tensor,
    teacher_linear_weight: Tensor, *, vocab_map: Tensor | None = None, position_decay: float = 1.0,
    token_weights: Tensor | None = None, num_items_in_batch: Tensor | float | None = None,
    sequence_ids: Tensor | None = None, teacher_linear_bias: Tensor | None = None, teacher_logit_scale: float = 1.0,
    teacher_softcap: float = 0.0, linear_bias: Tensor | None = None, temperature: float = 1.0,
    logit_scale: float = 1.0, softcap: float = 0.0, ignore_index: int = -100, skip_ignored: bool = False,
    chunk_size: int = 0, logits_dtype: torch.dtype | None = None, group: Any = None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Cross entropy of a draft's distributions with those of the model it drafts for, the target model.

        sum over steps k of position_decay**k * mean over tokens s of -sum_v t[s + k]_v * log q[k, s]_v

    with q[k, s] the draft's probabilities after k steps from position s, and t[s + k] the target model's where this
    step is. With a `vocab_map` both are over the draft's classes: the target model's probabilities are normalized over
    these, as what it gives to others no draft can propose.

    Args:
        input: The draft's hidden states `[B, S, H]`, or a list of them, one for each step.
        linear_weight: The draft's head `[V, H]`.
        target: `[B, S]`, aligned with the target model's: where it is `ignore_index` no step is compared with it.
            Mask there what a draft cannot learn, such as positions whose most likely class it does not have.
        teacher_input: The target model's hidden states `[B, S, H']`.
        teacher_linear_weight: Its head, `[V, H']`, or `[V', H']` with a `vocab_map`. Nothing of it gets a gradient.
        vocab_map: The target model's class of each of the draft's, int64 `[V]`, in ascending order. The rows of the
            head are gathered in each call; give the gathered head instead to keep them.
        position_decay: From 0 to 1: each step weighs so much of the one before.
        token_weights: Weight `[B, S]` of each position of the target model; a mean divides by their sum.
        num_items_in_batch: Denominator of each step in place of the batch's own, a scalar.
        sequence_ids: `[1, T]` for a packed batch: no step leaves its sequence.
        teacher_linear_bias: `[V]`, or `[V']` with a `vocab_map`.
        teacher_logit_scale, teacher_softcap: Scale and soft cap of the target model's logits; 1 and 0 are off.
        logits_dtype: As in `llmk.functional.fused_linear_ce`.
        linear_bias, temperature, logit_scale, softcap, ignore_index, skip_ignored, chunk_size: As in `dpo`; the
            temperature is that of both models. Where a scale is not 1 the hidden states are multiplied by it.
        group: As in `sft`, of ranks that have other sequences.

    Returns:
        The loss, a float32 scalar, to which a step without a token adds 0, and the metrics "loss/step_0" and so on,
        each step's cross entropy, and "divergence/step_0" and so on, by which it exceeds the target model's entropy.

    Raises:
        TypeError: An argument is not a tensor, or a dtype does not fit.
        ValueError: A shape or an option does not fit, or on a CPU in eager mode the ids of a `vocab_map` are not
            ascending classes of the target model. Elsewhere they make the loss NaN.

    Gradients are made in the forward pass: three products of the draft and one of the target model for each step, and
    one more of the target model for its entropy, which has no gradient.

    Sources: Li et al., "EAGLE-3", 2025, https://arxiv.org/abs/2503.01840.
    """
    if not isinstance(input, Tensor):
        check_list("input", input, "tensors, or a tensor")
    steps = [input] if isinstance(input, Tensor) else list(input)
    if not steps:
        raise ValueError("input: expected the hidden states of at least one step, got none")
    check_between("position_decay", position_decay, 0.0, 1.0)
    check_denominator("num_items_in_batch", num_items_in_batch)
    batches = [Batch.of({**arguments, "input": each}) for each in steps]
    check_other_model(steps[0], teacher_input, teacher_linear_weight, teacher_linear_bias, TEACHER)
    check_finite("logit_scale", logit_scale)
    check_finite("teacher_logit_scale", teacher_logit_scale)
    check_switch("teacher_softcap", teacher_softcap)
    position_weights = batches[0].per_token("token_weights")
    teacher_weight, teacher_bias, is_valid = _gathered(
        teacher_linear_weight.detach(), teacher_linear_bias, vocab_map, linear_weight
    )
    teacher_x, teacher_bias = scaled(teacher_logit_scale, teacher_input.detach(), teacher_bias)
    teacher_bias = None if teacher_bias is None else teacher_bias.detach()
    teacher = Head.of(arguments, input=teacher_x, linear_weight=teacher_weight, linear_bias=teacher_bias,
                      softcap=teacher_softcap, logit_scale=1.0, ignore_index=-1)  # fmt: skip
    with torch.no_grad():
        any_class = torch.where(target.long() == ignore_index, -1, 0)  # 0 itself may be the index to ignore
        _, entropy = linear_logprobs(target=any_class, **teacher.arguments())
    models = {"teacher_linear_weight": teacher_weight, "teacher_linear_bias": teacher_bias,
              "teacher_softcap": teacher_softcap, "beta": 0.0}  # fmt: skip
    loss, metrics = torch.zeros((), dtype=torch.float32, device=target.device), {}
    for k, batch in enumerate(batches):
        labels = _ahead(target, k, ignore_index)
        if sequence_ids is not None:
            labels = torch.where(_ahead(sequence_ids, k, -1) == sequence_ids, labels, ignore_index)
        weights = None if position_weights is None else _ahead(position_weights, k, 0.0)
        sequences = Sequences.from_rows(labels.long() != ignore_index).shared_by(batch.sequences.ranks)
        means = Means.of(sequences, weights, num_items_in_batch)
        divergence = means.whole(fused_linear_jsd(
            teacher_input=_ahead(teacher_x, k, 0.0), labels=labels, row_weight=means.row_weight, **models,
            **batch.head.arguments(without=("logit_scale",)),
        ))  # fmt: skip
        counted = torch.where(sequences.mask, 1.0 if means.row_weight is None else means.row_weight, 0.0)
        teacher_entropy = (_ahead(entropy, k, 0.0) * counted).sum() / denominator_of(counted.sum())
        step = divergence + means.whole(teacher_entropy)
        loss = loss + position_decay**k * step
        metrics |= {f"loss/step_{k}": step.detach(), f"divergence/step_{k}": divergence.detach()}
    return (loss if is_valid is None else torch.where(is_valid, loss, float("nan"))), metrics


def _ahead(values: Tensor, k: int, padding: float) -> Tensor:
    """Return `[B, S, ...]` so that a position has what is k positions ahead, and padding past the end."""
    return F.pad(values, (*[0, 0] * (values.dim() - 2), 0, k), value=padding)[:, k:] if k > 0 else values


def _gathered(
    teacher_weight: Tensor, teacher_bias: Tensor | None, vocab_map: Tensor | None, linear_weight: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the rows of the target model's head that a map names, and if it is valid where the host does not look."""
    if vocab_map is None:
        return teacher_weight, teacher_bias, None
    check_tensor("vocab_map", vocab_map, INTEGERS, "integers")
    if vocab_map.shape != linear_weight.shape[:1]:
        expected = f"({linear_weight.shape[0]},) (one for each class of linear_weight)"
        raise ValueError(f"vocab_map: expected shape {expected}, got {tuple(vocab_map.shape)}")
    check_same("vocab_map", vocab_map, "linear_weight", linear_weight)
    ids, classes = vocab_map.long(), teacher_weight.shape[0]
    ascending, in_range = (ids[1:] > ids[:-1]).all(), ((ids >= 0) & (ids < classes)).all()
    if ids.device.type == "cpu" and not torch.compiler.is_compiling():
        if not in_range:
            raise ValueError(f"vocab_map: expected classes in [0, {classes}), got {int(ids.min())} to {int(ids.max())}")
        if not ascending:
            raise ValueError("vocab_map: expected ascending classes, each once, got others")
    ids = ids.clamp(0, classes - 1)
    bias = None if teacher_bias is None else teacher_bias.index_select(0, ids)
    return teacher_weight.index_select(0, ids), bias, in_range & ascending
