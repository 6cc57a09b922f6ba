"""The kernels of `products.py` that compute gradients from P.

Both products of a chunk may be one launch. The tiles of dx are few and long, each a sum over all classes: mostly their
last wave does not fill the multiprocessors. Those of dW are many and short, and a program that has one tile of dx less
than others makes as many of them more.
"""

import triton.language as tl

from llmk.ops.common.products import column_halves, column_quarters, grouped_tile, product
from llmk.registry import jit

EPILOGUE: tl.constexpr = tl.constexpr(320)
"""Rows along which a tile of dW is multiplied in the time of its epilogue."""


@jit
def input_gradient_tile(
    tile, tiles_m, p, w, weight_ptr, dx_ptr, factor_ptr, own_ptr, place_ptr, end, V, H, M, p_stride, w_stride_v,
    w_stride_h, DESCRIBED: tl.constexpr, WIDEN: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Compute a tile of r (P W) + e W_t, `factor [2, M]` r and e, in the rows of dx that `place` says.

    Without own columns t there is no second term.
    """
    row_tile, col_tile = grouped_tile(tile, tiles_m, tl.cdiv(H, BLOCK_N), GROUP_M)
    first_row, first_col = row_tile * BLOCK_M, col_tile * BLOCK_N
    dx = product(
        p, w, first_row, first_col, end, H, V, p_stride, 1, w_stride_h, w_stride_v,
        DESCRIBED, False, False, WIDEN, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES,
    )  # fmt: skip
    rows, cols = first_row + tl.arange(0, BLOCK_M), first_col + tl.arange(0, BLOCK_N)
    inside = rows < end
    dx *= tl.load(factor_ptr + rows, mask=inside, other=0.0)[:, None]
    place = rows.to(tl.int64)
    if place_ptr is not None:
        place = tl.load(place_ptr + rows, mask=inside, other=0)
    if own_ptr is not None:
        e = tl.load(factor_ptr + M + rows, mask=inside, other=0.0)
        own = tl.load(own_ptr + rows, mask=inside, other=-1).to(tl.int64)
        offsets = cols[None, :].to(tl.int64) * w_stride_h
        has_own = (own >= 0)[:, None] & (cols < H)[None, :]
        w_t = tl.load(weight_ptr + own[:, None] * w_stride_v + offsets, mask=has_own, other=0.0).to(tl.float32)
        dx += w_t * e[:, None]
    mask = inside[:, None] & (cols < H)[None, :]
    tl.store(dx_ptr + place[:, None] * H + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)


@jit
def input_gradient_kernel(
    p, w, weight_ptr, dx_ptr, factor_ptr, own_ptr, count_ptr, place_ptr, V, H, M, p_stride, w_stride_v, w_stride_h,
    DESCRIBED: tl.constexpr, WIDEN: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Compute one tile of dx."""
    end, tile = tl.load(count_ptr), tl.program_id(0)
    tiles_m = tl.cdiv(end, BLOCK_M)
    if tile < tiles_m * tl.cdiv(H, BLOCK_N):
        input_gradient_tile(
            tile, tiles_m, p, w, weight_ptr, dx_ptr, factor_ptr, own_ptr, place_ptr, end, V, H, M, p_stride, w_stride_v,
            w_stride_h, DESCRIBED, WIDEN, GROUP_M, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES,
        )  # fmt: skip


@jit
def weight_gradient_tile(
    tile, tiles_m, p, x, total, scale_ptr, end, V, H, p_stride, x_stride,
    ADD: tl.constexpr, DESCRIBED: tl.constexpr, T_DESCRIBED: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Compute a tile of P^T x over the rows that count, or add it to what is there, rounded once."""
    row_tile, col_tile = grouped_tile(tile, tiles_m, tl.cdiv(H, BLOCK_N), GROUP_M)
    first_row, first_col = row_tile * BLOCK_M, col_tile * BLOCK_N
    dw = product(
        p, x, first_row, first_col, V, H, end, 1, p_stride, 1, x_stride,
        DESCRIBED, True, False, WIDEN, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES,
    )  # fmt: skip
    if scale_ptr is not None:
        dw *= tl.load(scale_ptr)
    # In pieces: so few registers and so little shared memory are left beside the next tile's operands.
    PIECES: tl.constexpr = 2 if T_DESCRIBED else 4
    WIDTH: tl.constexpr = BLOCK_N // PIECES
    pieces = column_halves(dw) if T_DESCRIBED else column_quarters(dw)
    for i in tl.static_range(PIECES):  # pyright: ignore[reportGeneralTypeIssues]
        piece, col = pieces[i], first_col + i * WIDTH
        if T_DESCRIBED:
            if ADD:
                piece += total.load([first_row, col]).to(tl.float32)
            total.store([first_row, col], piece.to(total.dtype))
        else:
            rows, cols = first_row + tl.arange(0, BLOCK_M), col + tl.arange(0, WIDTH)
            mask = (rows < V)[:, None] & (cols < H)[None, :]
            total_ptrs = total + rows.to(tl.int64)[:, None] * H + cols[None, :]
            if ADD:
                piece += tl.load(total_ptrs, mask=mask, other=0.0).to(tl.float32)
            tl.store(total_ptrs, piece.to(total.dtype.element_ty), mask=mask)


@jit
def weight_gradient_kernel(
    p, x, total, count_ptr, scale_ptr, V, H, p_stride, x_stride,
    ADD: tl.constexpr, DESCRIBED: tl.constexpr, T_DESCRIBED: tl.constexpr, WIDEN: tl.constexpr, PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Compute tiles of dW."""
    end = tl.load(count_ptr)
    tiles_m, tiles_n = tl.cdiv(V, BLOCK_M), tl.cdiv(H, BLOCK_N)
    tiles = tiles_m * tiles_n
    if ADD:
        tiles = tl.where(end > 0, tiles, 0)
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=T_DESCRIBED):
        weight_gradient_tile(
            tile, tiles_m, p, x, total, scale_ptr, end, V, H, p_stride, x_stride, ADD, DESCRIBED, T_DESCRIBED, WIDEN,
            BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, NUM_STAGES,
        )  # fmt: skip


@jit
def both_gradients_kernel(
    p, p_columns, w, x, total, weight_ptr, dx_ptr, factor_ptr, own_ptr, count_ptr, place_ptr, V, H, M, p_stride,
    w_stride_v, w_stride_h, x_stride,
    ADD: tl.constexpr, DESCRIBED: tl.constexpr, WIDEN: tl.constexpr, PROGRAMS: tl.constexpr, GROUP_M: tl.constexpr,
    NUM_STAGES: tl.constexpr, X_BLOCK_M: tl.constexpr, X_BLOCK_N: tl.constexpr, X_BLOCK_K: tl.constexpr,
    W_BLOCK_M: tl.constexpr, W_BLOCK_N: tl.constexpr, W_BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute tiles of dx, then tiles of dW, of which programs that have a tile of dx less make more.

    P is described twice, in the blocks of each product. What is added up has the dtype of P, and is described too.
    """
    end, program = tl.load(count_ptr), tl.program_id(0)
    tiles_m = tl.cdiv(end, X_BLOCK_M)
    tiles = tiles_m * tl.cdiv(H, X_BLOCK_N)
    for tile in tl.range(program, tiles, PROGRAMS):
        input_gradient_tile(
            tile, tiles_m, p, w, weight_ptr, dx_ptr, factor_ptr, own_ptr, place_ptr, end, V, H, M, p_stride, w_stride_v,
            w_stride_h, DESCRIBED, WIDEN, GROUP_M, X_BLOCK_M, X_BLOCK_N, X_BLOCK_K, NUM_STAGES,
        )  # fmt: skip
    busy = tiles % PROGRAMS  # the first ones have a tile more
    spare = tl.where(busy > 0, PROGRAMS - busy, 0)
    tiles_m = tl.cdiv(V, W_BLOCK_M)
    tiles = tiles_m * tl.cdiv(H, W_BLOCK_N)
    if ADD:
        tiles = tl.where(end > 0, tiles, 0)
    most = tl.minimum(V // (end + EPILOGUE), tl.cdiv(tiles, tl.maximum(spare, 1)))
    more = tl.where((spare > 0) & (program >= busy), most, 0)
    shared = spare * most  # the tiles before it are theirs
    number = more + tl.cdiv(tl.maximum(tiles - shared - program, 0), PROGRAMS)
    for i in tl.range(0, number, flatten=DESCRIBED):
        tile = tl.where(i < more, program - busy + i * spare, shared + program + (i - more) * PROGRAMS)
        tile = tl.minimum(tile, tiles - 1)
        weight_gradient_tile(
            tile, tiles_m, p_columns, x, total, None, end, V, H, p_stride, x_stride, ADD, DESCRIBED, DESCRIBED, WIDEN,
            W_BLOCK_M, W_BLOCK_N, W_BLOCK_K, GROUP_M, NUM_STAGES,
        )  # fmt: skip


@jit
def bias_gradient_kernel(
    p_ptr, factor_ptr, total_ptr, count_ptr, V, p_stride, scale, ADD: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute the sums of r P over the rows that count, or add them to what is there, in float32."""
    cols = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    end = tl.load(count_ptr)
    total = tl.zeros((BLOCK_V,), dtype=tl.float32)
    for start in range(0, end, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        r = tl.load(factor_ptr + rows, mask=rows < end, other=0.0)
        mask = (rows < end)[:, None] & (cols < V)[None, :]
        p = tl.load(p_ptr + rows.to(tl.int64)[:, None] * p_stride + cols[None, :], mask=mask, other=0.0)
        total += tl.sum(tl.where((r != 0.0)[:, None], p.to(tl.float32) * r[:, None], 0.0), axis=0)
    total *= tl.cast(scale, tl.float32)
    if ADD:
        total += tl.load(total_ptr + cols, mask=cols < V, other=0.0)
    tl.store(total_ptr + cols, total, mask=cols < V)
