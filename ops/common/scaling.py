"""The derivative of a loss whose forward pass has made the gradients: they are scaled, once.

In eager mode, where a backward pass is the last to read what was saved, the gradients are scaled where they are: they
are then in memory once, and where the factor is 1, as of most losses, nothing is done at all.

A factor that is infinite or NaN multiplies the gradients of what counts alone, as in autograd's formulas, which leave a
token that does not count out: a mean over no token comes in as 1 / 0. Labels say which tokens count, and without labels
those whose gradient is not 0.
"""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from llmk.registry import (
    PARTIAL,
    REPLICATE,
    KernelOp,
    axes,
    cdiv,
    empty,
    grid_cap,
    jit,
    num_programs,
    row_axes,
    wrap_triton,
)
from llmk.registry.devices import kernel_context, runs_kernels
from llmk.registry.eager.bypass import is_plain_eager, takes_fast_path
from llmk.registry.private.modes import graph_is_kept, top_saved_tensors_hooks

PROGRAMS = 8
"""Programs of 8 warps that a multiprocessor holds at a time: where a factor is expected to be 1 a program does no
more than start. With one for each 4096 elements of a gradient of 1 GiB that takes 0.11 ms of an H200 instead of 0.02;
where it is not 1 both take 0.56, but from float32 these 0.79 instead of 0.74."""


