"""Kahneman-Tversky optimization: completions that are good or bad by themselves, not in pairs."""

import torch
from torch import Tensor

from llmk.losses._checks import NUMBERS, check_of_sequences, check_positive, check_tensor
from llmk.losses._head import Head, check_reference, mean_over_tokens
from llmk.losses._sequences import number_of_sequences, sequences_of
from llmk.ops.linear_loss.pair_losses import LOSSES, LossOptions
from llmk.registry import check_not_negative, check_option, check_same


def kto(
    input: Tensor, linear_weight: Tensor, target: Tensor, label: Tensor, *,
    ref_logps: Tensor | None = None, ref_input: Tensor | None = None, ref_linear_weight: Tensor | None = None,
    ref_linear_bias: Tensor | None = None, kl: Tensor | None = None, beta: float = 0.1, desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0, loss_type: str = "kto", linear_bias: Tensor | None = None,
    temperature: float = 1.0, softcap: float = 0.0, ignore_index: int = -100, skip_ignored: bool = False,
    chunk_size: int = 0, sequence_ids: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Kahneman-Tversky optimization: the mean over sequences, with r = log pi / ref of a completion's tokens, of

        desirable_weight * (1 - sigmoid(beta * (r - kl)))      of a desirable one
        undesirable_weight * (1 - sigmoid(beta * (kl - r)))    of another

    Args:
        input, linear_weight, target: As in `dpo`, a sequence a row.
        label: `[B]`, bool: whether a completion is desirable.
        ref_logps, ref_input, ref_linear_weight, ref_linear_bias: The reference, as in `dpo`.
        kl: The estimate of KL(pi, ref), a scalar; 0 if None. TRL's is the mean of r, at least 0, over
            prompts with the completions of other prompts. It gets no gradient.
        beta: How strongly the policy is held to the reference; positive.
        desirable_weight, undesirable_weight: Of the two kinds, to make up for their numbers.
        loss_type: "kto", or "apo_zero_unpaired", which has `sigmoid(-beta * r)` and `sigmoid(beta * r)` in their place.
        linear_bias, temperature, softcap, ignore_index, skip_ignored, chunk_size: As in `dpo`.
        sequence_ids: `[1, T]`, of a packed batch `[1, T, H]`: the index into `label` of each token.

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
    check_not_negative("desirable_weight", desirable_weight)
    check_not_negative("undesirable_weight", undesirable_weight)
    check_option("loss_type", loss_type, ("kto", "apo_zero_unpaired"))
    count = number_of_sequences(None, "label", label)
    sequences = sequences_of(input, linear_weight, target, ignore_index, sequence_ids, count)
    check_of_sequences("label", label, sequences.places, target, "truth values")
    check_reference(input, ref_logps, ref_input, ref_linear_weight, ref_linear_bias)
    if ref_logps is not None:
        check_of_sequences("ref_logps", ref_logps, sequences.places, target)
    if kl is not None:
        _check_kl(kl, target)

    head = Head(linear_weight, linear_bias, temperature, softcap, ignore_index, skip_ignored, chunk_size)
    if ref_logps is None:
        assert ref_input is not None
        assert ref_linear_weight is not None
        ref_head = head.of_reference(ref_linear_weight, ref_linear_bias)
        ref_logps = sequences.sum(ref_head.logprobs(ref_input.detach(), target)[0])
    ref_logps = ref_logps.detach().float()
    shift = ref_logps.new_zeros(()) if kl is None else kl.detach().float().reshape(())
    base = ref_logps + shift if loss_type == "kto" else ref_logps
    sign = torch.where(label, ref_logps.new_ones(()), -1.0)
    weights = torch.where(label, desirable_weight, undesirable_weight * ref_logps.new_ones(()))
    options = LossOptions(beta)
    if head.takes_groups(sequences):
        loss, token_logps, entropy = head.preference(
            input, target, sign * base, members=1, token_weight=sign.unsqueeze(1).expand(target.shape),
            group_weight=weights / target.shape[0], loss_type="kto", **options.arguments(),
        )  # fmt: skip
    else:
        token_logps, entropy = head.logprobs(input, target)
        losses = weights * LOSSES["kto"].value(options, sign * (sequences.sum(token_logps) - base))
        loss = sequences.checked(sequences.mean(losses))
    logps = sequences.sum(token_logps.detach())
    metrics = {
        "kl": shift,
        "entropy": mean_over_tokens(entropy.detach(), sequences),
        **_kinds("rewards", beta * (logps - ref_logps), label),
        **_kinds("logps", logps, label),
    }
    metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    return loss, metrics


def _check_kl(kl: Tensor, target: Tensor) -> None:
    check_tensor("kl", kl, NUMBERS, "numbers")
    if kl.numel() != 1:
        raise ValueError(f"kl: expected a scalar, got shape {tuple(kl.shape)}")
    check_same("kl", kl, "target", target)


def _kinds(name: str, values: Tensor, label: Tensor) -> dict[str, Tensor]:
    return {
        f"{name}/{kind}": torch.where(of_kind, values, 0.0).sum() / of_kind.sum()
        for kind, of_kind in (("chosen", label), ("rejected", ~label))
    }
