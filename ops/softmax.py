r"""Softmax over any axis.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, https://arxiv.org/abs/1805.02867, for
the rows that do not fit; `torch.nn.functional.softmax` for the semantics.

Forward, for each row x of N values:

    m = max(x)
    y = exp(x - m) / sum(exp(x - m))

Backward, given dy; y is all that is kept:

    s  = sum(dy * y)
    dx = y * (dy - s - sum((dy - s) * y))

The last sum is zero were it not for rounding: that of s, and that of y, which in float16 and bfloat16 does not sum to
one. Without it a constant dy, whose gradient is zero, would get back what was lost there.

A row that fits in registers is read once in either direction. A longer one is walked in blocks, twice: first for its
statistics, then, from its end to its beginning, for the result. So the second walk begins with what was read last, and
the fewer rows are under way at a time, the more of it is still in the caches. Over an axis that is not the last one, a
program takes neighbouring columns and walks down.
"""

import math
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmk.ops._rows import as_rows
from llmk.registry import (
    Cost,
    KernelOp,
    Sample,
    at_most,
    cdiv,
    check_dtype,
    empty,
    next_power_of_2,
    num_programs,
    public_op,
    wrap_triton,
)

LOG2E = tl.constexpr(1.4426950408889634)


def softmax_reference(input: Tensor, dim: int = -1) -> Tensor:
    return torch.nn.functional.softmax(input, dim)


