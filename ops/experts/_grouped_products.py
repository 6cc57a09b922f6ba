"""Grouped products: each expert's rows times its own matrix, how many rows it has being known to the device alone.

bfloat16 on an NVIDIA GPU of compute capability 9 or 10 takes `torch.nn.functional.grouped_mm`. Other dtypes and GPUs
take the two kernels below: there PyTorch 2.11's waits for the device to count the rows. A CPU takes a loop over the
experts, in float32.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.math import everywhere
from llmk.ops.common.rows import contiguous, contiguous_last_dim, matrices_aligned
from llmk.registry import cdiv, empty, jit, next_power_of_2, wrap_triton
from llmk.registry.devices import INTERPRET, has_device_offsets


@jit
def _group_of_tile(offsets_ptr, tile, E, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """The expert of a tile of rows, the tile's first row and the end of the expert's; past the last tile no rows."""
    experts = tl.arange(0, BLOCK_E)
    ends = tl.load(offsets_ptr + experts, mask=experts < E, other=0)
    begins = tl.load(offsets_ptr + experts - 1, mask=(experts > 0) & (experts < E), other=0)
    tiles = (ends - begins + BLOCK_M - 1) // BLOCK_M
    past = tl.cumsum(tiles, axis=0)
    expert = tl.sum(tl.where((past <= tile) & (experts < E), 1, 0), axis=0)
    mine = (experts == expert) & (experts < E)
    first = tl.sum(tl.where(mine, begins + (tile - past + tiles) * BLOCK_M, 0), axis=0)
    return expert, first, tl.sum(tl.where(mine, ends, 0), axis=0)


@jit
def grouped_product_kernel(
    x_ptr, w_ptr, bias_ptr, offsets_ptr, y_ptr, E, D, H, x_stride_m, x_stride_h, w_stride_e, w_stride_o, w_stride_h,
    WIDEN: tl.constexpr, IN_TURNS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(D, BLOCK_D)
    expert, first, end = _group_of_tile(offsets_ptr, tl.program_id(0) // tiles, E, BLOCK_M, BLOCK_E)
    rows = first.to(tl.int64) + tl.arange(0, BLOCK_M)
    cols = ((tl.program_id(0) % tiles) * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)
    hs = tl.arange(0, BLOCK_H).to(tl.int64)
    x_ptrs = x_ptr + rows[:, None] * x_stride_m + hs[None, :] * x_stride_h
    w_ptrs = w_ptr + expert.to(tl.int64) * w_stride_e + cols[None, :] * w_stride_o + hs[:, None] * w_stride_h
    y = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    other = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for start in range(0, tl.where(expert < E, H, 0), BLOCK_H):
        within = hs < H - start
        x = tl.load(x_ptrs, mask=(rows < end)[:, None] & within[None, :], other=0.0)
        w = tl.load(w_ptrs, mask=(cols < D)[None, :] & within[:, None], other=0.0)
        if WIDEN:
            x, w = x.to(tl.float32), w.to(tl.float32)
        if IN_TURNS:
            y, other = other, tl.dot(x, w, y, input_precision="ieee")
        else:
            y = tl.dot(x, w, y, input_precision="ieee")
        x_ptrs += BLOCK_H * x_stride_h
        w_ptrs += BLOCK_H * w_stride_h
    if IN_TURNS:
        y += other
    if bias_ptr is not None:
        here = (cols < D) & everywhere(expert < E, cols)
        y += tl.load(bias_ptr + expert.to(tl.int64) * D + cols, mask=here, other=0.0).to(tl.float32)[None, :]
    mask = (rows < end)[:, None] & (cols < D)[None, :]
    tl.store(y_ptr + rows[:, None] * D + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@jit
def grouped_outer_kernel(
    a_ptr, b_ptr, offsets_ptr, out_ptr, A, B, a_stride_m, a_stride_a, b_stride_m, b_stride_b,
    WIDEN: tl.constexpr, IN_TURNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    tiles = tl.cdiv(B, BLOCK_B)
    a_cols = ((tl.program_id(0) // tiles) * BLOCK_A + tl.arange(0, BLOCK_A)).to(tl.int64)
    b_cols = ((tl.program_id(0) % tiles) * BLOCK_B + tl.arange(0, BLOCK_B)).to(tl.int64)
    begin = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets_ptr + expert)
    out = tl.zeros((BLOCK_A, BLOCK_B), dtype=tl.float32)
    other = tl.zeros((BLOCK_A, BLOCK_B), dtype=tl.float32)
    for start in range(begin, end, BLOCK_M):
        rows = (start + tl.arange(0, BLOCK_M)).to(tl.int64)
        a_mask, b_mask = (rows < end)[None, :] & (a_cols < A)[:, None], (rows < end)[:, None] & (b_cols < B)[None, :]
        a = tl.load(a_ptr + rows[None, :] * a_stride_m + a_cols[:, None] * a_stride_a, mask=a_mask, other=0.0)
        b = tl.load(b_ptr + rows[:, None] * b_stride_m + b_cols[None, :] * b_stride_b, mask=b_mask, other=0.0)
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        if IN_TURNS:
            out, other = other, tl.dot(a, b, out, input_precision="ieee")
        else:
            out = tl.dot(a, b, out, input_precision="ieee")
    if IN_TURNS:
        out += other
    mask = (a_cols < A)[:, None] & (b_cols < B)[None, :]
    offsets = expert.to(tl.int64) * A * B + a_cols[:, None] * B + b_cols[None, :]
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


@jit
def group_sums_kernel(
    rows_ptr, offsets_ptr, order_ptr, weights_ptr, out_ptr, C, stride, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr
):
    expert = tl.program_id(1)
    cols = (tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
    begin = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets_ptr + expert)
    total = tl.zeros((BLOCK_M, BLOCK_C), dtype=tl.float32)
    for start in range(begin, end, BLOCK_M):
        rows = (start + tl.arange(0, BLOCK_M)).to(tl.int64)
        mask = (rows < end)[:, None] & (cols < C)[None, :]
        value = tl.load(rows_ptr + rows[:, None] * stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if weights_ptr is not None:
            pairs = tl.load(order_ptr + rows, mask=rows < end, other=0)
            value *= tl.load(weights_ptr + pairs, mask=rows < end, other=0.0).to(tl.float32)[:, None]
        total += value
    out_ptr += expert.to(tl.int64) * C
    tl.store(out_ptr + cols, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=cols < C)


@jit
def finish_rows_kernel(bias_ptr, offsets_ptr, y_ptr, E, D, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK_E)
    ends = tl.load(offsets_ptr + experts, mask=experts < E, other=0)
    expert = tl.sum(tl.where((ends <= row) & (experts < E), 1, 0), axis=0)
    y_ptr += row * D
    for start in range(0, tl.where(expert == E, D, 0), BLOCK_D):
        cols = start + tl.arange(0, BLOCK_D)
        tl.store(y_ptr + cols, tl.zeros((BLOCK_D,), dtype=y_ptr.dtype.element_ty), mask=cols < D)
    if bias_ptr is not None:
        bias_ptr += expert.to(tl.int64) * D
        for start in range(0, tl.where(expert < E, D, 0), BLOCK_D):
            cols = start + tl.arange(0, BLOCK_D)
            y = tl.load(y_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)
            y += tl.load(bias_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)
            tl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty), mask=cols < D)


def _tile(element_size: int) -> dict[str, Any]:
    """Small enough for every GPU and dtype; it has not been tuned, as float16 and float32 are not trained at speed."""
    size = {"num_stages": 2, "IN_TURNS": True} if element_size == 4 else {"num_stages": 3, "IN_TURNS": False}
    return {"BLOCK_M": 64, "num_warps": 4, "WIDEN": INTERPRET, **size}


def _depth(element_size: int) -> int:
    """Return how many terms of a product's sums a turn of its loop adds.

    A float32 product adds one term after another to its sum, on no tensor core. Two sums in turns lose half as much as
    one that is twice as long, as the vendor's do; they need more than one turn, so that a turn is short.
    """
    return 16 if element_size == 4 else 128 // element_size


def _vendor(*tensors: Tensor) -> bool:
    """True if `grouped_mm` takes them as they are, without waiting for the device: rows or columns 16 bytes apart.

    Where an expert's rows begin is a multiple of that only in matrices `[N, C]` whose columns are side by side.
    """
    first = tensors[0]
    if first.dtype != torch.bfloat16 or not has_device_offsets(first.device):
        return False
    if any(t.dim() == 2 and t.stride(1) != 1 for t in tensors):
        return False
    return all(t.numel() > 0 and matrices_aligned(t) for t in tensors)


def grouped_rows(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None = None) -> Tensor:
    """`grouped_product` and `bias [E, D]`, with zeros in the rows that no expert has.

    The kernel adds the bias in float32. Behind `grouped_mm` it is added to products z that are already rounded, as in
    PyTorch's composition of the two. That rounding, of half a unit of z, is eps |z| / 2 at most and within the one unit
    of what y = z + b can lose that the accuracy rule allows: where |z| <= 2 |b| it is eps |b| at most, which is how far
    y moves when b does by a unit in its last place; where |z| > 2 |b|, |y| is more than |z| / 2, and half a unit of z
    is a unit of y at most. The root mean square of two roundings is sqrt(2) of one's where z and y are of one size.
    """
    if _by_grouped_mm(x, weight):
        y = grouped_product(x, weight, offsets)
        _finish_rows(y, offsets, bias)
    else:
        y = _launch_product(x, weight, offsets, bias)
        _finish_rows(y, offsets, None)
    return y


def _by_grouped_mm(x: Tensor, weight: Tensor) -> bool:
    return _vendor(x, weight) and weight.shape[1] % 8 == 0


def grouped_product(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """`[N, D]`: rows of expert e of `x [N, H]` times the transpose of `weight[e]`, of `[E, D, H]` with any strides.

    Rows that no expert has hold anything: `grouped_rows` makes them zeros.
    """
    if _by_grouped_mm(x, weight):
        return torch.nn.functional.grouped_mm(x, weight.transpose(1, 2), offs=offsets)
    return _launch_product(x, weight, offsets, None)


def _launch_product(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
    (N, H), (E, D) = x.shape, weight.shape[:2]
    y = empty((N, D), x.dtype, x.device)
    size, tile = x.element_size(), _tile(x.element_size())
    tiles_m, tiles_o = cdiv(N, tile["BLOCK_M"]) + E, cdiv(D, 64)
    blocks = {"BLOCK_D": 64, "BLOCK_H": _depth(size), "BLOCK_E": next_power_of_2(E)}
    wrap_triton(grouped_product_kernel)[(tiles_m * tiles_o,)](
        x, weight, contiguous(bias), offsets, y, E, D, H, *x.stride(), *weight.stride(), **blocks, **tile
    )
    return y


def _finish_rows(y: Tensor, offsets: Tensor, bias: Tensor | None) -> None:
    """Add `bias [E, D]` to the rows of each expert of `y [N, D]`, and make rows that no expert has zeros, in place."""
    (N, D), E = y.shape, offsets.shape[0]
    block = {"BLOCK_E": next_power_of_2(E), "BLOCK_D": min(1024, next_power_of_2(max(D, 1))), "num_warps": 4}
    wrap_triton(finish_rows_kernel)[(N,)](contiguous(bias), offsets, y, E, D, **block)


def grouped_outer(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """`[E, A, B]`: for each expert the product of its rows of `a [N, A]`, transposed, and of `b [N, B]`."""
    A, B, E = a.shape[1], b.shape[1], offsets.shape[0]
    if _vendor(a, b) and A % 8 == B % 8 == 0:
        return torch.nn.functional.grouped_mm(a.t(), b, offs=offsets)
    out = empty((E, A, B), a.dtype, a.device)
    size = a.element_size()
    blocks = {"BLOCK_A": 64, "BLOCK_B": 64} | _tile(size) | {"BLOCK_M": _depth(size)}
    wrap_triton(grouped_outer_kernel)[(cdiv(A, 64) * cdiv(B, 64), E)](
        a, b, offsets, out, A, B, *a.stride(), *b.stride(), **blocks
    )
    return out


def group_sums(rows: Tensor, offsets: Tensor, order: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
    """`[E, C]`: the sum of each expert's rows of `[N, C]`, times the weights of their pairs where those are given."""
    C, E = rows.shape[1], offsets.shape[0]
    out = empty((E, C), rows.dtype, rows.device)
    rows, weights = contiguous_last_dim(rows), contiguous(weights)
    wrap_triton(group_sums_kernel)[(cdiv(C, 64), E)](
        rows, offsets, order, weights, out, C, rows.stride(0), BLOCK_M=64, BLOCK_C=64, num_warps=4
    )
    return out


Groups = Sequence[tuple[int, int]]
"""First row and end of each expert's rows."""


def grouped_product_cpu(x: Tensor, weight: Tensor, groups: Groups, bias: Tensor | None = None) -> Tensor:
    """float32 `[N, D]` of `x [N, H]` and `weight [E, D, H]`; zeros in rows that no expert has."""
    y = torch.zeros((x.shape[0], weight.shape[1]), dtype=torch.float32, device=x.device)
    for e, (begin, end) in enumerate(groups):
        if begin < end:
            of_expert = None if bias is None else bias[e].float()
            y[begin:end] = torch.nn.functional.linear(x[begin:end].float(), weight[e].float(), of_expert)
    return y


def grouped_outer_cpu(a: Tensor, b: Tensor, groups: Groups) -> Tensor:
    """float32 `[E, A, B]` of the rows of `a [N, A]` and `b [N, B]`."""
    out = torch.zeros((len(groups), a.shape[1], b.shape[1]), dtype=torch.float32, device=a.device)
    for e, (begin, end) in enumerate(groups):
        if begin < end:
            torch.mm(a[begin:end].float().t(), b[begin:end].float(), out=out[e])
    return out
