r"""`fused_linear_ce` with what people watch while they train: the entropy, and whether the target was the largest.

The math is in `fused_linear_ce.py` and, of the entropy, in `_logprob_rows.py`. Each chunk's logits are read once more
before their gradient takes their place; no product is made again.
"""

from typing import Any

import torch
from torch import Tensor

from llmk.ops.linear_loss._cross_entropy import CrossEntropyCall, CrossEntropyOps, Shardings
from llmk.ops.linear_loss._row_loss_slices import SLICE_CPU, SLICE_KERNELS
from llmk.ops.linear_loss.checks import check_chunk_size, checked_linear
from llmk.ops.linear_loss.fused_linear_ce import (
    check_row_weight,
    fused_linear_ce_cost,
    fused_linear_ce_reference,
    fused_linear_ce_resized,
    fused_linear_ce_samples,
)
from llmk.ops.loss.cross_entropy import check_loss_options
from llmk.ops.loss.row_loss import CPU, KERNELS
from llmk.registry import public_op, replicate_only
from llmk.registry.eager.bypass import PLAIN_TENSORS

OPS = CrossEntropyOps("fused_linear_ce_metrics", KERNELS, CPU, Shardings(*[replicate_only] * 3), watched=True)
SLICES = CrossEntropyOps(
    "fused_linear_ce_metrics_slices", SLICE_KERNELS, SLICE_CPU, Shardings(*[replicate_only] * 3), watched=True,
    scale=OPS.scale,
)  # fmt: skip


def fused_linear_ce_metrics_reference(
    input: Tensor, linear_weight: Tensor, target: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    loss = fused_linear_ce_reference(input, linear_weight, target, **options)
    with torch.no_grad():
        logits = torch.nn.functional.linear(input, linear_weight, options.get("linear_bias"))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if softcap := options.get("softcap", 0.0):
            logits = softcap * torch.tanh(logits / softcap)
        log_softmax = logits.log_softmax(-1)
        entropy = -(log_softmax.exp() * log_softmax.masked_fill(log_softmax == float("-inf"), 0.0)).sum(-1)
        counts = target != options.get("ignore_index", -100)
        of_target = logits.gather(-1, (target.long() * counts).unsqueeze(-1)).squeeze(-1)
        entropy = torch.where(counts, entropy, 0.0)
        hit = (counts & (of_target == logits.amax(-1))).to(entropy.dtype)
        if options.get("reduction", "mean") != "none":
            entropy, hit = entropy.sum() / counts.sum(), hit.sum() / counts.sum()
    return loss, entropy, hit


@public_op(
    "fused_linear_ce_metrics(Tensor input, Tensor linear_weight, Tensor target, *, Tensor? linear_bias=None, "
    'Tensor? weight=None, int ignore_index=-100, str reduction="mean", float label_smoothing=0.0, '
    "float softcap=0.0, float z_loss=0.0, int chunk_size=0, Tensor? row_weight=None, bool skip_ignored=False) "
    "-> (Tensor, Tensor, Tensor)",
    reference=fused_linear_ce_metrics_reference,
    differentiable=("input", "linear_weight", "linear_bias"),
    kernel_ops=tuple(dict.fromkeys((*OPS.kernel_ops, *SLICES.kernel_ops))),
    samples=fused_linear_ce_samples,
    resized=fused_linear_ce_resized,
    cost=fused_linear_ce_cost,
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
    skip_ignored: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """`fused_linear_ce`, and of the same logits the entropy and whether the target was the largest, without gradients.

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
    check_row_weight(row_weight, input, target)
    tensors = (input, linear_weight, linear_bias, target, weight, row_weight)
    options = (ignore_index, label_smoothing, softcap, z_loss, skip_ignored, chunk_size)
    if type(linear_weight) not in PLAIN_TENSORS:
        from llmk.ops.linear_loss._vocab_shards import mesh_dim_of_classes, slices_of  # which imports torch.distributed

        dim = mesh_dim_of_classes(input, linear_weight)
        if dim is not None:
            slices = slices_of(dim, *tensors)
            where = (slices.vocab_start, slices.num_classes, slices.group_name, slices.dx_group_name)
            loss, entropy, hit = _watched(SLICES, reduction, slices[:6], options, where)
            return slices.whole(loss), slices.whole(entropy), slices.whole(hit)
    return _watched(OPS, reduction, tensors, options, (0, linear_weight.shape[0], "", ""))


def _watched(
    ops: CrossEntropyOps, reduction: str, tensors: tuple[Any, ...], options: tuple[Any, ...], where: tuple[Any, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    of_linear = checked_linear(*tensors[:3], fewest_classes=0)
    call = CrossEntropyCall(*of_linear, *tensors[3:], *options, *where)
    if call.num_classes == 0:
        raise ValueError(f"linear_weight: expected at least one class, got shape {tuple(call.linear_weight.shape)}")
    check_loss_options(
        call.num_classes, call.input, call.target, call.weight, reduction, call.label_smoothing, call.softcap,
        call.z_loss,
    )  # fmt: skip
    check_chunk_size(call.chunk_size)
    results = ops.rows(call) if reduction == "none" else ops.reduced(call, reduction)
    return results[0], results[1], results[2]
