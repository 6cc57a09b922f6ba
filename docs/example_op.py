r"""Squared leaky ReLU, an activation.

Source: the square of Primer's ReLU, So et al., 2021, https://arxiv.org/abs/2109.08668, with a slope below zero.

Forward, elementwise, with a the slope:

    l = x if x > 0 else a * x
    y = l^2

Backward, given dy; l is computed again, so that only x is kept:

    dx = dy * 2 * l * (1 if x > 0 else a)
"""

from collections.abc import Iterator

import torch
import triton.language as tl
from torch import Tensor

from llmk.registry import Cost, KernelOp, Sample, axes, cdiv, check_dtype, empty, jit, public_op, wrap_triton


def leaky_relu_squared_reference(input: Tensor, negative_slope: float = 0.01) -> Tensor:
    return torch.nn.functional.leaky_relu(input, negative_slope).square()


@jit
def leaky_relu_squared_kernel(x_ptr, y_ptr, N, slope, BLOCK_N: tl.constexpr):
    slope = tl.cast(slope, tl.float32)
    cols = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = cols < N
    x = tl.load(x_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    leaky = tl.where(x > 0, x, slope * x)
    tl.store(y_ptr + cols, (leaky * leaky).to(y_ptr.dtype.element_ty), mask=mask)


@jit
def leaky_relu_squared_backward_kernel(dy_ptr, x_ptr, dx_ptr, N, slope, BLOCK_N: tl.constexpr):
    slope = tl.cast(slope, tl.float32)
    cols = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = cols < N
    dy = tl.load(dy_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    leaky = tl.where(x > 0, x, slope * x)
    dx = dy * 2.0 * leaky * tl.where(x > 0, 1.0, slope)
    tl.store(dx_ptr + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)


BLOCK_N = 1024


def _leaky_relu_squared_fwd(input: Tensor, negative_slope: float) -> Tensor:
    x = input.contiguous()
    y = empty(x.shape, x.dtype, x.device)
    grid = (cdiv(x.numel(), BLOCK_N),)
    wrap_triton(leaky_relu_squared_kernel)[grid](x, y, x.numel(), negative_slope, BLOCK_N=BLOCK_N)
    return y


def _leaky_relu_squared_bwd(grad: Tensor, input: Tensor, negative_slope: float) -> Tensor:
    dy, x = grad.contiguous(), input.contiguous()
    dx = empty(x.shape, x.dtype, x.device)
    grid = (cdiv(x.numel(), BLOCK_N),)
    wrap_triton(leaky_relu_squared_backward_kernel)[grid](dy, x, dx, x.numel(), negative_slope, BLOCK_N=BLOCK_N)
    return dx


leaky_relu_squared_fwd = KernelOp(_leaky_relu_squared_fwd, launch_cached=True)
leaky_relu_squared_bwd = KernelOp(_leaky_relu_squared_bwd, launch_cached=True)


@leaky_relu_squared_fwd.register_kernel("cpu")
def _(input, negative_slope):
    x = input.float()
    leaky = torch.where(x > 0, x, negative_slope * x)
    return leaky.square().to(input.dtype).contiguous()


@leaky_relu_squared_bwd.register_kernel("cpu")
def _(grad, input, negative_slope):
    x = input.float()
    leaky = torch.where(x > 0, x, negative_slope * x)
    dx = grad.float() * 2 * leaky
    dx = torch.where(x > 0, dx, negative_slope * dx)
    return dx.to(input.dtype).contiguous()


@leaky_relu_squared_fwd.register_fake
def _(input):
    return input.new_empty(input.shape)


leaky_relu_squared_fwd.register_backward(leaky_relu_squared_bwd)


@leaky_relu_squared_fwd.register_sharding
def _(input):
    return [([axis], [axis]) for axis in axes(input)]


def leaky_relu_squared_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    yield Sample((randn(4, 16),), why="powers of two")
    yield Sample((randn(2, 3, 37), 0.2), why="three dimensions, odd width, another slope")
    yield Sample((randn(1, 1),), why="one element")
    yield Sample((randn(0, 16),), why="no rows")
    yield Sample((randn(24, 6).t(),), why="strided")
    yield Sample((randn(3000),), why="more than one block")


def leaky_relu_squared_resized(rows: int, device: torch.device, dtype: torch.dtype) -> Sample:
    return Sample((torch.randn(rows, 48, device=device, dtype=dtype),), why="resized")


def leaky_relu_squared_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample((torch.randn(8192, 14336, device=device, dtype=dtype),), why="8192x14336")


def leaky_relu_squared_cost(input: Tensor, negative_slope: float = 0.01) -> Cost:
    tensor = input.numel() * input.element_size()
    return Cost(bytes_forward=2 * tensor, bytes_full=5 * tensor)


@public_op(
    reference=leaky_relu_squared_reference,
    differentiable=("input",),
    kernel_ops=(leaky_relu_squared_fwd, leaky_relu_squared_bwd),
    samples=leaky_relu_squared_samples,
    resized=leaky_relu_squared_resized,
    workloads=leaky_relu_squared_workloads,
    cost=leaky_relu_squared_cost,
)
def leaky_relu_squared(input: Tensor, negative_slope: float = 0.01) -> Tensor:
    """The square of `torch.nn.functional.leaky_relu`, computed in float32 with one rounding.

    Args:
        input: Any shape and strides, float32, float16 or bfloat16.
        negative_slope: The slope below zero, before squaring.

    Returns:
        The shape and dtype of `input`, contiguous.

    Raises:
        TypeError: `input` is not float32, float16 or bfloat16.

    Source: So et al., 2021, https://arxiv.org/abs/2109.08668.
    """
    check_dtype("input", input)
    return leaky_relu_squared_fwd(input, negative_slope)
