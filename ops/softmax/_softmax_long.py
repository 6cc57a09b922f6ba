"""softmax of rows that are too long for one program's registers; softmax.py has the formulas.

A row is walked in blocks, twice: first for its statistics, then, from its end to its beginning, for the result. So the
second walk begins with what was read last, and the fewer rows are under way at a time, the more of it is still in L2.
The first block, which is whole in every such row, is read last and stays in registers.
"""

import triton.language as tl
from torch import Tensor

from llmk.ops.common.math import LOG2E
from llmk.ops.common.rows import rows_aligned
from llmk.ops.softmax._softmax import add_exponentials, finite_rest
from llmk.registry import grid_cap, jit, max_warps, num_programs, wrap_triton


@jit
def softmax_long_kernel(x_ptr, y_ptr, M, N, x_stride, LANES: tl.constexpr, WIDTH: tl.constexpr):
    # A lane is what a thread loads at once. Each has its own maximum and sum: no thread waits for another in the loop.
    lanes = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    BLOCK: tl.constexpr = LANES * WIDTH
    blocks = tl.cdiv(N, BLOCK)
    for row in range(tl.program_id(0).to(tl.int64), M, tl.num_programs(0)):
        x_row, y_row = x_ptr + row * x_stride, y_ptr + row * N
        m = tl.full((LANES,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((LANES,), dtype=tl.float32)
        for block in range(1, blocks):
            cols = block * BLOCK + lanes
            x = tl.load(x_row + cols, mask=cols < N, other=float("-inf"), eviction_policy="evict_last").to(tl.float32)
            m, total = add_exponentials(m, total, x, 1)
        held = tl.load(x_row + lanes, eviction_policy="evict_first")
        m, total = add_exponentials(m, total, held.to(tl.float32), 1)
        top = tl.max(m, axis=0)
        base = tl.where(top == float("-inf"), 0.0, top)
        scale = tl.div_rn(1.0, tl.sum(total * tl.exp2((m - base) * LOG2E), axis=0))
        y = tl.exp2((held.to(tl.float32) - top) * LOG2E) * scale
        tl.store(y_row + lanes, y.to(y_ptr.dtype.element_ty), eviction_policy="evict_first")
        for block in range(1, blocks):
            cols = (blocks - block) * BLOCK + lanes
            x = tl.load(x_row + cols, mask=cols < N, other=0.0, eviction_policy="evict_first").to(tl.float32)
            y = tl.exp2((x - top) * LOG2E) * scale
            tl.store(y_row + cols, y.to(y_ptr.dtype.element_ty), mask=cols < N, eviction_policy="evict_first")


@jit
def softmax_long_backward_kernel(dy_ptr, y_ptr, dx_ptr, M, N, dy_stride, LANES: tl.constexpr, WIDTH: tl.constexpr):
    lanes = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    BLOCK: tl.constexpr = LANES * WIDTH
    blocks = tl.cdiv(N, BLOCK)
    for index in range(tl.program_id(0).to(tl.int64), M, tl.num_programs(0)):
        row = M - 1 - index
        dy_row, y_row, dx_row = dy_ptr + row * dy_stride, y_ptr + row * N, dx_ptr + row * N
        dots = tl.zeros((LANES,), dtype=tl.float32)
        masses = tl.zeros((LANES,), dtype=tl.float32)
        for block in range(1, blocks):
            cols = block * BLOCK + lanes
            dy = tl.load(dy_row + cols, mask=cols < N, other=0.0, eviction_policy="evict_last").to(tl.float32)
            y = tl.load(y_row + cols, mask=cols < N, other=0.0, eviction_policy="evict_last").to(tl.float32)
            dots += tl.sum(dy * y, axis=1)
            masses += tl.sum(y, axis=1)
        held_dy = tl.load(dy_row + lanes, eviction_policy="evict_first")
        held_y = tl.load(y_row + lanes, eviction_policy="evict_first")
        dots += tl.sum(held_dy.to(tl.float32) * held_y.to(tl.float32), axis=1)
        masses += tl.sum(held_y.to(tl.float32), axis=1)
        s = tl.sum(dots, axis=0)
        # s * (1 - sum(y)) lane by lane: small numbers, whose sum is not rounded as s is.
        s += finite_rest(s, tl.sum(dots - s * masses, axis=0))
        dx = held_y.to(tl.float32) * (held_dy.to(tl.float32) - s)
        tl.store(dx_row + lanes, dx.to(dx_ptr.dtype.element_ty), eviction_policy="evict_first")
        for block in range(1, blocks):
            cols = (blocks - block) * BLOCK + lanes
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


def _lanes(*tensors: Tensor) -> dict[str, int]:
    """The block of a walk over these tensors, in lanes of 16 bytes."""
    nbytes = BYTES if rows_aligned(*tensors) else BYTES // 4
    return {
        "LANES": nbytes // (16 * len(tensors)),
        "WIDTH": 16 // tensors[0].element_size(),
        "num_warps": max_warps(),
    }


def long_forward(x: Tensor, y: Tensor) -> None:
    """Fill y, contiguous, from the rows of x."""
    M, N = x.shape
    programs = grid_cap(M, num_programs(x.device, 1))
    wrap_triton(softmax_long_kernel)[(programs,)](x, y, M, N, x.stride(0), **_lanes(x))


def long_backward(dy: Tensor, y: Tensor, dx: Tensor) -> None:
    """Fill dx from the rows of dy; y and dx are contiguous."""
    M, N = dy.shape
    programs = grid_cap(M, num_programs(dy.device, 1))
    wrap_triton(softmax_long_backward_kernel)[(programs,)](dy, y, dx, M, N, dy.stride(0), **_lanes(dy, y.view(M, N)))
