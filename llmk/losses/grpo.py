"""Group relative policy optimization (GRPO) and its variants, which differ in the token loss or its reduction."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from llmk.losses._batch import (
    Batch,
    Sequences,
    VocabGroup,
    check_between,
    check_per_sequence,
    check_per_token,
    denominator_of,
    mean_over_tokens,
)
from llmk.losses._policy import (
    AGGREGATIONS,
    TYPES,
    VespoOptions,
    aggregation_weights,
    largest_covariance,
    ratio_level,
    vespo_weight,
)
from llmk.losses._sampling import difference_metrics, high_entropy_mask, masked_max, masked_min, ratio_metrics
from llmk.ops.linear_loss.fused_linear_policy import check_policy_options
from llmk.ops.linear_loss.objectives.policy import PolicyOptions, PolicyTerms, bounded
from llmk.registry import (
    FromArguments,
    check_finite,
    check_flag,
    check_option,
    from_arguments,
    with_arguments,
)

LEVELS = ("token", "sequence")


@with_arguments
def grpo(
    arguments: dict[str, Any], /,
    input: Tensor, linear_weight: Tensor, target: Tensor, advantages: Tensor, *,
    old_per_token_logps: Tensor | None = None, ref_per_token_logps: Tensor | None = None, beta: float = 0.0,
    epsilon: float = 0.2, epsilon_high: float | None = None, delta: float | None = None, loss_type: str = "dapo",
    loss_agg: str | None = None, importance_sampling_level: str = "token",
    importance_sampling_ratio: Tensor | None = None,
    num_items_in_batch: Tensor | float | None = None, max_completion_length: int | None = None,
    num_sequences_in_batch: Tensor | float | None = None, count_empty_sequences: bool = True,
    entropy_coef: float = 0.0, use_bias_correction_kl: bool = True, kl_estimator: str = "k3",
    max_log_ratio: float | None = None, clip_ratio_c: float | None = None,
    off_policy_mask_threshold: float | None = None, sampling_per_token_logps: Tensor | None = None,
    top_entropy_quantile: float = 1.0, sapo_temperature_pos: float = 1.0, sapo_temperature_neg: float = 1.05,
    kl_cov_ratio: float = 0.0002, ppo_kl_coef: float = 1.0,
    vespo_k_pos: float = 2.0, vespo_lambda_pos: float = 3.0, vespo_k_neg: float = 3.0, vespo_lambda_neg: float = 2.0,
    linear_bias: Tensor | None = None, temperature: float = 1.0, logit_scale: float = 1.0, softcap: float = 0.0,
    ignore_index: int = -100, skip_ignored: bool = True, chunk_size: int = 0,
    logits_dtype: torch.dtype | None = None, sequence_ids: Tensor | None = None,
    num_sequences: int | None = None, support: Tensor | None = None, group: Any = None, context_group: Any = None,
    vocab_group: VocabGroup = None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Group relative policy optimization: with ratio = pi / pi_old and A the advantage, the loss of a token is

        -min(ratio * A, clip(ratio, 1 - epsilon, 1 + epsilon_high) * A) + beta * KL(pi, ref)

    `loss_type` selects other token losses, and how they are summed over tokens and divided.

    Args:
        input: Hidden states `[B, S, H]`, aligned with `target`.
        linear_weight: `[V, H]`.
        target: `[B, S]`, `ignore_index` where a token does not count: padding, a tool's output, a truncated completion.
        advantages: `[B]` or `[B, 1]`, one for each sequence, or `[B, S]`.
        old_per_token_logps: Log-probabilities `[B, S]` of the old policy, with which the step began; those of `input`,
            detached, if None.
        ref_per_token_logps: Log-probabilities `[B, S]` of the reference model; needed where `beta` is not 0.
        beta: The weight of the divergence from the reference.
        epsilon: The ratio is clipped from below at 1 - epsilon.
        epsilon_high: The ratio is clipped from above at 1 + epsilon_high; `epsilon` if None. "cispo" clips at
            epsilon_high itself.
        delta: Upper bound of the unclipped ratio, for negative advantages too.
        clip_ratio_c: Upper bound, above 1, of the ratio in the clipped losses where the advantage is negative: the dual
            clip; verl has 3. Above 1 + epsilon_high it is what `delta` is.
        loss_type: The token loss and the denominator of its sum:
            "dapo", by `num_items_in_batch`; "bnpo", by the tokens that count; "dr_grpo", by `B *
            max_completion_length`; "grpo", the mean over sequences of their means; "luspo", the mean of their sums;
            "cispo", a clipped ratio as the constant weight of A * log pi, by `num_items_in_batch`; "sapo", a soft gate
            for the clip, divided as "grpo"; "vespo", a weight from the sequence's ratio, divided as "dapo".
            "gpg", -A * log pi, without a ratio, divided as "dapo".
            "gmpo", -A times the geometric mean of a sequence's ratios, divided as "grpo". Their logarithms are clipped,
            from above at epsilon_high where A is positive and from below at -epsilon where it is negative, and 0 where
            it is; the paper has 0.4. TRL's has no bias correction of the divergence.
            "dppo_tv" and "dppo_kl", -min(ratio, delta) * A * log pi with a constant first factor, divided as "dapo". A
            token is left out where A moves pi on from pi_old and their divergence, of the token against all others, is
            more than epsilon_high for a positive A and epsilon for another: abs(pi - pi_old), or KL(pi_old, pi). verl
            has 20 for `delta`.
            "kl_cov", -ratio * A, divided as "dapo", and `ppo_kl_coef * abs(log ratio)` of some tokens: those whose
            log-probability and advantage have the largest product of differences from their means over the batch.
        loss_agg: How the losses of tokens are summed and divided, in place of the way of `loss_type`: "token", by
            `num_items_in_batch`; "sequence_mean", the mean over sequences of their means; "sequence_sum", the mean of
            their sums; "constant", by `B * max_completion_length`.
        importance_sampling_level: "token", or "sequence": the ratio is the geometric mean over a sequence (GSPO), which
            it always is in "gmpo".
        importance_sampling_ratio: Factor of each token's loss that corrects for the sampler's own log-probabilities:
            `[B, S]`, `[B, 1]` or `[B]`; 0 leaves a token out.
        num_items_in_batch: Denominator of "token" and of the types that divide as it, a scalar: the tokens of all
            batches of a step; those of this batch that count if None.
        num_sequences_in_batch: Number of sequences in means over sequences and in "constant", a scalar: those of all
            batches of a step; those of this batch if None.
        count_empty_sequences: Whether a sequence without a token that counts is one of this batch's, as in TRL; False
            is verl's way.
        max_completion_length: Length by which "dr_grpo" and "constant" divide; S if None. A packed batch needs it.
        entropy_coef: Coefficient of the mean entropy over the tokens that count, which is subtracted from the loss.
        use_bias_correction_kl: Multiply the divergence by the ratio, so that its gradient is unbiased.
        kl_estimator: "k3", exp(r) - r - 1 with r = log ref / pi, "k1", -r, "k2", r**2 / 2, or "k3+", the value of "k3"
            with the gradient of "k2", which is unbiased without `use_bias_correction_kl`.
        max_log_ratio: Clamp the logarithm of the ratio, and r in the divergence, to this distance from 0, with no
            gradient through a logarithm that is farther; None for no bound, verl has 20. In "vespo" it bounds the
            logarithms of tokens, which are clamped at 20 at most.
        off_policy_mask_threshold: Leave a sequence of negative advantage out where the mean of log(sampler / pi) over
            its tokens is larger.
        sampling_per_token_logps: Log-probabilities `[B, S]` of the sampler, for the mask and the metrics;
            `old_per_token_logps` if None.
        top_entropy_quantile: Fraction of the tokens that count, those with the highest entropies in this batch, that
            have a policy loss and over which `entropy_coef` takes the mean; 1 for all.
        sapo_temperature_pos, sapo_temperature_neg: Temperatures of "sapo" for positive and for other advantages.
        kl_cov_ratio: Fraction of the tokens that count, rounded down and at least one, that "kl_cov" penalizes.
        ppo_kl_coef: Coefficient of that penalty.
        vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: Parameters of "vespo".
        linear_bias: `[V]`.
        logits_dtype: As in `llmk.functional.fused_linear_ce`.
        temperature, logit_scale, softcap, skip_ignored, chunk_size: As in `llmk.functional.linear_logprobs`.
        ignore_index: The target of a token that does not count. None of its values is read, but its hidden state must
            be finite, as the weight's gradient has 0 times it, unless `skip_ignored`.
        sequence_ids: `[1, T]`, for a packed batch `[1, T, H]`: each token's sequence as an index into `advantages [B]`.
            A token that counts with an index out of range makes the loss NaN.
        num_sequences: How many sequences a packed batch holds, where the length of `advantages` does not say it.
        support: The classes `[B, S, L]` that a sampler kept, which cut by top-k or top-p, as in
            `llmk.functional.linear_logprobs`: log-probabilities and entropies are over these alone, and those that are
            given have to be too. A token whose target is not among them does not count.
        group, context_group, vocab_group: As in `dpo`. Neither of the first two goes with "kl_cov" or
            `top_entropy_quantile`, which order the tokens of the batch; "dr_grpo" and "constant" need
            `max_completion_length` with them.

    Returns:
        The loss, a float32 scalar, 0 over no token, and metrics under TRL's names; with `support` besides
        "outside_support", the fraction of tokens left out because their target is not in it.

    Raises:
        TypeError: An argument is not a tensor, or a dtype does not fit.
        ValueError: A shape or an option does not fit.

    The gradients are made in the forward pass, with three products. Four are made, the logits twice, where a token's
    weight is not known with the chunk of logits that it is in: with "sequence" and a chunk that does not hold a whole
    sequence (with `chunk_size` 0 on a GPU up to 8 GiB with their gradient), a packed batch or, on a CPU,
    `skip_ignored`, with `entropy_coef` in 16 bits, "vespo", "kl_cov", `off_policy_mask_threshold` or
    `top_entropy_quantile`, with DTensors, and with "sequence" and `context_group`.

    Sources: Shao et al., 2024, https://arxiv.org/abs/2402.03300; each loss type in `_policy.py`; GSPO: Zheng et
    al., 2025, https://arxiv.org/abs/2507.18071; masks and bias correction: DeepSeek-V3.2, 2025,
    https://arxiv.org/abs/2512.02556; dual clip: Ye et al., 2019, https://arxiv.org/abs/1912.09729. Reference
    implementations: `trl.GRPOTrainer`, and verl for what TRL does not have.
    """
    check_option("loss_type", loss_type, tuple(TYPES))
    if loss_agg is not None:
        check_option("loss_agg", loss_agg, tuple(AGGREGATIONS))
    check_option("importance_sampling_level", importance_sampling_level, LEVELS)
    term, level = TYPES[loss_type].term, "sequence" if loss_type == "gmpo" else importance_sampling_level
    high = epsilon if epsilon_high is None else epsilon_high
    options = from_arguments(
        PolicyOptions, arguments, loss_type=term, importance_sampling_level=level, epsilon_high=high
    )
    check_policy_options(options)
    check_between("kl_cov_ratio", kl_cov_ratio, 0.0, 1.0)
    vespo = from_arguments(VespoOptions, arguments)
    check_finite("beta", beta)
    check_finite("entropy_coef", entropy_coef)
    check_finite("ppo_kl_coef", ppo_kl_coef)
    for name in ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"):
        check_finite(name, getattr(vespo, name))
    check_flag("use_bias_correction_kl", use_bias_correction_kl)
    if off_policy_mask_threshold is not None:
        check_finite("off_policy_mask_threshold", off_policy_mask_threshold)
    check_between("top_entropy_quantile", top_entropy_quantile, 0.0, 1.0)
    if loss_type == "gmpo" and top_entropy_quantile != 1.0:
        raise ValueError(f"top_entropy_quantile: expected 1 with loss_type 'gmpo', got {top_entropy_quantile}")
    batch, advantages = policy_batch(arguments)
    sequences = batch.sequences
    if sequences.ranks.tokens and (loss_type == "kl_cov" or top_entropy_quantile != 1.0):
        name = "group" if sequences.ranks.sequences else "context_group"
        raise ValueError(f"{name}: expected None with 'kl_cov' or top_entropy_quantile, which order the batch's tokens")
    old_logps, ref_logps, sampled_logps = map(
        batch.per_token, ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps")
    )
    if beta != 0.0 and ref_per_token_logps is None:
        raise ValueError(f"ref_per_token_logps: expected shape {tuple(target.shape)} where beta is {beta}, got None")
    weights = aggregation_weights(loss_agg or loss_type, sequences, arguments)
    correction = None
    if importance_sampling_ratio is not None:
        correction = _correction(importance_sampling_ratio, sequences)

    ref_logps = None if beta == 0.0 else ref_logps
    terms = PolicyTerms(
        advantages=sequences.per_token(advantages),
        token_weight=weights if correction is None or loss_type == "vespo" else weights * correction,
        old_logps=old_logps,
        ref_logps=ref_logps,
        kl_weight=None if ref_logps is None else beta * weights,
        entropy_weight=_mean_weights(entropy_coef, sequences.mask, sequences.num_tokens),
        options=options,
        level=ratio_level(level, sequences),
    )
    late_vespo = vespo if loss_type == "vespo" else None
    late = _LateWeights.of(arguments, correction=correction, vespo=late_vespo, sampled_logps=sampled_logps)
    if loss_type != "kl_cov" and late.are_none:
        loss, logps, entropy = batch.policy(terms)
    else:
        logps, entropy = batch.logprobs()
        terms = late.replaced(terms, logps.detach(), entropy.detach(), sequences)
        loss = sequences.total(terms.loss(logps, entropy))
        if loss_type == "kl_cov":
            selected = largest_covariance(logps.detach(), terms.advantages, sequences.mask, kl_cov_ratio)
            penalty = ppo_kl_coef * bounded(terms.token_log_ratio(logps), max_log_ratio).abs()
            loss = loss + torch.where(selected, terms.token_weight * penalty, 0.0).sum()
        logps, entropy = logps.detach(), entropy.detach()

    metrics = {"entropy": mean_over_tokens(entropy, sequences)} | batch.outside
    if terms.kl_weight is not None:
        metrics["kl"] = mean_over_tokens(terms.divergence(logps, terms.log_ratio(logps)), sequences)
    if terms.entropy_weight is not None:
        metrics["policy_loss"] = loss.detach() + sequences.total((terms.entropy_weight * entropy).sum())
    old = logps if terms.old_logps is None else terms.old_logps
    metrics |= _sampler_metrics(importance_sampling_ratio, correction, old, sampled_logps, sequences)
    by_sequence = advantages.dim() == 1 and (level == "sequence" or loss_type == "vespo")
    if loss_type == "vespo":
        phi = vespo_weight(logps - old, terms.advantages, correction, sequences, vespo)
        metrics["vespo/phi_seq_mean"] = _means(phi, sequences, by_sequence)[1]
    metrics |= _clip_metrics(terms, logps, sequences, by_sequence)
    return sequences.checked(loss), metrics


