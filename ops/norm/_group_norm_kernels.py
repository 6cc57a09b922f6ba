"""The kernels of group_norm; group_norm.py has the formulas.

Of rows that fit in registers one program takes several if they are short: neighbouring groups first, whose values are
neighbours in memory, then samples.

Longer rows are read twice. Where there are enough of them, a program walks a row: from its start to its end for the
sums, then from its end to its start for the result, so that the second walk begins with what was read last. Few enough
rows are under way at a time that the second walk finds most of a row in L2. Without walks, forward and backward take
1.09 of the time for 32x512x64x64, 1.03 for 8x320x128x128 and 1.35 for 32x1280x16x16 (H200, 32 groups, bfloat16;
benchmarks/results/norms-h200.json).

A few long rows, and very long ones, are read each time by several programs. Forward makes the moments of pieces of a
row, then merges them in every program that writes a tile. Backward makes the sums of dy and dy * c * rstd over (a piece
of) each channel's positions: the affine gradients are summed from them, and dx needs their sums over the group.
"""

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.row_plan import RowKind
from llmk.ops.common.rows import aligned
from llmk.ops.common.sums import sum_pair
from llmk.ops.norm._moments import coarse_mean, column_moments, merge_moments
from llmk.registry import cdiv, empty, grid_cap, jit, max_warps, next_power_of_2, num_programs, size_hint, wrap_triton


@jit
def _flat(x):
    """Return a row's channels and positions as one axis: threads wait for each other once in a sum, and not twice."""
    return tl.reshape(x, (x.shape[0], x.shape[1] * x.shape[2]))


@jit
def _channels(block, ROWS: tl.constexpr, G, C, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr):
    """Groups of a block's rows, sample after sample; their channels, and which of them exist."""
    groups = block * BLOCK_G + tl.arange(0, ROWS) % BLOCK_G
    channels = tl.arange(0, BLOCK_C)
    mask = (groups < G)[:, None] & (channels < C)[None, :]
    return groups, groups[:, None] * C + channels[None, :], mask


@jit
def _sample_rows(start, groups, mask, B, G, C, S, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr):
    """The rows of these groups in the samples from start on, and which exist; the tile's offsets and mask."""
    samples = start + tl.arange(0, groups.shape[0]) // BLOCK_G
    rows = samples * G + groups
    positions = tl.arange(0, BLOCK_S)
    offsets = (rows * C * S)[:, None, None] + (tl.arange(0, BLOCK_C) * S)[None, :, None] + positions[None, None, :]
    mask = (mask & (samples < B)[:, None])[:, :, None] & (positions < S)[None, None, :]
    return rows, (samples < B) & (groups < G), offsets, mask


@jit
def _within(x, mask, FILLED: tl.constexpr):
    """x, and zero where the tile has no value of its row; a row of FILLED tiles has all of them."""
    if not FILLED:
        x = tl.where(mask, x, 0.0)
    return x


@jit
def group_norm_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, stats_ptr, B, G, C, S, eps,
    BLOCK_B: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, FILLED: tl.constexpr,
):  # fmt: skip
    """BLOCK_B samples of BLOCK_G groups."""
    eps = tl.cast(eps, tl.float32)
    blocks = tl.cdiv(G, BLOCK_G)
    block, start = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_B
    groups, affine, affine_mask = _channels(block, BLOCK_B * BLOCK_G, G, C, BLOCK_G, BLOCK_C)
    rows, row_mask, offsets, mask = _sample_rows(start, groups, affine_mask, B, G, C, S, BLOCK_G, BLOCK_C, BLOCK_S)
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    part = 1.0 / (C * S)  # one division, not one for each sum of each row
    mean = tl.sum(_flat(x), axis=1) * part
    c = _within(x - mean[:, None, None], mask, FILLED)
    near = coarse_mean(mean, tl.sum(_flat(c * c), axis=1) * part)
    c = _within(x - near[:, None, None], mask, FILLED)
    rest, squares = sum_pair(_flat(c), _flat(c * c), 1)
    rest *= part
    mean = near + rest
    # rest is so small beside a deviation that its square takes no digits from the variance.
    spread = tl.maximum(squares * part - rest * rest, 0.0)
    var = spread + eps
    y = (x - mean[:, None, None]) * tl.div_rn(1.0, tl.sqrt_rn(var))[:, None, None]
    if w_ptr is not None:
        y *= tl.load(w_ptr + affine, mask=affine_mask, other=0.0).to(tl.float32)[:, :, None]
    if b_ptr is not None:
        y += tl.load(b_ptr + affine, mask=affine_mask, other=0.0).to(tl.float32)[:, :, None]
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(stats_ptr + rows, mean, mask=row_mask)
    tl.store(stats_ptr + B * G + rows, var, mask=row_mask)
    tl.store(stats_ptr + 2 * B * G + rows, coarse_mean(mean, spread), mask=row_mask)


