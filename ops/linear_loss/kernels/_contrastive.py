r"""Softmaxes of a block of a similarity matrix, over its rows and over its columns, and their gradients: the kernels.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, https://arxiv.org/abs/1805.02867, for
adding up parts of a softmax.

For products z [R, M] of R queries and M keys, y = factor * z, where a key that is no negative of a query has y = -inf:

    row i       m_i = max_j(y_ij)    s_i = sum_j(exp(y_ij - m_i))
    column j    m_j = max_i(y_ij)    s_j = sum_i(exp(y_ij - m_j))

A program computes both pairs of numbers of a tile of z, which are then merged, those of the rows over the tiles of
columns and those of the columns over the tiles of rows, over blocks and over ranks:

    m = max_t(m_t)    s = sum_t(s_t * exp(m_t - m))

Of a tile that is made m is mostly its largest logit, for all its rows and columns: then one exponential serves both.

Backward, given the gradients g_i of the rows' logsumexp - y of their own pair and h_j of the columns':

    dy_ij = g_i * (exp(y_ij - m_i) / s_i - [ij is a pair]) + h_j * (exp(y_ij - m_j) / s_j - [ij is a pair])
    dz_ij = factor * dy_ij
    dfactor = sum_ij(dy_ij * z_ij)

where h_j is 0 of a key that is no query's own.

The tile of z is read, or made: z, which nothing else wants, is then never in memory. Of 16-bit embeddings a program
makes it as `ops/common/products.py` does; float32 products are the vendor's, as no tensor core has them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.math import LOG2E, merged_sums_cpu
from llmk.ops.common.products import (
    BLOCK_N,
    MAX_STRIDE,
    column_eighths,
    column_quarters,
    first_of_tile,
    grouped_tile,
    product,
    product_tile_sizes,
)
from llmk.ops.common.rows import aligned
from llmk.ops.common.sums import sum_partials, sum_to_scalar
from llmk.registry import cdiv, empty, jit, num_programs, wrap_triton
from llmk.registry.devices import INTERPRET
from llmk.registry.launch import describable, descriptor

BLOCK_R, BLOCK_C = 64, 128
"""A tile that is read. Its statistics are 2 (64 + 128) numbers for 8192 products."""
SPREAD: tl.constexpr = tl.constexpr(64.0)
"""The most bits by which logsumexps of a tile differ where one exponential serves all: what float32 loses of
exponentials relative to the largest is then below 2**-62 of a softmax."""
READ_TILE = {"BLOCK_R": BLOCK_R, "BLOCK_C": BLOCK_C, "num_warps": 8}


class Products(NamedTuple):
    """The products of a block of queries with all keys: in memory, or to be made where they are wanted."""

    queries: Tensor  # [R, H]
    keys: Tensor  # [M, H]
    stored: Tensor | None  # float32 [R, M]

    @property
    def shape(self) -> tuple[int, int]:
        return self.queries.shape[0], self.keys.shape[0]


class Similarities(NamedTuple):
    """The factor from products to logits, a block's queries' own keys, and the keys that are no negatives of theirs."""

    factor: Tensor  # float32 []
    query_ids: Tensor | None  # [R]
    key_ids: Tensor | None  # [M]; a key with a query's id is no negative of it
    first_pair: int  # the first query's own key; those of the others follow it


class LossGradients(NamedTuple):
    """The statistics of the rows or the columns, and the gradient of each one's loss."""

    stats: Tensor  # [2, L]
    grads: Tensor  # [L]


