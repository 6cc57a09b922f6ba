"""The driver of a linear layer and the cross entropy of its outputs, chunk by chunk: what the fused losses share.

The math is in `fused_linear_ce.py`. What a chunk's rows of logits cost and give is a `RowLoss`: that of whole rows, or
that of rows whose classes lie on several ranks.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from llmk.ops.linear_loss._chunked_linear import ChunkedLinear, LinearGradients
from llmk.ops.loss.row_loss import RowLoss, Rows, counted
from llmk.ops.loss.row_loss_math import Options
from llmk.registry import autocast_dtype, check_dtype, check_same, check_shape


class Call(NamedTuple):
    """One call, its tokens flattened."""

    linear: ChunkedLinear
    target: Tensor  # [N]
    options: Options
    row_loss: RowLoss
    dx_dtype: torch.dtype  # before dx is scaled

    @classmethod
    def of(
        cls, row_loss: RowLoss, input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor,
        weight: Tensor | None, ignore_index: int, label_smoothing: float, softcap: float, z_loss: float,
        chunk_size: int,
    ) -> "Call":  # fmt: skip
        linear = ChunkedLinear(input, linear_weight, linear_bias, chunk_size)
        options = Options(weight, ignore_index, label_smoothing, softcap, z_loss)
        return cls(linear, target.reshape(-1).contiguous(), options, row_loss, input.dtype)


def _gradient_of_rows(call: Call, mean: bool) -> Tensor:
    """1, which the backward pass divides by the divisor of a mean; infinity where class weights make that 0.

    Then the rows that count get gradients that are not finite, as is the loss, and the others 0: a factor at the end
    could not tell them apart. Without weights a divisor of 0 means that no row counts, and all gradients are 0.
    """
    one = torch.ones((), dtype=torch.float32, device=call.target.device)
    weight, ignore_index, *_ = call.options
    if weight is None or not mean:
        return one
    counts, index = counted(call.target, ignore_index)
    counts = counts & (index >= 0) & (index < weight.shape[0])
    divisor = torch.where(counts, weight[torch.where(counts, index, 0)].float(), 0.0).sum()
    return torch.where(divisor == 0, float("inf"), one)


def losses_and_gradients(call: Call, gradients: LinearGradients, of_rows: Tensor) -> Rows:
    """In one pass over the chunks, given the gradient of every row; their buffer is free again when this returns."""
    parts: list[Rows] = []
    for rows, logits in call.linear.chunks():
        part = call.row_loss.losses(logits, call.target[rows], call.options)
        parts.append(part)
        if any(gradients.need):
            call.row_loss.gradients(of_rows, None, logits, call.target[rows], part.stats, logits, call.options)
            gradients.add(rows, logits)
    return Rows.cat(parts)


def reduced(
    call: Call, reduction: str, need: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """The sum or mean of the losses, its divisor, and the gradients of the sum.

    "total" is the sum, with the divisor of the mean: what processes with some tokens each add up first.
    """
    gradients = LinearGradients(call.linear, need, call.dx_dtype)
    loss, counts, _ = losses_and_gradients(call, gradients, _gradient_of_rows(call, reduction == "mean"))
    if reduction == "mean":
        loss, divisor = call.row_loss.mean(loss, counts)
    elif reduction == "total":
        loss, divisor = call.row_loss.sum(loss), call.row_loss.sum(counts)
    else:
        loss, divisor = call.row_loss.sum(loss), torch.ones((), dtype=torch.float32, device=loss.device)
    dw = gradients.dw.to(saved_dtype(call.linear.x.dtype))
    return loss, divisor, (gradients.dx, dw, gradients.db)


def saved_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of dW between forward and backward: before it is scaled, float16's range does not hold it."""
    return torch.float32 if dtype == torch.float16 else dtype


def row_by_row(call: Call) -> tuple[Tensor, Tensor]:
    """Each token's loss `[...]`, and its maximum and sum `[2, ...]`."""
    parts = [call.row_loss.losses(logits, call.target[rows], call.options) for rows, logits in call.linear.chunks()]
    loss, _, stats = Rows.cat(parts)
    shape = call.linear.shape[:-1]
    return loss.view(shape), stats.view(2, *shape)


def _add_gradients(call: Call, grad: Tensor, stats: Tensor, gradients: LinearGradients) -> None:
    """Chunk by chunk, for an upstream gradient of each row; the logits are made again."""
    grad, stats = grad.reshape(-1), stats.reshape(2, -1)
    for rows, logits in call.linear.chunks():
        of_chunk = stats[:, rows].contiguous()
        call.row_loss.gradients(grad[rows], None, logits, call.target[rows], of_chunk, logits, call.options)
        gradients.add(rows, logits)


def row_by_row_gradients(
    call: Call, grad: Tensor, stats: Tensor, need: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = LinearGradients(call.linear, need, call.dx_dtype)
    _add_gradients(call, grad, stats, gradients)
    dtype = call.linear.x.dtype
    return gradients.dx, gradients.dw.to(dtype), gradients.db.to(dtype)


def fake_gradients(
    input: Tensor, linear_weight: Tensor, need: Sequence[bool], dtypes: Sequence[torch.dtype]
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = [input.shape, linear_weight.shape, linear_weight.shape[:1]]
    dx, dw, db = (
        input.new_empty(shape if wanted else (0,), dtype=dtype)
        for shape, wanted, dtype in zip(shapes, need, dtypes, strict=True)
    )
    return dx, dw, db


def linear_flops(products: int, x: Sequence[int], linear_weight: Sequence[int]) -> int:
    return 2 * math.prod(x) * linear_weight[0] * products


def checked_linear(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, fewest_classes: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The linear layer's tensors, in autocast's dtype where it is on, once they fit each other."""
    dtype = autocast_dtype(input.device)
    if dtype is not None:
        input, linear_weight = input.to(dtype), linear_weight.to(dtype)
        linear_bias = linear_bias if linear_bias is None else linear_bias.to(dtype)
    check_dtype("input", input)
    if input.dim() == 0 or input.shape[-1] == 0:
        raise ValueError(f"input: expected shape [..., H] with H at least 1, got {tuple(input.shape)}")
    H = input.shape[-1]
    if linear_weight.dim() != 2 or linear_weight.shape[1] != H or linear_weight.shape[0] < fewest_classes:
        raise ValueError(f"linear_weight: expected shape [V, {H}] to fit input, got {tuple(linear_weight.shape)}")
    check_same("linear_weight", linear_weight, "input", input, dtype=True)
    if linear_bias is not None:
        check_shape("linear_bias", linear_bias, linear_weight.shape[:1], "one for each class")
        check_same("linear_bias", linear_bias, "input", input, dtype=True)
    return input, linear_weight, linear_bias


def check_chunk_size(chunk_size: int) -> None:
    if chunk_size < 0:
        raise ValueError(f"chunk_size: expected a number of tokens, or 0 to have it chosen, got {chunk_size}")
