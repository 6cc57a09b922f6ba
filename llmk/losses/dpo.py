"""Direct preference optimization (DPO) and its variants."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from llmk.losses._batch import (
    Batch,
    Sequences,
    VocabGroup,
    check_between,
    check_list,
    mean_over_tokens,
)
from llmk.losses._pairs import (
    PAIR_LOSSES,
    TYPES,
    PairItems,
    Pairs,
    chosen_nll,
    chosen_nll_weight,
    pair_losses,
    pair_weights,
    reward_metrics,
)
from llmk.losses._ranks import share_with
from llmk.ops.linear_loss.objectives.preference import (
    F_DIVERGENCES,
    LOSSES,
    MARGIN_LOSSES,
    LossOptions,
    check_label_smoothing,
)
from llmk.registry import FromArguments, check_finite, check_flag, check_option, check_positive, with_arguments


@with_arguments
def dpo(
    arguments: dict[str, Any], /,
    input: Tensor, linear_weight: Tensor, target: Tensor, *,
    ref_logps: Tensor | None = None, ref_input: Tensor | None = None, ref_linear_weight: Tensor | None = None,
    ref_linear_bias: Tensor | None = None, beta: float = 0.1, loss_type: str | Sequence[str] = "sigmoid",
    loss_weights: Sequence[float] | None = None, label_smoothing: float = 0.0, f_divergence_type: str = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5, discopop_tau: float = 0.05, ld_alpha: float | None = None,
    num_items_in_batch: Tensor | float | None = None, num_chosen_tokens_in_batch: Tensor | float | None = None,
    use_weighting: bool = False, linear_bias: Tensor | None = None, temperature: float = 1.0,
    logit_scale: float = 1.0, softcap: float = 0.0, ignore_index: int = -100, skip_ignored: bool = True,
    chunk_size: int = 0,
    logits_dtype: torch.dtype | None = None, sequence_ids: Tensor | None = None, num_sequences: int | None = None,
    pair_order: str | None = None, group: Any = None, context_group: Any = None,
    vocab_group: VocabGroup = None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Direct preference optimization: the mean over pairs of a chosen and a rejected completion of

        -log sigmoid(beta * (log pi(chosen) / ref(chosen) - log pi(rejected) / ref(rejected)))

    `loss_type` selects other functions of the log-ratios. Log-probabilities are sums over a completion's tokens.

    Args:
        input: Hidden states `[B, S, H]`, aligned with `target`: pairs of a chosen and a rejected completion in the
            order `pair_order`.
        linear_weight: `[V, H]`.
        target: `[B, S]`, `ignore_index` where a token does not count.
        ref_logps: Log-probabilities of the reference model, summed over each sequence `[B]`; with `ld_alpha`, weighted
            in the same way.
        ref_input: Hidden states `[B, S, any]` of the reference model, in place of `ref_logps`.
        ref_linear_weight: Projection `[V, any]` of the reference model. Neither gets a gradient.
        ref_linear_bias: Bias `[V]` of that projection.
        beta: Strength of the penalty for deviating from the reference; positive.
        loss_type: "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot",
            "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm", or a list of them, whose losses
            are added.
        loss_weights: Weight of each loss type; 1 if None.
        label_smoothing: Assumed fraction of pairs with flipped labels, used by "robust" (below 0.5), "exo_pair" (above
            0), "aot" and "aot_unpaired" and ignored by the others, as in TRL.
        f_divergence_type: "reverse_kl", "forward_kl", "js_divergence" or "alpha_divergence", for the losses that
            depend on the difference of the two rewards alone.
        f_alpha_divergence_coef: Coefficient of the alpha divergence.
        discopop_tau: Temperature of "discopop"; positive.
        ld_alpha: Weight of the longer completion's tokens beyond the shorter one's length, 0 to 1.
        use_weighting: Multiply the loss of each pair by the product over its two completions of exp(mean over tokens of
            log pi - log sum_v pi(v)^2), detached; not with "aot" and "aot_unpaired".
        num_items_in_batch: Denominator of the mean over pairs, a scalar: the pairs of all batches of a step, for
            gradient accumulation; those of this batch if None.
        num_chosen_tokens_in_batch: Denominator of "sft", a scalar: the chosen tokens of all batches of a step; those
            of this batch if None.
        linear_bias: `[V]`.
        logits_dtype: As in `llmk.functional.fused_linear_ce`.
        temperature, logit_scale, softcap, skip_ignored, chunk_size: As in `llmk.functional.linear_logprobs`.
        ignore_index: The target of a token that does not count.
        sequence_ids: `[1, T]`, for a packed batch `[1, T, H]`: each token's sequence. A token that counts with an index
            out of range makes the loss NaN.
        num_sequences: Number of sequences in a packed batch, where `ref_logps` does not have that length. With
            neither, the number of tokens is its bound, which in eager mode takes memory for their square, and
            `pair_order` must be "interleaved".
        pair_order: Where the two of pair i are among the B sequences, the chosen first: "halves", i and i + B / 2, as
            in TRL's batches, or "interleaved", 2i and 2i + 1. None is "halves" for rows; a packed batch has to say it.
        group: The ranks that have other pairs of the batch: a `torch.distributed.ProcessGroup`, its name or a
            DeviceMesh of one dimension. Every rank makes the call and gets the loss and the metrics of the whole batch,
            and the gradients of that one loss with respect to its own tensors; those of parameters have yet to be
            summed over the ranks. Denominators that are given are those of all ranks. Not with "aot" and
            "aot_unpaired", which sort the pairs of the batch.
        context_group: The ranks that have other tokens of the same sequences, likewise. What is one for each sequence
            is the same on all of them, and a packed batch has the same number of sequences. Not with `ld_alpha`, which
            asks for positions.
        vocab_group: A `torch.distributed.ProcessGroup`, or its name, each of whose ranks has some rows of
            `linear_weight` in a plain tensor, and the same of the other projection and the biases: equally many, in the
            ranks' order; for others what `llmk.functional.vocab_slice` returns. All else is alike on the ranks, as loss
            and metrics then are, and the gradient of `input` is the whole one, summed over the ranks.

    Returns:
        The loss, a float32 scalar, and metrics under TRL's names. An empty completion has log-probability 0.

    Raises:
        TypeError: An argument is not a tensor, or a dtype does not fit.
        ValueError: A shape or an option does not fit.

    The forward pass computes the gradients, with three products of the policy where a chunk holds the logits of a pair
    and their gradient (with `chunk_size` 0 on a GPU up to 8 GiB), else with four. With "aot", "aot_unpaired" or "sft"
    alone, a packed batch, `context_group` or DTensors the backward pass computes them: four products, and five with
    `use_weighting`. The reference has one.

    Sources: Rafailov et al., 2023, https://arxiv.org/abs/2305.18290; the other loss types in `_pairs.py`; ld_alpha:
    Liu et al., 2024, https://arxiv.org/abs/2409.06411; use_weighting: Zhou et al., WPO, 2024,
    https://arxiv.org/abs/2406.11827, equation 2. Reference implementation: `trl.DPOTrainer`.
    """
    check_flag("use_weighting", use_weighting)
    types = _loss_types(loss_type, loss_weights, label_smoothing, f_divergence_type)
    names = [name for name, _ in types]
    sorts = "aot" in names or "aot_unpaired" in names
    if use_weighting and sorts:
        raise ValueError(f"use_weighting: expected False with 'aot' and 'aot_unpaired', got loss_type {loss_type!r}")
    check_finite("f_alpha_divergence_coef", f_alpha_divergence_coef)
    if use_weighting and num_items_in_batch is not None and "sft" in names:
        raise ValueError("num_items_in_batch: expected None with use_weighting and 'sft', whose product is no sum")
    check_positive("beta", beta)
    check_positive("discopop_tau", discopop_tau)
    if ld_alpha is not None:
        check_between("ld_alpha", ld_alpha, 0.0, 1.0)
    own = _Options.of(arguments, types=types)
    batch = Batch.of(arguments, counted_by="ref_logps")
    sequences = batch.sequences
    if sequences.ranks.sequences and sorts:
        raise ValueError("group: expected None with 'aot' and 'aot_unpaired', which sort the pairs of the batch")
    if sequences.ranks.context and ld_alpha is not None:
        raise ValueError("context_group: expected None with ld_alpha, which asks for the positions of tokens")
    ref_logps = batch.reference_logps(partial(_sequence_logps, sequences=sequences, ld_alpha=ld_alpha))
    compute = _fused_loss if not use_weighting and _can_fuse(names) and batch.supports_groups else _loss
    loss, logps, entropy = compute(batch, ref_logps, own)
    rewards = sequences.halves(beta * (logps - ref_logps))
    metrics = {
        "entropy": mean_over_tokens(entropy.detach(), sequences),
        **reward_metrics(*rewards, logps, sequences),
    }
    return loss, metrics