@jit
def scale_kernel(
    x_ptr, grad_ptr, labels_ptr, y_ptr, N, tokens, ignore_index,
    OF_TOKENS: tl.constexpr, IN_PLACE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    factor = tl.load(grad_ptr)
    if IN_PLACE:  # noqa: SIM102  Triton evaluates both sides of an `and`
        if factor == 1.0:
            return
    first, step = tl.program_id(0).to(tl.int64) * BLOCK_N, tl.num_programs(0).to(tl.int64) * BLOCK_N
    if tl.abs(factor) < float("inf"):  # which multiplies what counts and what does not alike, that is 0
        for start in tl.range(first, N, step, num_stages=3):  # pyright: ignore[reportGeneralTypeIssues]
            offsets = start + tl.arange(0, BLOCK_N)
            x = tl.load(x_ptr + offsets, mask=offsets < N, other=0.0).to(tl.float32)
            tl.store(y_ptr + offsets, (x * factor).to(y_ptr.dtype.element_ty), mask=offsets < N)
        return
    counted = 0
    if labels_ptr is not None and not OF_TOKENS:
        for start in range(0, tokens, BLOCK_N):
            offsets = start + tl.arange(0, BLOCK_N)
            labels = tl.load(labels_ptr + offsets, mask=offsets < tokens, other=ignore_index).to(tl.int64)
            counted += tl.sum((labels != ignore_index).to(tl.int32), axis=0)
    for start in range(first, N, step):
        offsets = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + offsets, mask=offsets < N, other=0.0).to(tl.float32)
        counts = x != 0.0
        if labels_ptr is not None:
            counts = tl.full((BLOCK_N,), counted, tl.int32) > 0
            if OF_TOKENS:
                labels = tl.load(labels_ptr + offsets // (N // tokens), mask=offsets < N, other=ignore_index)
                counts = labels.to(tl.int64) != ignore_index
        tl.store(y_ptr + offsets, tl.where(counts, x * factor, x).to(y_ptr.dtype.element_ty), mask=offsets < N)


def _launch(
    x: Tensor, grad: Tensor, labels: Tensor | None, ignore_index: int, of_tokens: bool, y: Tensor, in_place: bool
) -> None:
    blocks, tokens = cdiv(x.numel(), 4096), 0 if labels is None else labels.numel()
    programs = grid_cap(blocks, num_programs(x.device, PROGRAMS)) if in_place else blocks
    wrap_triton(scale_kernel)[(programs,)](
        x, grad, labels if labels is None else labels.contiguous(), y, x.numel(), tokens, ignore_index,
        OF_TOKENS=of_tokens, IN_PLACE=in_place, BLOCK_N=4096, num_warps=8,
    )  # fmt: skip


def _scale(
    input: Tensor, grad: Tensor, labels: Tensor | None, ignore_index: int, of_tokens: bool, dtype: torch.dtype
) -> Tensor:
    """input * grad, a float32 scalar, rounded once to `dtype`; the input where nothing counts.

    Labels of tokens `[...]` say what counts: of gradients of tokens `[..., H]` theirs, of others any.
    """
    y = empty(input.shape, dtype, input.device)
    _launch(input, grad, labels, ignore_index, of_tokens, y, in_place=False)
    return y


def scale_op(name: str) -> KernelOp:
    """`_scale` as a kernel op of one operator's own."""
    scale = KernelOp(_scale, name=name, launch_cached=True)
    scale.register_kernel("cpu")(_scale_on_cpu)
    scale.register_fake(lambda input, dtype: input.new_empty(input.shape, dtype=dtype))
    scale.register_sharding(_scale_sharding)
    return scale


def _scale_on_cpu(
    input: Tensor, grad: Tensor, labels: Tensor | None, ignore_index: int, of_tokens: bool, dtype: torch.dtype
) -> Tensor:
    x = input.float()
    counts = x != 0 if labels is None else labels.long() != ignore_index
    if labels is not None:
        counts = counts.unsqueeze(-1) if of_tokens else counts.any()
    return torch.where(counts, x * grad, x).to(dtype)


def _scale_sharding(input: Any, labels: Any, of_tokens: bool) -> list[Any]:
    """Return the ways to split: by tokens, by other axes, and sums over processes, of other tokens too."""
    splits = [([axis], [axis, REPLICATE, axis if of_tokens else REPLICATE]) for axis in row_axes(input)]
    splits += [([split], [split, REPLICATE, REPLICATE]) for split in (input.ndim - 1, PARTIAL)]
    tokens = () if labels is None or of_tokens else axes(labels)
    return splits + [([PARTIAL], [PARTIAL, REPLICATE, axis]) for axis in tokens]


def save_gradients(ctx: Any, *gradients: Tensor, counted: tuple[Tensor | None, int] = (None, 0)) -> None:
    """Save the gradients that `SavedGradients` scales, in a `setup_context`.

    `counted` has the labels of tokens that say which count, and the one of those that do not.
    """
    ctx.hooked = top_saved_tensors_hooks() is not None
    labels, ctx.ignore_index = counted
    ctx.save_for_backward(*gradients, labels)


class SavedGradients:
    """The gradients that were saved, for a backward formula to scale by the incoming one."""

    def __init__(self, ctx: Any, grad: Tensor, scale: KernelOp) -> None:
        *self.gradients, self.labels = ctx.saved_tensors
        self.grad, self.ignore_index, self.scale = grad, ctx.ignore_index, scale
        last = is_plain_eager() and not (torch.is_grad_enabled() or ctx.hooked or graph_is_kept())
        self.last = last and takes_fast_path((grad, *self.gradients))
        self.by_kernels = self.last and runs_kernels(scale.name, grad)

    def times(self, index: int, dtype: torch.dtype | None = None, *, of_tokens: bool = False) -> Tensor:
        """One of them, times the incoming gradient and rounded once to `dtype`, by default its own."""
        saved = self.gradients[index]
        dtype = saved.dtype if dtype is None else dtype
        counted = self.labels, self.ignore_index, of_tokens
        if not self.last or saved.dtype != dtype:
            return self.scale(saved, self.grad, *counted, dtype)
        # It was an output of the forward pass: as it is, it would keep the graph alive as long as the gradient. Nobody
        # reads it again, so it is scaled where it is; a factor of 1 changes no bit of it.
        saved = saved.detach()
        if not self.by_kernels:
            return saved.copy_(_scale_on_cpu(saved, self.grad, *counted, saved.dtype))
        with kernel_context(saved):
            _launch(saved, self.grad, *counted, saved, in_place=True)
        return saved


def mean_of_all(total: Tensor, denominator: Tensor, weighted: bool) -> Tensor:
    """A total of all processes, divided. Without weights none counts where the denominator is 0: NaN, no gradient."""
    if weighted:
        return total / denominator
    nothing = denominator == 0
    return total / torch.where(nothing, 1.0, denominator) + torch.where(nothing, float("nan"), 0.0)
