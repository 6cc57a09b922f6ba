"""Rows of tokens and rows of experts: the passes that gather the ones and add up the others.

Where an order, offsets or positions are wrong nothing is read or written out of bounds: such a row counts as zero.
"""

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.math import everywhere
from llmk.ops.common.rows import contiguous, contiguous_last_dim, row_and_columns
from llmk.registry import cdiv, empty, jit, next_power_of_2, wrap_triton


@jit
def gather_rows_kernel(
    x_ptr, positions_ptr, weights_ptr, offsets_ptr, rows_ptr, N, E, H, x_stride, K: tl.constexpr, BLOCK_H: tl.constexpr
):
    """A token is read once and written K times: its pairs lie too far apart for a cache to keep it."""
    token, cols = row_and_columns(H, BLOCK_H)
    count = N if offsets_ptr is None else tl.load(offsets_ptr + E - 1)
    x = tl.load(x_ptr + token * x_stride + cols, mask=cols < H, other=0.0)
    for k in tl.static_range(K):  # type: ignore[misc]
        row = tl.load(positions_ptr + token * K + k).to(tl.int64)
        value = tl.where(row < count, x.to(tl.float32), 0.0)
        if weights_ptr is not None:
            value *= tl.load(weights_ptr + token * K + k).to(tl.float32)
        live = (row >= 0) & (row < N)
        mask = (cols < H) & everywhere(live, cols)
        tl.store(rows_ptr + row * H + cols, value.to(rows_ptr.dtype.element_ty), mask=mask)


@jit
def sum_rows_kernel(
    rows_ptr, positions_ptr, weights_ptr, bias_ptr, indices_ptr, offsets_ptr, y_ptr, N, E, H, rows_stride,
    K: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    token, cols = row_and_columns(H, BLOCK_H)
    count = N if offsets_ptr is None else tl.load(offsets_ptr + E - 1)
    total = tl.zeros((BLOCK_H,), dtype=tl.float32)
    for k in tl.static_range(K):
        row = tl.load(positions_ptr + token * K + k).to(tl.int64)
        live = (row >= 0) & (row < count)
        mask = (cols < H) & everywhere(live, cols)
        value = tl.load(rows_ptr + row * rows_stride + cols, mask=mask, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            expert = tl.load(indices_ptr + token * K + k).to(tl.int64)
            bias = tl.load(bias_ptr + expert * H + cols, mask=mask, other=0.0).to(tl.float32)
            weight = tl.load(weights_ptr + token * K + k).to(tl.float32)
            total += value + tl.where(live, bias * weight, 0.0)
        elif weights_ptr is not None:
            weight = tl.load(weights_ptr + token * K + k).to(tl.float32)
            total += tl.where(live, value * weight, 0.0)
        else:
            total += value
    tl.store(y_ptr + token * H + cols, total.to(y_ptr.dtype.element_ty), mask=cols < H)


@jit
def dot_rows_kernel(table_ptr, indices_ptr, dy_ptr, dot_ptr, M, K, H, table_stride, dy_stride, BLOCK_H: tl.constexpr):
    pair = tl.program_id(0).to(tl.int64)
    row = tl.load(indices_ptr + pair).to(tl.int64)
    live = (row >= 0) & (row < M)
    table_ptr += row * table_stride
    dy_ptr += (pair // K) * dy_stride
    total = tl.zeros((BLOCK_H,), dtype=tl.float32)
    for start in range(0, H, BLOCK_H):
        cols = start + tl.arange(0, BLOCK_H)
        value = tl.load(table_ptr + cols, mask=(cols < H) & everywhere(live, cols), other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + cols, mask=(cols < H) & everywhere(live, cols), other=0.0).to(tl.float32)
        total += value * dy
    tl.store(dot_ptr + pair, tl.sum(total, axis=0).to(dot_ptr.dtype.element_ty))


def _block(H: int) -> dict[str, int]:
    """A thousand columns a program, as in the gated units."""
    return {"BLOCK_H": min(1024, next_power_of_2(max(H, 1))), "num_warps": 4}


def gather_rows(x: Tensor, positions: Tensor, offsets: Tensor) -> Tensor:
    """`[N, H]`: for each row of experts its token's row of `x [T, H]`, zeros for rows that no expert has.

    `positions [T, K]` name each row once, so that all are written.
    """
    rows = empty((positions.numel(), x.shape[1]), x.dtype, x.device)
    _gather(x, positions, None, offsets, rows)
    return rows


def scatter_rows(dy: Tensor, positions: Tensor, weights: Tensor | None, N: int) -> Tensor:
    """`[N, H]`: each pair's row of `dy [T, H]` times its weight, where its position says; zeros elsewhere."""
    rows = torch.zeros((N, dy.shape[1]), dtype=dy.dtype, device=dy.device)
    _gather(dy, positions, weights, None, rows)
    return rows


def _gather(x: Tensor, positions: Tensor, weights: Tensor | None, offsets: Tensor | None, rows: Tensor) -> None:
    x, positions, weights = contiguous_last_dim(x), positions.contiguous(), contiguous(weights)
    (T, K), (N, H), E = positions.shape, rows.shape, 0 if offsets is None else offsets.shape[0]
    block = _block(H)
    wrap_triton(gather_rows_kernel)[(T * cdiv(H, block["BLOCK_H"]),)](
        x, positions, weights, offsets, rows, N, E, H, x.stride(0), K=K, **block
    )


def sum_rows(
    rows: Tensor,
    positions: Tensor,
    weights: Tensor | None = None,
    bias: Tensor | None = None,
    indices: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """`[T, H]`: of each token the sum of its K rows, in float32 and in their order.

    Without a bias, `weights [T, K]` multiply the rows. `bias [E, H]` is multiplied by them instead, for rows that were
    multiplied already. `offsets` say which rows experts have; without them it is all.
    """
    rows, positions = contiguous_last_dim(rows), positions.contiguous()
    weights, bias, indices = contiguous(weights), contiguous(bias), contiguous(indices)
    (T, K), (N, H) = positions.shape, rows.shape
    y = empty((T, H), rows.dtype, rows.device)
    block = _block(H)
    sizes = N, 0 if offsets is None else offsets.shape[0], H, rows.stride(0)
    wrap_triton(sum_rows_kernel)[(T * cdiv(H, block["BLOCK_H"]),)](
        rows, positions, weights, bias, indices, offsets, y, *sizes, K=K, **block
    )
    return y


def dot_rows(table: Tensor, indices: Tensor, dy: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the products `[T, K]` of row `indices[t, k]` of `table [M, H]` with row t of `dy`."""
    table, dy, indices = contiguous_last_dim(table), contiguous_last_dim(dy), indices.contiguous()
    M, H = table.shape
    dots = empty(tuple(indices.shape), dtype, dy.device)
    wrap_triton(dot_rows_kernel)[(indices.numel(),)](
        table, indices, dy, dots, M, indices.shape[1], H, table.stride(0), dy.stride(0), **_block(H)
    )
    return dots
