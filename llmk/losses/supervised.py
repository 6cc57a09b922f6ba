"""Supervised training on tokens: weights of their own, dynamic fine-tuning, several heads."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from llmk.losses._checks import check_of_tokens
from llmk.losses._head import Head, mean_over_tokens
from llmk.losses._policy import number_of_items, policy_terms
from llmk.losses._sequences import sequences_of
from llmk.ops.linear_loss.fused_linear_ce import fused_linear_ce
from llmk.ops.linear_loss.policy_losses import PolicyOptions
from llmk.registry import check_finite, check_not_negative


def sft(
    input: Tensor, linear_weight: Tensor, target: Tensor, *,
    token_weights: Tensor | None = None, entropy_coef: float = 0.0, num_items_in_batch: Tensor | float | None = None,
    linear_bias: Tensor | None = None, temperature: float = 1.0, softcap: float = 0.0, ignore_index: int = -100,
    skip_ignored: bool = False, chunk_size: int = 0,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """The negative log-likelihood of the targets, with a weight for each token and a term for the entropy:

        sum of -weight * log pi / num_items - entropy_coef * mean entropy

    Args:
        input, linear_weight, target: Hidden states `[B, S, H]`, `[V, H]`, and `[B, S]`, aligned. A packed batch is
            `[1, T]`; which sequence a token is of does not matter here.
        token_weights: `[B, S]`, 1 if None. They get no gradient.
        entropy_coef: What the mean entropy over the tokens that count is multiplied by and taken off the loss: a
            positive one keeps the distribution wide.
        num_items_in_batch: What the sum is divided by, a scalar; the tokens that count if None, whatever their weights.
        linear_bias, temperature, softcap, ignore_index, skip_ignored, chunk_size: As in `dpo`.

    Returns:
        The loss, a float32 scalar, 0 over no token, and the metric "entropy".

    Raises:
        TypeError: An argument is not a tensor, or a dtype does not fit.
        ValueError: A shape or an option does not fit.

    Gradients are made in the forward pass: three products, or four with DTensors.

    Source: Pereyra et al., 2017, https://arxiv.org/abs/1701.06548, for the entropy. Reference implementation:
    `trl.SFTTrainer`.
    """
    check_finite("entropy_coef", entropy_coef)
    sequences = sequences_of(input, linear_weight, target, ignore_index, None)
    if token_weights is not None:
        check_of_tokens("token_weights", token_weights, target)
    head = Head(linear_weight, linear_bias, temperature, softcap, ignore_index, skip_ignored, chunk_size)
    counts = sequences.counts.float()
    of_tokens = counts if token_weights is None else torch.where(sequences.counts, token_weights.detach().float(), 0.0)
    weight = counts / number_of_items(num_items_in_batch, sequences)
    terms = policy_terms(PolicyOptions("reinforce"), of_tokens, weight, sequences)
    if entropy_coef != 0.0:
        terms = replace(terms, entropy_weight=entropy_coef * counts / number_of_items(None, sequences))
    loss, _, entropy = head.policy(input, target, terms, sequences)
    return loss, {"entropy": mean_over_tokens(entropy, sequences)}


def dft(
    input: Tensor, linear_weight: Tensor, target: Tensor, *,
    num_items_in_batch: Tensor | float | None = None, linear_bias: Tensor | None = None, temperature: float = 1.0,
    softcap: float = 0.0, ignore_index: int = -100, skip_ignored: bool = False, chunk_size: int = 0,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Dynamic fine-tuning: the sum over tokens of -pi * log pi, the first a constant, over the tokens that count.

    Args:
        input, linear_weight, target: As in `sft`.
        num_items_in_batch: What the sum is divided by instead, a scalar.
        linear_bias, temperature, softcap, ignore_index, skip_ignored, chunk_size: As in `dpo`.

    Returns:
        The loss, a float32 scalar, 0 over no token, and the metric "entropy".

    Raises:
        TypeError: An argument is not a tensor, or a dtype does not fit.
        ValueError: A shape or an option does not fit.

    Three products, as `sft`.

    Sources: Wu et al., 2025, https://arxiv.org/abs/2508.05629, equation 9. Reference implementation: `trl.SFTTrainer`
    with `loss_type="dft"`.
    """
    sequences = sequences_of(input, linear_weight, target, ignore_index, None)
    head = Head(linear_weight, linear_bias, temperature, softcap, ignore_index, skip_ignored, chunk_size)
    counts = sequences.counts.float()
    weight = counts / number_of_items(num_items_in_batch, sequences)
    terms = policy_terms(PolicyOptions("dft"), counts, weight, sequences)
    loss, _, entropy = head.policy(input, target, terms, sequences)
    return loss, {"entropy": mean_over_tokens(entropy, sequences)}


def multi_token(
    inputs: Sequence[Tensor], linear_weight: Tensor | Sequence[Tensor], targets: Sequence[Tensor], *,
    head_weights: Sequence[float] | None = None, label_smoothing: float = 0.0, z_loss: float = 0.0,
    linear_bias: Tensor | None = None, softcap: float = 0.0, ignore_index: int = -100, chunk_size: int = 0,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Cross entropy of several heads on hidden states of their own, as for predicting several tokens ahead.

        sum over heads of head_weight * mean over its tokens of (-log p + z_loss * logsumexp**2)

    Args:
        inputs: Of each head the hidden states `[B, S, H]`.
        linear_weight: The projection of all, `[V, H]`, or one of each head.
        targets: Of each head `[B, S]`: the caller shifts the second by one token more than the first, and so on.
        head_weights: One for each head; 1 if None.
        label_smoothing, z_loss, linear_bias, softcap, ignore_index, chunk_size: As in
            `llmk.functional.fused_linear_ce`.

    Returns:
        The loss, a float32 scalar, to which a head without a token adds 0, and the metrics "loss/head_0" and so on.

    Raises:
        TypeError: An argument is not a tensor, or a dtype does not fit.
        ValueError: A shape or an option does not fit.

    Gradients are made in the forward pass: three products a head.

    Source: Gloeckle et al., 2024, https://arxiv.org/abs/2404.19737.
    """
    heads = len(inputs)
    if heads == 0:
        raise ValueError("inputs: expected the hidden states of at least one head, got none")
    weights = [linear_weight] * heads if isinstance(linear_weight, Tensor) else list(linear_weight)
    scales = [1.0] * heads if head_weights is None else list(head_weights)
    for name, values in (("linear_weight", weights), ("targets", targets), ("head_weights", scales)):
        if len(values) != heads:
            raise ValueError(f"{name}: expected {heads}, one for each of inputs, got {len(values)}")
    check_not_negative("z_loss", z_loss)
    batches = [sequences_of(x, w, t, ignore_index, None) for x, w, t in zip(inputs, weights, targets, strict=True)]
    losses = [
        fused_linear_ce(
            x, w, t, linear_bias=linear_bias, ignore_index=ignore_index, reduction="sum",
            label_smoothing=label_smoothing, softcap=softcap, z_loss=z_loss, chunk_size=chunk_size,
        )
        / sequences.counts.sum().clamp(min=1)
        for x, w, t, sequences in zip(inputs, weights, targets, batches, strict=True)
    ]  # fmt: skip
    metrics = {f"loss/head_{i}": loss.detach() for i, loss in enumerate(losses)}
    return torch.stack([scale * loss for scale, loss in zip(scales, losses, strict=True)]).sum(), metrics
