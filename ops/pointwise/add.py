"""Vector addition, the smallest complete operator.

Forward, elementwise:

    y = a + b

Backward, given dy:

    da = dy
    db = dy
"""

from collections.abc import Iterator
from functools import partial

import torch
import triton.language as tl
from torch import Tensor

from llmk.registry import (
    PARTIAL,
    Cost,
    KernelOp,
    Sample,
    axes,
    cdiv,
    check_dtype,
    check_like,
    empty,
    jit,
    public_op,
    wrap_triton,
)


def add_reference(input: Tensor, other: Tensor) -> Tensor:
    return input + other


@jit
def add_kernel(a_ptr, b_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    cols = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = cols < N
    a = tl.load(a_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + cols, (a + b).to(y_ptr.dtype.element_ty), mask=mask)


BLOCK_N = 1024


def _add_fwd(input: Tensor, other: Tensor) -> Tensor:
    a, b = input.contiguous(), other.contiguous()
    y = empty(a.shape, a.dtype, a.device)
    N = y.numel()
    wrap_triton(add_kernel)[(cdiv(N, BLOCK_N),)](a, b, y, N, BLOCK_N=BLOCK_N)
    return y


add_fwd = KernelOp(_add_fwd, launch_cached=True)


@add_fwd.register_kernel("cpu")
def _(input: Tensor, other: Tensor) -> Tensor:
    return (input.float() + other.float()).to(input.dtype).contiguous()


@add_fwd.register_fake
def _(input: Tensor, other: Tensor) -> Tensor:
    return input.new_empty(input.shape)


@add_fwd.register_sharding
def _(input, other):
    return [*(([axis], [axis, axis]) for axis in axes(input)), ([PARTIAL], [PARTIAL, PARTIAL])]


add_fwd.register_autograd(lambda ctx, grad: (grad, grad))


def add_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    randn = partial(torch.randn, device=device, dtype=dtype)
    yield Sample((randn(4, 16), randn(4, 16)), why="powers of two")
    yield Sample((randn(2, 3, 37), randn(2, 3, 37)), why="three dimensions, odd width")
    yield Sample((randn(()), randn(())), why="no axis, one element")
    yield Sample((randn(0, 16), randn(0, 16)), why="no rows")
    yield Sample((randn(24, 6).t(), randn(6, 24)), why="one strided, the other not")
    yield Sample((randn(1, 16).expand(5, 16), randn(9, 20)[:5, 4:]), why="one expanded, the other a slice")
    yield Sample((1e4 * randn(3, 64), 1e4 * randn(3, 64)), why="large values")
    yield Sample((randn(2, 100_003), randn(2, 100_003)), why="many blocks")


def add_resized(rows: int, device: torch.device, dtype: torch.dtype) -> Sample:
    input, other = (torch.randn(rows, 48, device=device, dtype=dtype) for _ in range(2))
    return Sample((input, other), why="resized")


def add_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    input, other = (torch.randn(2**28, device=device, dtype=dtype) for _ in range(2))
    yield Sample((input, other), why="2^28 elements")


def add_cost(input: Tensor, other: Tensor) -> Cost:
    tensor = input.numel() * input.element_size()
    return Cost(bytes_forward=3 * tensor, bytes_full=3 * tensor)  # backward, dy is handed on


@public_op(
    reference=add_reference,
    differentiable=("input", "other"),
    kernel_ops=(add_fwd,),
    samples=add_samples,
    resized=add_resized,
    workloads=add_workloads,
    cost=add_cost,
)
def add(input: Tensor, other: Tensor) -> Tensor:
    """The sum of two tensors of one shape and dtype; `torch.add` also broadcasts and mixes dtypes.

    Args:
        input: Any shape and strides, float32, float16 or bfloat16.
        other: Shape, dtype and device of `input`.

    Returns:
        The shape and dtype of `input`, contiguous.

    Raises:
        TypeError: `input` is not float32, float16 or bfloat16, or the dtype of `other` is another.
        ValueError: The shape or the device of `other` is not that of `input`.

    Source: the first kernel of Triton's tutorials,
    https://triton-lang.org/main/getting-started/tutorials/01-vector-add.html.
    """
    check_dtype("input", input)
    check_like("other", other, "input", input)
    return add_fwd(input, other)
