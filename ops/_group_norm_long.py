"""group_norm of rows that are too long for one program's registers; group_norm.py has the formulas.

Rows are read twice, each time by several programs: a few groups of many values keep all multiprocessors busy too.
Forward makes the moments of pieces of a row, then merges them in every program that writes a tile. Backward makes the
sums of dy and dy * c * rstd over (a piece of) each channel's places: the affine gradients are summed from them, and dx
needs their sums over the group. The second reading goes from the end to the start: what the first one read last is
still in L2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmk.ops._norm import coarse_mean, row_moments
from llmk.registry import cdiv, empty, next_power_of_2, wrap_triton


@triton.jit
def group_norm_long_moments_kernel(x_ptr, moments_ptr, D, PIECES, PIECE, BLOCK_N: tl.constexpr):
    """Mean and squared deviations of a piece of a row."""
    program = tl.program_id(0).to(tl.int64)
    row, first = program // PIECES, program % PIECES * PIECE
    mean, squares = row_moments(x_ptr + row * D + first, tl.minimum(PIECE, D - first), BLOCK_N)  # type: ignore[misc]
    tl.store(moments_ptr + program, mean)
    tl.store(moments_ptr + tl.num_programs(0) + program, squares)


@triton.jit
def _tile(G, C, S, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr):
    """The row and the number within it of this program's [BLOCK_C, BLOCK_S] tile, last one first, and its offsets."""
    columns = tl.cdiv(S, BLOCK_S)
    tiles = tl.cdiv(C, BLOCK_C) * columns
    program = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    row, tile = program // tiles, program % tiles
    channels = tile // columns * BLOCK_C + tl.arange(0, BLOCK_C)
    places = tile % columns * BLOCK_S + tl.arange(0, BLOCK_S)
    offsets = row * C * S + (channels * S)[:, None] + places[None, :]
    mask = (channels < C)[:, None] & (places < S)[None, :]
    return row, tile, row % G * C + channels, channels < C, offsets, mask


