"""Group relative policy optimization, and the losses that differ in the term of a token or in how terms are summed."""

from dataclasses import replace

import torch
from torch import Tensor

from llmk.losses._checks import check_between, check_of_sequences, check_of_tokens, check_positive
from llmk.losses._head import Head, mean_over_tokens
from llmk.losses._policy import TYPES, Totals, VespoOptions, level_of, vespo_weight
from llmk.losses._sampling import difference_metrics, of_high_entropy, ratio_metrics
from llmk.losses._sequences import Sequences, number_of_sequences, sequences_of
from llmk.ops.linear_loss.policy_losses import ESTIMATORS, PolicyOptions, PolicyTerms
from llmk.registry import check_finite, check_not_negative, check_option

LEVELS = ("token", "sequence")


def grpo(
    input: Tensor, linear_weight: Tensor, target: Tensor, advantages: Tensor, *,
    old_per_token_logps: Tensor | None = None, ref_per_token_logps: Tensor | None = None, beta: float = 0.0,
    epsilon: float = 0.2, epsilon_high: float | None = None, delta: float | None = None, loss_type: str = "dapo",
    importance_sampling_level: str = "token", importance_sampling_ratio: Tensor | None = None,
    num_items_in_batch: Tensor | float | None = None, max_completion_length: int | None = None,
    entropy_coef: float = 0.0, use_bias_correction_kl: bool = True, kl_estimator: str = "k3",
    off_policy_mask_threshold: float | None = None, sampling_per_token_logps: Tensor | None = None,
    top_entropy_quantile: float = 1.0,
    sapo_temperature_pos: float = 1.0, sapo_temperature_neg: float = 1.05, vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0, vespo_k_neg: float = 3.0, vespo_lambda_neg: float = 2.0,
    linear_bias: Tensor | None = None, temperature: float = 1.0, softcap: float = 0.0, ignore_index: int = -100,
    skip_ignored: bool = False, chunk_size: int = 0, sequence_ids: Tensor | None = None,
    num_sequences: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Group relative policy optimization: with ratio = pi / pi_old and A the advantage, of each token

        -min(ratio * A, clip(ratio, 1 - epsilon, 1 + epsilon_high) * A) + beta * KL(pi, ref)

    or what `loss_type` has in its place, summed over tokens and divided as `loss_type` says.

    Args:
        input: Hidden states `[B, S, H]`, aligned with `target`.
        linear_weight: `[V, H]`.
        target: `[B, S]`, `ignore_index` where a token does not count: padding, a tool's output, a truncated completion.
        advantages: `[B]`, one for each sequence, or `[B, S]`.
        old_per_token_logps: `[B, S]`, of the policy that the step began with; those of `input`, as constants, if None.
        ref_per_token_logps: `[B, S]`, of the reference model; needed where `beta` is not 0.
        beta: The weight of the divergence from the reference.
        epsilon: The ratio is clipped at 1 - epsilon.
        epsilon_high: And at 1 + epsilon_high; `epsilon` if None. "cispo" clips at epsilon_high itself.
        delta: An upper bound of the ratio that is not clipped, for negative advantages too.
        loss_type: The term and what its sum is divided by:
            "dapo", by `num_items_in_batch`; "bnpo", by the tokens that count; "dr_grpo", by `B *
            max_completion_length`; "grpo", the mean over sequences of their means; "luspo", the mean of their sums;
            "cispo", a clipped ratio as the constant weight of A * log pi, by `num_items_in_batch`; "sapo", a soft gate
            for the clip, divided as "grpo"; "vespo", a weight from the sequence's ratio, divided as "dapo".
        importance_sampling_level: "token", or "sequence": the ratio is the geometric mean over a sequence (GSPO).
        importance_sampling_ratio: What terms are multiplied by to correct for the sampler's own log-probabilities:
            `[B, S]`, `[B, 1]` or `[B]`; 0 leaves a token out.
        num_items_in_batch: What "dapo", "cispo" and "vespo" divide by, a scalar; the tokens that count if None.
        max_completion_length: Of "dr_grpo"; S if None, which a packed batch does not have.
        entropy_coef: The mean entropy over the tokens that count times this is taken off the loss.
        use_bias_correction_kl: Multiply the divergence by the ratio, so that its gradient is unbiased.
        kl_estimator: "k3", exp(r) - r - 1 with r = log ref / pi, "k1", -r, or "k2", r**2 / 2.
        off_policy_mask_threshold: Leave a sequence of negative advantage out where the mean of log(sampler / pi) over
            its tokens is larger.
        sampling_per_token_logps: `[B, S]`, of the sampler, for that and for metrics; `old_per_token_logps` if None.
        top_entropy_quantile: The share of the tokens that count, those of the highest entropies in this batch, whose
            policy term is kept and over which the mean of `entropy_coef` is taken; 1 for all.
        sapo_temperature_pos, sapo_temperature_neg: Of "sapo", for positive advantages and for the others.
        vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: Of "vespo".
        linear_bias: `[V]`.
        temperature, softcap, skip_ignored, chunk_size: As in `llmk.functional.linear_logprobs`.
        ignore_index: The target of a token that does not count. Nothing else is read of it.
        sequence_ids: `[1, T]`, of a packed batch `[1, T, H]`: the number of each token's sequence, its index into
            `advantages [B]`. A token that counts and has no such number makes the loss NaN.
        num_sequences: How many sequences a packed batch holds, where the length of `advantages` does not say it.

    Returns:
        The loss, a float32 scalar, 0 over no token, and metrics under TRL's names.

    Raises:
        TypeError: An argument is not a tensor, or a dtype does not fit.
        ValueError: A shape or an option does not fit.

    The gradients are made in the forward pass, with three products. Four are made, the logits twice, where a token's
    weight is not known with the chunk of logits that it is in: with "sequence" and a chunk that does not hold a whole
    sequence (with `chunk_size` 0 on a GPU 2.67 GiB), a packed batch or `skip_ignored`, with "vespo",
    `off_policy_mask_threshold` or `top_entropy_quantile`, and with DTensors.

    Sources: Shao et al., 2024, https://arxiv.org/abs/2402.03300; of each term and sum in `_policy.py`; GSPO: Zheng et
    al., 2025, https://arxiv.org/abs/2507.18071; masks and bias correction: DeepSeek-V3.2, 2025,
    https://arxiv.org/abs/2512.02556. Reference implementation: `trl.GRPOTrainer`.
    """
    check_option("loss_type", loss_type, tuple(TYPES))
    check_option("importance_sampling_level", importance_sampling_level, LEVELS)
    check_option("kl_estimator", kl_estimator, tuple(ESTIMATORS))
    check_between("epsilon", epsilon, 0.0, float("inf"))
    for name, number in (("beta", beta), ("entropy_coef", entropy_coef)):
        check_finite(name, number)
    check_between("top_entropy_quantile", top_entropy_quantile, 0.0, 1.0)
    for name, number in (("epsilon_high", epsilon_high), ("delta", delta)):
        if number is not None:
            check_not_negative(name, number)
    check_positive("sapo_temperature_pos", sapo_temperature_pos)
    check_positive("sapo_temperature_neg", sapo_temperature_neg)
    count = number_of_sequences(num_sequences, "advantages", advantages)
    sequences = sequences_of(input, linear_weight, target, ignore_index, sequence_ids, count)
    check_advantages(advantages, sequences)
    for name, value in (
        ("old_per_token_logps", old_per_token_logps),
        ("ref_per_token_logps", ref_per_token_logps),
        ("sampling_per_token_logps", sampling_per_token_logps),
    ):
        if value is not None:
            check_of_tokens(name, value, target)
    if beta != 0.0 and ref_per_token_logps is None:
        raise ValueError(f"ref_per_token_logps: expected shape {tuple(target.shape)} where beta is {beta}, got None")
    _check_lengths(loss_type, num_items_in_batch, max_completion_length, sequences)
    correction = None
    if importance_sampling_ratio is not None:
        correction = _correction(importance_sampling_ratio, sequences)

    head = Head(linear_weight, linear_bias, temperature, softcap, ignore_index, skip_ignored, chunk_size)
    high = epsilon if epsilon_high is None else epsilon_high
    options = PolicyOptions(
        TYPES[loss_type].term, importance_sampling_level, epsilon, high, delta,
        sapo_temperature_pos, sapo_temperature_neg, kl_estimator, use_bias_correction_kl,
    )  # fmt: skip
    weights = TYPES[loss_type].weights(sequences, Totals(num_items_in_batch, max_completion_length))
    terms = PolicyTerms(
        of_tokens(advantages, sequences),
        weights if correction is None or loss_type == "vespo" else weights * correction,
        None if old_per_token_logps is None else of_tokens(old_per_token_logps, sequences),
        None if ref_per_token_logps is None or beta == 0.0 else of_tokens(ref_per_token_logps, sequences),
        None if ref_per_token_logps is None or beta == 0.0 else beta * weights,
        None if entropy_coef == 0.0 else _mean_weights(entropy_coef, sequences.counts),
        options,
        level_of(importance_sampling_level, sequences),
    )
    vespo = None
    if loss_type == "vespo":
        vespo = VespoOptions(vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg)
    if vespo is None and off_policy_mask_threshold is None and top_entropy_quantile == 1.0:
        loss, logps, entropy = head.policy(input, target, terms, sequences)
    else:
        logps, entropy = head.logprobs(input, target)
        sampled = None if sampling_per_token_logps is None else of_tokens(sampling_per_token_logps, sequences)
        terms = _known_after_logps(
            terms, logps.detach(), entropy.detach(), sequences, correction, vespo, off_policy_mask_threshold, sampled,
            top_entropy_quantile, entropy_coef,
        )  # fmt: skip
        loss, logps, entropy = terms.loss(logps, entropy), logps.detach(), entropy.detach()

    ratio = terms.ratio(logps)
    metrics = {"entropy": mean_over_tokens(entropy, sequences)}
    if terms.kl_weight is not None:
        metrics["kl"] = mean_over_tokens(terms.divergence(logps, ratio), sequences)
    if terms.entropy_weight is not None:
        metrics["policy_loss"] = loss.detach() + (terms.entropy_weight * entropy).sum()
    old = logps if terms.old_logps is None else terms.old_logps
    metrics |= _sampler_metrics(importance_sampling_ratio, correction, old, sampling_per_token_logps, sequences)
    whole = advantages.dim() == 1 and (importance_sampling_level == "sequence" or loss_type == "vespo")
    if vespo is not None:
        phi = vespo_weight(logps - old, terms.advantages, correction, sequences, vespo)
        metrics["vespo/phi_seq_mean"] = _shares(phi, sequences, whole)[1]
    return sequences.checked(loss), metrics | _clip_metrics(ratio, terms.advantages, sequences, options, whole)


def _mean_weights(coef: float, counts: Tensor) -> Tensor:
    """What makes `coef` times the mean over those that count a sum."""
    return coef * counts.float() / counts.sum().clamp(min=1)


def _known_after_logps(
    terms: PolicyTerms, logps: Tensor, entropy: Tensor, sequences: Sequences, correction: Tensor | None,
    vespo: VespoOptions | None, off_policy_mask_threshold: float | None, sampled: Tensor | None,
    top_entropy_quantile: float, entropy_coef: float,
) -> PolicyTerms:  # fmt: skip
    """With weights that depend on log-probabilities and entropies of whole sequences, or of the batch."""
    weight, entropy_weight = terms.weight, terms.entropy_weight
    old = logps if terms.old_logps is None else terms.old_logps
    if vespo is not None:
        weight = weight * vespo_weight(logps - old, terms.advantages, correction, sequences, vespo)
    if off_policy_mask_threshold is not None:
        # Of a token that the sampler could not score nothing is known.
        drift = ((old if sampled is None else sampled) - logps).nan_to_num(0.0)
        drift = sequences.spread(sequences.averages(drift))
        weight = weight * ((terms.advantages >= 0) | (drift <= off_policy_mask_threshold))
    if top_entropy_quantile < 1.0:
        acted_on = of_high_entropy(entropy, sequences.counts, top_entropy_quantile)
        weight = torch.where(acted_on, weight, 0.0)
        entropy_weight = None if entropy_weight is None else _mean_weights(entropy_coef, acted_on)
    return replace(terms, weight=weight, entropy_weight=entropy_weight)


def check_advantages(advantages: Tensor, sequences: Sequences) -> None:
    """`[B]`, one for each sequence, or `[B, S]`."""
    if isinstance(advantages, Tensor) and advantages.dim() == 1:
        check_of_sequences("advantages", advantages, sequences.places, sequences.counts)
    else:
        check_of_tokens("advantages", advantages, sequences.counts)


def of_tokens(values: Tensor, sequences: Sequences) -> Tensor:
    """`[B]` or `[B, S]` as constants `[B, S]`, 0 where a token does not count."""
    values = values.detach().float()
    return _counting(sequences.spread(values) if values.dim() == 1 else values, sequences)


def _counting(values: Tensor, sequences: Sequences) -> Tensor:
    return torch.where(sequences.counts, values, 0.0)


def _correction(ratio: Tensor, sequences: Sequences) -> Tensor:
    counts = sequences.counts
    if isinstance(ratio, Tensor) and ratio.dim() == 1:
        check_of_sequences("importance_sampling_ratio", ratio, sequences.places, counts)
        ratio = sequences.spread(ratio)
    elif isinstance(ratio, Tensor) and sequences.ids is None and ratio.shape == (counts.shape[0], 1):
        ratio = ratio.expand(counts.shape)
    check_of_tokens("importance_sampling_ratio", ratio, counts)
    return torch.where(counts, ratio.detach().float(), 1.0)


def _sampler_metrics(
    ratio: Tensor | None, correction: Tensor | None, old: Tensor, sampled: Tensor | None, sequences: Sequences
) -> dict[str, Tensor]:
    """Of the correction, given as `ratio` of sequences or of tokens, and of what it is made of."""
    if ratio is None or correction is None:
        return {}
    of_sequences = ratio.dim() == 1 or ratio.shape[1] == 1 != sequences.counts.shape[1]
    if of_sequences:
        metrics = ratio_metrics(ratio.detach().float().flatten(), sequences.exists())
    else:
        metrics = ratio_metrics(correction, sequences.counts)
    return metrics if sampled is None else metrics | difference_metrics(old, sampled.detach().float(), sequences)


def _check_lengths(
    loss_type: str, num_items: Tensor | float | None, max_completion_length: int | None, sequences: Sequences
) -> None:
    if isinstance(num_items, Tensor) and num_items.numel() != 1:
        raise ValueError(f"num_items_in_batch: expected a scalar, got shape {tuple(num_items.shape)}")
    if max_completion_length is not None and max_completion_length < 1:
        raise ValueError(f"max_completion_length: expected a number of at least 1, got {max_completion_length}")
    if loss_type == "dr_grpo" and max_completion_length is None and sequences.ids is not None:
        raise ValueError("max_completion_length: expected a number with 'dr_grpo' and sequence_ids, got None")


def _shares(values: Tensor, sequences: Sequences, whole: bool) -> tuple[Tensor, Tensor]:
    """Means of values `[B, S]` over each sequence; and over `whole` sequences, or over tokens."""
    values = _counting(values.float(), sequences)
    of_sequences = sequences.averages(values)
    return of_sequences, sequences.mean(of_sequences) if whole else mean_over_tokens(values, sequences)


def _clip_metrics(
    ratio: Tensor, advantages: Tensor, sequences: Sequences, options: PolicyOptions, whole: bool
) -> dict[str, Tensor]:
    """How much is clipped; `whole` sequences where the ratio and the advantage are a sequence's."""
    if options.loss_type == "cispo":
        clips = (ratio > options.epsilon_high) & (advantages > 0)
        return {"cispo_clip_ratio": _shares(clips, sequences, whole)[1]}
    if options.loss_type != "clipped":
        return {}
    ratio = ratio if options.delta is None else ratio.clamp(max=options.delta)
    low, low_mean = _shares((ratio < 1 - options.epsilon) & (advantages < 0), sequences, whole)
    high, high_mean = _shares((ratio > 1 + options.epsilon_high) & (advantages > 0), sequences, whole)
    none = sequences.lengths == 0
    return {
        "clip_ratio/low_mean": low_mean,
        "clip_ratio/high_mean": high_mean,
        "clip_ratio/region_mean": low_mean + high_mean,
        "clip_ratio/low_min": low.masked_fill(none, 1.0).amin(),
        "clip_ratio/high_max": high.masked_fill(none, 0.0).amax(),
    }
