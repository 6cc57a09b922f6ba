"""Supervised fine-tuning with token weights, dynamic fine-tuning, and multi-token prediction."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from llmk.losses._batch import (
    Batch,
    VocabGroup,
    check_batch,
    check_denominator,
    check_list,
    cross_entropy_sum,
    mean_over_tokens,
)
from llmk.losses._policy import ratio_level, token_denominator
from llmk.ops.linear_loss.objectives.policy import PolicyOptions, PolicyTerms
from llmk.registry import check_finite, check_not_negative, with_arguments


@with_arguments
def sft(
    arguments: dict[str, Any], /,
    input: Tensor, linear_weight: Tensor, target: Tensor, *,
    token_weights: Tensor | None = None, entropy_coef: float = 0.0, num_items_in_batch: Tensor | float | None = None,
    linear_bias: Tensor | None = None, temperature: float = 1.0, logit_scale: float = 1.0, softcap: float = 0.0,
    ignore_index: int = -100, skip_ignored: bool = True, chunk_size: int = 0, logits_dtype: torch.dtype | None = None,
    group: Any = None,
    vocab_group: VocabGroup = None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """The negative log-likelihood of the targets, with a weight for each token and a term for the entropy:

        sum of -weight * log pi / num_items - entropy_coef * mean entropy

    Args:
        input, linear_weight, target: Hidden states `[B, S, H]`, `[V, H]`, and `[B, S]`, aligned. A packed batch is
            `[1, T]`; the sequences of its tokens do not matter here.
        token_weights: `[B, S]`, 1 if None. They get no gradient.
        entropy_coef: Coefficient of the mean entropy over the tokens that count, which is subtracted from the loss: a
            positive one keeps the distribution wide.
        num_items_in_batch: Denominator of the sum, a scalar; the tokens that count if None, whatever their weights.
        linear_bias, temperature, logit_scale, softcap, ignore_index, skip_ignored, chunk_size: As in `dpo`.
        group: As in `dpo`, of ranks that have other tokens of the batch, of the same sequences or of others.
        logits_dtype, vocab_group: As in `dpo`.

    Returns:
        The loss, a float32 scalar, 0 over no token, and the metric "entropy".

    Raises:
        TypeError: An argument is not a tensor, or a dtype does not fit.
        ValueError: A shape or an option does not fit.

    Gradients are made in the forward pass: three products, or four with DTensors.

    Source: Pereyra et al., 2017, https://arxiv.org/abs/1701.06548, for the entropy. Reference implementation:
    `trl.SFTTrainer`.
    """
    return _supervised(arguments, "reinforce")


def _supervised(arguments: dict[str, Any], loss_type: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the metrics of `sft`, with the token losses of a policy's loss type, from its arguments."""
    entropy_coef, num_items = arguments["entropy_coef"], arguments["num_items_in_batch"]
    check_finite("entropy_coef", entropy_coef)
    check_denominator("num_items_in_batch", num_items)
    batch = Batch.of(arguments)
    sequences = batch.sequences
    weights = batch.per_token("token_weights")
    mask = sequences.mask.float()
    terms = PolicyTerms(
        advantages=mask if weights is None else weights,
        token_weight=mask / token_denominator(num_items, sequences),
        entropy_weight=None if entropy_coef == 0.0 else entropy_coef * mask / token_denominator(None, sequences),
        options=PolicyOptions(loss_type=loss_type),
        level=ratio_level("token", sequences),
    )
    loss, _, entropy = batch.policy(terms)
    return loss, {"entropy": mean_over_tokens(entropy, sequences)}


