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
from llmk.ops.linear_loss.policy_losses import PolicyTerms
from llmk.registry import is_sharded


@dataclass(frozen=True)
class Head:
    linear_weight: Tensor  # [V, H]
    linear_bias: Tensor | None  # [V]
    temperature: float
    softcap: float
    ignore_index: int
    skip_ignored: bool
    chunk_size: int

    def logprobs(self, input: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Of the targets, in their shape, and the entropy of each token; float32, 0 where a token does not count."""
        return linear_logprobs(
            input, self.linear_weight, target, linear_bias=self.linear_bias, temperature=self.temperature,
            softcap=self.softcap, ignore_index=self.ignore_index, skip_ignored=self.skip_ignored,
            chunk_size=self.chunk_size,
        )  # fmt: skip

    def log_sum_sq_probs(self, input: Tensor, target: Tensor, logprobs: Tensor) -> Tensor:
        """log sum_v p_v^2 of each token, from the log-probabilities of the targets: a constant, for one product more.

        With logits z it is logsumexp(2z) - 2 logsumexp(z): twice the target's log-probability, less that at half the
        temperature. 0 where a token does not count.
        """
        with torch.no_grad():
            sharper, _ = replace(self, temperature=self.temperature / 2).logprobs(input, target)
        return 2 * logprobs.detach() - sharper

    def takes_groups(self, sequences: Sequences) -> bool:
        """Whether `preference` does: not a packed batch, nor a vocabulary that is split over ranks."""
        return sequences.ids is None and not is_sharded(self.linear_weight)

    def preference(
        self, input: Tensor, target: Tensor, ref_logps: Tensor | None, *, members: int = 2,
        token_weight: Tensor | None = None, nll_weight: Tensor | None = None, **options: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """`fused_linear_preference` of a batch whose groups have a sequence in each of `members` parts of it.

        Of all sequences `[B]` or tokens `[B, S]`; the loss, a sum over groups, and log-probabilities and entropies.
        """
        groups = target.shape[0] // members

        def grouped(values: Tensor) -> Tensor:
            return values.unflatten(0, (members, groups)).transpose(0, 1)

        tensors = {"ref_logps": ref_logps, "token_weight": token_weight, "nll_weight": nll_weight}
        given: dict[str, Any] = {name: grouped(values) for name, values in tensors.items() if values is not None}
        loss, logprobs, entropy = fused_linear_preference(
            grouped(input), self.linear_weight, grouped(target), linear_bias=self.linear_bias,
            temperature=self.temperature, softcap=self.softcap, ignore_index=self.ignore_index,
            skip_ignored=self.skip_ignored, chunk_size=self.chunk_size, **given,
            **options,
        )  # fmt: skip
        return loss, logprobs.transpose(0, 1).flatten(0, 1), entropy.transpose(0, 1).flatten(0, 1)

    def policy(
        self, input: Tensor, target: Tensor, terms: PolicyTerms, sequences: Sequences
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """`fused_linear_policy`; or, where it does not take the batch, the same of `logprobs`.

        Of tokens `[B, S]`; the loss, a sum, and log-probabilities and entropies as constants.
        """
        by_tokens = terms.options.importance_sampling_level == "token"
        if is_sharded(input, self.linear_weight, target) or not (by_tokens or sequences.ids is None):
            logprobs, entropy = self.logprobs(input, target)
            return terms.loss(logprobs, entropy), logprobs.detach(), entropy.detach()
        return fused_linear_policy(
            input, self.linear_weight, target, linear_bias=self.linear_bias, advantages=terms.advantages,
            token_weight=terms.weight, old_logps=terms.old_logps, ref_logps=terms.ref_logps, kl_weight=terms.kl_weight,
            entropy_weight=terms.entropy_weight, temperature=self.temperature, softcap=self.softcap,
            ignore_index=self.ignore_index, skip_ignored=self.skip_ignored, chunk_size=self.chunk_size,
            **terms.options.arguments(),
        )  # fmt: skip

    def of_reference(self, linear_weight: Tensor, linear_bias: Tensor | None) -> "Head":
        bias = None if linear_bias is None else linear_bias.detach()
        return replace(self, linear_weight=linear_weight.detach(), linear_bias=bias)


def mean_over_tokens(values: Tensor, sequences: Sequences) -> Tensor:
    """Over the tokens that count, 0 over none; `values [B, S]` are 0 where a token does not count."""
    return values.sum() / sequences.counts.sum().clamp(min=1)


def check_reference(
    input: Tensor, ref_logps: Tensor | None, ref_input: Tensor | None, ref_linear_weight: Tensor | None,
    ref_linear_bias: Tensor | None,
) -> None:  # fmt: skip
    """Either the log-probabilities of the reference model, or its hidden states and projection."""
    hidden = {"ref_input": ref_input, "ref_linear_weight": ref_linear_weight}
    if ref_logps is not None:
        for name, value in (*hidden.items(), ("ref_linear_bias", ref_linear_bias)):
            if value is not None:
                raise ValueError(f"{name}: expected None beside ref_logps, got a {type(value).__name__}")
        return
    for name, value in hidden.items():
        if value is None:
            raise ValueError(f"{name}: expected a tensor where ref_logps is None, got None")
        check_is_tensor(name, value)
    assert ref_input is not None
    if ref_input.dim() != 3 or ref_input.shape[:2] != input.shape[:2]:
        expected = f"({input.shape[0]}, {input.shape[1]}, H)"
        raise ValueError(f"ref_input: expected shape {expected} like input, got {tuple(ref_input.shape)}")