def _mean_weights(coef: float, mask: Tensor, count: Tensor) -> Tensor | None:
    """Return weights whose weighted sum is `coef` times the mean over `count` tokens, those of the mask; None for 0."""
    return None if coef == 0.0 else coef * mask.float() / denominator_of(count)


@dataclass(frozen=True, kw_only=True)
class _LateWeights(FromArguments):
    """The options of `grpo` whose weights depend on log-probabilities and entropies, of sequences or of the batch."""

    correction: Tensor | None
    vespo: VespoOptions | None
    off_policy_mask_threshold: float | None
    sampled_logps: Tensor | None  # [B, S]
    top_entropy_quantile: float
    entropy_coef: float

    @property
    def are_none(self) -> bool:
        return self.vespo is None and self.off_policy_mask_threshold is None and self.top_entropy_quantile == 1.0

    def replaced(self, terms: PolicyTerms, logps: Tensor, entropy: Tensor, sequences: Sequences) -> PolicyTerms:
        """Return the terms with these weights."""
        weight, entropy_weight = terms.token_weight, terms.entropy_weight
        old = logps if terms.old_logps is None else terms.old_logps
        if self.vespo is not None:
            weight = weight * vespo_weight(logps - old, terms.advantages, self.correction, sequences, self.vespo)
        if self.off_policy_mask_threshold is not None:
            # The sampler's log-probability is NaN where it could not score a token.
            sampled = old if self.sampled_logps is None else self.sampled_logps
            drift = (sampled - logps).nan_to_num(0.0)
            drift = sequences.expand_to_tokens(sequences.token_means(drift))
            weight = weight * ((terms.advantages >= 0) | (drift <= self.off_policy_mask_threshold))
        if self.top_entropy_quantile < 1.0:
            selected = high_entropy_mask(entropy, sequences.mask, self.top_entropy_quantile)
            weight = torch.where(selected, weight, 0.0)
            entropy_weight = _mean_weights(self.entropy_coef, selected, selected.sum())
        return replace(terms, token_weight=weight, entropy_weight=entropy_weight)