@triton.jit
def group_norm_long_kernel(
    x_ptr, w_ptr, b_ptr, moments_ptr, y_ptr, stats_ptr, B, G, C, S, PIECES, PIECE, eps,
    BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    eps = tl.cast(eps, tl.float32)
    row, tile, channels, channel_mask, offsets, mask = _tile(G, C, S, BLOCK_C, BLOCK_S)  # type: ignore[misc]
    D = tl.cast(C, tl.int64) * S
    k = tl.arange(0, BLOCK_K)
    count = tl.where(k < PIECES, tl.minimum(PIECE, D - k * PIECE), 0).to(tl.float32)
    means = tl.load(moments_ptr + row * PIECES + k, mask=k < PIECES, other=0.0)
    squares = tl.load(moments_ptr + (B * G + row) * PIECES + k, mask=k < PIECES, other=0.0)
    mean = tl.sum(means * count, axis=0) / D
    mean += tl.sum((means - mean) * count, axis=0) / D
    spread = tl.sum(squares + (means - mean) * (means - mean) * count, axis=0) / D
    var = spread + eps
    if tile == 0:
        tl.store(stats_ptr + row, mean)
        tl.store(stats_ptr + B * G + row, var)
        tl.store(stats_ptr + 2 * B * G + row, coarse_mean(mean, spread))
    y = (tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32) - mean) * tl.div_rn(1.0, tl.sqrt_rn(var))
    if w_ptr is not None:
        y *= tl.load(w_ptr + channels, mask=channel_mask, other=0.0).to(tl.float32)[:, None]
    if b_ptr is not None:
        y += tl.load(b_ptr + channels, mask=channel_mask, other=0.0).to(tl.float32)[:, None]
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def group_norm_long_backward_sums_kernel(
    dy_ptr, x_ptr, stats_ptr, partial_ptr, B, G, C, S, PIECES, PIECE, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr
):
    """Sums of dy * c * rstd (if x is given) and dy over a piece of the places of BLOCK_C channels."""
    program = tl.program_id(0).to(tl.int64)
    piece, block = program % PIECES, program // PIECES
    blocks = tl.cdiv(C, BLOCK_C)
    row = block // blocks
    channels = block % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    channel_mask = channels < C
    if x_ptr is not None:
        mean, near = tl.load(stats_ptr + row), tl.load(stats_ptr + 2 * B * G + row)
        rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.load(stats_ptr + B * G + row)))
    dw = tl.zeros((BLOCK_C, BLOCK_S), dtype=tl.float32)
    db = tl.zeros((BLOCK_C, BLOCK_S), dtype=tl.float32)
    for start in range(piece * PIECE, tl.minimum(S, (piece + 1) * PIECE), BLOCK_S):
        places = start + tl.arange(0, BLOCK_S)
        mask = channel_mask[:, None] & (places < S)[None, :]
        offsets = row * C * S + (channels * S)[:, None] + places[None, :]
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        db += dy
        if x_ptr is not None:
            dw += dy * ((tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32) - near) * rstd)
    SUMS: tl.constexpr = 1 if x_ptr is None else 2
    partial_ptr += ((row // G * PIECES + piece) * SUMS * G + row % G) * C + channels
    db_sum = tl.sum(db, axis=1)
    if x_ptr is not None:
        tl.store(partial_ptr, tl.sum(dw, axis=1) - (mean - near) * rstd * db_sum, mask=channel_mask)
    tl.store(partial_ptr + (SUMS - 1) * G * C, db_sum, mask=channel_mask)


@triton.jit
def group_norm_long_backward_kernel(
    dy_ptr, x_ptr, w_ptr, stats_ptr, partial_ptr, dx_ptr, B, G, C, S, PIECES,
    BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    row, _, channels, channel_mask, offsets, mask = _tile(G, C, S, BLOCK_C, BLOCK_S)  # type: ignore[misc]
    dot = tl.zeros((BLOCK_K,), dtype=tl.float32)
    total = tl.zeros((BLOCK_K,), dtype=tl.float32)
    for start in range(0, PIECES * C, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        channel = row % G * C + k % C
        at = partial_ptr + (row // G * PIECES + k // C) * 2 * G * C + channel
        dw = tl.load(at, mask=k < PIECES * C, other=0.0)
        db = tl.load(at + G * C, mask=k < PIECES * C, other=0.0)
        if w_ptr is not None:
            w = tl.load(w_ptr + channel, mask=k < PIECES * C, other=0.0).to(tl.float32)
            dw *= w
            db *= w
        dot += dw
        total += db
    D = tl.cast(C, tl.int64) * S
    mean = tl.load(stats_ptr + row)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.load(stats_ptr + B * G + row)))
    dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    xhat = (tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32) - mean) * rstd
    if w_ptr is not None:
        dy *= tl.load(w_ptr + channels, mask=channel_mask, other=0.0).to(tl.float32)[:, None]
    dx = rstd * (dy - tl.sum(total, axis=0) / D - xhat * (tl.sum(dot, axis=0) / D))
    tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)


# H200, bf16, times the floor: 1.88 at 32x512x64x64 and 1.98 at 8x320x128x128, 32 groups each; the floor counts one
# reading in each direction where this makes two.
MOMENTS = {"BLOCK_N": 8192, "num_warps": 8}
# Pieces that a row is summed in: what the second reading merges is small beside its tile.
MAX_PIECES = 64


def _long_tile(C: int, S: int) -> dict[str, int]:
    """Four thousand elements of a row, as an elementwise kernel would take."""
    block_s = min(4096, next_power_of_2(S))
    return {"BLOCK_C": min(next_power_of_2(C), 4096 // block_s), "BLOCK_S": block_s, "num_warps": 8}


def _pieces(length: int, block: int, most: int) -> tuple[int, int]:
    """Into how many pieces of whole blocks a length is cut, at most so many, and how long they are."""
    piece = cdiv(cdiv(length, block), most) * block
    return cdiv(length, piece), piece


def long_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, y: Tensor, stats: Tensor,
    sizes: tuple[int, int, int, int], eps: float,
) -> None:  # fmt: skip
    """Fill y and stats."""
    B, G, C, S = sizes
    pieces, piece = _pieces(C * S, MOMENTS["BLOCK_N"], MAX_PIECES)
    moments = empty((2, B * G * pieces), torch.float32, x.device)
    wrap_triton(group_norm_long_moments_kernel)[(B * G * pieces,)](x, moments, C * S, pieces, piece, **MOMENTS)
    tile = _long_tile(C, S)
    wrap_triton(group_norm_long_kernel)[(B * G * cdiv(C, tile["BLOCK_C"]) * cdiv(S, tile["BLOCK_S"]),)](
        x, weight, bias, moments, y, stats, B, G, C, S, pieces, piece, eps, BLOCK_K=next_power_of_2(pieces), **tile
    )


def long_backward(
    dy: Tensor, x: Tensor | None, weight: Tensor | None, stats: Tensor, dx: Tensor | None,
    sizes: tuple[int, int, int, int],
) -> Tensor:  # fmt: skip
    """Fill dx, if given; return the partials of the weight's gradient, if x is given, and of the bias's."""
    B, G, C, S = sizes
    tile = _long_tile(C, S)
    blocks = cdiv(C, tile["BLOCK_C"])
    pieces, piece = _pieces(S, tile["BLOCK_S"], max(1, MAX_PIECES // C))
    partials = empty((B * pieces, 1 if x is None else 2, G * C), torch.float32, dy.device)
    wrap_triton(group_norm_long_backward_sums_kernel)[(B * G * blocks * pieces,)](
        dy, x, stats, partials, B, G, C, S, pieces, piece, **tile
    )
    if dx is not None:
        wrap_triton(group_norm_long_backward_kernel)[(B * G * blocks * cdiv(S, tile["BLOCK_S"]),)](
            dy, x, weight, stats, partials, dx, B, G, C, S, pieces, BLOCK_K=256, **tile
        )
    return partials
