"""Policy gradients from advantages of one's own: REINFORCE, RLOO and PPO with its value term."""

from typing import Any

import torch
from torch import Tensor

from llmk.losses._batch import (
    Sequences,
    VocabGroup,
    check_between,
    check_denominator,
    check_is_tensor,
    check_per_sequence,
    check_per_token,
    mean_over_tokens,
)
from llmk.losses._policy import AGGREGATIONS, aggregation_weights, ratio_level
from llmk.losses._sampling import masked_max, masked_min
from llmk.losses.grpo import grpo, policy_batch
from llmk.ops.linear_loss.fused_linear_policy import check_policy_options
from llmk.ops.linear_loss.objectives.policy import PolicyOptions, PolicyTerms, bounded
from llmk.registry import check_not_negative, check_option, from_arguments, with_arguments


@with_arguments
def reinforce(
    arguments: dict[str, Any], /,
    input: Tensor, linear_weight: Tensor, target: Tensor, advantages: Tensor, *,
    loss_agg: str = "token", max_completion_length: int | None = None,
    num_sequences_in_batch: Tensor | float | None = None, count_empty_sequences: bool = True,
    num_items_in_batch: Tensor | float | None = None, linear_bias: Tensor | None = None, temperature: float = 1.0,
    logit_scale: float = 1.0, softcap: float = 0.0, ignore_index: int = -100, skip_ignored: bool = True,
    chunk_size: int = 0,
    logits_dtype: torch.dtype | None = None, sequence_ids: Tensor | None = None, num_sequences: int | None = None,
    support: Tensor | None = None, group: Any = None, context_group: Any = None,
    vocab_group: VocabGroup = None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """REINFORCE: the mean over the tokens that count of -A * log pi.

    Args:
        input, linear_weight, target: As in `grpo`.
        advantages: Rewards less a baseline: `[B]` or `[B, 1]`, one for each sequence, or `[B, S]`.
        loss_agg: How the losses of tokens are summed and divided: "token", "sequence_mean", "sequence_sum" or
            "constant", as in `grpo`.
        num_items_in_batch: Denominator of "token", a scalar; the tokens that count if None.
        max_completion_length, num_sequences_in_batch, count_empty_sequences: As in `grpo`.
        linear_bias, temperature, logit_scale, softcap, ignore_index, skip_ignored, chunk_size: As in `grpo`.
        logits_dtype, sequence_ids, num_sequences, support, group, context_group, vocab_group: As in `grpo`.

    Returns:
        The loss, a float32 scalar, 0 over no token, and the metric "entropy"; "outside_support" as in `grpo`.

    Raises:
        TypeError: An argument is not a tensor, or a dtype does not fit.
        ValueError: A shape or an option does not fit.

    Three products, as `grpo` with ratios of tokens.

    Source: Williams, 1992, https://doi.org/10.1007/BF00992696.
    """
    check_option("loss_agg", loss_agg, tuple(AGGREGATIONS))
    return grpo(**arguments, loss_type="gpg")


@with_arguments
def rloo(
    arguments: dict[str, Any], /,
    input: Tensor, linear_weight: Tensor, target: Tensor, advantages: Tensor, *,
    old_logps: Tensor | None = None, epsilon: float = 0.2, epsilon_high: float | None = None,
    max_log_ratio: float | None = None, num_items_in_batch: Tensor | float | None = None,
    linear_bias: Tensor | None = None, temperature: float = 1.0, logit_scale: float = 1.0, softcap: float = 0.0,
    ignore_index: int = -100, skip_ignored: bool = True, chunk_size: int = 0,
    logits_dtype: torch.dtype | None = None, sequence_ids: Tensor | None = None, support: Tensor | None = None,
    group: Any = None, context_group: Any = None,
    vocab_group: VocabGroup = None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """REINFORCE leave-one-out: the mean over sequences of the clipped loss of PPO, with the ratio of whole sequences.

    Args:
        input, linear_weight, target: As in `grpo`.
        advantages: `[B]` or `[B, 1]`: the reward of a completion less the mean of those of the prompt's others.
        old_logps: Log-probabilities of the old policy, summed over each sequence `[B]`; those of `input` if None.
        epsilon: The ratio is clipped from below at 1 - epsilon.
        epsilon_high: The ratio is clipped from above at 1 + epsilon_high; `epsilon` if None.
        max_log_ratio: Clamp the logarithm of the ratio to this distance from 0, as in `grpo`.
        num_items_in_batch: Denominator of the mean over sequences, a scalar: the sequences of all batches of a step;
            those of this batch if None.
        linear_bias, temperature, logit_scale, softcap, ignore_index, skip_ignored, chunk_size: As in `grpo`.
        logits_dtype, sequence_ids, support, group, context_group, vocab_group: As in `grpo`.

    Returns:
        The loss, a float32 scalar, and metrics under TRL's names.

    Raises:
        TypeError: An argument is not a tensor, or a dtype does not fit.
        ValueError: A shape or an option does not fit.

    Three products or four, as `grpo` with ratios of sequences.

    Sources: Ahmadian et al., 2024, https://arxiv.org/abs/2402.14740. Reference implementation: `trl.RLOOTrainer`.
    """
    high = epsilon if epsilon_high is None else epsilon_high
    options = from_arguments(PolicyOptions, arguments, importance_sampling_level="sequence_sum", epsilon_high=high)
    check_policy_options(options)
    check_denominator("num_items_in_batch", num_items_in_batch)
    batch, advantages = policy_batch(arguments)
    sequences, ranks = batch.sequences, batch.sequences.ranks
    check_per_sequence("advantages", advantages, sequences.slots, batch.target)
    if old_logps is not None:
        check_per_sequence("old_logps", old_logps, sequences.slots, batch.target)
    lengths, advantages = sequences.lengths.clamp(min=1.0), advantages.detach().float()
    old = None if old_logps is None else old_logps.detach().float()
    items = {"num_sequences_in_batch": num_items_in_batch}
    weight = sequences.mask * aggregation_weights("sequence_mean", sequences, items)
    terms = PolicyTerms(
        advantages=sequences.per_token(advantages),
        token_weight=weight,
        old_logps=None if old is None else sequences.per_token(old / lengths),
        options=options,
        level=ratio_level("sequence_sum", sequences),
    )
    loss, token_logps, entropy = batch.policy(terms)
    logps = sequences.sum(token_logps)
    ratio = bounded(logps - (logps if old is None else old), max_log_ratio).exp()
    # An empty completion has no token that could carry its loss.
    empty = sequences.lengths == 0
    of_empty = torch.where(empty, clipped_loss(ratio, advantages, epsilon, high), 0.0)
    loss = loss + sequences.mean(of_empty, num_items_in_batch)
    low_clips = ((ratio < 1 - epsilon) & (advantages < 0)).float()
    high_clips = ((ratio > 1 + high) & (advantages > 0)).float()
    low_mean, high_mean = sequences.mean(low_clips), sequences.mean(high_clips)
    all_sequences = torch.ones_like(empty)
    metrics = {
        "entropy": mean_over_tokens(entropy, sequences),
        "clip_ratio/low_mean": low_mean,
        "clip_ratio/low_min": masked_min(low_clips, all_sequences, ranks.sequences),
        "clip_ratio/high_mean": high_mean,
        "clip_ratio/high_max": masked_max(high_clips, all_sequences, ranks.sequences),
        "clip_ratio/region_mean": low_mean + high_mean,
        **batch.outside,
    }
    return sequences.checked(loss), metrics


def clipped_loss(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


@with_arguments
def ppo(
    arguments: dict[str, Any], /,
    input: Tensor, linear_weight: Tensor, target: Tensor, advantages: Tensor, *,
    old_per_token_logps: Tensor | None = None, cliprange: float = 0.2, values: Tensor | None = None,
    old_values: Tensor | None = None, returns: Tensor | None = None, cliprange_value: float = 0.2,
    max_log_ratio: float | None = None, clip_ratio_c: float | None = None,
    loss_agg: str = "token", max_completion_length: int | None = None,
    num_items_in_batch: Tensor | float | None = None, num_sequences_in_batch: Tensor | float | None = None,
    count_empty_sequences: bool = True,
    vf_coef: float = 0.1, linear_bias: Tensor | None = None, temperature: float = 1.0, logit_scale: float = 1.0,
    softcap: float = 0.0, ignore_index: int = -100, skip_ignored: bool = True, chunk_size: int = 0,
    logits_dtype: torch.dtype | None = None,
    sequence_ids: Tensor | None = None, num_sequences: int | None = None, support: Tensor | None = None,
    group: Any = None, context_group: Any = None,
    vocab_group: VocabGroup = None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Proximal policy optimization: the mean over the tokens that count of the policy loss and the value loss,

        -min(ratio * A, clip(ratio, 1 - cliprange, 1 + cliprange) * A)
        + vf_coef / 2 * max((v - R)**2, (clip(v, v_old - cliprange_value, v_old + cliprange_value) - R)**2)

    Args:
        input, linear_weight, target: As in `grpo`.
        advantages: `[B, S]`, or `[B]` or `[B, 1]`, one for each sequence.
        old_per_token_logps: Log-probabilities `[B, S]` of the old policy; those of `input` if None.
        cliprange: The ratio is clipped to this distance from 1.
        max_log_ratio: Clamp the logarithm of the ratio to this distance from 0, as in `grpo`.
        clip_ratio_c: Upper bound, above 1, of the ratio where the advantage is negative, the dual clip, as in `grpo`.
        values: Predictions `[B, S]` of the value model, which get a gradient; None for the policy loss alone.
        old_values, returns: `[B, S]`, needed with `values`: v_old and R.
        cliprange_value: Values are clipped to this distance from the old ones.
        vf_coef: Coefficient of the value loss.
        loss_agg: How the losses of tokens are summed and divided, those of values too: "token", "sequence_mean",
            "sequence_sum" or "constant", as in `grpo`.
        num_items_in_batch: Denominator of "token", a scalar; the tokens that count if None.
        max_completion_length, num_sequences_in_batch, count_empty_sequences: As in `grpo`.
        linear_bias, temperature, logit_scale, softcap, ignore_index, skip_ignored, chunk_size: As in `grpo`.
        logits_dtype, sequence_ids, num_sequences, support, group, context_group, vocab_group: As in `grpo`.

    Returns:
        The loss, a float32 scalar, 0 over no token, and metrics under TRL's names.

    Raises:
        TypeError: An argument is not a tensor, or a dtype does not fit.
        ValueError: A shape or an option does not fit.

    Three products, as `grpo` with ratios of tokens.

    Sources: Schulman et al., 2017, https://arxiv.org/abs/1707.06347, equations 7 and 9; dual clip: Ye et al., 2019,
    https://arxiv.org/abs/1912.09729. Reference implementation: the `PPOTrainer` that TRL had before 1.16.
    """
    check_between("cliprange", cliprange, 0.0, float("inf"))
    check_between("cliprange_value", cliprange_value, 0.0, float("inf"))
    check_not_negative("vf_coef", vf_coef)
    check_option("loss_agg", loss_agg, tuple(AGGREGATIONS))
    options = from_arguments(PolicyOptions, arguments, epsilon=cliprange, epsilon_high=cliprange)
    check_policy_options(options)
    batch, advantages = policy_batch(arguments)
    sequences = batch.sequences
    old = batch.per_token("old_per_token_logps")
    _check_values(values, old_values, returns, batch.target)
    weight = aggregation_weights(loss_agg, sequences, arguments)
    terms = PolicyTerms(
        advantages=sequences.per_token(advantages), token_weight=weight, old_logps=old, options=options,
        level=ratio_level("token", sequences),
    )  # fmt: skip
    policy, logps, entropy = batch.policy(terms)
    ratio, negative = terms.ratio(logps), terms.advantages < 0
    clips = torch.where(negative, ratio < 1 - cliprange, (ratio > 1 + cliprange) & (terms.advantages > 0))
    metrics = {
        "policy/entropy_avg": mean_over_tokens(entropy, sequences),
        "policy/approxkl_avg": 0.5 * mean_over_tokens((logps - (logps if old is None else old)).square(), sequences),
        "policy/clipfrac_avg": mean_over_tokens((clips & sequences.mask).float(), sequences),
        "loss/policy_avg": policy.detach(),
        **batch.outside,
    }
    if clip_ratio_c is not None:
        metrics["policy/clipfrac_dual_avg"] = mean_over_tokens((negative & (ratio > clip_ratio_c)).float(), sequences)
    if values is None:
        return sequences.checked(policy), metrics
    assert old_values is not None
    assert returns is not None
    value, value_metrics = _value_loss(values, old_values, returns, cliprange_value, weight, sequences)
    return sequences.checked(policy + vf_coef * value), metrics | value_metrics


def _check_values(values: Tensor | None, old_values: Tensor | None, returns: Tensor | None, target: Tensor) -> None:
    for name, value in (("values", values), ("old_values", old_values), ("returns", returns)):
        if values is None and value is not None:
            raise ValueError(f"{name}: expected None where values is None, got a {type(value).__name__}")
        if values is not None:
            check_is_tensor(name, value)
            check_per_token(name, value, target)


def _value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, cliprange: float, weight: Tensor, sequences: Sequences
) -> tuple[Tensor, dict[str, Tensor]]:
    old, returns = sequences.per_token(old_values), sequences.per_token(returns)
    values = torch.where(sequences.mask, values.float(), 0.0)
    free = (values - returns).square()
    held = (torch.clamp(values, old - cliprange, old + cliprange) - returns).square()
    loss = 0.5 * sequences.total((weight * torch.where(sequences.mask, torch.maximum(free, held), 0.0)).sum())
    clips = (held > free).detach() & sequences.mask
    return loss, {"loss/value_avg": loss.detach(), "val/clipfrac_avg": mean_over_tokens(clips.float(), sequences)}
