"""x * x by kernels of one's own, each broken in one way."""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmk.registry import Op, Sample


@triton.jit
def sound_kernel(x_ptr, y_ptr, M, N, x_stride, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0).to(tl.int64), M, tl.num_programs(0)):
        x = tl.load(x_ptr + row * x_stride + cols, mask=cols < N, other=0.0)
        tl.store(y_ptr + row * N + cols, x * x, mask=cols < N)


@triton.jit
def load_without_mask_kernel(x_ptr, y_ptr, M, N, x_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + cols)
    tl.store(y_ptr + row * N + cols, x * x, mask=cols < N)


@triton.jit
def store_without_mask_kernel(x_ptr, y_ptr, M, N, x_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + cols, mask=cols < N, other=0.0)
    tl.store(y_ptr + row * N + cols, x * x)


@triton.jit
def short_offset_kernel(x_ptr, y_ptr, M, N, x_stride, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * x_stride + cols, mask=cols < N, other=0.0)
    tl.store(y_ptr + tl.program_id(0).to(tl.int64) * N + cols, x * x, mask=cols < N)


@triton.jit
def short_offset_in_a_loop_kernel(x_ptr, y_ptr, M, N, x_stride, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), M, tl.num_programs(0)):
        x = tl.load(x_ptr + row.to(tl.int64) * x_stride + cols, mask=cols < N, other=0.0)
        tl.store(y_ptr + row * N + cols, x * x, mask=cols < N)


@triton.jit
def short_rows_kernel(x_ptr, y_ptr, M, N, x_stride, BLOCK: tl.constexpr):
    """One program: its rows are no program's number, but their offsets have 32 bits all the same."""
    for first in range(0, M, 4):
        rows, cols = first + tl.arange(0, 4)[:, None], tl.arange(0, BLOCK)[None, :]
        mask = (rows < M) & (cols < N)
        x = tl.load(x_ptr + rows * x_stride + cols, mask=mask, other=0.0)
        tl.store(y_ptr + rows.to(tl.int64) * N + cols, x * x, mask=mask)


@triton.jit
def first_rows_kernel(x_ptr, y_ptr, M, N, x_stride, BLOCK: tl.constexpr):
    """One program of 64 rows: those past them are not written, and the samples have 4."""
    for first in range(0, 64, 4):
        rows, cols = first + tl.arange(0, 4).to(tl.int64)[:, None], tl.arange(0, BLOCK)[None, :]
        mask = (rows < M) & (cols < N)
        x = tl.load(x_ptr + rows * x_stride + cols, mask=mask, other=0.0)
        tl.store(y_ptr + rows * N + cols, x * x, mask=mask)


