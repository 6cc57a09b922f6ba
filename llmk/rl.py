"""Log-probabilities for trainers of reinforcement learning, which compute losses of their own from them.

A trainer's function takes logits `[..., V]` and labels; this one takes the hidden states and the projection instead, so
that no logits are in memory. It is `linear_logprobs` with the names that trainers have.
"""

from typing import Literal, overload

import torch
from torch import Tensor

from llmk.losses._batch import INTEGERS, KINDS, VocabGroup, check_is_tensor, check_tensor, own_classes
from llmk.ops.linear_loss.head import check_linear
from llmk.ops.linear_loss.linear_logprobs import linear_logprobs
from llmk.registry import check_flag, check_same

__all__ = ["logprobs"]

LINEAR = ("hidden", "weight", "bias")


@overload
def logprobs(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, entropy: Literal[False] = False, bias: Tensor | None = None,
    temperature: float = 1.0, logit_scale: float = 1.0, softcap: float = 0.0, ignore_index: int = -100,
    logits_dtype: torch.dtype | None = None, vocab_group: VocabGroup = None,
) -> Tensor: ...  # fmt: skip


@overload
def logprobs(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, entropy: Literal[True], bias: Tensor | None = None,
    temperature: float = 1.0, logit_scale: float = 1.0, softcap: float = 0.0, ignore_index: int = -100,
    logits_dtype: torch.dtype | None = None, vocab_group: VocabGroup = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def logprobs(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, entropy: bool = False, bias: Tensor | None = None,
    temperature: float = 1.0, logit_scale: float = 1.0, softcap: float = 0.0, ignore_index: int = -100,
    logits_dtype: torch.dtype | None = None, vocab_group: VocabGroup = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Log-probability of each label under the softmax of `linear(hidden, weight, bias)`, which is not materialized.

    Labels are not shifted: `labels[..., t]` is the token that `hidden[..., t]` predicts. The logits are multiplied by
    `logit_scale`, capped, and divided by `temperature`. They are float32 unless `logits_dtype` says otherwise.

    `weight` may be split over ranks by its classes, as tensor parallelism does it: a DTensor placed `Shard(0)`, or each
    rank's rows in a plain tensor, as in Megatron, with `vocab_group`. Every rank then calls with the same hidden states
    and labels, has the same results, and gets the whole gradient of `hidden`, which must not be summed again.

    Args:
        hidden: Hidden states `[..., H]`, float32, float16 or bfloat16, any strides.
        weight: Weight of the projection `[V, H]`, dtype of `hidden`; under autocast both are cast.
        labels: Class indices `[...]`, int64 or int32.
        entropy: Return the entropies too. Without it they are not computed.
        bias: Bias of the projection `[V]`, dtype of `hidden`.
        temperature: Divides the logits, after the cap; positive.
        logit_scale: Factor of the logits, before the cap.
        softcap: Logits are replaced by `softcap * tanh(logits / softcap)`; 0 is off.
        ignore_index: A label of this index has log-probability and entropy 0, no gradient, and no work.
        logits_dtype: None or torch.float32, or the dtype of `hidden`, to which the logits are then rounded.
        vocab_group: The ranks that have all classes together, as a process group or its name if they have equally many
            in their order, else what `llmk.functional.vocab_slice` returns. None if this rank has all.

    Returns:
        Log-probabilities `[...]`; with `entropy` also the entropies `[...]` in nats. Both are float32 and
        differentiable, for any gradient that comes in.

    Raises:
        TypeError: An argument is not a tensor, a dtype does not fit, or `weight` is a tensor subclass other than a
            DTensor.
        ValueError: A shape, a device, a group or an option does not fit.
        IndexError: On the CPU, a label is neither a class nor `ignore_index`. On a GPU its results are NaN.
    """
    for name, value in (("hidden", hidden), ("weight", weight)):
        check_is_tensor(name, value)
    if bias is not None:
        check_is_tensor("bias", bias)
    check_tensor("labels", labels, INTEGERS, KINDS[INTEGERS])
    check_flag("entropy", entropy)
    check_linear(hidden, weight, bias, LINEAR)
    check_same("labels", labels, "hidden", hidden)
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(f"labels: expected shape {tuple(hidden.shape[:-1])} (of hidden), got {tuple(labels.shape)}")
    found, entropies = linear_logprobs(
        hidden, weight, labels, linear_bias=bias, temperature=temperature, logit_scale=logit_scale, softcap=softcap,
        ignore_index=ignore_index, logits_dtype=logits_dtype, entropy=entropy, **own_classes(weight, vocab_group),
    )  # fmt: skip
    return (found, entropies) if entropy else found
