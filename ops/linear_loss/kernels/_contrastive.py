r"""Softmaxes of a block of a similarity matrix, over its rows and over its columns, and their gradients: the kernels.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, https://arxiv.org/abs/1805.02867, for
adding up parts of a softmax.

For products z [R, M] of R queries and M keys, y = factor * z, where a key that is no negative of a query has y = -inf:

    row i       m_i = max_j(y_ij)    s_i = sum_j(exp(y_ij - m_i))
    column j    m_j = max_i(y_ij)    s_j = sum_i(exp(y_ij - m_j))

A program reads a tile of z once and computes both pairs of numbers of the tile, which are then merged, those of the
rows over the tiles of columns and those of the columns over the tiles of rows, over blocks and over ranks:

    m = max_t(m_t)    s = sum_t(s_t * exp(m_t - m))

Backward, given the gradients g_i of the rows' logsumexp - y of their own pair and h_j of the columns':

    dy_ij = g_i * (exp(y_ij - m_i) / s_i - [ij is a pair]) + h_j * (exp(y_ij - m_j) / s_j - [ij is a pair])
    dz_ij = factor * dy_ij
    dfactor = sum_ij(dy_ij * z_ij)

where h_j is 0 of a key that is no query's own.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.math import LOG2E
from llmk.ops.common.sums import sum_to_scalar
from llmk.registry import cdiv, empty, jit, wrap_triton

BLOCK_R, BLOCK_C = 64, 128
"""A tile. Its statistics are 2 (64 + 128) numbers for 8192 products that are read."""
TILE = {"BLOCK_R": BLOCK_R, "BLOCK_C": BLOCK_C, "num_warps": 8}


class Similarities(NamedTuple):
    """How a block's products become logits, which keys are its queries' own, and which are no negatives of theirs."""

    factor: Tensor  # float32 []
    query_ids: Tensor | None  # [R]
    key_ids: Tensor | None  # [M]; a key with a query's id is no negative of it
    first_pair: int  # the first query's own key; those of the others follow it

    def of_pairs(self, products: Tensor) -> Tensor:
        """Return the logits `[R]` of the queries and their own keys."""
        return products.diagonal(self.first_pair)[: products.shape[0]] * self.factor


class Gradients(NamedTuple):
    """The statistics of the rows or the columns, and the gradient of each one's loss."""

    stats: Tensor  # [2, L]
    grads: Tensor  # [L]


