"""A tile of the product of two matrices, x [M, K] and the transpose of w [N, K], for kernels that finish it themselves.

Each program makes one tile: it walks K in blocks, sums in float32, and finishes the tile in registers. Tiles are
numbered in groups of GROUP_M rows of tiles, column by column, so that the programs that run at the same time share
blocks of x and w in L2.
"""

import triton.language as tl

from llmk.registry import jit, next_power_of_2

BLOCK_M, BLOCK_N = 128, 128
MAX_STRIDE = 2**24
"""Offsets within a tile are 32 bits wide, and BLOCK_M rows must not be further apart."""


def product_tile_sizes(N: int, K: int, element_size: int) -> dict[str, int]:
    """The tile and its launch, from the sizes that a batch does not change; 16 is the least that tensor cores take."""
    # Eight warps need 128 registers each on sm_90 (138 for gelu with z), and three stages 96 KiB of its shared memory:
    # two programs fit a multiprocessor, and one's product covers the other's epilogue. On gfx942 the stages take all of
    # the 64 KiB that there are. 128 x 256 x 32 fits too, one program at a time, and reads a quarter less from L2; the
    # two were not compared.
    return {
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": min(BLOCK_N, max(16, next_power_of_2(N))),
        "BLOCK_K": min(128 // element_size, max(16, next_power_of_2(K))),
        "GROUP_M": 8,
        "NUM_STAGES": 3,
        "num_warps": 8,
    }


@jit
def grouped_tile(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Return the row and the column of a tile in a grid of so many."""
    group = tile // (GROUP_M * tiles_n)
    group_rows = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    within = tile % (GROUP_M * tiles_n)
    return group * GROUP_M + within % group_rows, within // group_rows


@jit
def first_of_tile(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Return the first row and the first column of this program's tile."""
    row, col = grouped_tile(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    return (row * BLOCK_M).to(tl.int64), (col * BLOCK_N).to(tl.int64)


@jit
def product_tile(
    x_ptr, w_ptr, first_row, first_col, M, N, K, x_stride_m, x_stride_k, w_stride_n, w_stride_k,
    EVEN_K: tl.constexpr, WIDEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Return the tile's products in float32, in rows and columns past the end those of its first ones."""
    rows, cols, ks = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    # Rows and columns past the end read the tile's first ones again: only K needs a mask in the loop.
    x_rows = tl.where(first_row + rows < M, rows, 0)
    w_cols = tl.where(first_col + cols < N, cols, 0)
    x_ptrs = x_ptr + first_row * x_stride_m + (x_rows[:, None] * x_stride_m + ks[None, :] * x_stride_k)
    w_ptrs = w_ptr + first_col * w_stride_n + (w_cols[None, :] * w_stride_n + ks[:, None] * w_stride_k)
    z = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
        if EVEN_K:
            x, w = tl.load(x_ptrs), tl.load(w_ptrs)
        else:
            x = tl.load(x_ptrs, mask=(ks < K - start)[None, :], other=0.0)
            w = tl.load(w_ptrs, mask=(ks < K - start)[:, None], other=0.0)
        if WIDEN:  # Triton's interpreter multiplies the integers that it keeps bfloat16 in
            x, w = x.to(tl.float32), w.to(tl.float32)
        z = tl.dot(x, w, z, input_precision="ieee")
        x_ptrs += BLOCK_K * x_stride_k
        w_ptrs += BLOCK_K * w_stride_k
    return z


@jit
def product(
    a, b, first_row, first_col, M, N, K, a_stride_m, a_stride_k, b_stride_n, b_stride_k,
    DESCRIBED: tl.constexpr, TRANSPOSE_A: tl.constexpr, TRANSPOSE_B: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Return a tile of the product of a [M, K] and b [K, N]; a described operand that is transposed is stored so."""
    if DESCRIBED:
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
            left = a.load([k, first_row]).T if TRANSPOSE_A else a.load([first_row, k])
            right = b.load([first_col, k]).T if TRANSPOSE_B else b.load([k, first_col])
            if WIDEN:
                left, right = left.to(tl.float32), right.to(tl.float32)
            total = tl.dot(left, right, total)
    else:
        # Within a tile too, rows of a matrix that is part of another one may lie 2**31 elements apart.
        a_stride_m, a_stride_k = tl.cast(a_stride_m, tl.int64), tl.cast(a_stride_k, tl.int64)
        b_stride_n, b_stride_k = tl.cast(b_stride_n, tl.int64), tl.cast(b_stride_k, tl.int64)
        total = product_tile(
            a, b, first_row.to(tl.int64), first_col.to(tl.int64), M, N, K,
            a_stride_m, a_stride_k, b_stride_n, b_stride_k, False, WIDEN, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES,
        )  # fmt: skip
    return total


@jit
def column_halves(z):
    """Split a tile in two, so that an epilogue has registers left beside the sums."""
    M: tl.constexpr = z.shape[0]
    N: tl.constexpr = z.shape[1]
    return tl.split(tl.permute(tl.reshape(z, (M, 2, N // 2)), (0, 2, 1)))


@jit
def column_quarters(z):
    left, right = column_halves(z)
    first, second = column_halves(left)
    third, fourth = column_halves(right)
    return first, second, third, fourth


@jit
def column_eighths(z):
    first, second, third, fourth = column_quarters(z)
    a, b = column_halves(first)
    c, d = column_halves(second)
    e, f = column_halves(third)
    g, h = column_halves(fourth)
    return a, b, c, d, e, f, g, h
