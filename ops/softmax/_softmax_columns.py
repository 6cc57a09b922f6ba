"""softmax of `[outer, N, C]` over N: a program takes neighbouring columns; softmax.py has the formulas.

Columns that fit in registers are read once in either direction; down longer ones a program walks twice.
"""

import triton.language as tl
from torch import Tensor

from llmk.ops.common.math import LOG2E
from llmk.ops.common.rows import aligned
from llmk.ops.common.sums import sum_pair
from llmk.ops.softmax._softmax import add_exponentials, finite_rest
from llmk.registry import cdiv, jit, next_power_of_2, wrap_triton


@jit
def _columns(C, BLOCK_C: tl.constexpr):
    """Which of the outer indices and which columns are this program's."""
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
    dy_ptr, y_ptr, dx_ptr, N, C, dy_stride_outer, dy_stride_n, dy_stride_c,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    outer, cols = _columns(C, BLOCK_C)
    n = tl.arange(0, BLOCK_N).to(tl.int64)[:, None]
    mask = (n < N) & (cols < C)
    offsets = outer * N * C + n * C + cols
    dy_ptr += outer * dy_stride_outer + cols * dy_stride_c
    dy = tl.load(dy_ptr + n * dy_stride_n, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    s, mass = sum_pair(dy * y, y, 0)
    s += finite_rest(s, s * (1.0 - mass))
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
        m, total = add_exponentials(m, total, x, 0)
    scale = tl.div_rn(1.0, total)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N).to(tl.int64)[:, None]
        mask = (n < N) & (cols < C)
        x = tl.load(x_ptr + n * x_stride_n, mask=mask, other=0.0).to(tl.float32)
        y = tl.exp2((x - m[None, :]) * LOG2E) * scale[None, :]
        tl.store(y_ptr + n * C, y.to(y_ptr.dtype.element_ty), mask=mask)


@jit
def softmax_long_columns_backward_kernel(
    dy_ptr, y_ptr, dx_ptr, N, C, dy_stride_outer, dy_stride_n, dy_stride_c,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
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
    s += finite_rest(s, tl.sum(dots - s[None, :] * masses, axis=0))
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


def _held(N: int, C: int) -> bool:
    """Return True if a program holds its columns; those that are not aligned take more registers."""
    return (MAX_HELD if aligned(C) else MAX_HELD // 2) >= N


def _held_tile(N: int, C: int) -> dict[str, int]:
    block_n, block_c = next_power_of_2(max(N, 1)), min(HELD_COLUMNS, next_power_of_2(max(C, 1)))
    return {"BLOCK_N": block_n, "BLOCK_C": block_c, "num_warps": min(8, max(4, block_n * block_c // 512))}


def _long_tile(N: int, C: int) -> dict[str, int]:
    """Stretches of up to 64 columns, 128 bytes in bfloat16, and rows to make up 2048 elements."""
    block_c = min(64, next_power_of_2(max(C, 1)))
    return {"BLOCK_N": min(2048 // block_c, next_power_of_2(max(N, 1))), "BLOCK_C": block_c, "num_warps": 4}


def columns_forward(x: Tensor, y: Tensor) -> None:
    """Fill y, contiguous, from x `[outer, N, C]`."""
    outer, N, C = x.shape
    held = _held(N, C)
    tile = _held_tile(N, C) if held else _long_tile(N, C)
    grid = (outer * cdiv(C, tile["BLOCK_C"]),)
    if held:
        wrap_triton(softmax_columns_kernel)[grid](x, y, N, C, *x.stride(), **tile)
    else:
        wrap_triton(softmax_long_columns_kernel)[grid](x, y, N, C, *x.stride(), **tile)


def columns_backward(dy: Tensor, y: Tensor, dx: Tensor) -> None:
    """Fill dx from dy `[outer, N, C]`; y and dx are contiguous."""
    outer, N, C = dy.shape
    held = _held(N, C)
    tile = _held_tile(N, C) if held else _long_tile(N, C)
    grid = (outer * cdiv(C, tile["BLOCK_C"]),)
    if held:
        wrap_triton(softmax_columns_backward_kernel)[grid](dy, y, dx, N, C, *dy.stride(), **tile)
    else:
        wrap_triton(softmax_long_columns_backward_kernel)[grid](dy, y, dx, N, C, *dy.stride(), **tile)
