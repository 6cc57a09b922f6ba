r"""Squared ReLU, the activation of Primer's feed-forward layer.

Source: So et al., "Primer: Searching for Efficient Transformers for Language Modeling", 2021,
https://arxiv.org/abs/2109.08668.

Forward, elementwise:

    y = 0 if x <= 0 else x^2

Backward, given dy; only x is kept:

    dx = 0 if x <= 0 else dy * 2x

NaN is not <= 0 and comes through, as it does through PyTorch's ReLU.
"""

from collections.abc import Iterator
from functools import partial

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.rows import as_long_rows
from llmk.ops.common.samples import normal_resized, normal_workloads
from llmk.ops.pointwise._patterns import RELU_SQUARED
from llmk.registry import (
    Cost,
    KernelOp,
    Sample,
    axes,
    cdiv,
    check_dtype,
    empty,
    jit,
    like_first,
    public_op,
    wrap_triton,
)


def relu_squared_reference(input: Tensor) -> Tensor:
    return torch.nn.functional.relu(input).square()


@jit
def relu_squared_kernel(x_ptr, y_ptr, N, x_stride, BLOCK_N: tl.constexpr):
    blocks = tl.cdiv(N, BLOCK_N)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + row * x_stride + cols, mask=cols < N, other=0.0).to(tl.float32)
    y = tl.where(x <= 0.0, 0.0, x * x)
    tl.store(y_ptr + row * N + cols, y.to(y_ptr.dtype.element_ty), mask=cols < N)


@jit
def relu_squared_backward_kernel(dy_ptr, x_ptr, dx_ptr, N, dy_stride, x_stride, BLOCK_N: tl.constexpr):
    blocks = tl.cdiv(N, BLOCK_N)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    dy = tl.load(dy_ptr + row * dy_stride + cols, mask=cols < N, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_stride + cols, mask=cols < N, other=0.0).to(tl.float32)
    dx = tl.where(x <= 0.0, 0.0, dy * (2.0 * x))
    tl.store(dx_ptr + row * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < N)


# Sixteen elements a thread: each access is 16 bytes wide, and two are under way for every tensor.
BLOCK = {"BLOCK_N": 2048, "num_warps": 4}


def _relu_squared_fwd(input: Tensor) -> Tensor:
    (x,) = as_long_rows(input)
    M, N = x.shape
    y = empty(input.shape, input.dtype, input.device)
    wrap_triton(relu_squared_kernel)[(M * cdiv(N, BLOCK["BLOCK_N"]),)](x, y, N, x.stride(0), **BLOCK)
    return y


def _relu_squared_bwd(grad: Tensor, input: Tensor) -> Tensor:
    dy, x = as_long_rows(grad, input)
    M, N = x.shape
    dx = empty(input.shape, input.dtype, input.device)
    wrap_triton(relu_squared_backward_kernel)[(M * cdiv(N, BLOCK["BLOCK_N"]),)](
        dy, x, dx, N, dy.stride(0), x.stride(0), **BLOCK
    )
    return dx


relu_squared_fwd = KernelOp(_relu_squared_fwd, launch_cached=True)
relu_squared_bwd = KernelOp(_relu_squared_bwd, launch_cached=True)


@relu_squared_fwd.register_kernel("cpu")
def _(input):
    return torch.relu(input.float()).square().to(input.dtype).contiguous()


@relu_squared_bwd.register_kernel("cpu")
def _(grad, input):
    x = input.float()
    return torch.where(x <= 0, 0.0, grad.float() * (2 * x)).to(input.dtype).contiguous()


relu_squared_fwd.register_fake(like_first)
relu_squared_fwd.register_backward(relu_squared_bwd)


@relu_squared_fwd.register_sharding
def _(input):
    return [([axis], [axis]) for axis in axes(input)]


def relu_squared_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    randn = partial(torch.randn, device=device, dtype=dtype)
    special = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-4]
    yield Sample((randn(4, 16),), why="powers of two")
    yield Sample((randn(2, 3, 37),), why="three dimensions, odd width")
    yield Sample((randn(1, 1),), why="one element")
    yield Sample((randn(()),), why="no axis")
    yield Sample((randn(0, 16),), why="no rows")
    yield Sample((randn(24, 6).t(),), why="strided")
    yield Sample((randn(6, 80)[:, 16:48],), why="a slice of a wider row")
    yield Sample((randn(1, 16).expand(5, 16),), why="one row expanded")
    yield Sample((1e4 * randn(3, 64),), why="large values")
    yield Sample((torch.tensor(special, device=device, dtype=dtype),), why="zeros, infinities and NaN")
    yield Sample((randn(2, 100_003),), why="100,003 columns")


@public_op(
    reference=relu_squared_reference,
    differentiable=("input",),
    kernel_ops=(relu_squared_fwd, relu_squared_bwd),
    samples=relu_squared_samples,
    resized=normal_resized(lambda rows: ((rows, 48),)),
    workloads=normal_workloads([(8192, 14336), (32768, 14336)], lambda M, N: ((M, N),)),
    cost=Cost.passes(2, 5),
    patterns=RELU_SQUARED,
)
def relu_squared(input: Tensor) -> Tensor:
    """The square of `torch.nn.functional.relu`, computed in float32 with one rounding.

    Args:
        input: Any shape and strides, float32, float16 or bfloat16.

    Returns:
        The shape and dtype of `input`, contiguous.

    Raises:
        TypeError: `input` is not float32, float16 or bfloat16.

    Source: So et al., 2021, https://arxiv.org/abs/2109.08668.
    """
    check_dtype("input", input)
    return relu_squared_fwd(input)