@jit
def _tile(
    z_ptr, factor_ptr, query_id_ptr, key_id_ptr, R, M, z_stride, first_pair,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Return a tile's row and column, its rows and columns, masks of what is inside and of pairs, products, logits."""
    tiles = tl.cdiv(M, BLOCK_C)  # consecutive programs read consecutive memory
    tile_row, tile_col = (tl.program_id(0) // tiles).to(tl.int64), (tl.program_id(0) % tiles).to(tl.int64)
    rows, cols = tile_row * BLOCK_R + tl.arange(0, BLOCK_R), tile_col * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (rows < R)[:, None] & (cols < M)[None, :]
    z = tl.load(z_ptr + rows[:, None] * z_stride + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    pair = cols[None, :] == rows[:, None] + first_pair
    counts = inside
    if query_id_ptr is not None:
        query_id = tl.load(query_id_ptr + rows, mask=rows < R, other=0).to(tl.int64)
        key_id = tl.load(key_id_ptr + cols, mask=cols < M, other=0).to(tl.int64)
        counts &= pair | (query_id[:, None] != key_id[None, :])
    y = tl.where(counts, z * tl.load(factor_ptr), float("-inf"))
    return tile_row, tile_col, rows, cols, inside, pair, z, y


@jit
def _store_statistics(y, out_ptr, tile, at, L, axis: tl.constexpr):
    """Store maximum and sum over an axis of a tile of logits as a part of `[T, 2, L]`."""
    m = tl.max(y, axis=axis)
    base = tl.where(m == float("-inf"), 0.0, m)  # where all are masked
    s = tl.sum(tl.exp2((y - tl.expand_dims(base, axis)) * LOG2E), axis=axis)
    out_ptr += tile * 2 * L
    tl.store(out_ptr + at, m, mask=at < L)
    tl.store(out_ptr + L + at, s, mask=at < L)


@jit
def contrastive_statistics_kernel(
    z_ptr, factor_ptr, query_id_ptr, key_id_ptr, row_ptr, col_ptr, R, M, z_stride, first_pair,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    tile_row, tile_col, rows, cols, _, _, _, y = _tile(
        z_ptr, factor_ptr, query_id_ptr, key_id_ptr, R, M, z_stride, first_pair, BLOCK_R, BLOCK_C
    )
    _store_statistics(y, row_ptr, tile_col, rows, R, 1)
    if col_ptr is not None:
        _store_statistics(y, col_ptr, tile_row, cols, M, 0)


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
def _softmax(y, stats_ptr, at, L, axis: tl.constexpr):
    """Return the softmax over an axis of a tile, 0 where y is masked: a column may have nothing else."""
    m = tl.expand_dims(tl.load(stats_ptr + at, mask=at < L, other=0.0), axis)
    s = tl.expand_dims(tl.load(stats_ptr + L + at, mask=at < L, other=1.0), axis)
    return tl.where(y == float("-inf"), 0.0, tl.exp2((y - m) * LOG2E) / s)


@jit
def contrastive_gradient_kernel(
    z_ptr, factor_ptr, query_id_ptr, key_id_ptr, row_ptr, row_grad_ptr, col_ptr, col_grad_ptr, dz_ptr, dfactor_ptr,
    R, M, z_stride, dz_stride, first_pair, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a tile of products, which may be over them, and its part of the factor's."""
    _, _, rows, cols, inside, pair, z, y = _tile(
        z_ptr, factor_ptr, query_id_ptr, key_id_ptr, R, M, z_stride, first_pair, BLOCK_R, BLOCK_C
    )
    own = pair.to(tl.float32)
    # Where p is near 1 the two nearly cancel: their difference first.
    p = _softmax(y, row_ptr, rows, R, 1)
    dy = tl.expand_dims(tl.load(row_grad_ptr + rows, mask=rows < R, other=0.0), 1) * (p - own)
    if col_ptr is not None:
        p = _softmax(y, col_ptr, cols, M, 0)
        dy += tl.expand_dims(tl.load(col_grad_ptr + cols, mask=cols < M, other=0.0), 0) * (p - own)
    dz = (dy * tl.load(factor_ptr)).to(dz_ptr.dtype.element_ty)
    tl.store(dz_ptr + rows[:, None] * dz_stride + cols[None, :], dz, mask=inside)
    if dfactor_ptr is not None:
        tl.store(dfactor_ptr + tl.program_id(0), tl.sum(tl.sum(tl.where(inside, dy * z, 0.0), axis=1), axis=0))


def statistics(products: Tensor, similarities: Similarities, columns: bool) -> tuple[Tensor, Tensor | None]:
    """Compute the parts `[T, 2, R]` of the rows' statistics of `[R, M]`, and of the columns' `[T, 2, M]` if asked."""
    (R, M), (factor, query_ids, key_ids, first_pair) = products.shape, similarities
    tiles_r, tiles_c = cdiv(R, BLOCK_R), cdiv(M, BLOCK_C)
    row_parts = empty((tiles_c, 2, R), torch.float32, products.device)
    col_parts = empty((tiles_r, 2, M), torch.float32, products.device) if columns else None
    wrap_triton(contrastive_statistics_kernel)[(tiles_r * tiles_c,)](
        products, factor, query_ids, key_ids, row_parts, col_parts, R, M, products.stride(0), first_pair, **TILE
    )
    return row_parts, col_parts


def merge(parts: Tensor, before: Tensor | None = None) -> Tensor:
    """Merge statistics `[T, 2, L]`, after those of before `[2, L]`, into `[2, L]`."""
    T, _, L = parts.shape
    out = empty((2, L), torch.float32, parts.device)
    wrap_triton(merge_kernel)[(cdiv(L, 32),)](parts, before, out, T, L, BLOCK_T=16, BLOCK_L=32, num_warps=4)
    return out


def gradients(
    products: Tensor, dproducts: Tensor, similarities: Similarities, rows: Gradients, columns: Gradients | None,
    need_factor: bool,
) -> Tensor | None:  # fmt: skip
    """Write the gradient of products `[R, M]`, which may be over them; return the factor's, float32 `[]`, if needed."""
    (R, M), (factor, query_ids, key_ids, first_pair) = products.shape, similarities
    tiles = cdiv(R, BLOCK_R) * cdiv(M, BLOCK_C)
    parts = empty((tiles,), torch.float32, products.device) if need_factor else None
    wrap_triton(contrastive_gradient_kernel)[(tiles,)](
        products, factor, query_ids, key_ids, *rows, *(columns or (None, None)), dproducts, parts,
        R, M, products.stride(0), dproducts.stride(0), first_pair, **TILE,
    )  # fmt: skip
    return None if parts is None else sum_to_scalar(parts)


def _logits_cpu(products: Tensor, similarities: Similarities) -> tuple[Tensor, Tensor]:
    """Return logits `[R, M]` and the mask of the pairs."""
    (R, M), (factor, query_ids, key_ids, first_pair) = products.shape, similarities
    own = torch.arange(first_pair, first_pair + R, dtype=torch.int64, device=products.device)
    pair = own.unsqueeze(1) == torch.arange(M, dtype=torch.int64, device=products.device)
    y = products * factor
    if query_ids is not None and key_ids is not None:
        y = y.masked_fill_((query_ids.unsqueeze(1) == key_ids) & ~pair, float("-inf"))
    return y, pair


def statistics_cpu(products: Tensor, similarities: Similarities, columns: bool) -> tuple[Tensor, Tensor | None]:
    """`statistics` in plain PyTorch, in one part."""
    y, _ = _logits_cpu(products, similarities)
    return _statistics_over(y, 1), _statistics_over(y, 0) if columns else None


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
    m_t, s_t = torch.cat((first.unsqueeze(0), parts)).unbind(1)
    m = m_t.amax(0)
    base = torch.where(m == float("-inf"), 0.0, m)
    return torch.stack((m, (s_t * (m_t - base).exp()).sum(0)))


def gradients_cpu(
    products: Tensor, dproducts: Tensor, similarities: Similarities, rows: Gradients, columns: Gradients | None,
    need_factor: bool,
) -> Tensor | None:  # fmt: skip
    """`gradients` in plain PyTorch."""
    y, pair = _logits_cpu(products, similarities)
    masked, own = y == float("-inf"), pair.float()

    def term(statistics: Gradients, dim: int) -> Tensor:
        m, s, grads = (each.unsqueeze(dim) for each in (*statistics.stats, statistics.grads))
        return (y - m).exp_().div_(s).masked_fill_(masked, 0.0).sub_(own).mul_(grads)

    dy = term(rows, 1)
    if columns is not None:
        dy += term(columns, 0)
    dfactor = (dy * products).sum(dtype=torch.float64).float() if need_factor else None
    dproducts.copy_(dy.mul_(similarities.factor))
    return dfactor


class ContrastiveFunctions(NamedTuple):
    """The steps from a block's products to statistics, their merging, and from these to the products' gradient."""

    statistics: Callable[[Tensor, Similarities, bool], tuple[Tensor, Tensor | None]]
    merge: Callable[..., Tensor]
    gradients: Callable[[Tensor, Tensor, Similarities, Gradients, Gradients | None, bool], Tensor | None]


KERNELS = ContrastiveFunctions(statistics, merge, gradients)
PYTORCH = ContrastiveFunctions(statistics_cpu, merge_cpu, gradients_cpu)
