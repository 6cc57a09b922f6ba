r"""Cross entropy of rows of logits: the kernels that `cross_entropy` and `fused_linear_ce` share.

Sources: `torch.nn.functional.cross_entropy` for the semantics; Milakov and Gimelshein, "Online normalizer calculation
for softmax", 2018, https://arxiv.org/abs/1805.02867; softcap as in Gemma 2, https://arxiv.org/abs/2408.00118; z-loss as
in PaLM, https://arxiv.org/abs/2204.02311.

Forward, for a row of V logits, its target t, class weights w (all 1 if not given) and smoothing a, with
x = softcap(logits) where softcap(u) = c * tanh(u / c), or u when c = 0:

    m    = max(x)
    lse  = m + log(sum(exp(x - m)))
    loss = (1 - a) * w_t * (lse - x_t) + a / V * sum_c(w_c * (lse - x_c)) + z_loss * lse^2

A row whose target is `ignore_index` has loss 0. "mean" divides the sum by the sum of w_t over the rows that count.

Backward, given the gradient g of a row's loss, with p = exp(x - lse) and W = sum_c(w_c):

    dx_c      = g * ((1 - a) * w_t * (p_c - [c = t]) + a / V * (W * p_c - w_c) + 2 * z_loss * lse * p_c)
    dlogits_c = dx_c * (1 - tanh(logits_c / c)^2)         the last factor only with a softcap

Forward reads the logits once, keeping a running maximum and sum; both are kept for the backward pass rather than lse,
which in float32 loses the digits of large logits. Backward reads the logits once more, recomputes p as
exp(x - m) / sum and writes the gradient. The kernels are in `row_loss_short.py`, of rows that one tile holds, and in
`row_loss_long.py`; the same in plain PyTorch is in `row_loss_cpu.py`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from llmk.ops.common.rows import as_rows
from llmk.ops.common.sums import mean_of_rows, sum_to_scalar
from llmk.ops.loss.row_loss_cpu import row_gradients_cpu, row_losses_cpu
from llmk.ops.loss.row_loss_long import long_gradients, long_losses
from llmk.ops.loss.row_loss_math import Options, Rows
from llmk.ops.loss.row_loss_short import is_short, short_gradients, short_losses
from llmk.registry import empty


def row_losses(logits: Tensor, target: Tensor, options: Options) -> Rows:
    """By the kernels, of `[..., V]` logits and `[...]` targets."""
    logits, target = as_rows(logits), target.contiguous()
    loss, count = (empty(target.shape, torch.float32, logits.device) for _ in range(2))
    stats = empty((2, *target.shape), torch.float32, logits.device)
    launch = short_losses if is_short(logits.shape[1]) else long_losses
    launch(logits, target, loss, count, stats, options)
    return Rows(loss, count, stats)


def row_gradients(
    grad: Tensor,
    divisor: Tensor | None,
    logits: Tensor,
    target: Tensor,
    stats: Tensor,
    dlogits: Tensor,
    options: Options,
) -> None:
    """By the kernels, for the gradient of each row `[...]` or of all of them `[]`, divided by `divisor`.

    The rows of `dlogits`, which it fills, are contiguous, and may be those of `logits`.
    """
    logits, dlogits = as_rows(logits), as_rows(dlogits)
    launch = short_gradients if is_short(logits.shape[1]) else long_gradients
    launch(grad.reshape(-1) if grad.dim() else grad, divisor, logits, target, stats, dlogits, options)


def mean_of_rows_cpu(loss: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    divisor = count.sum()
    return loss.sum() / divisor, divisor


class RowLoss(NamedTuple):
    """The two directions of the loss of rows, and what makes one number of it."""

    losses: Callable[[Tensor, Tensor, Options], Rows]
    gradients: Callable[[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor, Options], None]
    sum: Callable[[Tensor], Tensor]
    mean: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


KERNELS = RowLoss(row_losses, row_gradients, sum_to_scalar, mean_of_rows)
CPU = RowLoss(row_losses_cpu, row_gradients_cpu, torch.sum, mean_of_rows_cpu)