@triton.jit
def zeroes_the_next_kernel(x_ptr, y_ptr, M, N, x_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    width = tl.where(row + 1 < M, N, 0)
    tl.store(y_ptr + (row + 1) * N + cols, 0.0, mask=cols < width)
    x = tl.load(x_ptr + row * x_stride + cols, mask=cols < N, other=0.0)
    tl.store(y_ptr + row * N + cols, x * x, mask=cols < N)


@triton.jit
def adds_the_last_kernel(x_ptr, y_ptr, M, N, x_stride, BLOCK: tl.constexpr):
    """Each program reads half the bytes of what the one before has stored, and none stores where another one does."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    last = (y_ptr + (row - 1) * N).to(tl.pointer_type(tl.int16), bitcast=True)
    added = tl.load(last + 2 * cols + 1, mask=cols < tl.where(row > 0, N, 0), other=0)
    x = tl.load(x_ptr + row * x_stride + cols, mask=cols < N, other=0.0)
    tl.store(y_ptr + row * N + cols, x * x + added, mask=cols < N)


@triton.jit
def takes_the_first_kernel(x_ptr, y_ptr, M, N, x_stride, BLOCK: tl.constexpr):
    """The program that comes first takes all columns, the others none: by an exchange of integers."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    found = tl.atomic_cas(y_ptr.to(tl.pointer_type(tl.int32), bitcast=True), 0, row.to(tl.int32) + 1)
    x = tl.load(x_ptr + row * x_stride + cols, mask=cols < N, other=0.0)
    left = tl.where(found == 0, N - 1, 0)
    tl.store(y_ptr + row * N + cols + 1, x * x, mask=cols < left)


@triton.jit
def float_atomic_kernel(x_ptr, y_ptr, M, N, x_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + cols, mask=cols < N, other=0.0)
    tl.atomic_add(y_ptr + row * N + cols, x * x, mask=cols < N)


@triton.jit
def unwritten_tail_kernel(x_ptr, y_ptr, M, N, x_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + cols, mask=cols < N, other=0.0)
    tl.store(y_ptr + row * N + cols, x * x, mask=cols < N // 16 * 16)


@triton.jit
def turns_by_data_kernel(x_ptr, y_ptr, M, N, x_stride, BLOCK: tl.constexpr):
    """Newton's square root of x^4, until no element moves: rounding may move one to and fro."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + cols, mask=cols < N, other=1.0)
    y, last = x * x, x * 0.0 - 1.0
    while tl.sum((y != last).to(tl.int32), axis=0) > 0:
        last = y
        y = tl.where(x == 0.0, 0.0, (y + x * x * x * x / y) / 2.0)
    tl.store(y_ptr + row * N + cols, x * x, mask=cols < N)


@triton.jit
def never_ends_kernel(x_ptr, y_ptr, M, N, x_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + cols, mask=cols < N, other=0.0)
    left = tl.sum(x * x, axis=0)
    while left > 0.0:
        left = left * 1.0
    tl.store(y_ptr + row * N + cols, x * x, mask=cols < N)


@triton.jit
def bounded_turns_kernel(x_ptr, y_ptr, M, N, x_stride, BLOCK: tl.constexpr):
    """Sound: every loop's turns have a bound."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + cols, mask=cols < N, other=0.0)
    turn, last = 0, -1.0
    while (turn < BLOCK) and (tl.sum(x, axis=0) != last):
        last = tl.sum(x, axis=0)
        turn += 1
    tries = tl.cast(2, tl.int32)
    while tries > 0:
        tries = tl.where(last < 0, 0, tries - 1)
    start = 0
    while start < N:
        start = start + 16
    tl.store(y_ptr + row * N + cols, x * x, mask=cols < N)


def _rows(tensor: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Return the tensor with neighbouring columns side by side; and the numbers of rows and columns."""
    tensor = tensor if tensor.stride(-1) == 1 else tensor.contiguous()
    return tensor, (tensor.shape[0], tensor.shape[1])


def _launch(kernel: Any, x: Tensor, zeroed: bool = False) -> Tensor:
    rows, (M, N) = _rows(x)
    allocate = torch.zeros if zeroed else torch.empty
    y = allocate((M, N), dtype=x.dtype, device=x.device)
    programs = 1 if kernel in (short_rows_kernel, first_rows_kernel) else min(M, 3) if "loop" in kernel.__name__ else M
    if y.numel():
        kernel[(programs,)](rows, y, M, N, rows.stride(0), BLOCK=triton.next_power_of_2(N))
    return y


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample((torch.randn(4, 37, device=device, dtype=dtype),), why="odd width")


def _resized(rows: int, device: torch.device, dtype: torch.dtype) -> Sample:
    return Sample((torch.randn(rows, 20, device=device, dtype=dtype),), why="resized")


def square_by(kernel: Any) -> Op:
    """x * x as an operator whose forward pass is the kernel."""
    name = f"square_by_{kernel.__name__}"
    zeroed = kernel in (float_atomic_kernel, takes_the_first_kernel)
    op = torch.library.custom_op(
        f"llmk_test::{name}",
        lambda input: _launch(kernel, input, zeroed),
        mutates_args=(),
        schema="(Tensor input) -> Tensor",
    )
    op.register_fake(lambda input: torch.empty(input.shape, dtype=input.dtype, device=input.device))
    op.register_autograd(
        lambda ctx, grad: 2 * grad * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return Op(
        name=name,
        overload=getattr(torch.ops.llmk_test, name).default,
        reference=lambda input: input * input,
        samples=_samples,
        resized=_resized,
        differentiable=("input",),
        dtypes=(torch.float32,),
    )


BROKEN_KERNELS = [
    (load_without_mask_kernel, "in_bounds", "loads offset 148 of x_ptr, which is (4, 37)"),
    (store_without_mask_kernel, "in_bounds", "stores to offset 148 of y_ptr, which is (4, 37)"),
    (zeroes_the_next_kernel, "any_program_order", "element 37 of y_ptr depends on the order of the programs"),
    (float_atomic_kernel, "no_float_atomics", "float_atomic_kernel: tl.atomic_fadd on floats"),
    (short_offset_kernel, "long_offsets", "an offset of x_ptr is a program's number times an argument, in 32 bits"),
    (short_offset_in_a_loop_kernel, "long_offsets", "an offset of y_ptr is a program's number times an argument"),
    (turns_by_data_kernel, "every_kernel_ends", "has no bound: expected a comparison of a counter"),
    (unwritten_tail_kernel, "every_element_written", "output 0: 20 element(s) never written"),
    (first_rows_kernel, "other_sizes", "the first of 19220 wrong elements, [64, 0], is nan"),
    (adds_the_last_kernel, "any_program_order", "element 37 of y_ptr depends on the order of the programs"),
    (takes_the_first_kernel, "any_program_order", "element 0 of y_ptr depends on the order of the programs"),
    (short_rows_kernel, "far_rows", "an offset of 32 bits wraps"),
]
"""Each with the promise that names its fault first, and words of how it does."""
