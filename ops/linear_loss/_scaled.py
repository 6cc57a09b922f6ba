"""The derivative of a loss whose forward pass has made the gradients: they are scaled, once.

In eager mode, where a backward pass is the last to read what was saved, the gradients are scaled where they are: dW is
then in memory once, and where the factor is 1, as of most losses, nothing is done at all.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmk.ops.linear_loss._call import CallOp, fake_gradients
from llmk.ops.linear_loss._ranks import sum_over
from llmk.registry import PARTIAL, REPLICATE, KernelOp, axes, cdiv, empty, wrap_triton
from llmk.registry.backends import runs_kernels
from llmk.registry.devices import kernel_context
from llmk.registry.eager.bypass import is_plain_eager, takes_short_path
from llmk.registry.private.autograd import graph_is_kept, saved_tensors_are_hooked

DIFFERENTIABLE = ["input", "linear_weight", "linear_bias"]


@triton.jit
def scale_kernel(x_ptr, grad_ptr, divisor_ptr, y_ptr, N, IN_PLACE: tl.constexpr, BLOCK_N: tl.constexpr):
    grad, divisor = tl.load(grad_ptr), tl.load(divisor_ptr)
    factor = tl.where(divisor == 0.0, grad, grad / divisor)
    if IN_PLACE:  # noqa: SIM102  Triton evaluates both sides of an `and`
        if factor == 1.0:
            return
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + offsets, mask=offsets < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + offsets, (x * factor).to(y_ptr.dtype.element_ty), mask=offsets < N)


def _launch(x: Tensor, grad: Tensor, divisor: Tensor, y: Tensor, in_place: bool) -> None:
    wrap_triton(scale_kernel)[(cdiv(x.numel(), 4096),)](
        x, grad, divisor, y, x.numel(), IN_PLACE=in_place, BLOCK_N=4096, num_warps=8
    )


def _scale(input: Tensor, grad: Tensor, divisor: Tensor, dtype: torch.dtype) -> Tensor:
    """input * grad / divisor, both float32 scalars, rounded once to `dtype`; input * grad where the divisor is zero."""
    y = empty(input.shape, dtype, input.device)
    _launch(input, grad, divisor, y, in_place=False)
    return y


def scale_op(name: str) -> KernelOp:
    """`_scale` as a kernel op of one operator's own."""
    scale = KernelOp(_scale, name=name, replayed=True)
    scale.register_kernel("cpu")(_scale_on_cpu)
    scale.register_fake(lambda input, grad, divisor, dtype: input.new_empty(input.shape, dtype=dtype))
    scale.register_sharding(
        lambda input, *_: [([split], [split, REPLICATE, REPLICATE]) for split in (*axes(input), PARTIAL)]
    )
    return scale


def _scale_on_cpu(input: Tensor, grad: Tensor, divisor: Tensor, dtype: torch.dtype) -> Tensor:
    factor = torch.where(divisor == 0, grad, grad / divisor)
    return torch.mul(input.float(), factor).to(dtype)


def _scale_saved(op: KernelOp, saved: Tensor, grad: Tensor, divisor: Tensor) -> Tensor:
    """The same where `saved` is, which nobody reads again. A factor of 1 changes no bit of it."""
    if not runs_kernels(op.name, saved):
        return saved.copy_(_scale_on_cpu(saved, grad, divisor, saved.dtype))
    with kernel_context(saved.device):
        _launch(saved, grad, divisor, saved, in_place=True)
    return saved


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
        ctx.hooked = saved_tensors_are_hooked()
        ctx.save_for_backward(None if is_total(inputs[-4]) else divisor, *gradients)

    def scaled(ctx: Any, grad: Tensor, *constants: Tensor) -> Any:
        divisor, dx, dw, db = ctx.saved_tensors
        divisor = torch.ones_like(grad) if divisor is None else divisor
        need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
        last = is_plain_eager() and not (torch.is_grad_enabled() or ctx.hooked or graph_is_kept())

        def times(saved: Tensor, dtype: torch.dtype) -> Tensor:
            if last and saved.dtype == dtype and takes_short_path((saved, grad, divisor)):
                return _scale_saved(scale, saved, grad, divisor)
            return scale(saved, grad, divisor, dtype)

        return (
            sum_over(ctx.dx_group_name, times(dx, dx.dtype)).to(ctx.dtype) if need_dx else None,
            times(dw, ctx.dtype) if need_dw else None,
            times(db, ctx.dtype) if need_db else None,
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


def mean_of_all(total: Tensor, divisor: Tensor, weighted: bool) -> Tensor:
    """A total of all processes, divided. Without weights none counts where the divisor is 0: NaN, no gradient."""
    if weighted:
        return total / divisor
    nothing = divisor == 0
    return total / torch.where(nothing, 1.0, divisor) + torch.where(nothing, float("nan"), 0.0)
