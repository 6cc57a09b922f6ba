r"""Softmax over any axis.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, https://arxiv.org/abs/1805.02867, for
the rows that do not fit; `torch.nn.functional.softmax` for the semantics.

Forward, for each row x of N values:

    m = max(x)
    y = exp(x - m) / sum(exp(x - m))

Backward, given dy; y is all that is kept:

    s  = sum(dy * y)
    dx = y * (dy - s - s * (1 - sum(y)))

The last term is zero were it not for rounding: in float16 and bfloat16 y does not sum to one. Without it a constant dy,
whose gradient is zero, would get back what was lost there. It is added to s by itself: 2 - sum(y) would lose what is
less than one unit of float32.

A row that fits in registers is read once in either direction. A longer one is walked in blocks, twice: first for its
statistics, then, from its end to its beginning, for the result. So the second walk begins with what was read last, and
the fewer rows are under way at a time, the more of it is still in L2. The first block, which is whole in every such
row, is read last and stays in registers.

Over an axis that is not the last one, of `[outer, N, C]`, a program takes neighbouring columns. Those that fit in
registers are read once in either direction; down longer ones a program walks twice.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.math import LOG2E
from llmk.ops.common.rows import aligned, as_rows, rows_ahead, rows_aligned
from llmk.ops.common.samples import normal_resized
from llmk.ops.common.sums import sum_pair
from llmk.registry import (
    Cost,
    KernelOp,
    Sample,
    cdiv,
    check_dtype,
    empty,
    grid_cap,
    jit,
    like_first,
    max_warps,
    next_power_of_2,
    num_programs,
    public_op,
    split_around_dim,
    wrap_triton,
)


def softmax_reference(input: Tensor, dim: int = -1) -> Tensor:
    return torch.nn.functional.softmax(input, dim)


@jit
def _finite_rest(s, rest):
    """The rest that s leaves: none where s is infinite, and dy - s is what PyTorch gives."""
    return tl.where(tl.abs(s) < float("inf"), rest, 0.0)


@jit
def _add_exponentials(m, total, x, axis: tl.constexpr):
    """The running maximum m and sum of exp(x - m), with the values of x along `axis` counted in."""
    new_m = tl.maximum(m, tl.max(x, axis=axis))
    # Subtracting -inf from -inf would be NaN where nothing finite has been seen yet.
    base = tl.where(new_m == float("-inf"), 0.0, new_m)
    e = tl.exp2((x - tl.expand_dims(base, axis)) * LOG2E)
    return new_m, total * tl.exp2((m - base) * LOG2E) + tl.sum(e, axis=axis)


@jit
def softmax_kernel(
    x_ptr, y_ptr, M, N, x_stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr
):
    cols = tl.arange(0, BLOCK_N)
    # One turn, or where a program has several the next row is prefetched.
    first = tl.program_id(0).to(tl.int64) * BLOCK_M
    for start in tl.range(first, M, tl.num_programs(0) * BLOCK_M, num_stages=NUM_STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        rows = start + tl.arange(0, BLOCK_M)
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=float("-inf")).to(tl.float32)
        e = tl.exp2((x - tl.max(x, axis=1)[:, None]) * LOG2E)
        y = e * tl.div_rn(1.0, tl.sum(e, axis=1))[:, None]
        tl.store(y_ptr + rows[:, None] * N + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@jit
def softmax_backward_kernel(
    dy_ptr, y_ptr, dx_ptr, M, N, dy_stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HOLD: tl.constexpr
):
    # Last rows first: what wrote dy and y ended there, and left them in L2.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    rows = program.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    dy_ptr += rows[:, None] * dy_stride + cols[None, :]
    dy = tl.load(dy_ptr, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + rows[:, None] * N + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    s, mass = sum_pair(dy * y, y, 1)
    if not HOLD:  # from L2: registers hold y alone
        dy = tl.load(dy_ptr, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    s += _finite_rest(s, s * (1.0 - mass))
    dx = y * (dy - s[:, None])
    tl.store(dx_ptr + rows[:, None] * N + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)


# Widest row that one program holds in registers, forward x, backward y and dy.
MAX_BYTES = 65536
# Widest row with sixteen elements a thread; beyond it the program has a multiprocessor to itself.
MAX_SHARED = 16384


def _tile(N: int, elements: int) -> dict[str, int]:
    """Rows per program, to make up so many elements, and sixteen elements a thread while warps last."""
    block_n = next_power_of_2(max(N, 1))
    block_m = max(1, elements // block_n)
    # 16 elements a thread, 32 of rows past 4096, where threads wait for each other less: H200, bf16, times the floor at
    # 5120 columns 1.28 forward and 1.05 backward, with twice the warps 1.55 and 1.20.
    warps = min(16, max(4, block_m * block_n // (512 if block_n <= 4096 else 1024)))
    warps = max_warps() if N > MAX_SHARED else warps
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": warps}


def _held(x: Tensor) -> bool:
    """Return True if one program holds a row of x `[M, N]`."""
    N = x.shape[1]
    return N * x.element_size() <= MAX_BYTES and (N <= MAX_SHARED or rows_aligned(x))


def _forward_launch(M: int, N: int, x: Tensor) -> tuple[int, dict[str, int]]:
    """The number of programs, and their tile and prefetch of rows of x."""
    # H200, bf16, times the floor: 1.18 at 8192x4096. At 16384x32768, where a multiprocessor has room for one program:
    # 1.10 with two rows ahead, without prefetch 1.28, with half the warps 1.11.
    tile = _tile(N, 2048)
    if N > MAX_SHARED:
        ahead = rows_ahead(tile["BLOCK_N"] * x.element_size(), x.device)
        return grid_cap(M, num_programs(x.device, 1)), tile | {"NUM_STAGES": 1 + ahead}
    return cdiv(M, tile["BLOCK_M"]), tile | {"NUM_STAGES": 1}


def _backward_tile(N: int) -> dict[str, int]:
    return _tile(N, 4096) | {"HOLD": N <= MAX_SHARED}


@jit
def softmax_long_kernel(x_ptr, y_ptr, M, N, x_stride, THREADS: tl.constexpr, WIDTH: tl.constexpr):
    # A row of these columns is what a thread loads at once. It has its own maximum and sum: no thread waits for
    # another in the loop.
    first_cols = tl.arange(0, THREADS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    BLOCK: tl.constexpr = THREADS * WIDTH
    blocks = tl.cdiv(N, BLOCK)
    for row in range(tl.program_id(0).to(tl.int64), M, tl.num_programs(0)):
        x_row, y_row = x_ptr + row * x_stride, y_ptr + row * N
        m = tl.full((THREADS,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((THREADS,), dtype=tl.float32)
        for block in range(1, blocks):
            cols = block * BLOCK + first_cols
            x = tl.load(x_row + cols, mask=cols < N, other=float("-inf"), eviction_policy="evict_last").to(tl.float32)
            m, total = _add_exponentials(m, total, x, 1)
        held = tl.load(x_row + first_cols, eviction_policy="evict_first")
        m, total = _add_exponentials(m, total, held.to(tl.float32), 1)
        top = tl.max(m, axis=0)
        base = tl.where(top == float("-inf"), 0.0, top)
        scale = tl.div_rn(1.0, tl.sum(total * tl.exp2((m - base) * LOG2E), axis=0))
        y = tl.exp2((held.to(tl.float32) - top) * LOG2E) * scale
        tl.store(y_row + first_cols, y.to(y_ptr.dtype.element_ty), eviction_policy="evict_first")
        for block in range(1, blocks):
            cols = (blocks - block) * BLOCK + first_cols
            x = tl.load(x_row + cols, mask=cols < N, other=0.0, eviction_policy="evict_first").to(tl.float32)
            y = tl.exp2((x - top) * LOG2E) * scale
            tl.store(y_row + cols, y.to(y_ptr.dtype.element_ty), mask=cols < N, eviction_policy="evict_first")


@jit
def softmax_long_backward_kernel(dy_ptr, y_ptr, dx_ptr, M, N, dy_stride, THREADS: tl.constexpr, WIDTH: tl.constexpr):
    first_cols = tl.arange(0, THREADS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    BLOCK: tl.constexpr = THREADS * WIDTH
    blocks = tl.cdiv(N, BLOCK)
    for index in range(tl.program_id(0).to(tl.int64), M, tl.num_programs(0)):
        row = M - 1 - index
        dy_row, y_row, dx_row = dy_ptr + row * dy_stride, y_ptr + row * N, dx_ptr + row * N
        dots = tl.zeros((THREADS,), dtype=tl.float32)
        masses = tl.zeros((THREADS,), dtype=tl.float32)
        for block in range(1, blocks):
            cols = block * BLOCK + first_cols
            dy = tl.load(dy_row + cols, mask=cols < N, other=0.0, eviction_policy="evict_last").to(tl.float32)
            y = tl.load(y_row + cols, mask=cols < N, other=0.0, eviction_policy="evict_last").to(tl.float32)
            dots += tl.sum(dy * y, axis=1)
            masses += tl.sum(y, axis=1)
        held_dy = tl.load(dy_row + first_cols, eviction_policy="evict_first")
        held_y = tl.load(y_row + first_cols, eviction_policy="evict_first")
        dots += tl.sum(held_dy.to(tl.float32) * held_y.to(tl.float32), axis=1)
        masses += tl.sum(held_y.to(tl.float32), axis=1)
        s = tl.sum(dots, axis=0)
        # s * (1 - sum(y)) lane by lane: small numbers, whose sum is not rounded as s is.
        s += _finite_rest(s, tl.sum(dots - s * masses, axis=0))
        dx = held_y.to(tl.float32) * (held_dy.to(tl.float32) - s)
        tl.store(dx_row + first_cols, dx.to(dx_ptr.dtype.element_ty), eviction_policy="evict_first")
        for block in range(1, blocks):
            cols = (blocks - block) * BLOCK + first_cols
            dy = tl.load(dy_row + cols, mask=cols < N, other=0.0, eviction_policy="evict_first").to(tl.float32)
            y = tl.load(y_row + cols, mask=cols < N, other=0.0, eviction_policy="evict_first").to(tl.float32)
            dx = y * (dy - s)
            tl.store(dx_row + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < N, eviction_policy="evict_first")


# One row under way on each multiprocessor, 256 KiB of a tensor at 131,072 columns of bfloat16, half of what is not held
# still to be read again, on average, from an H200's 50 MB of L2; 64 KiB of loads in flight make up for the one program.
# H200, bf16, times the floor at 4096x131072: forward 1.19, backward 1.33; with nothing held 1.40 and 1.46. Prototypes:
# two blocks of half the size held 1.31 and 1.51; two such blocks, a program for each row 1.27 forward, three and 16
# warps 1.28; rows split over programs that wait for each other 1.5 at best.
BYTES = 65536


def _walk_block(*tensors: Tensor) -> dict[str, int]:
    """The block of a walk over these tensors, in first_cols of 16 bytes."""
    nbytes = BYTES if rows_aligned(*tensors) else BYTES // 4
    return {
        "THREADS": nbytes // (16 * len(tensors)),
        "WIDTH": 16 // tensors[0].element_size(),
        "num_warps": max_warps(),
    }


def _long_forward(x: Tensor, y: Tensor) -> None:
    """Fill y, contiguous, from the rows of x."""
    M, N = x.shape
    programs = grid_cap(M, num_programs(x.device, 1))
    wrap_triton(softmax_long_kernel)[(programs,)](x, y, M, N, x.stride(0), **_walk_block(x))


def _long_backward(dy: Tensor, y: Tensor, dx: Tensor) -> None:
    """Fill dx from the rows of dy; y and dx are contiguous."""
    M, N = dy.shape
    programs = grid_cap(M, num_programs(dy.device, 1))
    wrap_triton(softmax_long_backward_kernel)[(programs,)](
        dy, y, dx, M, N, dy.stride(0), **_walk_block(dy, y.view(M, N))
    )


@jit
def _columns(C, BLOCK_C: tl.constexpr):
    """Return the outer index and the columns of this program."""
    blocks = tl.cdiv(C, BLOCK_C)
    program = tl.program_id(0)
    cols = (program % blocks).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    return (program // blocks).to(tl.int64), cols[None, :]


@jit
def softmax_columns_kernel(
    x_ptr, y_ptr, N, C, x_stride_outer, x_stride_n, x_stride_c, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr
):
    outer, cols = _columns(C, BLOCK_C)
    n = tl.arange(0, BLOCK_N).to(tl.int64)[:, None]
    mask = (n < N) & (cols < C)
    x_ptr += outer * x_stride_outer + cols * x_stride_c
    x = tl.load(x_ptr + n * x_stride_n, mask=mask, other=float("-inf")).to(tl.float32)
    e = tl.exp2((x - tl.max(x, axis=0)[None, :]) * LOG2E)
    y = e * tl.div_rn(1.0, tl.sum(e, axis=0))[None, :]
    tl.store(y_ptr + outer * N * C + n * C + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@jit
def softmax_columns_backward_kernel(
    dy_ptr, y_ptr, dx_ptr, N, C, dy_stride_outer, dy_stride_n, dy_stride_c, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr
):
    outer, cols = _columns(C, BLOCK_C)
    n = tl.arange(0, BLOCK_N).to(tl.int64)[:, None]
    mask = (n < N) & (cols < C)
    offsets = outer * N * C + n * C + cols
    dy_ptr += outer * dy_stride_outer + cols * dy_stride_c
    dy = tl.load(dy_ptr + n * dy_stride_n, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    s, mass = sum_pair(dy * y, y, 0)
    s += _finite_rest(s, s * (1.0 - mass))
    dx = y * (dy - s[None, :])
    tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@jit
def softmax_long_columns_kernel(
    x_ptr, y_ptr, N, C, x_stride_outer, x_stride_n, x_stride_c, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr
):
    outer, cols = _columns(C, BLOCK_C)
    x_ptr += outer * x_stride_outer + cols * x_stride_c
    y_ptr += outer * N * C + cols
    m = tl.full((BLOCK_C,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_C,), dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N).to(tl.int64)[:, None]
        x = tl.load(x_ptr + n * x_stride_n, mask=(n < N) & (cols < C), other=float("-inf")).to(tl.float32)
        m, total = _add_exponentials(m, total, x, 0)
    scale = tl.div_rn(1.0, total)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N).to(tl.int64)[:, None]
        mask = (n < N) & (cols < C)
        x = tl.load(x_ptr + n * x_stride_n, mask=mask, other=0.0).to(tl.float32)
        y = tl.exp2((x - m[None, :]) * LOG2E) * scale[None, :]
        tl.store(y_ptr + n * C, y.to(y_ptr.dtype.element_ty), mask=mask)


@jit
def softmax_long_columns_backward_kernel(
    dy_ptr, y_ptr, dx_ptr, N, C, dy_stride_outer, dy_stride_n, dy_stride_c, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr
):
    outer, cols = _columns(C, BLOCK_C)
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
    s += _finite_rest(s, tl.sum(dots - s[None, :] * masses, axis=0))
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N).to(tl.int64)[:, None]
        mask = (n < N) & (cols < C)
        dy = tl.load(dy_ptr + n * dy_stride_n, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + n * C, mask=mask, other=0.0).to(tl.float32)
        dx = y * (dy - s[None, :])
        tl.store(dx_ptr + n * C, dx.to(dx_ptr.dtype.element_ty), mask=mask)


# Columns that one program holds: 16 of them, 32 bytes in bfloat16, of 1024 values. H200, bf16, 64x1024x1024, times the
# floor of forward and backward: 1.63; 32 columns 1.85, 8 columns 2.8, walking twice 2.52.
MAX_HELD, HELD_COLUMNS = 1024, 16


def _columns_held(N: int, C: int) -> bool:
    """Return True if a program holds its columns; those that are not aligned take more registers."""
    return (MAX_HELD if aligned(C) else MAX_HELD // 2) >= N


def _held_columns_tile(N: int, C: int) -> dict[str, int]:
    block_n, block_c = next_power_of_2(max(N, 1)), min(HELD_COLUMNS, next_power_of_2(max(C, 1)))
    return {"BLOCK_N": block_n, "BLOCK_C": block_c, "num_warps": min(8, max(4, block_n * block_c // 512))}


def _long_columns_tile(N: int, C: int) -> dict[str, int]:
    """Up to 64 neighbouring columns, 128 bytes in bfloat16, and rows to make up 2048 elements."""
    block_c = min(64, next_power_of_2(max(C, 1)))
    return {"BLOCK_N": min(2048 // block_c, next_power_of_2(max(N, 1))), "BLOCK_C": block_c, "num_warps": 4}


def _launch_columns(held_kernel: Any, long_kernel: Any, x: Tensor, *contiguous: Tensor) -> None:
    """Launch one of the two kernels on x `[outer, N, C]` and tensors of its shape that are contiguous."""
    outer, N, C = x.shape
    held = _columns_held(N, C)
    tile = _held_columns_tile(N, C) if held else _long_columns_tile(N, C)
    grid = (outer * cdiv(C, tile["BLOCK_C"]),)
    wrap_triton(held_kernel if held else long_kernel)[grid](x, *contiguous, N, C, *x.stride(), **tile)


def _split(x: Tensor, dim: int) -> tuple[int, int, int]:
    """The sizes of x before, at and after `dim`."""
    return math.prod(x.shape[:dim]), x.shape[dim], math.prod(x.shape[dim + 1 :])


def _softmax_fwd(input: Tensor, dim: int) -> Tensor:
    outer, N, C = _split(input, dim)
    y = empty(input.shape, input.dtype, input.device)
    if C != 1:  # the reshape copies only if the axes before dim, or those after it, do not merge
        _launch_columns(softmax_columns_kernel, softmax_long_columns_kernel, input.reshape(outer, N, C), y)
        return y
    x = as_rows(input.flatten(dim))
    if not _held(x):
        _long_forward(x, y)
        return y
    programs, tile = _forward_launch(outer, N, x)
    wrap_triton(softmax_kernel)[(programs,)](x, y, outer, N, x.stride(0), **tile)
    return y


def _softmax_bwd(grad: Tensor, output: Tensor, dim: int) -> Tensor:
    outer, N, C = _split(output, dim)
    y = output.contiguous()
    dx = empty(output.shape, output.dtype, output.device)
    if C != 1:
        kernels = softmax_columns_backward_kernel, softmax_long_columns_backward_kernel
        _launch_columns(*kernels, grad.reshape(outer, N, C), y, dx)
        return dx
    dy = as_rows(grad.flatten(dim))
    if not _held(dy):
        _long_backward(dy, y, dx)
        return dx
    tile = _backward_tile(N)
    grid = (cdiv(outer, tile["BLOCK_M"]),)
    wrap_triton(softmax_backward_kernel)[grid](dy, y, dx, outer, N, dy.stride(0), **tile)
    return dx


softmax_fwd = KernelOp(_softmax_fwd, launch_cached=True)
softmax_bwd = KernelOp(_softmax_bwd, launch_cached=True)


@softmax_fwd.register_kernel("cpu")
def _(input, dim):
    return torch.softmax(input.float(), dim).to(input.dtype).contiguous()


@softmax_bwd.register_kernel("cpu")
def _(grad, output, dim):
    dy, y = grad.float(), output.float()
    s = (dy * y).sum(dim, keepdim=True)
    s = s + torch.where(s.isfinite(), s * (1.0 - y.sum(dim, keepdim=True)), torch.zeros_like(s))
    return (y * (dy - s)).to(output.dtype).contiguous()


softmax_fwd.register_fake(like_first)
softmax_bwd.register_fake(like_first)
softmax_fwd.register_backward(softmax_bwd)
softmax_fwd.register_sharding(split_around_dim)
softmax_bwd.register_sharding(split_around_dim)


def softmax_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    randn = partial(torch.randn, device=device, dtype=dtype)
    yield Sample((randn(4, 16),), why="powers of two")
    yield Sample((randn(2, 3, 37),), why="three dimensions, odd width")
    yield Sample((randn(3, 37, 5), 1), why="the middle axis")
    yield Sample((randn(70, 6).t(), 0), why="the first axis, strided")
    yield Sample((randn(5000, 2), 0), why="the first axis, more than a program holds")
    yield Sample((randn(7, 1),), why="one column")
    yield Sample((randn(()),), why="no dimension")
    yield Sample((randn(0, 16),), why="no rows")
    yield Sample((randn(6, 80)[:, 16:48],), why="a slice of a wider row")
    yield Sample((randn(1, 16).expand(5, 16),), why="one row expanded")
    yield Sample((1e4 * randn(3, 64),), why="large values")
    masked = torch.arange(40, device=device, dtype=torch.int64) < torch.tensor(
        [[0], [20], [40]], device=device, dtype=torch.int64
    )
    yield Sample((randn(3, 40).masked_fill(masked, float("-inf")),), why="rows with none, some and all at -inf: NaN")
    yield Sample((randn(3, 20_001),), why="a row that takes a program of its own")
    yield Sample((randn(2, 100_003),), why="100,003 columns")


def softmax_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for rows, columns in [(8192, 4096), (16384, 32768), (4096, 131072), (32768, 1024)]:
        yield Sample((torch.randn(rows, columns, device=device, dtype=dtype),), why=f"{rows}x{columns}")
    yield Sample((torch.randn(64, 1024, 1024, device=device, dtype=dtype), 1), why="64x1024x1024 over the middle axis")


@public_op(
    reference=softmax_reference,
    differentiable=("input",),
    kernel_ops=(softmax_fwd, softmax_bwd),
    samples=softmax_samples,
    resized=normal_resized(lambda rows: ((rows, 48),)),
    workloads=softmax_workloads,
    cost=Cost.passes(2, 5),
    choices=(
        "rows past 65,536 bytes are read twice, but for as many bytes as stay in registers: at 4096x131072 on an H200 "
        "1.19 times the floor forward and 1.33 backward, with nothing held 1.40 and 1.46. What reads such a row once "
        "spreads it over multiprocessors that read each other's shared memory, which Triton's reductions do not",
    ),
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