@triton.jit
def softmax_kernel(x_ptr, y_ptr, M, N, x_stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=float("-inf")).to(tl.float32)
    e = tl.exp2((x - tl.max(x, axis=1)[:, None]) * LOG2E)
    y = e * tl.div_rn(1.0, tl.sum(e, axis=1))[:, None]
    tl.store(y_ptr + rows[:, None] * N + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _finite(s, rest):
    """The rest that s leaves: none where s is infinite, and dy - s is what PyTorch gives."""
    return tl.where(tl.abs(s) < float("inf"), rest, 0.0)


@triton.jit
def softmax_backward_kernel(
    dy_ptr, y_ptr, dx_ptr, M, N, dy_stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    # Last rows first: what wrote dy and y ended there, and left them in L2.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    rows = program.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    dy = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + rows[:, None] * N + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    s = tl.sum(dy * y, axis=1)
    dy -= s[:, None]
    rest = _finite(s, tl.sum(dy * y, axis=1))  # type: ignore[misc]
    dx = y * (dy - rest[:, None])
    tl.store(dx_ptr + rows[:, None] * N + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _add_exponentials(m, total, x, axis: tl.constexpr):
    """The running maximum m and sum of exp(x - m), with the values of x along `axis` counted in."""
    new_m = tl.maximum(m, tl.max(x, axis=axis))
    # Subtracting -inf from -inf would be NaN where nothing finite has been seen yet.
    base = tl.where(new_m == float("-inf"), 0.0, new_m)
    e = tl.exp2((x - tl.expand_dims(base, axis)) * LOG2E)
    return new_m, total * tl.exp2((m - base) * LOG2E) + tl.sum(e, axis=axis)


@triton.jit
def softmax_long_kernel(x_ptr, y_ptr, M, N, x_stride, LANES: tl.constexpr, WIDTH: tl.constexpr):
    # A lane is what a thread loads at once. Each has its own maximum and sum: no thread waits for another in the loop.
    lanes = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    BLOCK: tl.constexpr = LANES * WIDTH
    blocks = tl.cdiv(N, BLOCK)
    for row in range(tl.program_id(0).to(tl.int64), M, tl.num_programs(0)):
        x_row, y_row = x_ptr + row * x_stride, y_ptr + row * N
        m = tl.full((LANES,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((LANES,), dtype=tl.float32)
        for block in range(blocks):
            cols = block * BLOCK + lanes
            x = tl.load(x_row + cols, mask=cols < N, other=float("-inf"), eviction_policy="evict_last").to(tl.float32)
            m, total = _add_exponentials(m, total, x, 1)  # type: ignore[misc]
        top = tl.max(m, axis=0)
        base = tl.where(top == float("-inf"), 0.0, top)
        scale = tl.div_rn(1.0, tl.sum(total * tl.exp2((m - base) * LOG2E), axis=0))
        for block in range(blocks):
            cols = (blocks - 1 - block) * BLOCK + lanes
            x = tl.load(x_row + cols, mask=cols < N, other=0.0, eviction_policy="evict_first").to(tl.float32)
            y = tl.exp2((x - top) * LOG2E) * scale
            tl.store(y_row + cols, y.to(y_ptr.dtype.element_ty), mask=cols < N, eviction_policy="evict_first")


@triton.jit
def softmax_long_backward_kernel(dy_ptr, y_ptr, dx_ptr, M, N, dy_stride, LANES: tl.constexpr, WIDTH: tl.constexpr):
    lanes = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    BLOCK: tl.constexpr = LANES * WIDTH
    blocks = tl.cdiv(N, BLOCK)
    for index in range(tl.program_id(0).to(tl.int64), M, tl.num_programs(0)):
        row = M - 1 - index
        dy_row, y_row, dx_row = dy_ptr + row * dy_stride, y_ptr + row * N, dx_ptr + row * N
        dots = tl.zeros((LANES,), dtype=tl.float32)
        masses = tl.zeros((LANES,), dtype=tl.float32)
        for block in range(blocks):
            cols = block * BLOCK + lanes
            dy = tl.load(dy_row + cols, mask=cols < N, other=0.0, eviction_policy="evict_last").to(tl.float32)
            y = tl.load(y_row + cols, mask=cols < N, other=0.0, eviction_policy="evict_last").to(tl.float32)
            dots += tl.sum(dy * y, axis=1)
            masses += tl.sum(y, axis=1)
        s = tl.sum(dots, axis=0)
        # The rest lane by lane: these are small numbers, and their sum is not rounded as s is.
        rest = _finite(s, tl.sum(dots - s * masses, axis=0))  # type: ignore[misc]
        for block in range(blocks):
            cols = (blocks - 1 - block) * BLOCK + lanes
            dy = tl.load(dy_row + cols, mask=cols < N, other=0.0, eviction_policy="evict_first").to(tl.float32)
            y = tl.load(y_row + cols, mask=cols < N, other=0.0, eviction_policy="evict_first").to(tl.float32)
            dx = y * (dy - s - rest)
            tl.store(dx_row + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < N, eviction_policy="evict_first")


@triton.jit
def _columns(C, BLOCK_C: tl.constexpr):
    """Which of the outer indices and which columns are this program's."""
    blocks = tl.cdiv(C, BLOCK_C)
    program = tl.program_id(0)
    cols = (program % blocks).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    return (program // blocks).to(tl.int64), cols[None, :]


@triton.jit
def softmax_columns_kernel(
    x_ptr, y_ptr, N, C, x_stride_outer, x_stride_n, x_stride_c, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr
):
    """`[outer, N, C]` over N."""
    outer, cols = _columns(C, BLOCK_C)  # type: ignore[misc]
    x_ptr += outer * x_stride_outer + cols * x_stride_c
    y_ptr += outer * N * C + cols
    m = tl.full((BLOCK_C,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_C,), dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N).to(tl.int64)[:, None]
        x = tl.load(x_ptr + n * x_stride_n, mask=(n < N) & (cols < C), other=float("-inf")).to(tl.float32)
        m, total = _add_exponentials(m, total, x, 0)  # type: ignore[misc]
    scale = tl.div_rn(1.0, total)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N).to(tl.int64)[:, None]
        mask = (n < N) & (cols < C)
        x = tl.load(x_ptr + n * x_stride_n, mask=mask, other=0.0).to(tl.float32)
        y = tl.exp2((x - m[None, :]) * LOG2E) * scale[None, :]
        tl.store(y_ptr + n * C, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def softmax_columns_backward_kernel(
    dy_ptr, y_ptr, dx_ptr, N, C, dy_stride_outer, dy_stride_n, dy_stride_c,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    outer, cols = _columns(C, BLOCK_C)  # type: ignore[misc]
    dy_ptr += outer * dy_stride_outer + cols * dy_stride_c
    y_ptr += outer * N * C + cols
    dx_ptr += outer * N * C + cols
    dots = tl.zeros((BLOCK_N, BLOCK_C), dtype=tl.float32)
    masses = tl.zeros((BLOCK_N, BLOCK_C), dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N).to(tl.int64)[:, None]
        mask = (n < N) & (cols < C)
        dy = tl.load(dy_ptr + n * dy_stride_n, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + n * C, mask=mask, other=0.0).to(tl.float32)
        dots += dy * y
        masses += y
    s = tl.sum(dots, axis=0)
    rest = _finite(s, tl.sum(dots - s[None, :] * masses, axis=0))  # type: ignore[misc]
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N).to(tl.int64)[:, None]
        mask = (n < N) & (cols < C)
        dy = tl.load(dy_ptr + n * dy_stride_n, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + n * C, mask=mask, other=0.0).to(tl.float32)
        dx = y * (dy - s[None, :] - rest[None, :])
        tl.store(dx_ptr + n * C, dx.to(dx_ptr.dtype.element_ty), mask=mask)


# Widest row that one program holds in registers, forward x, backward y and dy. Beyond it sixteen warps have more
# than 32 values of each a thread, and a second program does not fit beside the first. H200, bf16, times the floor: 1.08
# at 8192x4096, 1.08 to 1.18 at 32768x1024.
MAX_BLOCK = 16384


def _tile(N: int, elements: int) -> dict[str, int]:
    """Rows per program, to make up so many elements, and sixteen elements a thread while warps last."""
    block_n = next_power_of_2(max(N, 1))
    block_m = max(1, elements // block_n)
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": min(16, max(4, block_m * block_n // 512))}


def _long(N: int, element_size: int, tensors: int) -> tuple[int, dict[str, int]]:
    """Programs per multiprocessor that walk long rows of one or two tensors, and their block in lanes of 16 bytes."""
    # Each program has one row under way, 256 KB of a tensor at 131,072 columns of bfloat16, half of which on average is
    # still to be read again from an H200's 50 MB of L2. So few programs, each with 32 KB of loads or more in flight to
    # make up for it. H200, bf16, times the floor: 1.23 at 16384x32768, 1.58 at 4096x131072.
    programs = 2 if tensors * N * element_size <= 2**18 else 1
    return programs, {
        "LANES": min(2048, 4096 // (programs * tensors)),
        "WIDTH": 16 // element_size,
        "num_warps": 16,
    }


def _columns_tile(N: int, C: int) -> dict[str, int]:
    """Stretches of up to 64 columns, 128 bytes in bfloat16, and rows to make up 2048 elements."""
    block_c = min(64, next_power_of_2(max(C, 1)))
    return {"BLOCK_N": min(2048 // block_c, next_power_of_2(max(N, 1))), "BLOCK_C": block_c, "num_warps": 4}


def _split(x: Tensor, dim: int) -> tuple[int, int, int]:
    """The sizes of x before, at and after `dim`."""
    return math.prod(x.shape[:dim]), x.shape[dim], math.prod(x.shape[dim + 1 :])


def _softmax_fwd(input: Tensor, dim: int) -> Tensor:
    outer, N, C = _split(input, dim)
    y = empty(input.shape, input.dtype, input.device)
    if C != 1:
        x = input.reshape(outer, N, C)  # copies only if the axes before dim, or those after it, do not merge
        tile = _columns_tile(N, C)
        wrap_triton(softmax_columns_kernel)[(outer * cdiv(C, tile["BLOCK_C"]),)](x, y, N, C, *x.stride(), **tile)
        return y
    x = as_rows(input.flatten(dim))
    if N <= MAX_BLOCK:
        tile = _tile(N, 2048)
        wrap_triton(softmax_kernel)[(cdiv(outer, tile["BLOCK_M"]),)](x, y, outer, N, x.stride(0), **tile)
    else:
        per_multiprocessor, tile = _long(N, x.element_size(), 1)
        programs = at_most(outer, num_programs(x.device, per_multiprocessor))
        wrap_triton(softmax_long_kernel)[(programs,)](x, y, outer, N, x.stride(0), **tile)
    return y


def _softmax_bwd(grad: Tensor, output: Tensor, dim: int) -> Tensor:
    outer, N, C = _split(output, dim)
    y = output.contiguous()
    dx = empty(output.shape, output.dtype, output.device)
    if C != 1:
        dy = grad.reshape(outer, N, C)
        tile = _columns_tile(N, C)
        wrap_triton(softmax_columns_backward_kernel)[(outer * cdiv(C, tile["BLOCK_C"]),)](
            dy, y, dx, N, C, *dy.stride(), **tile
        )
        return dx
    dy = as_rows(grad.flatten(dim))
    if N <= MAX_BLOCK:
        tile = _tile(N, 4096)
        grid = (cdiv(outer, tile["BLOCK_M"]),)
        wrap_triton(softmax_backward_kernel)[grid](dy, y, dx, outer, N, dy.stride(0), **tile)
    else:
        per_multiprocessor, tile = _long(N, y.element_size(), 2)
        programs = at_most(outer, num_programs(y.device, per_multiprocessor))
        wrap_triton(softmax_long_backward_kernel)[(programs,)](dy, y, dx, outer, N, dy.stride(0), **tile)
    return dx


softmax_fwd = KernelOp(_softmax_fwd, planned=True)
softmax_bwd = KernelOp(_softmax_bwd, planned=True)


@softmax_fwd.register_kernel("cpu")
def _(input: Tensor, dim: int) -> Tensor:
    return torch.softmax(input.float(), dim).to(input.dtype).contiguous()


@softmax_bwd.register_kernel("cpu")
def _(grad: Tensor, output: Tensor, dim: int) -> Tensor:
    dy, y = grad.float(), output.float()
    s = (dy * y).sum(dim, keepdim=True)
    dy = dy - s
    rest = torch.where(s.isfinite(), (dy * y).sum(dim, keepdim=True), 0.0)
    return (y * (dy - rest)).to(output.dtype).contiguous()


@softmax_fwd.register_fake
def _(input: Tensor, dim: int) -> Tensor:
    return input.new_empty(input.shape)


@softmax_bwd.register_fake
def _(grad: Tensor, output: Tensor, dim: int) -> Tensor:
    return output.new_empty(output.shape)


def _setup_context(ctx, inputs, output) -> None:
    _, ctx.dim = inputs
    ctx.save_for_backward(output)


def _backward(ctx, grad):
    (output,) = ctx.saved_tensors
    return softmax_bwd(grad, output, ctx.dim), None


softmax_fwd.register_autograd(_backward, setup_context=_setup_context)


def softmax_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    yield Sample((randn(4, 16),), why="powers of two")
    yield Sample((randn(2, 3, 37),), why="three dimensions, odd width")
    yield Sample((randn(3, 37, 5), 1), why="the middle axis")
    yield Sample((randn(70, 6).t(), 0), why="the first axis, strided")
    yield Sample((randn(5000, 2), 0), why="the first axis, more than a block of it")
    yield Sample((randn(7, 1),), why="one column")
    yield Sample((randn(),), why="no dimension")
    yield Sample((randn(0, 16),), why="no rows")
    yield Sample((randn(6, 80)[:, 16:48],), why="a slice of a wider row")
    yield Sample((randn(1, 16).expand(5, 16),), why="one row expanded")
    yield Sample((1e4 * randn(3, 64),), why="large values")
    masked = torch.arange(40, device=device) < torch.tensor([[0], [20], [40]], device=device)
    yield Sample((randn(3, 40).masked_fill(masked, float("-inf")),), why="rows with none, some and all at -inf: NaN")
    yield Sample((randn(2, 100_003),), why="100,003 columns")


def softmax_resized(rows: int, device: torch.device, dtype: torch.dtype) -> Sample:
    return Sample((torch.randn(rows, 48, device=device, dtype=dtype),), why="resized")


def softmax_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for rows, columns in [(8192, 4096), (16384, 32768), (4096, 131072), (32768, 1024)]:
        yield Sample((torch.randn(rows, columns, device=device, dtype=dtype),), why=f"{rows}x{columns}")
    yield Sample((torch.randn(64, 1024, 1024, device=device, dtype=dtype), 1), why="64x1024x1024 over the middle axis")


def softmax_cost(input: Tensor, dim: int = -1) -> Cost:
    tensor = input.numel() * input.element_size()
    return Cost(bytes_forward=2 * tensor, bytes_full=5 * tensor)


@public_op(
    "softmax(Tensor input, int dim=-1) -> Tensor",
    reference=softmax_reference,
    differentiable=("input",),
    kernel_ops=(softmax_fwd, softmax_bwd),
    samples=softmax_samples,
    resized=softmax_resized,
    workloads=softmax_workloads,
    cost=softmax_cost,
)
def softmax(input: Tensor, dim: int = -1) -> Tensor:
    """Softmax over an axis, as `torch.nn.functional.softmax`, computed in float32 with one rounding.

    Args:
        input: Any shape and strides, float32, float16 or bfloat16. Over its last axis it is copied if neighbours there
            are not neighbours in memory; over another one only if the axes around it do not merge.
        dim: The axis, counted from the end if negative.

    Returns:
        The shape and dtype of `input`, contiguous. A row that is all -inf, or has NaN or inf in it, is NaN.

    Raises:
        TypeError: `input` is not float32, float16 or bfloat16.
        IndexError: `input` has no such axis.

    Source: Milakov and Gimelshein, 2018, https://arxiv.org/abs/1805.02867.
    """
    check_dtype("input", input)
    axes = max(input.dim(), 1)
    if not -axes <= dim < axes:
        raise IndexError(
            f"dim: Dimension out of range (expected to be in range of [{-axes}, {axes - 1}], but got {dim})"
        )
    if input.dim() == 0:
        return softmax_fwd(input.view(1), 0).view(())
    return softmax_fwd(input, dim % axes)
