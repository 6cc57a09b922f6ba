"""The derivative of a fused loss whose forward pass has made the gradients of its input, weight and bias."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from llmk.ops.common.scaling import SavedGradients, save_gradients
from llmk.ops.linear_loss._call import CallOp, fake_gradients
from llmk.ops.linear_loss._ranks import sum_over
from llmk.registry import KernelOp

DIFFERENTIABLE = ["input", "linear_weight", "linear_bias"]


def differentiate_by_scaling(op: CallOp, scale: KernelOp, is_total: Callable[[Any], bool], constants: int = 0) -> None:
    """Register the derivative of an op that gives its loss, a divisor, and the gradients of input, weight and bias.

    Args:
        op: After its call it takes what says how it reduces, and then whether each of the three gradients is needed.
        scale: Multiplies by the incoming gradient and divides by the divisor.
        is_total: Whether that says a total. Its divisor is for whoever asked for it: its gradient is that of a sum.
        constants: How many results without gradients follow the loss.
    """
    dx_group_name = op.call_type.names().index("dx_group_name")

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        divisor, *gradients = output[-4:]
        ctx.dtype, ctx.dx_group_name, ctx.arguments = inputs[0].dtype, inputs[dx_group_name], len(inputs)
        save_gradients(ctx, None if is_total(inputs[-4]) else divisor, *gradients)

    def scaled(ctx: Any, grad: Tensor, *constants: Tensor) -> Any:
        saved = SavedGradients(ctx, grad, scale)
        need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
        return (
            sum_over(ctx.dx_group_name, saved.times(0)).to(ctx.dtype) if need_dx else None,
            saved.times(1, ctx.dtype) if need_dw else None,
            saved.times(2, ctx.dtype) if need_db else None,
            *[None] * (ctx.arguments - 3),
        )

    op.op.register_autograd(
        scaled,
        setup_context=keep,
        depends_on=[DIFFERENTIABLE, *[[]] * constants],
        keeps=lambda needs_input_grad, args: needs_input_grad[:3],
    )


def fake_loss(call: Any, total: bool, *need: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Like the results of an op that is differentiated so: a call's `dtypes` are those of its gradients."""
    loss, divisor = (call.input.new_empty((), dtype=torch.float32) for _ in range(2))
    return loss, divisor, *fake_gradients(call, need, call.dtypes)