def policy_batch(arguments: dict[str, Any]) -> tuple[Batch, Tensor]:
    """Return the batch, and the advantages, `[B]`, one for each sequence, or `[B, S]`; TRL's `[B, 1]` are `[B]`."""
    advantages = arguments["advantages"]
    if isinstance(advantages, Tensor) and advantages.dim() == 2 and advantages.shape[1] == 1:
        advantages = advantages[:, 0]
    batch = Batch.of({**arguments, "advantages": advantages}, counted_by="advantages")
    slots, mask = batch.sequences.slots, batch.sequences.mask
    if isinstance(advantages, Tensor) and advantages.dim() == 1:
        check_per_sequence("advantages", advantages, slots, mask)
        return batch, advantages
    if isinstance(advantages, Tensor) and advantages.shape != mask.shape:
        expected = f"({slots},) (one for each sequence) or {tuple(mask.shape)} (that of target)"
        raise ValueError(f"advantages: expected shape {expected}, got {tuple(advantages.shape)}")
    check_per_token("advantages", advantages, mask)
    return batch, advantages


def _correction(ratio: Tensor, sequences: Sequences) -> Tensor:
    mask = sequences.mask
    if isinstance(ratio, Tensor) and ratio.dim() == 1:
        check_per_sequence("importance_sampling_ratio", ratio, sequences.slots, mask)
        ratio = sequences.expand_to_tokens(ratio)
    elif isinstance(ratio, Tensor) and sequences.ids is None and ratio.shape == (mask.shape[0], 1):
        ratio = ratio.expand(mask.shape)
    check_per_token("importance_sampling_ratio", ratio, mask)
    return torch.where(mask, ratio.detach().float(), 1.0)