@with_arguments
def dft(
    arguments: dict[str, Any], /,
    input: Tensor, linear_weight: Tensor, target: Tensor, *,
    num_items_in_batch: Tensor | float | None = None, linear_bias: Tensor | None = None, temperature: float = 1.0,
    logit_scale: float = 1.0, softcap: float = 0.0, ignore_index: int = -100, skip_ignored: bool = True,
    chunk_size: int = 0, logits_dtype: torch.dtype | None = None, group: Any = None,
    vocab_group: VocabGroup = None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Dynamic fine-tuning: the mean over the tokens that count of -pi * log pi, with the first factor detached.

    Args:
        input, linear_weight, target: As in `sft`.
        num_items_in_batch: Denominator, a scalar; the tokens that count if None.
        linear_bias, temperature, logit_scale, softcap, ignore_index, skip_ignored, chunk_size: As in `dpo`.
        logits_dtype, group, vocab_group: As in `sft`.

    Returns:
        The loss, a float32 scalar, 0 over no token, and the metric "entropy".

    Raises:
        TypeError: An argument is not a tensor, or a dtype does not fit.
        ValueError: A shape or an option does not fit.

    Three products, as `sft`.

    Sources: Wu et al., 2025, https://arxiv.org/abs/2508.05629, equation 9. Reference implementation: `trl.SFTTrainer`
    with `loss_type="dft"`.
    """
    return _supervised({**arguments, "token_weights": None, "entropy_coef": 0.0}, "dft")


@with_arguments
def multi_token(
    arguments: dict[str, Any], /,
    inputs: Sequence[Tensor], linear_weight: Tensor | Sequence[Tensor], targets: Sequence[Tensor], *,
    num_items_in_batch: Tensor | float | Sequence[Tensor | float] | None = None,
    head_weights: Sequence[float] | None = None, label_smoothing: float = 0.0, z_loss: float = 0.0,
    linear_bias: Tensor | None = None, logit_scale: float = 1.0, softcap: float = 0.0, ignore_index: int = -100,
    chunk_size: int = 0, logits_dtype: torch.dtype | None = None, group: Any = None,
    vocab_group: VocabGroup = None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Cross entropy of several heads, each with its own hidden states, as in multi-token prediction.

        sum over heads of head_weight * mean over its tokens of (-log p + z_loss * logsumexp**2)

    Args:
        inputs: Hidden states `[B, S, H]` of each head.
        linear_weight: One projection `[V, H]` for all heads, or one for each head.
        targets: Class indices `[B, S]` for each head: the caller shifts each by one token more than the one before.
        num_items_in_batch: Denominator in place of a head's own tokens, a scalar for all heads or a list with one for
            each: the tokens of all batches of a step.
        head_weights: One for each head; 1 if None.
        logit_scale: Factor of the logits, before the cap.
        label_smoothing, z_loss, linear_bias, softcap, ignore_index, chunk_size: As in
            `llmk.functional.fused_linear_ce`.
        group: As in `sft`.
        vocab_group: As in `dpo`.

    Returns:
        The loss, a float32 scalar, to which a head without a token adds 0, and the metrics "loss/head_0" and so on.

    Raises:
        TypeError: An argument is not a tensor, or a dtype does not fit.
        ValueError: A shape or an option does not fit.

    Gradients are made in the forward pass: three products a head.

    Source: Gloeckle et al., 2024, https://arxiv.org/abs/2404.19737.
    """
    check_list("inputs", inputs, "tensors, the hidden states of each head")
    heads = len(inputs)
    if heads == 0:
        raise ValueError("inputs: expected the hidden states of at least one head, got none")
    check_list("targets", targets, "tensors, one for each of inputs")
    if head_weights is not None:
        check_list("head_weights", head_weights, "numbers, one for each of inputs")
    if not isinstance(linear_weight, Tensor):
        check_list("linear_weight", linear_weight, "tensors, one for each of inputs, or a tensor")
    weights = [linear_weight] * heads if isinstance(linear_weight, Tensor) else list(linear_weight)
    scales = [1.0] * heads if head_weights is None else list(head_weights)
    given = num_items_in_batch
    num_items: list[Any] = list(given) if isinstance(given, list | tuple) else [given] * heads
    per_head = {"linear_weight": weights, "targets": targets, "head_weights": scales, "num_items_in_batch": num_items}
    for name, values in per_head.items():
        if len(values) != heads:
            raise ValueError(f"{name}: expected {heads}, one for each of inputs, got {len(values)}")
    for value in num_items:
        check_denominator("num_items_in_batch", value)
    for value in scales:
        check_finite("head_weights", value)
    check_not_negative("z_loss", z_loss)
    check_finite("logit_scale", logit_scale)
    for i, each in enumerate(zip(inputs, weights, targets, strict=True)):
        place = "" if isinstance(linear_weight, Tensor) else f"[{i}]"
        check_batch(*each, ignore_index, names=(f"inputs[{i}]", f"linear_weight{place}", f"targets[{i}]"))
    losses = []
    for x, w, t, items in zip(inputs, weights, targets, num_items, strict=True):
        batch = Batch.of({**arguments, "input": x, "linear_weight": w, "target": t})
        total = cross_entropy_sum(batch.head, t, label_smoothing=label_smoothing, z_loss=z_loss)
        losses.append(batch.sequences.total(total) / token_denominator(items, batch.sequences))
    metrics = {f"loss/head_{i}": loss.detach() for i, loss in enumerate(losses)}
    return torch.stack([scale * loss for scale, loss in zip(scales, losses, strict=True)]).sum(), metrics