@dataclass(frozen=True, kw_only=True)
class _Options(FromArguments):
    """The arguments of `dpo` that are not about the batch."""

    types: list[tuple[str, float]]  # and the weight of each
    of_pairs: LossOptions
    f_divergence_type: str
    f_alpha_divergence_coef: float
    ld_alpha: float | None
    use_weighting: bool
    items: PairItems


def _can_fuse(names: list[str]) -> bool:
    """Return True if each pair's gradient depends on that pair alone; that of "sft" depends on the targets."""
    return names != ["sft"] * len(names) and all([name in (*PAIR_LOSSES, "sft") for name in names])


def _fused_loss(batch: Batch, ref_logps: Tensor, own: _Options) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, the log-probabilities of sequences and the entropies of tokens, with gradients at once."""
    sequences = batch.sequences
    pair_types = [(name, weight) for name, weight in own.types if name in PAIR_LOSSES]
    weights = pair_weights(sequences, [weight for _, weight in pair_types], own.items)
    sft_coef = sum([weight for name, weight in own.types if name == "sft"])
    loss, token_logps, entropy = batch.preference(
        ref_logps,
        token_weight=None if own.ld_alpha is None else _weighted(sequences.mask.float(), sequences, own.ld_alpha),
        nll_weight=chosen_nll_weight(sequences, sft_coef, own.items),
        group_weight=weights if len(pair_types) > 1 else weights[0],
        loss_type="+".join([name for name, _ in pair_types]),
        f_divergence_type=own.f_divergence_type,
        f_divergence_coef=own.f_alpha_divergence_coef,
        **own.of_pairs._asdict(),
    )
    return loss, _sequence_logps(token_logps, sequences, own.ld_alpha), entropy


def _loss(batch: Batch, ref_logps: Tensor, own: _Options) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same as `_fused_loss` of any batch and types."""
    sequences = batch.sequences
    token_logps, entropy = batch.logprobs()
    logps = _sequence_logps(token_logps, sequences, own.ld_alpha)
    nll = chosen_nll(token_logps, sequences, own.items)
    pairs = _pairs(nll, logps, ref_logps, sequences, own)
    weights = _wpo_weights(batch, token_logps) if own.use_weighting else 1.0
    terms = []
    for name, coef in own.types:
        num_items = None if name == "sft" else own.items.num_items_in_batch  # "sft" is a mean over tokens already
        losses = weights * pair_losses(name, pairs, own.of_pairs)
        terms.append(coef * sequences.mean(losses, num_items))
    return sequences.checked(torch.stack(terms).sum()), logps, entropy


