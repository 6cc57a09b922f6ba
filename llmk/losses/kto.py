"""Kahneman-Tversky optimization (KTO): completions with a binary label, not in pairs."""

from typing import Any

import torch
from torch import Tensor

from llmk.losses._batch import (
    INTEGERS,
    NUMBERS,
    Batch,
    VocabGroup,
    check_denominator,
    check_per_sequence,
    check_tensor,
    mean_over_tokens,
)
from llmk.losses._ranks import Groups, sum_over
from llmk.ops.linear_loss.objectives.preference import LOSSES, LossOptions
from llmk.registry import check_finite, check_not_negative, check_option, check_positive, check_same, with_arguments

LABELS = (torch.bool, *INTEGERS, torch.int8, torch.uint8)


@with_arguments
def kto(
    arguments: dict[str, Any], /,
    input: Tensor, linear_weight: Tensor, target: Tensor, label: Tensor, *,
    ref_logps: Tensor | None = None, ref_input: Tensor | None = None, ref_linear_weight: Tensor | None = None,
    ref_linear_bias: Tensor | None = None, kl: Tensor | float | None = None, beta: float = 0.1,
    desirable_weight: float = 1.0, undesirable_weight: float = 1.0, loss_type: str = "kto",
    num_items_in_batch: Tensor | float | None = None,
    linear_bias: Tensor | None = None, temperature: float = 1.0, logit_scale: float = 1.0, softcap: float = 0.0,
    ignore_index: int = -100, skip_ignored: bool = True, chunk_size: int = 0,
    logits_dtype: torch.dtype | None = None, sequence_ids: Tensor | None = None, group: Any = None,
    context_group: Any = None,
    vocab_group: VocabGroup = None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Kahneman-Tversky optimization: the mean over sequences, with r = log pi / ref of a completion's tokens, of

        desirable_weight * (1 - sigmoid(beta * (r - kl)))      of a desirable one
        undesirable_weight * (1 - sigmoid(beta * (kl - r)))    of another

    Args:
        input, linear_weight, target: As in `dpo`, a sequence a row.
        label: `[B]`: True or 1 for a desirable completion, False or 0 for another; another number makes the loss NaN.
        ref_logps, ref_input, ref_linear_weight, ref_linear_bias: The reference, as in `dpo`.
        kl: The estimate of KL(pi, ref), a number or a scalar tensor; 0 if None. TRL's is the mean of r, at least
            0, over prompts with the completions of other prompts. It gets no gradient.
        beta: Strength of the penalty for deviating from the reference; positive.
        desirable_weight, undesirable_weight: Weights of the two kinds, to balance their numbers.
        loss_type: "kto", or "apo_zero_unpaired", which has `sigmoid(-beta * r)` and `sigmoid(beta * r)` in their place.
        num_items_in_batch: Denominator of the mean over sequences, a scalar: the sequences of all batches of a step,
            for gradient accumulation; those of this batch if None.
        linear_bias, temperature, logit_scale, softcap, ignore_index, skip_ignored, chunk_size: As in `dpo`.
        sequence_ids: `[1, T]`, for a packed batch `[1, T, H]`: each token's sequence as an index into `label`.
        group, context_group: As in `dpo`, of ranks that have other sequences, or other tokens of the same. `kl` is that
            of the whole batch.
        logits_dtype, vocab_group: As in `dpo`.

    Returns:
        The loss, a float32 scalar, and metrics under TRL's names, each NaN where there is none of its kind.

    Raises:
        TypeError: An argument is not a tensor, or a dtype does not fit.
        ValueError: A shape or an option does not fit.

    Three products where a chunk of logits holds a sequence's, else four, as `dpo`.

    Sources: Ethayarajh et al., 2024, https://arxiv.org/abs/2402.01306, equation 7; D'Oosterlinck et al., APO, 2024,
    https://arxiv.org/abs/2408.06266. Reference implementation: `trl.KTOTrainer`.
    """
    check_positive("beta", beta)
    check_denominator("num_items_in_batch", num_items_in_batch)
    check_not_negative("desirable_weight", desirable_weight)
    check_not_negative("undesirable_weight", undesirable_weight)
    check_option("loss_type", loss_type, ("kto", "apo_zero_unpaired"))
    batch = Batch.of(arguments, counted_by="label")
    sequences, ranks = batch.sequences, batch.sequences.ranks
    check_per_sequence("label", label, sequences.slots, target, LABELS, "truth values (bool, or integers 0 and 1)")
    ref_logps = batch.reference_logps(sequences.sum)
    shift = _shift(kl, ref_logps)
    base = ref_logps + shift if loss_type == "kto" else ref_logps
    sign = 2.0 * label.to(ref_logps.dtype) - 1.0
    sign, label = torch.where(sign.abs() == 1.0, sign, float("nan")), label != 0
    weights = torch.where(label, desirable_weight, undesirable_weight * ref_logps.new_ones(()))
    options = LossOptions(beta=beta)
    if batch.supports_groups:
        loss, token_logps, entropy = batch.preference(
            sign * base,
            token_weight=sign.unsqueeze(1).expand(target.shape),
            group_weight=weights / sequences.denominator(num_items_in_batch),
            loss_type="kto",
            **options._asdict(),
        )
    else:
        token_logps, entropy = batch.logprobs()
        losses = weights * LOSSES["kto"].value(options, sign * (sequences.sum(token_logps) - base))
        loss = sequences.checked(sequences.mean(losses, num_items_in_batch))
    logps = sequences.sum(token_logps.detach())
    metrics = {
        "kl": shift,
        "entropy": mean_over_tokens(entropy.detach(), sequences),
        **_kinds("rewards", beta * (logps - ref_logps), label, ranks.sequences),
        **_kinds("logps", logps, label, ranks.sequences),
    }
    metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    return loss, metrics


def _shift(kl: Tensor | float | None, ref_logps: Tensor) -> Tensor:
    if kl is None or isinstance(kl, int | float):
        check_finite("kl", 0.0 if kl is None else kl)
        return ref_logps.new_full((), 0.0 if kl is None else kl)
    check_tensor("kl", kl, NUMBERS, "numbers, or a number")
    if kl.numel() != 1:
        raise ValueError(f"kl: expected a scalar, got shape {tuple(kl.shape)}")
    check_same("kl", kl, "target", ref_logps)
    return kl.detach().float().reshape(())


def _kinds(name: str, values: Tensor, label: Tensor, groups: Groups) -> dict[str, Tensor]:
    return {
        f"{name}/{kind}": sum_over(groups, torch.where(mask, values, 0.0).sum()) / sum_over(groups, mask.sum())
        for kind, mask in (("chosen", label), ("rejected", ~label))
    }