@jit
def group_norm_backward_kernel(
    dy_ptr, x_ptr, w_ptr, stats_ptr, dx_ptr, partial_ptr, B, G, C, S, HAS_DW: tl.constexpr, HAS_DB: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, FILLED: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Make the gradients in BLOCK_G groups of some samples."""
    blocks = tl.cdiv(G, BLOCK_G)
    block, part = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    parts = tl.num_programs(0) // blocks
    groups, affine, affine_mask = _channels(block, BLOCK_B * BLOCK_G, G, C, BLOCK_G, BLOCK_C)
    if w_ptr is not None:
        w = tl.load(w_ptr + affine, mask=affine_mask, other=0.0).to(tl.float32)[:, :, None]
    dw = tl.zeros((BLOCK_B * BLOCK_G, BLOCK_C), dtype=tl.float32)
    db = tl.zeros((BLOCK_B * BLOCK_G, BLOCK_C), dtype=tl.float32)
    inverse = 1.0 / (C * S)
    # Persistent: the next samples are prefetched while these are computed, and dw and db stay in registers.
    for start in tl.range(part * BLOCK_B, B, parts * BLOCK_B, num_stages=NUM_STAGES):
        rows, row_mask, offsets, mask = _sample_rows(start, groups, affine_mask, B, G, C, S, BLOCK_G, BLOCK_C, BLOCK_S)
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if HAS_DB:
            db += tl.sum(dy, axis=2)
        if x_ptr is not None:
            x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
            mean = tl.load(stats_ptr + rows, mask=row_mask, other=0.0)
            var = tl.load(stats_ptr + B * G + rows, mask=row_mask, other=1.0)
            near = tl.load(stats_ptr + 2 * B * G + rows, mask=row_mask, other=0.0)
            rstd = tl.div_rn(1.0, tl.sqrt_rn(var))
            c = x - mean[:, None, None]
            if HAS_DW:
                # dy is zero past a row's end; there x - near times rstd could be infinite.
                products = tl.sum(dy * (x - near[:, None, None]), axis=2)
                dw += rstd[:, None] * (products - (mean - near)[:, None] * tl.sum(dy, axis=2))
            if dx_ptr is not None:
                if w_ptr is not None:
                    dy *= w
                # Flat to the end: where a sum went back to channels and positions, Triton 3.6 added up each row again,
                # in every thread, one value after the other.
                g, c = _flat(dy), _flat(c)
                if BLOCK_C * BLOCK_S == 1:
                    dx = g * c  # zero, and NaN where PyTorch's is
                else:
                    total = tl.sum(g, axis=1) * inverse
                    g = _within(g - total[:, None], _flat(mask), FILLED)  # so that g * c is zero there
                    rest, dot = sum_pair(g, g * c, 1)
                    g -= (rest * inverse)[:, None]  # corrected like mean
                    dot = tl.div_rn(dot * inverse, var)
                    dx = rstd[:, None] * (g - c * dot[:, None])
                dx = tl.reshape(dx, offsets.shape)
                tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    _, affine, affine_mask = _channels(block, BLOCK_G, G, C, BLOCK_G, BLOCK_C)
    if HAS_DW or HAS_DB:
        partial_ptr += part * (HAS_DW + HAS_DB) * G * C + affine
    if HAS_DW:
        dw_sum = tl.sum(tl.reshape(dw, (BLOCK_B, BLOCK_G, BLOCK_C)), axis=0)
        tl.store(partial_ptr, dw_sum, mask=affine_mask)
    if HAS_DB:
        db_sum = tl.sum(tl.reshape(db, (BLOCK_B, BLOCK_G, BLOCK_C)), axis=0)
        tl.store(partial_ptr + HAS_DW * G * C, db_sum, mask=affine_mask)


FORWARD = RowKind({2048: (1, 4), 4096: (1, 8), 8192: (1, 16)})
BACKWARD = RowKind({2048: (1, 8), 4096: (1, 8), 8192: (1, 16)})


def _aligned(C: int, S: int) -> bool:
    return aligned(S) or (S == 1 and aligned(C))


def _row_tile(C: int, S: int) -> int:
    return next_power_of_2(C) * next_power_of_2(S)


def _holds_backward(C: int, S: int) -> bool:
    """Return True if one program holds a row backward: what this leaves out spills on sm_90."""
    widest = max(BACKWARD.tiles)
    return _row_tile(C, S) <= (widest // 4 if not _aligned(C, S) else widest if S > 1 else widest // 2)


def _short_tile(kind: RowKind, G: int, C: int, S: int) -> dict[str, int]:
    """Whole rows: neighbouring groups first, then samples."""
    block_c, block_s = next_power_of_2(C), next_power_of_2(S)
    tile = kind.tile(block_c * block_s)
    block_g = min(tile["BLOCK_M"], next_power_of_2(G))
    sizes = {"BLOCK_B": tile["BLOCK_M"] // block_g, "BLOCK_G": block_g, "BLOCK_C": block_c, "BLOCK_S": block_s}
    return sizes | {"FILLED": block_c == int(C) and block_s == int(S), "num_warps": tile["num_warps"]}


def _backward_tile(G: int, C: int, S: int, element_size: int) -> dict[str, int]:
    """Up to two tiles are on their way: what 8 KiB of each tensor hold."""
    ahead = min(2, 8192 // (max(_row_tile(C, S), 2048) * element_size))
    return _short_tile(BACKWARD, G, C, S) | {"NUM_STAGES": 1 + ahead}


def _shares(B: int, G: int, tile: dict[str, int], device: torch.device) -> int:
    """Into how many the samples are divided: the programs fill each multiprocessor with 24 warps of 80 registers."""
    programs = num_programs(device, max(1, 24 // tile["num_warps"]))
    return grid_cap(cdiv(B, tile["BLOCK_B"]), cdiv(programs, cdiv(G, tile["BLOCK_G"])))


@jit
def _tile(row, tile, G, C, S, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr):
    """Return a tile's channels and which of them exist, its offsets and mask, and its column of tiles."""
    columns = tl.cdiv(S, BLOCK_S)
    channels = tile // columns * BLOCK_C + tl.arange(0, BLOCK_C)
    positions = tile % columns * BLOCK_S + tl.arange(0, BLOCK_S)
    offsets = row * C * S + (channels * S)[:, None] + positions[None, :]
    mask = (channels < C)[:, None] & (positions < S)[None, :]
    return row % G * C + channels, channels < C, offsets, mask, tile % columns


@jit
def _store_stats(stats_ptr, row, rows, mean, spread, var):
    tl.store(stats_ptr + row, mean)
    tl.store(stats_ptr + rows + row, var)
    tl.store(stats_ptr + 2 * rows + row, coarse_mean(mean, spread))


@jit
def _write_y(x_ptr, w_ptr, b_ptr, y_ptr, row, tile, G, C, S, moments, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr):
    mean, rstd = moments
    channels, channel_mask, offsets, mask, _ = _tile(row, tile, G, C, S, BLOCK_C, BLOCK_S)
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    y = (x - mean) * rstd
    if w_ptr is not None:
        y *= tl.load(w_ptr + channels, mask=channel_mask, other=0.0).to(tl.float32)[:, None]
    if b_ptr is not None:
        y += tl.load(b_ptr + channels, mask=channel_mask, other=0.0).to(tl.float32)[:, None]
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@jit
def _write_dx(
    dy_ptr, x_ptr, w_ptr, dx_ptr, row, tile, G, C, S, moments, total, dot, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr
):
    """Given the means of dy * weight and of dy * weight * c * rstd over the row."""
    mean, rstd = moments
    channels, channel_mask, offsets, mask, _ = _tile(row, tile, G, C, S, BLOCK_C, BLOCK_S)
    dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    if w_ptr is not None:
        dy *= tl.load(w_ptr + channels, mask=channel_mask, other=0.0).to(tl.float32)[:, None]
    dx = rstd * (dy - total - (x - mean) * (rstd * dot))  # two factors, not three, in registers
    tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@jit
def group_norm_walk_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, stats_ptr, B, G, C, S, eps,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """A row."""
    eps = tl.cast(eps, tl.float32)
    row = tl.program_id(0).to(tl.int64)
    D = C * S
    mean, squares = column_moments(x_ptr + row * D, D, BLOCK_C * BLOCK_S, NUM_STAGES)
    spread = squares / D
    var = spread + eps
    _store_stats(stats_ptr, row, B * G, mean, spread, var)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(var))
    tiles = tl.cdiv(C, BLOCK_C) * tl.cdiv(S, BLOCK_S)
    for i in tl.range(tiles, num_stages=NUM_STAGES):
        _write_y(x_ptr, w_ptr, b_ptr, y_ptr, row, tiles - 1 - i, G, C, S, (mean, rstd), BLOCK_C, BLOCK_S)