def _loss_types(
    loss_type: str | Sequence[str], loss_weights: Sequence[float] | None, label_smoothing: float, divergence: str
) -> list[tuple[str, float]]:
    if not isinstance(loss_type, str):
        check_list("loss_type", loss_type, "names, or a name")
    names = [loss_type] if isinstance(loss_type, str) else list(loss_type)
    if not names:
        raise ValueError("loss_type: expected a name or a list of names, got an empty list")
    for name in names:
        check_option("loss_type", name, TYPES)
    if loss_weights is not None:
        check_list("loss_weights", loss_weights, "numbers, one for each loss_type")
    weights = [1.0] * len(names) if loss_weights is None else list(loss_weights)
    for weight in weights:
        check_finite("loss_weights", weight)
    if len(weights) != len(names):
        raise ValueError(f"loss_weights: expected {len(names)} numbers, one for each loss_type, got {len(weights)}")
    check_option("f_divergence_type", divergence, tuple(F_DIVERGENCES))
    check_between("label_smoothing", label_smoothing, 0.0, 1.0)
    check_label_smoothing([name for name in names if name in LOSSES], label_smoothing)
    for name in names:
        if divergence != "reverse_kl" and name not in (*MARGIN_LOSSES, "sft"):
            raise ValueError(f"f_divergence_type: expected 'reverse_kl' with loss_type {name!r}, got {divergence!r}")
    return list(zip(names, weights, strict=True))


def _wpo_weights(batch: Batch, token_logps: Tensor) -> Tensor:
    """Return the weight of each pair in WPO, `[P]`, detached."""
    aligned = token_logps.detach() - batch.log_sum_sq_probs(token_logps)
    chosen, rejected = batch.sequences.halves(batch.sequences.token_means(aligned))
    return torch.exp(chosen + rejected)


def _sequence_logps(token_logps: Tensor, sequences: Sequences, ld_alpha: float | None) -> Tensor:
    """Sum log-probabilities over sequences; `ld_alpha` weights tokens beyond the shorter length of a pair."""
    return sequences.sum(_weighted(token_logps, sequences, ld_alpha))


def _weighted(values: Tensor, sequences: Sequences, ld_alpha: float | None) -> Tensor:
    """Multiply values `[B, S]` beyond the shorter length of a pair by `ld_alpha`."""
    if ld_alpha is None:
        return values
    chosen, rejected = sequences.halves(sequences.lengths)
    shared = torch.minimum(chosen, rejected)
    beyond = sequences.positions() > sequences.expand_to_tokens(sequences.joined(shared, shared))
    return torch.where(beyond, ld_alpha * values, values)


def _pairs(nll: Tensor, logps: Tensor, ref_logps: Tensor, sequences: Sequences, own: _Options) -> Pairs:
    logratios = logps - ref_logps
    rewards = F_DIVERGENCES[own.f_divergence_type](logratios, own.f_alpha_divergence_coef)
    values = logratios, rewards, sequences.lengths, logps, ref_logps
    return Pairs(
        *(sequences.halves(each) for each in values),
        nll=share_with(sequences.ranks.sequences, nll),  # each pair has it in its loss, those of other ranks too
        exists=sequences.exists,
    )
