"""The cross entropy of rows in plain PyTorch, for a CPU; `cross_entropy.py` has the formulas."""

import torch
from torch import Tensor

from llmk.ops.common.math import cap_cpu, cap_slope_cpu
from llmk.ops.loss.cross_entropy_options import CrossEntropyOptions, RowLoss, RowResults, counted
from llmk.registry import empty


def class_index(target: Tensor, num_classes: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """`counted`; a real target out of range raises."""
    counts, index = counted(target, ignore_index)
    if type(target) is Tensor and bool(((index < 0) | (index >= num_classes)).any()):
        bad = int(index[(index < 0) | (index >= num_classes)][0])
        raise IndexError(
            f"target: expected class indices in [0, {num_classes}) or ignore_index {ignore_index}, got {bad}"
        )
    return counts, index


FEW_CLASSES = 64
"""Up to here PyTorch's softmax, which adds up the lanes of a vector in a tree, loses less of a sum than `torch.sum`."""


def row_sum_cpu(x: Tensor) -> Tensor:
    """Sums over the last axis in float32.

    `torch.sum` adds up the lanes one after the other, and each of them rounds: where one class has nearly all, they
    round its 1 up to nine times in one direction, and a gradient p - 1 is what is left of that.
    """
    return x.sum(-1, dtype=torch.float64).float() if x.shape[-1] <= FEW_CLASSES else x.sum(-1)


def capped_cpu(logits: Tensor, softcap: float) -> Tensor:
    x = logits.float().contiguous()  # as its sums will be
    return cap_cpu(x, softcap) if softcap else x


def z_loss_cpu(lse: Tensor, z_loss: float) -> Tensor:
    """Return `z_loss * lse**2` without the square: it may be infinite, and 0 times that is no number."""
    return z_loss * lse * lse


def row_losses_cpu(logits: Tensor, target: Tensor, options: CrossEntropyOptions) -> RowResults:
    """`row_losses` in plain PyTorch; on real tensors a target out of range raises."""
    V = logits.shape[-1]
    weight, _, smoothing, _, z_loss = options
    counts, index = class_index(target, V, options.ignore_index)
    x = capped_cpu(logits, options.softcap)
    maximum = x.amax(-1)
    base = torch.where(maximum == float("-inf"), 0.0, maximum)
    total = row_sum_cpu((x - base.unsqueeze(-1)).exp_())
    logsum = total.log()
    w_t = counts.float() if weight is None else torch.where(counts, weight[index].float(), 0.0)
    loss = w_t * (logsum - (x.gather(-1, index.unsqueeze(-1)).squeeze(-1) - maximum))
    if smoothing:
        w = options.class_weights(V, x.device)
        smooth = w.sum() * logsum + (w * (base.unsqueeze(-1) - x)).sum(-1)
        loss = (1 - smoothing) * loss + smoothing / V * smooth
    loss = torch.where(counts, loss + z_loss_cpu(maximum + logsum, z_loss), 0.0)
    return RowResults(loss, w_t, torch.stack((maximum, total)))


def row_gradients_cpu(
    grad: Tensor,
    denominator: Tensor | None,
    logits: Tensor,
    target: Tensor,
    stats: Tensor,
    options: CrossEntropyOptions,
) -> Tensor:
    """`row_gradients` in plain PyTorch."""
    V = logits.shape[-1]
    maximum, total = stats.unbind()
    grad = (grad if denominator is None else grad / denominator).expand(target.shape)
    weight, ignore_index, smoothing, softcap, z_loss = options
    counts, index = counted(target, ignore_index)
    w_t = torch.ones_like(grad) if weight is None else weight[index].float()
    column = index.unsqueeze(-1)
    x = capped_cpu(logits, softcap)
    grad, total = grad.unsqueeze(-1), total.unsqueeze(-1)
    weight_t = (1 - smoothing) * w_t.unsqueeze(-1)
    pull = 2 * z_loss * (maximum.unsqueeze(-1) + total.log())
    # In place where it can be: the op is made of passes over [M, V] in memory, unless Inductor fuses them.
    dx = (x - maximum.unsqueeze(-1)).exp_()
    p_t = dx.gather(-1, column) / total
    smooth = None
    if smoothing:
        w = options.class_weights(V, x.device)
        smooth = grad * smoothing / V * (w.sum() / total * dx - w)
    dx.mul_((weight_t + pull) / total * grad)
    dx.scatter_(-1, column, grad * (weight_t * (p_t - 1.0) + pull * p_t))
    if smooth is not None:
        dx.add_(smooth)
    if softcap:
        dx.mul_(cap_slope_cpu(logits.float(), softcap))
    dx.masked_fill_(~counts.unsqueeze(-1), 0.0)  # whatever a row holds that does not count
    return empty(logits.shape, logits.dtype, logits.device).copy_(dx)


def mean_of_rows_cpu(loss: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    denominator = count.sum()
    return loss.sum() / denominator, denominator


CPU = RowLoss(row_losses_cpu, row_gradients_cpu, torch.sum, mean_of_rows_cpu)