@jit
def group_norm_walk_backward_kernel(
    dy_ptr, x_ptr, w_ptr, stats_ptr, dx_ptr, partial_ptr, B, G, C, S,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """A row; the sums of each tile's channels are kept for the affine gradients."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.cdiv(S, BLOCK_S)
    tiles = tl.cdiv(C, BLOCK_C) * columns
    mean, near = tl.load(stats_ptr + row), tl.load(stats_ptr + 2 * B * G + row)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.load(stats_ptr + B * G + row)))
    total = tl.zeros((BLOCK_C,), dtype=tl.float32)
    dot = tl.zeros((BLOCK_C,), dtype=tl.float32)
    for tile in tl.range(tiles, num_stages=NUM_STAGES):
        channels, channel_mask, offsets, mask, column = _tile(row, tile, G, C, S, BLOCK_C, BLOCK_S)
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        # dy is zero past the tile's edge; there x - near times rstd could be infinite.
        db, dw = sum_pair(dy, dy * (x - near), 1)
        dw = rstd * (dw - (mean - near) * db)
        at = partial_ptr + (row // G * columns + column) * 2 * G * C + channels
        tl.store(at, dw, mask=channel_mask)
        tl.store(at + G * C, db, mask=channel_mask)
        if w_ptr is not None:
            w = tl.load(w_ptr + channels, mask=channel_mask, other=0.0).to(tl.float32)
            dw *= w
            db *= w
        total += db
        dot += dw
    total, dot = sum_pair(total, dot, 0)
    D = C * S
    moments = (mean, rstd)
    for i in tl.range(tiles, num_stages=NUM_STAGES):
        _write_dx(
            dy_ptr, x_ptr, w_ptr, dx_ptr, row, tiles - 1 - i, G, C, S, moments, total / D, dot / D, BLOCK_C, BLOCK_S
        )


@jit
def group_norm_long_moments_kernel(
    x_ptr, moments_ptr, D, PIECES, PIECE, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr
):
    """Mean and squared deviations of a piece of a row."""
    program = tl.program_id(0).to(tl.int64)
    row, first = program // PIECES, program % PIECES * PIECE
    length = tl.minimum(PIECE, D - first)
    mean, squares = column_moments(x_ptr + row * D + first, length, BLOCK_N, NUM_STAGES)
    tl.store(moments_ptr + program, mean)
    tl.store(moments_ptr + tl.num_programs(0) + program, squares)


@jit
def group_norm_long_kernel(
    x_ptr, w_ptr, b_ptr, moments_ptr, y_ptr, stats_ptr, B, G, C, S, PIECES, PIECE, eps,
    BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """A tile of a row, last one first."""
    eps = tl.cast(eps, tl.float32)
    tiles = tl.cdiv(C, BLOCK_C) * tl.cdiv(S, BLOCK_S)
    program = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    row, tile = program // tiles, program % tiles
    D = tl.cast(C, tl.int64) * S
    k = tl.arange(0, BLOCK_K)
    count = tl.where(k < PIECES, tl.minimum(PIECE, D - k * PIECE), 0).to(tl.float32)
    means = tl.load(moments_ptr + row * PIECES + k, mask=k < PIECES, other=0.0)
    squares = tl.load(moments_ptr + (B * G + row) * PIECES + k, mask=k < PIECES, other=0.0)
    mean, squares = merge_moments(means, 0.0, squares, count, D)
    spread = squares / D
    var = spread + eps
    if tile == 0:
        _store_stats(stats_ptr, row, B * G, mean, spread, var)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(var))
    _write_y(x_ptr, w_ptr, b_ptr, y_ptr, row, tile, G, C, S, (mean, rstd), BLOCK_C, BLOCK_S)


@jit
def group_norm_long_backward_sums_kernel(
    dy_ptr, x_ptr, stats_ptr, partial_ptr, B, G, C, S, PIECES, PIECE, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr
):
    """Sums of dy * c * rstd (if x is given) and dy over a piece of the positions of BLOCK_C channels."""
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
        positions = start + tl.arange(0, BLOCK_S)
        mask = channel_mask[:, None] & (positions < S)[None, :]
        offsets = row * C * S + (channels * S)[:, None] + positions[None, :]
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        db += dy
        if x_ptr is not None:
            x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
            dw += dy * (x - near)  # dy is zero past the tile's edge
    SUMS: tl.constexpr = 1 if x_ptr is None else 2
    partial_ptr += ((row // G * PIECES + piece) * SUMS * G + row % G) * C + channels
    db_sum = tl.sum(db, axis=1)
    if x_ptr is not None:
        tl.store(partial_ptr, rstd * (tl.sum(dw, axis=1) - (mean - near) * db_sum), mask=channel_mask)
    tl.store(partial_ptr + (SUMS - 1) * G * C, db_sum, mask=channel_mask)


@jit
def group_norm_long_backward_kernel(
    dy_ptr, x_ptr, w_ptr, stats_ptr, partial_ptr, dx_ptr, B, G, C, S, PIECES,
    BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """A tile of a row, last one first."""
    tiles = tl.cdiv(C, BLOCK_C) * tl.cdiv(S, BLOCK_S)
    program = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    row, tile = program // tiles, program % tiles
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
    total, dot = sum_pair(total, dot, 0)
    moments = (mean, rstd)
    _write_dx(dy_ptr, x_ptr, w_ptr, dx_ptr, row, tile, G, C, S, moments, total / D, dot / D, BLOCK_C, BLOCK_S)


MOMENTS = {"BLOCK_N": 2048, "NUM_STAGES": 3, "num_warps": 8}
# The shortest piece of a row whose moments are made: a few blocks, so that the next one is on its way.
PIECE = 8 * MOMENTS["BLOCK_N"]
# Pieces that a row is summed in: what the second reading merges is small beside its tile.
MAX_PIECES = 64
# Bytes of a row, in all tensors, up to which it is walked: the half of the rows under way that is still to be read
# again, on average, is to fit in an H200's 50 MB of L2.
WALK_BYTES = 384 * 1024


def _blocks(C: int, S: int, elements: int, positions: int) -> dict[str, int]:
    """A tile of so many elements: a power of two of channels that divides C, each with so many positions or more.

    More channels where positions are fewer. A symbolic C becomes a fixed number, as in next_power_of_2.
    """
    C, block_s = int(C), next_power_of_2(S)
    if block_s > positions:
        even = C & -C
        block_s = min(block_s, max(positions, elements // even))
    return {"BLOCK_C": max(1, min(next_power_of_2(C), elements // block_s)), "BLOCK_S": min(block_s, elements)}


def _walk_tile(C: int, S: int, element_size: int, tensors: int) -> dict[str, int]:
    """16 bytes of each tensor for a thread, and the more warps the longer a row.

    A warp reads 256 positions of one channel, or two of float32, and sums them without waiting for the other warps.
    """
    # H200, bf16, times the floor, forward and backward: 1.71 and 1.80 at 32x512x64x64, 2.15 and 2.01 at 32x1280x16x16,
    # in 32 groups. With prefetch forward 1.82 and 2.27, backward the second 2.35; 32 warps without it the first 1.91.
    warps = next_power_of_2(cdiv(C * S * element_size * tensors, 12 * 1024))
    warps = min(max_warps(), max(4, warps)) if tensors == 1 else min(16, max(8, warps))
    stages = 3 if tensors > 1 and warps == 16 else 1
    return _blocks(C, S, warps * 32 * 16 // element_size, 256) | {"NUM_STAGES": stages, "num_warps": warps}


def _walks(row_bytes: int, rows: int, device: torch.device) -> bool:
    return row_bytes <= WALK_BYTES and size_hint(rows) >= num_programs(device, 1)


def _long_tile(C: int, S: int) -> dict[str, int]:
    # H200, bf16, times the floor at 8x320x128x128 with 32 groups: 2.03 in either direction; twice both 2.05 and 2.16.
    return _blocks(C, S, 2048, 2048) | {"num_warps": 4}


def _pieces(length: int, block: int, most: int) -> tuple[int, int]:
    """Into how many pieces of whole blocks a length is cut, at most so many, and how long they are."""
    piece = cdiv(cdiv(length, block), most) * block
    return cdiv(length, piece), piece


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, y: Tensor, stats: Tensor, sizes: tuple[int, ...], eps: float
) -> None:
    """Fill y and stats; the sizes are B, G, C and S."""
    B, G, C, S = sizes
    if _row_tile(C, S) <= max(FORWARD.tiles):
        tile = _short_tile(FORWARD, G, C, S)
        grid = (cdiv(G, tile["BLOCK_G"]) * cdiv(B, tile["BLOCK_B"]),)
        wrap_triton(group_norm_kernel)[grid](x, weight, bias, y, stats, *sizes, eps, **tile)
        return
    if _walks(C * S * x.element_size(), B * G, x.device):
        tile = _walk_tile(C, S, x.element_size(), 1)
        wrap_triton(group_norm_walk_kernel)[(B * G,)](x, weight, bias, y, stats, *sizes, eps, **tile)
        return
    pieces, piece = _pieces(C * S, PIECE, MAX_PIECES)
    moments = empty((2, B * G * pieces), torch.float32, x.device)
    wrap_triton(group_norm_long_moments_kernel)[(B * G * pieces,)](x, moments, C * S, pieces, piece, **MOMENTS)
    tile = _long_tile(C, S)
    wrap_triton(group_norm_long_kernel)[(B * G * cdiv(C, tile["BLOCK_C"]) * cdiv(S, tile["BLOCK_S"]),)](
        x, weight, bias, moments, y, stats, *sizes, pieces, piece, eps, BLOCK_K=next_power_of_2(pieces), **tile
    )


def backward(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    stats: Tensor,
    dx: Tensor | None,
    sizes: tuple[int, ...],
    need_dw: bool,
    need_db: bool,
) -> Tensor | None:
    """Fill dx, if given; return the partials of the weight's and the bias's gradient, if one of them is needed.

    Those of the weight are there if it is needed and, for rows that no program holds, if x is given; the bias's always
    are for such rows.
    """
    B, G, C, S = sizes
    if _holds_backward(C, S):
        tile = _backward_tile(G, C, S, dy.element_size())
        shares = _shares(B, G, tile, dy.device)
        partials = None
        if need_dw or need_db:
            partials = empty((shares, need_dw + need_db, G * C), torch.float32, dy.device)
        wrap_triton(group_norm_backward_kernel)[(cdiv(G, tile["BLOCK_G"]) * shares,)](
            dy, x, weight, stats, dx, partials, *sizes, HAS_DW=need_dw, HAS_DB=need_db, **tile
        )
        return partials
    if x is not None and dx is not None and _walks(2 * C * S * x.element_size(), B * G, dy.device):
        tile = _walk_tile(C, S, x.element_size(), 2)
        partials = empty((B * cdiv(S, tile["BLOCK_S"]), 2, G * C), torch.float32, dy.device)
        wrap_triton(group_norm_walk_backward_kernel)[(B * G,)](dy, x, weight, stats, dx, partials, *sizes, **tile)
        return partials
    tile = _long_tile(C, S)
    blocks = cdiv(C, tile["BLOCK_C"])
    pieces, piece = _pieces(S, tile["BLOCK_S"], max(1, MAX_PIECES // C))
    partials = empty((B * pieces, 1 if x is None else 2, G * C), torch.float32, dy.device)
    wrap_triton(group_norm_long_backward_sums_kernel)[(B * G * blocks * pieces,)](
        dy, x, stats, partials, *sizes, pieces, piece, **tile
    )
    if dx is not None:
        wrap_triton(group_norm_long_backward_kernel)[(B * G * blocks * cdiv(S, tile["BLOCK_S"]),)](
            dy, x, weight, stats, partials, dx, *sizes, pieces, BLOCK_K=256, **tile
        )
    return partials