@jit
def _read_tile(z_ptr, R, M, z_stride, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return a tile's first row and column, and its products."""
    tiles = tl.cdiv(M, BLOCK_C)  # consecutive programs read consecutive memory
    first_row = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_R
    first_col = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK_C
    rows, cols = first_row + tl.arange(0, BLOCK_R), first_col + tl.arange(0, BLOCK_C)
    inside = (rows < R)[:, None] & (cols < M)[None, :]
    z = tl.load(z_ptr + rows[:, None] * z_stride + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    return first_row, first_col, z


@jit
def _left(L, first, block: tl.constexpr):
    """Return how many of a block's rows or columns there are, in 32 bits: each element compares with it."""
    return tl.minimum(L - first, block).to(tl.int32)


@jit
def _logits(z, factor_ptr, query_id_ptr, key_id_ptr, R, M, first_row, first_col, first_pair):
    """Return masks of what is inside of a tile and of pairs, and logits, -inf of what is masked."""
    row, col = tl.arange(0, z.shape[0]), tl.arange(0, z.shape[1])
    in_rows, in_cols = row < _left(R, first_row, z.shape[0]), col < _left(M, first_col, z.shape[1])
    inside = in_rows[:, None] & in_cols[None, :]
    # In 32 bits: a comparison of 64 for each element is a good part of what a tile costs.
    apart = tl.minimum(tl.maximum(first_row + first_pair - first_col, -z.shape[0]), z.shape[1]).to(tl.int32)
    pair = col[None, :] == row[:, None] + apart
    counts = inside
    if query_id_ptr is not None:
        query_id = tl.load(query_id_ptr + first_row + row, mask=in_rows, other=0).to(tl.int64)
        key_id = tl.load(key_id_ptr + first_col + col, mask=in_cols, other=0).to(tl.int64)
        counts &= pair | (query_id[:, None] != key_id[None, :])
    y = tl.where(counts, z * tl.load(factor_ptr), float("-inf"))
    return inside, pair, y


@jit
def _maximum_and_sum(y, axis: tl.constexpr):
    m = tl.max(y, axis=axis)
    base = tl.where(m == float("-inf"), 0.0, m)  # where all are masked
    return m, tl.sum(tl.exp2((y - tl.expand_dims(base, axis)) * LOG2E), axis=axis)


@jit
def _merged(m, s, other_m, other_s):
    new_m = tl.maximum(m, other_m)
    base = tl.where(new_m == float("-inf"), 0.0, new_m)
    return new_m, s * tl.exp2((m - base) * LOG2E) + other_s * tl.exp2((other_m - base) * LOG2E)


@jit
def _store_part(m, s, out_ptr, part, at, L):
    """Store maxima and sums as a part of `[T, 2, L]`."""
    out_ptr += part * 2 * L
    tl.store(out_ptr + at, m, mask=at < L)
    tl.store(out_ptr + L + at, s, mask=at < L)


@jit
def _is_plain(query_id_ptr, R, M, first_row, first_col, first_pair, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return True if a tile is whole and has neither a pair nor a key that is no negative, as nearly all are."""
    whole = (first_row + BLOCK_M <= R) & (first_col + BLOCK_N <= M)
    own = first_row + first_pair
    plain = whole & ((own >= first_col + BLOCK_N) | (own + BLOCK_M <= first_col))
    return plain & (query_id_ptr is None)


@jit
def _statistics(
    z, factor_ptr, query_id_ptr, key_id_ptr, col_ptr, pair_ptr, R, M, first_row, first_col, first_pair,
):  # fmt: skip
    """Return the rows' statistics in some columns of a tile; store these columns' and the logits of the pairs."""
    rows, cols = first_row + tl.arange(0, z.shape[0]), first_col + tl.arange(0, z.shape[1])
    _, pair, y = _logits(z, factor_ptr, query_id_ptr, key_id_ptr, R, M, first_row, first_col, first_pair)
    own = rows + first_pair  # each row's is in the columns of one program
    here = (rows < R) & (own >= first_col) & (own < first_col + z.shape[1])
    tl.store(pair_ptr + rows, tl.sum(tl.where(pair, y, 0.0), axis=1), mask=here)
    if col_ptr is not None:
        m, s = _maximum_and_sum(y, 0)
        _store_part(m, s, col_ptr, first_row // z.shape[0], cols, M)
    return _maximum_and_sum(y, 1)


@jit
def _statistics_of_quarters(
    z, factor_ptr, query_id_ptr, key_id_ptr, col_ptr, pair_ptr, R, M, first_row, first_col, first_pair
):
    """Return the rows' statistics in a tile: few registers are left beside one."""
    WIDTH: tl.constexpr = z.shape[1] // 4
    m = tl.full((z.shape[0],), float("-inf"), dtype=tl.float32)
    s = tl.zeros((z.shape[0],), dtype=tl.float32)
    quarters = column_quarters(z)
    for i in tl.static_range(4):  # pyright: ignore[reportGeneralTypeIssues]
        other_m, other_s = _statistics(
            quarters[i], factor_ptr, query_id_ptr, key_id_ptr, col_ptr, pair_ptr, R, M,
            first_row, first_col + i * WIDTH, first_pair,
        )  # fmt: skip
        m, s = _merged(m, s, other_m, other_s)
    return m, s


@jit
def _plain_statistics(z, factor_ptr, col_ptr, M, first_row, first_col):
    """Return the rows' statistics in a plain tile, relative to its largest logit, and if they and the columns' serve.

    One exponential is for both: sums that do not serve are of rows or columns far below the largest. The columns'
    statistics are stored.
    """
    WIDTH: tl.constexpr = z.shape[1] // 4
    factor = tl.load(factor_ptr) * LOG2E
    base = tl.maximum(factor * tl.max(z), factor * tl.min(z))
    m = base / LOG2E
    s = tl.zeros((z.shape[0],), dtype=tl.float32)
    lost = tl.zeros((WIDTH,), dtype=tl.int32)
    quarters = column_quarters(z)
    for i in tl.static_range(4):  # pyright: ignore[reportGeneralTypeIssues]
        e = tl.exp2(quarters[i] * factor - base)
        s += tl.sum(e, axis=1)
        if col_ptr is not None:
            of_cols = tl.sum(e, axis=0)
            lost |= _is_lost(of_cols)
            cols = first_col + i * WIDTH + tl.arange(0, WIDTH)
            _store_part(m + tl.zeros_like(of_cols), of_cols, col_ptr, first_row // z.shape[0], cols, M)
    some = tl.maximum(tl.max(lost, axis=0), tl.max(_is_lost(s), axis=0))
    return m + tl.zeros_like(s), s, some == 0


@jit
def _is_lost(s):
    """Return 1 for sums whose largest exponential may have lost digits, and for NaN."""
    return tl.where(s >= tl.exp2(-SPREAD), 0, 1)


@jit
def contrastive_statistics_kernel(
    z_ptr, factor_ptr, query_id_ptr, key_id_ptr, row_ptr, col_ptr, pair_ptr, R, M, z_stride, first_pair,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    first_row, first_col, z = _read_tile(z_ptr, R, M, z_stride, BLOCK_R, BLOCK_C)
    m, s = _statistics(
        z, factor_ptr, query_id_ptr, key_id_ptr, col_ptr, pair_ptr, R, M, first_row, first_col, first_pair
    )
    _store_part(m, s, row_ptr, first_col // BLOCK_C, first_row + tl.arange(0, BLOCK_R), R)


@jit
def contrastive_product_statistics_kernel(
    q, k, factor_ptr, query_id_ptr, key_id_ptr, row_ptr, col_ptr, pair_ptr, R, M, H, first_pair,
    DESCRIBED: tl.constexpr, WIDEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    first_row, first_col = first_of_tile(R, M, BLOCK_M, BLOCK_N, GROUP_M)
    z = product(
        q, k, first_row.to(tl.int32), first_col.to(tl.int32), R, M, H, H, 1, H, 1,
        DESCRIBED, False, True, WIDEN, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES,
    )  # fmt: skip
    m = tl.zeros((BLOCK_M,), dtype=tl.float32)
    s = tl.zeros((BLOCK_M,), dtype=tl.float32)
    served = _is_plain(query_id_ptr, R, M, first_row, first_col, first_pair, BLOCK_M, BLOCK_N)
    if served:
        m, s, served = _plain_statistics(z, factor_ptr, col_ptr, M, first_row, first_col)
    if served == 0:
        m, s = _statistics_of_quarters(
            z, factor_ptr, query_id_ptr, key_id_ptr, col_ptr, pair_ptr, R, M, first_row, first_col, first_pair
        )
    _store_part(m, s, row_ptr, first_col // BLOCK_N, first_row + tl.arange(0, BLOCK_M), R)


@jit
def merge_kernel(parts_ptr, before_ptr, out_ptr, T, L, BLOCK_T: tl.constexpr, BLOCK_L: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK_L + tl.arange(0, BLOCK_L)
    m = tl.full((BLOCK_L,), float("-inf"), dtype=tl.float32)
    s = tl.zeros((BLOCK_L,), dtype=tl.float32)
    if before_ptr is not None:
        m = tl.load(before_ptr + at, mask=at < L, other=0.0)
        s = tl.load(before_ptr + L + at, mask=at < L, other=0.0)
    for start in range(0, T, BLOCK_T):
        t = (start + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
        mask = (t < T) & (at < L)[None, :]
        m_t = tl.load(parts_ptr + t * 2 * L + at[None, :], mask=mask, other=float("-inf"))
        s_t = tl.load(parts_ptr + t * 2 * L + L + at[None, :], mask=mask, other=0.0)
        new_m = tl.maximum(m, tl.max(m_t, axis=0))
        base = tl.where(new_m == float("-inf"), 0.0, new_m)
        s = s * tl.exp2((m - base) * LOG2E) + tl.sum(s_t * tl.exp2((m_t - base[None, :]) * LOG2E), axis=0)
        m = new_m
    tl.store(out_ptr + at, m, mask=at < L)
    tl.store(out_ptr + L + at, s, mask=at < L)


@jit
def _softmax(y, stats_ptr, first, L, axis: tl.constexpr):
    """Return the softmax over an axis of a tile, 0 where y is masked: a column may have nothing else."""
    block: tl.constexpr = y.shape[1 - axis]
    at = tl.arange(0, block)
    inside = at < _left(L, first, block)
    m = tl.expand_dims(tl.load(stats_ptr + first + at, mask=inside, other=0.0), axis)
    share = tl.expand_dims(1.0 / tl.load(stats_ptr + L + first + at, mask=inside, other=1.0), axis)
    return tl.where(y == float("-inf"), 0.0, tl.exp2((y - m) * LOG2E) * share)


@jit
def _loss_gradients(grad_ptr, first, L, block: tl.constexpr):
    at = tl.arange(0, block)
    return tl.load(grad_ptr + first + at, mask=at < _left(L, first, block), other=0.0)


@jit
def _gradient(
    z, factor_ptr, query_id_ptr, key_id_ptr, row_ptr, row_grad_ptr, col_ptr, col_grad_ptr,
    R, M, first_row, first_col, first_pair,
):  # fmt: skip
    """Return the gradient of a tile of logits, and what of it is inside."""
    inside, pair, y = _logits(z, factor_ptr, query_id_ptr, key_id_ptr, R, M, first_row, first_col, first_pair)
    own = pair.to(tl.float32)
    # Where p is near 1 the two nearly cancel: their difference first.
    dy = _loss_gradients(row_grad_ptr, first_row, R, z.shape[0])[:, None] * (
        _softmax(y, row_ptr, first_row, R, 1) - own
    )
    if col_ptr is not None:
        p = _softmax(y, col_ptr, first_col, M, 0)
        dy += _loss_gradients(col_grad_ptr, first_col, M, z.shape[1])[None, :] * (p - own)
    return dy, inside


@jit
def _far_and_share(stats_ptr, grad_ptr, first, L, block: tl.constexpr, base):
    """Return how far logsumexps are from a base, in bits, and what exponentials relative to it have as factors."""
    at = tl.arange(0, block)
    inside = at < _left(L, first, block)
    m = tl.load(stats_ptr + first + at, mask=inside, other=0.0)
    logsumexp = m * LOG2E + tl.log2(tl.load(stats_ptr + L + first + at, mask=inside, other=1.0))
    share = _loss_gradients(grad_ptr, first, L, block) * tl.exp2(base - logsumexp)
    return tl.max(tl.abs(logsumexp - base), axis=0), share


@jit
def _store_gradient(value, dz, R, M, dz_stride, first_row, first_col, DESCRIBED: tl.constexpr):
    """Store a tile of the products' gradient, or a piece of one."""
    if DESCRIBED:
        dz.store([first_row.to(tl.int32), first_col.to(tl.int32)], value.to(dz.dtype))
    else:
        row, col = tl.arange(0, value.shape[0]), tl.arange(0, value.shape[1])
        in_rows, in_cols = row < _left(R, first_row, value.shape[0]), col < _left(M, first_col, value.shape[1])
        dz_ptrs = dz + (first_row + row)[:, None] * dz_stride + (first_col + col)[None, :]
        tl.store(dz_ptrs, value.to(dz.dtype.element_ty), mask=in_rows[:, None] & in_cols[None, :])


@jit
def _store_rows(x, out_ptr, part, first_row, R):
    """Store a tile's numbers of rows as a part of `[T, R]`."""
    rows = first_row + tl.arange(0, x.shape[0])
    tl.store(out_ptr + part * R + rows, x, mask=rows < R)


@jit
def contrastive_gradient_kernel(
    z_ptr, factor_ptr, query_id_ptr, key_id_ptr, row_ptr, row_grad_ptr, col_ptr, col_grad_ptr, dz_ptr, dfactor_ptr,
    R, M, z_stride, dz_stride, first_pair, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a tile of products, which may be over them, and its part of the factor's."""
    first_row, first_col, z = _read_tile(z_ptr, R, M, z_stride, BLOCK_R, BLOCK_C)
    dy, inside = _gradient(
        z, factor_ptr, query_id_ptr, key_id_ptr, row_ptr, row_grad_ptr, col_ptr, col_grad_ptr,
        R, M, first_row, first_col, first_pair,
    )  # fmt: skip
    if dz_ptr is not None:
        _store_gradient(dy * tl.load(factor_ptr), dz_ptr, R, M, dz_stride, first_row, first_col, False)
    dfactor = tl.sum(tl.where(inside, dy * z, 0.0), axis=1)
    if dfactor_ptr is not None:
        _store_rows(dfactor, dfactor_ptr, first_col // BLOCK_C, first_row, R)


@jit
def contrastive_product_gradient_kernel(
    q, k, factor_ptr, query_id_ptr, key_id_ptr, row_ptr, row_grad_ptr, col_ptr, col_grad_ptr, dz,
    dfactor_ptr, R, M, H, dz_stride, first_pair, DESCRIBED: tl.constexpr, DZ_DESCRIBED: tl.constexpr,
    PROGRAMS: tl.constexpr, WIDEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Write the gradients of tiles of products, if they are wanted, and their rows' parts of the factor's."""
    WIDTH: tl.constexpr = BLOCK_N // 8
    tiles_m, tiles_n = tl.cdiv(R, BLOCK_M), tl.cdiv(M, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=DESCRIBED):
        row_tile, col_tile = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        first_row, first_col = (row_tile * BLOCK_M).to(tl.int64), (col_tile * BLOCK_N).to(tl.int64)
        z = product(
            q, k, first_row.to(tl.int32), first_col.to(tl.int32), R, M, H, H, 1, H, 1,
            DESCRIBED, False, True, WIDEN, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES,
        )  # fmt: skip
        # One exponential serves both softmaxes of a plain tile, unless logsumexps are far from its first row's.
        base = tl.load(row_ptr + first_row) * LOG2E + tl.log2(tl.load(row_ptr + R + first_row))
        far, of_rows = _far_and_share(row_ptr, row_grad_ptr, first_row, R, BLOCK_M, base)
        of_cols = tl.zeros((BLOCK_N,), dtype=tl.float32)
        if col_ptr is not None:
            far_cols, of_cols = _far_and_share(col_ptr, col_grad_ptr, first_col, M, BLOCK_N, base)
            far = tl.maximum(far, far_cols)
        plain = _is_plain(query_id_ptr, R, M, first_row, first_col, first_pair, BLOCK_M, BLOCK_N) & (far < SPREAD)
        factor = tl.load(factor_ptr)
        dfactor = tl.zeros((BLOCK_M,), dtype=tl.float32)
        # In pieces, of which none spills. What they multiply with was read at once: each would wait for its own.
        pieces, shares = column_eighths(z), column_eighths(of_cols[None, :])
        for i in tl.static_range(8):  # pyright: ignore[reportGeneralTypeIssues]
            piece, col = pieces[i], first_col + i * WIDTH
            if plain:
                dy = tl.exp2(piece * (factor * LOG2E) - base) * (of_rows[:, None] + shares[i])
            else:
                dy, _ = _gradient(
                    piece, factor_ptr, query_id_ptr, key_id_ptr, row_ptr, row_grad_ptr, col_ptr, col_grad_ptr,
                    R, M, first_row, col, first_pair,
                )  # fmt: skip
            dfactor += tl.sum(dy * piece, axis=1)
            if dz is not None:
                _store_gradient(dy * factor, dz, R, M, dz_stride, first_row, col, DZ_DESCRIBED)
        if dfactor_ptr is not None:
            _store_rows(dfactor, dfactor_ptr, first_col // BLOCK_N, first_row, R)


def makes_products(embeddings: Tensor) -> bool:
    """True if the kernels make the products of such embeddings `[N, H]`, which they then take contiguous."""
    H = embeddings.shape[1]
    return embeddings.dtype != torch.float32 and aligned(H) and H < MAX_STRIDE


def _tile(products: Products) -> tuple[dict[str, Any], int, int]:
    """Return how a tile of products is made or read, and its rows and columns.

    Four warps have all the registers that an epilogue can use, and two programs fit a multiprocessor. H200, of cuBLAS's
    time for the bare product, 8192 x 768 x 32768 and 8192 x 1024 x 32768: statistics 1.34 and 1.31 (eight warps, tiles
    of 128 x 256 and programs that walk over them 1.84 and 1.83), gradients 1.23 and 1.18 (4 warps, a program for each
    tile 1.40 and 1.29).
    """
    if products.stored is not None:
        return READ_TILE, BLOCK_R, BLOCK_C
    keys = products.keys
    tile = product_tile_sizes(BLOCK_N, keys.shape[1], keys.element_size()) | {"num_warps": 4}
    return {"WIDEN": INTERPRET} | tile, tile["BLOCK_M"], tile["BLOCK_N"]


def _operands(products: Products, launch: dict[str, Any]) -> tuple[Any, Any, bool]:
    """Return queries and keys for a kernel, described where they can be, and if they are."""
    queries, keys, _ = products
    if not (describable(queries) and describable(keys)):
        return queries, keys, False
    depth = launch["BLOCK_K"]
    return descriptor(queries, [launch["BLOCK_M"], depth]), descriptor(keys, [launch["BLOCK_N"], depth]), True


def statistics(products: Products, similarities: Similarities, columns: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """Compute statistics of the rows and, if asked, the columns in parts, and the logits of the queries' own keys.

    Returns:
        `[T, 2, R]`, `[T, 2, M]` or None, and `[R]`, all float32.
    """
    (R, M), (factor, query_ids, key_ids, first_pair), z = products.shape, similarities, products.stored
    launch, block_r, block_c = _tile(products)
    tiles_r, tiles_c = cdiv(R, block_r), cdiv(M, block_c)
    device = products.queries.device
    row_parts = empty((tiles_c, 2, R), torch.float32, device)
    col_parts = empty((tiles_r, 2, M), torch.float32, device) if columns else None
    pairs = empty((R,), torch.float32, device)
    given = factor, query_ids, key_ids, row_parts, col_parts, pairs, R, M
    grid = (tiles_r * tiles_c,)
    if z is None:
        H = products.keys.shape[1]
        queries, keys, described = _operands(products, launch)
        wrap_triton(contrastive_product_statistics_kernel)[grid](
            queries, keys, *given, H, first_pair, DESCRIBED=described, **launch
        )
    else:
        wrap_triton(contrastive_statistics_kernel)[grid](z, *given, z.stride(0), first_pair, **launch)
    return row_parts, col_parts, pairs


def merge(parts: Tensor, before: Tensor | None = None) -> Tensor:
    """Merge statistics `[T, 2, L]`, after those of before `[2, L]`, into `[2, L]`."""
    T, _, L = parts.shape
    out = empty((2, L), torch.float32, parts.device)
    wrap_triton(merge_kernel)[(cdiv(L, 32),)](parts, before, out, T, L, BLOCK_T=16, BLOCK_L=32, num_warps=4)
    return out


def gradients(
    products: Products, dproducts: Tensor | None, similarities: Similarities, rows: LossGradients,
    columns: LossGradients | None, need_factor: bool,
) -> Tensor | None:  # fmt: skip
    """Write the gradient of products `[R, M]`, which may be over them, if one is given to write to.

    Return the factor's, float32 `[]`, if needed.
    """
    (R, M), (factor, query_ids, key_ids, first_pair), z = products.shape, similarities, products.stored
    launch, block_r, block_c = _tile(products)
    tiles_r, tiles_c = cdiv(R, block_r), cdiv(M, block_c)
    tiles, device = tiles_r * tiles_c, products.keys.device
    parts = empty((tiles_c, R), torch.float32, device) if need_factor else None
    stride = 0 if dproducts is None else dproducts.stride(0)
    given = factor, query_ids, key_ids, *rows, *(columns or (None, None))
    if z is None:
        H = products.keys.shape[1]
        queries, keys, described = _operands(products, launch)
        stores_blocks, target = described and dproducts is not None and describable(dproducts), dproducts
        if dproducts is not None and stores_blocks:
            target = descriptor(dproducts, [block_r, block_c // 8])
        programs = num_programs(device, 2)
        wrap_triton(contrastive_product_gradient_kernel)[(min(tiles, programs),)](
            queries, keys, *given, target, parts, R, M, H, stride, first_pair,
            DESCRIBED=described, DZ_DESCRIBED=stores_blocks, PROGRAMS=programs, **launch | {"GROUP_M": 16},
        )  # fmt: skip
    else:
        wrap_triton(contrastive_gradient_kernel)[(tiles,)](
            z, *given, dproducts, parts, R, M, z.stride(0), stride, first_pair, **launch
        )
    return None if parts is None else sum_to_scalar(sum_partials(parts, torch.float32))


def _logits_cpu(products: Tensor, similarities: Similarities) -> tuple[Tensor, Tensor]:
    """Return logits `[R, M]` and the mask of the pairs."""
    (R, M), (factor, query_ids, key_ids, first_pair) = products.shape, similarities
    own = torch.arange(first_pair, first_pair + R, dtype=torch.int64, device=products.device)
    pair = own.unsqueeze(1) == torch.arange(M, dtype=torch.int64, device=products.device)
    y = products * factor
    if query_ids is not None and key_ids is not None:
        y = y.masked_fill_((query_ids.unsqueeze(1) == key_ids) & ~pair, float("-inf"))
    return y, pair


def statistics_cpu(
    products: Products, similarities: Similarities, columns: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """`statistics` in plain PyTorch, in one part."""
    assert products.stored is not None
    y, _ = _logits_cpu(products.stored, similarities)
    pairs = y.diagonal(similarities.first_pair)[: y.shape[0]].clone()
    return _statistics_over(y, 1), _statistics_over(y, 0) if columns else None, pairs


def _statistics_over(y: Tensor, dim: int) -> Tensor:
    if y.shape[dim] == 0:
        return empty((0, 2, y.shape[1 - dim]), y.dtype, y.device)
    m = y.amax(dim)
    base = torch.where(m == float("-inf"), 0.0, m).unsqueeze(dim)
    # In float32 a sum of small terms, one after the other, rounds the largest one's 1 in one direction.
    return torch.stack((m, (y - base).exp_().sum(dim, dtype=torch.float64).float())).unsqueeze(0)


def merge_cpu(parts: Tensor, before: Tensor | None = None) -> Tensor:
    """`merge` in plain PyTorch."""
    nothing = torch.tensor([float("-inf"), 0.0], dtype=torch.float32, device=parts.device)
    first = nothing.unsqueeze(1).expand(parts.shape[1:]) if before is None else before
    return torch.stack(merged_sums_cpu(*torch.cat((first.unsqueeze(0), parts)).unbind(1)))


def gradients_cpu(
    products: Products, dproducts: Tensor | None, similarities: Similarities, rows: LossGradients,
    columns: LossGradients | None, need_factor: bool,
) -> Tensor | None:  # fmt: skip
    """`gradients` in plain PyTorch."""
    z = products.stored
    assert z is not None
    y, pair = _logits_cpu(z, similarities)
    masked, own = y == float("-inf"), pair.float()

    def term(statistics: LossGradients, dim: int) -> Tensor:
        m, s, grads = (each.unsqueeze(dim) for each in (*statistics.stats, statistics.grads))
        return (y - m).exp_().div_(s).masked_fill_(masked, 0.0).sub_(own).mul_(grads)

    dy = term(rows, 1)
    if columns is not None:
        dy += term(columns, 0)
    dfactor = (dy * z).sum(dtype=torch.float64).float() if need_factor else None
    if dproducts is not None:
        dproducts.copy_(dy.mul_(similarities.factor))
    return dfactor


class ContrastiveFunctions(NamedTuple):
    """The steps from a block's products to statistics, their merging, and from these to the products' gradient."""

    makes_products: Callable[[Tensor], bool]
    statistics: Callable[[Products, Similarities, bool], tuple[Tensor, Tensor | None, Tensor]]
    merge: Callable[..., Tensor]
    gradients: Callable[
        [Products, Tensor | None, Similarities, LossGradients, LossGradients | None, bool], Tensor | None
    ]


KERNELS = ContrastiveFunctions(makes_products, statistics, merge, gradients)
PYTORCH = ContrastiveFunctions(lambda _: False, statistics_cpu, merge_cpu, gradients_cpu)
