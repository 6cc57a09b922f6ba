"""The projection to the vocabulary with its options, and the log-probabilities that every loss begins with."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from llmk.losses._checks import check_is_tensor
from llmk.losses._sequences import Sequences
from llmk.ops.linear_loss.fused_linear_policy import fused_linear_policy
from llmk.ops.linear_loss.fused_linear_preference import fused_linear_preference
from llmk.ops.linear_loss.linear_logprobs import linear_logprobs
from llmk.ops.linear_loss.objectives.policy import PolicyTerms
from llmk.registry import is_sharded


@dataclass(frozen=True)
class Head:
    linear_weight: Tensor  # [V, H]
    linear_bias: Tensor | None  # [V]
    temperature: float
    logit_scale: float
    softcap: float
    ignore_index: int
    skip_ignored: bool
    chunk_size: int

    def logprobs(self, input: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the targets' log-probabilities and the entropies, float32, 0 where a token does not count."""
        return linear_logprobs(
            input, self.linear_weight, target, linear_bias=self.linear_bias, temperature=self.temperature,
            logit_scale=self.logit_scale, softcap=self.softcap, ignore_index=self.ignore_index,
            skip_ignored=self.skip_ignored, chunk_size=self.chunk_size,
        )  # fmt: skip

    def log_sum_sq_probs(self, input: Tensor, target: Tensor, logprobs: Tensor) -> Tensor:
        """Compute log sum_v p_v^2 of each token from the targets' log-probabilities, detached, with one product more.

        With logits z it is logsumexp(2z) - 2 logsumexp(z): twice the target's log-probability, less that at half the
        temperature. 0 where a token does not count.
        """
        with torch.no_grad():
            sharper, _ = replace(self, temperature=self.temperature / 2).logprobs(input, target)
        return 2 * logprobs.detach() - sharper

    def supports_groups(self, sequences: Sequences) -> bool:
        """Return True if `preference` takes the batch, which is neither packed nor vocabulary-parallel."""
        return sequences.ids is None and not is_sharded(self.linear_weight)

    def preference(
        self, input: Tensor, target: Tensor, ref_logps: Tensor | None, *, group_size: int = 2,
        token_weight: Tensor | None = None, nll_weight: Tensor | None = None, **options: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Call `fused_linear_preference`; a group has one sequence in each of `group_size` equal parts of the batch.

        Arguments are `[B]` or `[B, S]`. Return the loss, a sum over groups, log-probabilities and entropies.
        """
        groups = target.shape[0] // group_size

        def to_groups(values: Tensor) -> Tensor:
            return values.unflatten(0, (group_size, groups)).transpose(0, 1)

        tensors = {"ref_logps": ref_logps, "token_weight": token_weight, "nll_weight": nll_weight}
        given: dict[str, Any] = {name: to_groups(values) for name, values in tensors.items() if values is not None}
        loss, logprobs, entropy = fused_linear_preference(
            to_groups(input), self.linear_weight, to_groups(target), linear_bias=self.linear_bias,
            temperature=self.temperature, logit_scale=self.logit_scale, softcap=self.softcap,
            ignore_index=self.ignore_index, skip_ignored=self.skip_ignored, chunk_size=self.chunk_size, **given,
            **options,
        )  # fmt: skip
        return loss, logprobs.transpose(0, 1).flatten(0, 1), entropy.transpose(0, 1).flatten(0, 1)

    def policy(
        self, input: Tensor, target: Tensor, terms: PolicyTerms, sequences: Sequences
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Call `fused_linear_policy`, or compute the loss from `logprobs` where it does not take the batch.

        Return the loss, a sum, and the detached log-probabilities and entropies `[B, S]`.
        """
        by_tokens = terms.options.importance_sampling_level == "token"
        if is_sharded(input, self.linear_weight, target) or not (by_tokens or sequences.ids is None):
            logprobs, entropy = self.logprobs(input, target)
            return terms.loss(logprobs, entropy), logprobs.detach(), entropy.detach()
        return fused_linear_policy(
            input, self.linear_weight, target, linear_bias=self.linear_bias, advantages=terms.advantages,
            token_weight=terms.weight, old_logps=terms.old_logps, ref_logps=terms.ref_logps, kl_weight=terms.kl_weight,
            entropy_weight=terms.entropy_weight, temperature=self.temperature, logit_scale=self.logit_scale,
            softcap=self.softcap, ignore_index=self.ignore_index, skip_ignored=self.skip_ignored,
            chunk_size=self.chunk_size, **terms.options._asdict(),
        )  # fmt: skip

    def scaled(self, input: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return an input and a bias that give the scaled logits, for operators that have no scale."""
        return scaled(self.logit_scale, input, self.linear_bias)

    def reference(self, linear_weight: Tensor, linear_bias: Tensor | None) -> "Head":
        bias = None if linear_bias is None else linear_bias.detach()
        return replace(self, linear_weight=linear_weight.detach(), linear_bias=bias)


def scaled(logit_scale: float, input: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if logit_scale == 1.0:
        return input, bias
    return input * logit_scale, None if bias is None else bias * logit_scale


def mean_over_tokens(values: Tensor, sequences: Sequences) -> Tensor:
    """Average `values [B, S]`, 0 where a token does not count, over the tokens that count; 0 over none."""
    return values.sum() / sequences.mask.sum().clamp(min=1)


def check_reference(
    input: Tensor, ref_logps: Tensor | None, ref_input: Tensor | None, ref_linear_weight: Tensor | None,
    ref_linear_bias: Tensor | None,
) -> None:  # fmt: skip
    """Check that either the reference model's log-probabilities or its hidden states and projection are given."""
    hidden = {"ref_input": ref_input, "ref_linear_weight": ref_linear_weight}
    if ref_logps is not None:
        for name, value in (*hidden.items(), ("ref_linear_bias", ref_linear_bias)):
            if value is not None:
                raise ValueError(f"{name}: expected None beside ref_logps, got a {type(value).__name__}")
        return
    if ref_input is None and ref_linear_weight is None:
        raise ValueError(
            "ref_logps: expected log-probabilities of the reference model, one for each sequence, or in their place "
            "ref_input and ref_linear_weight, got None"
        )
    for name, value in hidden.items():
        if value is None:
            raise ValueError(f"{name}: expected a tensor where ref_logps is None, got None")
        check_is_tensor(name, value)
    assert ref_input is not None
    if ref_input.dim() != 3 or ref_input.shape[:2] != input.shape[:2]:
        expected = f"({input.shape[0]}, {input.shape[1]}, H)"
        raise ValueError(f"ref_input: expected shape {expected} like input, got {tuple(ref_input.shape)}")
