r"""`fused_linear_ce` with training metrics: the entropy, and whether the target has the largest logit.

The math is in `fused_linear_ce.py`, and that of the entropy in `softmax.py`: one sum more of each chunk's exponentials.
"""

from typing import Any

import torch
from torch import Tensor

from llmk.ops.linear_loss._records import linear_cost, logits_reference, token_resized
from llmk.ops.linear_loss.drivers.cross_entropy import CrossEntropyOps
from llmk.ops.linear_loss.fused_linear_ce import fused_linear_ce_reference, fused_linear_ce_samples
from llmk.ops.linear_loss.linear_logprobs import linear_logprobs_reference
from llmk.registry import BatchDependent, public_op

KERNEL_OPS = CrossEntropyOps("fused_linear_ce_metrics")


def fused_linear_ce_metrics_reference(
    input: Tensor, linear_weight: Tensor, target: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    loss = fused_linear_ce_reference(input, linear_weight, target, **options)
    names = ("linear_bias", "softcap", "logits_dtype")
    given = {name: options[name] for name in names if name in options}
    ignore_index = options.get("ignore_index", -100)
    with torch.no_grad():
        logits, counts = logits_reference(input, linear_weight, **given), target != ignore_index
        _, entropy = linear_logprobs_reference(input, linear_weight, target, ignore_index=ignore_index, **given)
        target_logit = logits.gather(-1, (target.long() * counts).unsqueeze(-1)).squeeze(-1)
        correct = (counts & (target_logit == logits.amax(-1))).to(entropy.dtype)
        if options.get("reduction", "mean") != "none":
            entropy, correct = entropy.sum() / counts.sum(), correct.sum() / counts.sum()
    return loss, entropy, correct


@public_op(
    reference=fused_linear_ce_metrics_reference,
    differentiable=("input", "linear_weight", "linear_bias"),
    kernel_ops=KERNEL_OPS.kernel_ops,
    samples=fused_linear_ce_samples,
    resized=token_resized,
    cost=linear_cost,
    batch_dependent=BatchDependent.float32_products("output 0", "output 1", "output 2", "gradient of input"),
)
def fused_linear_ce_metrics(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
    z_loss: float = 0.0,
    chunk_size: int = 0,
    row_weight: Tensor | None = None,
    skip_ignored: bool = True,
    logits_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`fused_linear_ce`, and from the same logits the entropy and the accuracy, without gradients.

    Args:
        input: This and all others as in `fused_linear_ce`. `label_smoothing`, `z_loss` and the weights are the loss's
            alone; the entropy is that of the capped logits.

    Returns:
        The loss; the entropy in nats; and 1 where no logit is larger than the target's, else 0, whose mean is the
        accuracy. All float32, the last two detached: `[...]` with reduction "none", 0 for tokens that do not count;
        else the means over the tokens that count, each counting as one, NaN over none.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape, a device or an option does not fit.
        IndexError: On the CPU, a target is neither a class nor `ignore_index`. On a GPU such a row makes the loss NaN.
        NotImplementedError: `weight` or `row_weight` requires a gradient.

    Sources: those of `fused_linear_ce`.
    """
    loss, entropy, correct = KERNEL_OPS(locals(), with_metrics=True)
    return loss, entropy, correct