def _sampler_metrics(
    ratio: Tensor | None, correction: Tensor | None, old: Tensor, sampled: Tensor | None, sequences: Sequences
) -> dict[str, Tensor]:
    """Return metrics of the importance sampling `ratio`, per sequence or per token, and of its log-probabilities."""
    if ratio is None or correction is None:
        return {}
    by_sequence = ratio.dim() == 1 or ratio.shape[1] == 1 != sequences.mask.shape[1]
    if by_sequence:
        metrics = ratio_metrics(ratio.detach().float().flatten(), sequences.exists, sequences.ranks.sequences)
    else:
        metrics = ratio_metrics(correction, sequences.mask, sequences.ranks.tokens)
    return metrics if sampled is None else metrics | difference_metrics(old, sampled, sequences)


def _means(values: Tensor, sequences: Sequences, by_sequence: bool) -> tuple[Tensor, Tensor]:
    """Return the means of values `[B, S]` over each sequence, and the mean over sequences or over tokens."""
    values = sequences.per_token(values)
    sequence_values = sequences.token_means(values)
    return sequence_values, sequences.mean(sequence_values) if by_sequence else mean_over_tokens(values, sequences)


def _clip_metrics(terms: PolicyTerms, logps: Tensor, sequences: Sequences, by_sequence: bool) -> dict[str, Tensor]:
    """Return the fraction of tokens clipped, or of sequences where ratio and advantage are per sequence."""
    options, advantages = terms.options, terms.advantages
    if options.loss_type == "gmpo":
        log_ratio = terms.token_log_ratio(logps)
        low, high = log_ratio < -options.epsilon, log_ratio > options.epsilon_high
        return _clip_fractions(low & (advantages < 0), high & (advantages > 0), sequences, by_sequence=False)
    keeps = terms.keeps(logps)
    if keeps is not None:
        return {"dppo_clip_ratio": _means(~keeps, sequences, by_sequence=False)[1]}
    if options.loss_type not in ("cispo", "clipped"):
        return {}
    ratio = terms.ratio(logps)
    if options.loss_type == "cispo":
        clips = (ratio > options.epsilon_high) & (advantages > 0)
        return {"cispo_clip_ratio": _means(clips, sequences, by_sequence)[1]}
    ratio = ratio if options.delta is None else ratio.clamp(max=options.delta)
    dual: dict[str, Tensor] = {}
    if options.clip_ratio_c is not None:
        above = (ratio > options.clip_ratio_c) & (advantages < 0)
        dual = {"clip_ratio/dual_mean": _means(above, sequences, by_sequence)[1]}
    low, high = ratio < 1 - options.epsilon, ratio > 1 + options.epsilon_high
    return dual | _clip_fractions(low & (advantages < 0), high & (advantages > 0), sequences, by_sequence)


def _clip_fractions(low: Tensor, high: Tensor, sequences: Sequences, by_sequence: bool) -> dict[str, Tensor]:
    """Return TRL's metrics of the tokens that are clipped from below and from above."""
    low, low_mean = _means(low, sequences, by_sequence)
    high, high_mean = _means(high, sequences, by_sequence)
    nonempty = sequences.lengths > 0
    return {
        "clip_ratio/low_mean": low_mean,
        "clip_ratio/high_mean": high_mean,
        "clip_ratio/region_mean": low_mean + high_mean,
        "clip_ratio/low_min": masked_min(low, nonempty, sequences.ranks.sequences),
        "clip_ratio/high_max": masked_max(high, nonempty, sequences.ranks.sequences),
    }
