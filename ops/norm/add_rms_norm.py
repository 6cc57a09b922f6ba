r"""Residual addition and root mean square layer normalization in one pass.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, https://arxiv.org/abs/1910.07467, after the
addition that precedes it in every layer of Llama. The offset is Gemma's: https://arxiv.org/abs/2403.08295.

Forward, for each row of N values, with w = weight + offset:

    h = input + residual    rounded to their dtype
    y = h * rstd * w        with rstd = 1 / sqrt(ms) and ms = mean(h^2) + eps

The norm is taken of the rounded h, as PyTorch's composition does: it is what the backward pass will find.

Backward, given dy and dh:

    dinput = dresidual = rstd * (dy * w - h * mean(dy * w * h) / ms) + dh
    dw     = sum over rows of dy * h * rstd

The kernels are those of `_rms_norm_kernels.py`, with a residual; h and ms are what is kept for the backward pass.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from llmk.ops.common.samples import normal_resized, normal_workloads
from llmk.ops.norm import _rms_norm_kernels as norm
from llmk.ops.norm._patterns import ADD_RMS_NORM
from llmk.registry import (
    PARTIAL,
    REPLICATE,
    Cost,
    KernelOp,
    Sample,
    check_finite,
    check_like,
    check_not_negative,
    check_parameter,
    check_rows,
    public_op,
    row_axes,
    split_rows,
)


def add_rms_norm_reference(
    input: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    h = input + residual
    scale = weight + offset if weight is not None and offset else weight
    return torch.nn.functional.rms_norm(h, h.shape[-1:], scale, eps), h


def _add_rms_norm_fwd(
    input: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    y, h, ms = norm.forward(input, residual, weight, eps, offset)
    assert h is not None
    return y, h, ms


def _add_rms_norm_bwd(
    grad: Tensor,
    grad_h: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    ms: Tensor,
    eps: float,
    offset: float,
    need_weight: bool,
) -> tuple[Tensor, Tensor]:
    return norm.backward(grad, grad_h, h, weight, ms, eps, offset, need_weight)


# In a graph it is PyTorch's own operations, which Inductor fuses with the sums around it and computes again for the
# backward pass, so that y is not kept; the backward pass is the kernel. Longer rows Inductor reads from memory twice.
add_rms_norm_fwd = KernelOp(_add_rms_norm_fwd, launch_cached=True, decomposed=norm.inductor_reads_once)
add_rms_norm_bwd = KernelOp(_add_rms_norm_bwd, launch_cached=True)


add_rms_norm_fwd.register_kernel("cpu")(norm.forward_plain)
add_rms_norm_bwd.register_kernel("cpu")(norm.backward_plain)


@add_rms_norm_fwd.register_fake
def _(input):
    y, h = input.new_empty(input.shape), input.new_empty(input.shape)
    return y, h, input.new_empty(input.shape[:-1], dtype=torch.float32)


@add_rms_norm_bwd.register_fake
def _(grad, h, weight, need_weight):
    dw = weight.new_empty(weight.shape) if weight is not None and need_weight else grad.new_empty((0,))
    return h.new_empty(h.shape), dw


add_rms_norm_fwd.register_sharding(split_rows(outputs=3, inputs=2, parameters=1))


@add_rms_norm_bwd.register_sharding
def _(grad):
    return [([axis, PARTIAL], [axis, axis, axis, REPLICATE, axis]) for axis in row_axes(grad)]


def _setup_context(ctx, inputs, output) -> None:
    _, _, weight, ctx.eps, ctx.offset = inputs
    _, h, ms = output
    ctx.save_for_backward(h, weight, ms)


def _backward(ctx, grad, grad_h):
    # Input and residual get one tensor, as from torch.add: autograd copies where a gradient must not be shared.
    if grad is None:
        return grad_h, grad_h, None, None, None
    h, weight, ms = ctx.saved_tensors
    need_dw = ctx.needs_input_grad[2]
    dx, dw = add_rms_norm_bwd(grad, grad_h, h, weight, ms, ctx.eps, ctx.offset, need_dw)
    return dx, dx, dw if need_dw else None, None, None


add_rms_norm_fwd.register_autograd(
    _backward,
    setup_context=_setup_context,
    depends_on=[("input", "residual", "weight"), ("input", "residual")],
    takes_none=True,
)


def add_rms_norm_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    randn = partial(torch.randn, device=device, dtype=dtype)
    yield Sample((randn(4, 16), randn(4, 16), randn(16)), why="powers of two")
    yield Sample((randn(2, 3, 37), randn(2, 3, 37), randn(37), 1e-5), {"offset": 1.0}, why="odd width, Gemma's offset")
    yield Sample((randn(5, 40), randn(5, 40)), why="no weight")
    yield Sample((randn(5, 40), randn(5, 40), randn(40, dtype=torch.float32)), why="a float32 weight")
    yield Sample((randn(33), randn(33), randn(33)), why="one dimension")
    yield Sample((randn(7, 1), randn(7, 1), randn(1)), why="one column")
    yield Sample((randn(0, 16), randn(0, 16), randn(16)), why="no rows")
    yield Sample((randn(24, 6).t(), randn(6, 80)[:, 16:40], randn(24)), why="columns strided, and a slice")
    yield Sample(
        (randn(2, 3, 80)[..., 16:48].view(2, 3, 4, 8), randn(2, 3, 4, 20)[..., :8], randn(8)),
        why="rows at two distances",
    )
    yield Sample((randn(1, 16).expand(5, 16), randn(5, 16), randn(16)), why="input expanded")
    yield Sample((randn(300, 24), randn(300, 24), randn(24)), why="more rows than programs")
    yield Sample((1e4 * randn(3, 64), 1e4 * randn(3, 64), randn(64)), why="large values")
    yield Sample((randn(2, 100_003), randn(2, 100_003), randn(100_003)), why="100,003 columns")


@public_op(
    reference=add_rms_norm_reference,
    differentiable=("input", "residual", "weight"),
    kernel_ops=(add_rms_norm_fwd, add_rms_norm_bwd),
    samples=add_rms_norm_samples,
    resized=normal_resized(lambda rows: ((rows, 48), (rows, 48), (48,))),
    workloads=normal_workloads(
        [(32768, 4096), (8192, 4096), (65536, 1024), (4096, 16384)], lambda M, N: ((M, N), (M, N), (N,))
    ),
    cost=Cost.passes(4, 8),
    patterns=ADD_RMS_NORM,
    choices=norm.CHOICES,
)
def add_rms_norm(
    input: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The sum `h = input + residual` and its root mean square normalization over the last axis, `rms_norm(h)`.

    The sum is rounded once, and normalized as rounded, with statistics and products in float32 and one rounding.
    Kernels hold rows of up to 32 KiB, of half as much where they are not aligned to 16 elements; wider ones go through
    plain PyTorch.

    Args:
        input: `[..., N]`, float32, float16 or bfloat16, any strides.
        residual: Shape and dtype of `input`, any strides.
        weight: `[N]`, any of these dtypes; None for no scale.
        eps: Added to the mean square, at least 0.
        offset: Added to the weight: 1.0 for Gemma's, which is stored minus one.

    Returns:
        `(rms_norm(h), h)`, both `[..., N]`, contiguous, in the dtype of `input`.

    Raises:
        TypeError: A tensor is not float32, float16 or bfloat16, or `residual` has not the dtype of `input`.
        ValueError: `input` has no axis, its last one is empty, `residual` has not its shape, `weight` is not `[N]`,
            they are not on one device, or a number is out of range.

    Source: Zhang and Sennrich, 2019, https://arxiv.org/abs/1910.07467.
    """
    check_rows("input", input, "N")
    check_like("residual", residual, "input", input)
    check_parameter("weight", weight, input.shape[-1:], "the last axis of input", "input", input)
    check_not_negative("eps", eps)
    check_finite("offset", offset)
    y, h, _ = add_rms_norm_fwd(input, residual, weight, eps, offset)
    return y, h
