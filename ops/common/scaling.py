"""The derivative of a loss whose forward pass has made the gradients: they are scaled, once.

In eager mode, where a backward pass is the last to read what was saved, the gradients are scaled where they are: they
are then in memory once, and where the factor is 1, as of most losses, nothing is done at all.

A gradient that is 0 stays 0, whatever comes in: one of 0 is what nothing depends on, such as a token that does not
count, and autograd's formulas leave that out instead of multiplying it. A mean over no token comes in as 1 / 0.
"""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from llmk.registry import PARTIAL, REPLICATE, KernelOp, axes, cdiv, empty, grid_cap, jit, num_programs, wrap_triton
from llmk.registry.devices import kernel_context, runs_kernels
from llmk.registry.eager.bypass import is_plain_eager, takes_fast_path
from llmk.registry.private.modes import graph_is_kept, saved_tensors_are_hooked

PROGRAMS = 8
"""Programs of 8 warps that a multiprocessor holds at a time: where a factor is expected to be 1 a program does no
more than start. With one for each 4096 elements of a gradient of 1 GiB that takes 0.11 ms of an H200 instead of 0.02;
where it is not 1 both take 0.56, but from float32 these 0.79 instead of 0.74."""


@jit
def scale_kernel(x_ptr, grad_ptr, y_ptr, N, IN_PLACE: tl.constexpr, BLOCK_N: tl.constexpr):
    factor = tl.load(grad_ptr)
    if IN_PLACE:  # noqa: SIM102  Triton evaluates both sides of an `and`
        if factor == 1.0:
            return
    step = tl.num_programs(0).to(tl.int64) * BLOCK_N
    for start in tl.range(tl.program_id(0).to(tl.int64) * BLOCK_N, N, step, num_stages=3):  # pyright: ignore[reportGeneralTypeIssues]
        offsets = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + offsets, mask=offsets < N, other=0.0).to(tl.float32)
        y = tl.where(x == 0.0, x, x * factor)
        tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=offsets < N)


def _launch(x: Tensor, grad: Tensor, y: Tensor, in_place: bool) -> None:
    blocks = cdiv(x.numel(), 4096)
    programs = grid_cap(blocks, num_programs(x.device, PROGRAMS)) if in_place else blocks
    wrap_triton(scale_kernel)[(programs,)](x, grad, y, x.numel(), IN_PLACE=in_place, BLOCK_N=4096, num_warps=8)


def _scale(input: Tensor, grad: Tensor, dtype: torch.dtype) -> Tensor:
    """input * grad, a float32 scalar, rounded once to `dtype`; 0 where the input is."""
    y = empty(input.shape, dtype, input.device)
    _launch(input, grad, y, in_place=False)
    return y


def scale_op(name: str) -> KernelOp:
    """`_scale` as a kernel op of one operator's own."""
    scale = KernelOp(_scale, name=name, launch_cached=True)
    scale.register_kernel("cpu")(_scale_on_cpu)
    scale.register_fake(lambda input, grad, dtype: input.new_empty(input.shape, dtype=dtype))
    scale.register_sharding(lambda input, *_: [([split], [split, REPLICATE]) for split in (*axes(input), PARTIAL)])
    return scale


def _scale_on_cpu(input: Tensor, grad: Tensor, dtype: torch.dtype) -> Tensor:
    x = input.float()
    return torch.where(x == 0, x, x * grad).to(dtype)


def _scale_saved(op: KernelOp, saved: Tensor, grad: Tensor) -> Tensor:
    """The same where `saved` is, which nobody reads again. A factor of 1 changes no bit of it."""
    if not runs_kernels(op.name, saved):
        return saved.copy_(_scale_on_cpu(saved, grad, saved.dtype))
    with kernel_context(saved):
        _launch(saved, grad, saved, in_place=True)
    return saved


def save_gradients(ctx: Any, *gradients: Tensor) -> None:
    """Save the gradients that `SavedGradients` scales, in a `setup_context`."""
    ctx.hooked = saved_tensors_are_hooked()
    ctx.save_for_backward(*gradients)


class SavedGradients:
    """The gradients that were saved, for a backward formula to scale by the incoming one."""

    def __init__(self, ctx: Any, grad: Tensor, scale: KernelOp) -> None:
        self.gradients, self.grad, self.scale = ctx.saved_tensors, grad, scale
        self.last = is_plain_eager() and not (torch.is_grad_enabled() or ctx.hooked or graph_is_kept())

    def times(self, index: int, dtype: torch.dtype | None = None) -> Tensor:
        """One of them, times the incoming gradient and rounded once to `dtype`, by default its own."""
        saved = self.gradients[index]
        dtype = saved.dtype if dtype is None else dtype
        if self.last and saved.dtype == dtype and takes_fast_path((saved, self.grad)):
            # It was an output of the forward pass: as it is, it would keep the graph alive as long as the gradient.
            return _scale_saved(self.scale, saved.detach(), self.grad)
        return self.scale(saved, self.grad, dtype)


def mean_of_all(total: Tensor, denominator: Tensor, weighted: bool) -> Tensor:
    """A total of all processes, divided. Without weights none counts where the denominator is 0: NaN, no gradient."""
    if weighted:
        return total / denominator
    nothing = denominator == 0
    return total / torch.where(nothing, 1.0, denominator) + torch.where(nothing, float("nan"), 0.0)
