"""group_norm of rows that fit in registers, several by one program if they are short; group_norm.py has the formulas.

A program takes neighbouring groups first, whose values are neighbours in memory, then samples.
"""

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.rows import aligned
from llmk.ops.common.sums import sum_pair
from llmk.ops.norm._moments import coarse_mean, normalize_group_if_huge, overflowed, share_and_rstd
from llmk.registry import cdiv, empty, grid_cap, jit, next_power_of_2, num_programs, wrap_triton


@jit
def _flat(x):
    """A row's channels and places as one axis, so that its threads wait for each other once in a sum and not twice."""
    return tl.reshape(x, (x.shape[0], x.shape[1] * x.shape[2]))


@jit
def _channels(block, ROWS: tl.constexpr, G, C, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr):
    """Groups of a block's rows, sample after sample; their channels, and which of them exist."""
    groups = block * BLOCK_G + tl.arange(0, ROWS) % BLOCK_G
    channels = tl.arange(0, BLOCK_C)
    mask = (groups < G)[:, None] & (channels < C)[None, :]
    return groups, groups[:, None] * C + channels[None, :], mask


@jit
def _tile(start, groups, mask, B, G, C, S, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr):
    """The rows of these groups in the samples from start on, and which exist; the tile's offsets and mask."""
    samples = start + tl.arange(0, groups.shape[0]) // BLOCK_G
    rows = samples * G + groups
    places = tl.arange(0, BLOCK_S)
    offsets = (rows * C * S)[:, None, None] + (tl.arange(0, BLOCK_C) * S)[None, :, None] + places[None, None, :]
    mask = (mask & (samples < B)[:, None])[:, :, None] & (places < S)[None, None, :]
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
    rows, row_mask, offsets, mask = _tile(start, groups, affine_mask, B, G, C, S, BLOCK_G, BLOCK_C, BLOCK_S)
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
    spread = tl.where(squares < float("inf"), tl.maximum(squares * part - rest * rest, 0.0), float("inf"))
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
    if overflowed(squares):
        tl.debug_barrier()  # another thread may have written the same place
        for i in range(0, BLOCK_B * BLOCK_G):
            sample, group = start + i // BLOCK_G, block * BLOCK_G + i % BLOCK_G
            if (sample < B) & (group < G):
                normalize_group_if_huge(x_ptr, w_ptr, b_ptr, y_ptr, stats_ptr, sample * G + group, B, G, C, S, eps)


@jit
def group_norm_backward_kernel(
    dy_ptr, x_ptr, w_ptr, stats_ptr, dx_ptr, partial_ptr, B, G, C, S, HAS_DW: tl.constexpr, HAS_DB: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, FILLED: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """BLOCK_G groups of a share of the samples."""
    blocks = tl.cdiv(G, BLOCK_G)
    block, share = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    shares = tl.num_programs(0) // blocks
    groups, affine, affine_mask = _channels(block, BLOCK_B * BLOCK_G, G, C, BLOCK_G, BLOCK_C)
    if w_ptr is not None:
        w = tl.load(w_ptr + affine, mask=affine_mask, other=0.0).to(tl.float32)[:, :, None]
    dw = tl.zeros((BLOCK_B * BLOCK_G, BLOCK_C), dtype=tl.float32)
    db = tl.zeros((BLOCK_B * BLOCK_G, BLOCK_C), dtype=tl.float32)
    part = 1.0 / (C * S)
    # Persistent: the next samples are prefetched while these are computed, and dw and db stay in registers.
    for start in tl.range(share * BLOCK_B, B, shares * BLOCK_B, num_stages=NUM_STAGES):
        rows, row_mask, offsets, mask = _tile(start, groups, affine_mask, B, G, C, S, BLOCK_G, BLOCK_C, BLOCK_S)
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if HAS_DB:
            db += tl.sum(dy, axis=2)
        if x_ptr is not None:
            x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
            mean = tl.load(stats_ptr + rows, mask=row_mask, other=0.0)
            var = tl.load(stats_ptr + B * G + rows, mask=row_mask, other=1.0)
            near = tl.load(stats_ptr + 2 * B * G + rows, mask=row_mask, other=0.0)
            of_x, rstd = share_and_rstd(var)
            c = x * of_x[:, None, None] - mean[:, None, None]
            if HAS_DW:
                # dy is zero past a row's end; there x - near times rstd could be infinite.
                products = tl.sum(dy * (x * of_x[:, None, None] - near[:, None, None]), axis=2)
                dw += rstd[:, None] * (products - (mean - near)[:, None] * tl.sum(dy, axis=2))
            if dx_ptr is not None:
                if w_ptr is not None:
                    dy *= w
                # Flat to the end: where a sum went back to channels and places, Triton 3.6 added up each row again, in
                # every thread, one value after the other.
                g, c = _flat(dy), _flat(c)
                if BLOCK_C * BLOCK_S == 1:
                    dx = g * c  # zero, and NaN where PyTorch's is
                else:
                    total = tl.sum(g, axis=1) * part
                    g = _within(g - total[:, None], _flat(mask), FILLED)  # so that g * c is zero there
                    rest, dot = sum_pair(g, g * c, 1)
                    g -= (rest * part)[:, None]  # corrected like mean
                    dot = tl.div_rn(dot * part, tl.abs(var))
                    dx = (of_x * rstd)[:, None] * (g - c * dot[:, None])
                dx = tl.reshape(dx, offsets.shape)
                tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    _, affine, affine_mask = _channels(block, BLOCK_G, G, C, BLOCK_G, BLOCK_C)
    if HAS_DW or HAS_DB:
        partial_ptr += share * (HAS_DW + HAS_DB) * G * C + affine
    if HAS_DW:
        dw_sum = tl.sum(tl.reshape(dw, (BLOCK_B, BLOCK_G, BLOCK_C)), axis=0)
        tl.store(partial_ptr, dw_sum, mask=affine_mask)
    if HAS_DB:
        db_sum = tl.sum(tl.reshape(db, (BLOCK_B, BLOCK_G, BLOCK_C)), axis=0)
        tl.store(partial_ptr + HAS_DW * G * C, db_sum, mask=affine_mask)


# Largest tile of a row (a group of a sample) that one program holds in registers.
MAX_FORWARD_TILE = 8192
MAX_BACKWARD_TILE = 8192


def _aligned(C: int, S: int) -> bool:
    return aligned(S) or (S == 1 and aligned(C))


def _row_tile(C: int, S: int) -> int:
    return next_power_of_2(C) * next_power_of_2(S)


def fits_forward(C: int, S: int) -> bool:
    return _row_tile(C, S) <= MAX_FORWARD_TILE


def fits_backward(C: int, S: int) -> bool:
    # What this leaves out spills on sm_90.
    if not _aligned(C, S):
        return _row_tile(C, S) <= MAX_BACKWARD_TILE // 4
    return _row_tile(C, S) <= (MAX_BACKWARD_TILE if S > 1 else MAX_BACKWARD_TILE // 2)


def _short_tile(G: int, C: int, S: int, elements: int) -> dict[str, int]:
    """Whole rows, to make up so many elements: neighbouring groups first, then samples."""
    block_c, block_s = next_power_of_2(C), next_power_of_2(S)
    rows = max(1, elements // (block_c * block_s))
    block_g = min(rows, next_power_of_2(G))
    filled = block_c == int(C) and block_s == int(S)
    return {"BLOCK_B": rows // block_g, "BLOCK_G": block_g, "BLOCK_C": block_c, "BLOCK_S": block_s, "FILLED": filled}


def _forward_tile(G: int, C: int, S: int) -> dict[str, int]:
    """16 elements a thread."""
    return _short_tile(G, C, S, 2048) | {"num_warps": min(16, max(4, _row_tile(C, S) // 512))}


def _backward_tile(G: int, C: int, S: int, element_size: int) -> dict[str, int]:
    """8 elements a thread, 16 of longer rows; up to two tiles are on their way: what 8 KiB of each tensor hold."""
    row = _row_tile(C, S)
    ahead = min(2, 8192 // (max(row, 2048) * element_size))
    return _short_tile(G, C, S, 2048) | {"num_warps": min(16, max(8, row // 512)), "NUM_STAGES": 1 + ahead}


def _shares(B: int, G: int, tile: dict[str, int], device: torch.device) -> int:
    """Into how many the samples are divided: the programs fill each multiprocessor with 24 warps of 80 registers."""
    programs = num_programs(device, max(1, 24 // tile["num_warps"]))
    return grid_cap(cdiv(B, tile["BLOCK_B"]), cdiv(programs, cdiv(G, tile["BLOCK_G"])))


def short_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, y: Tensor, stats: Tensor,
    sizes: tuple[int, int, int, int], eps: float,
) -> None:  # fmt: skip
    """Fill y and stats."""
    B, G, C, S = sizes
    tile = _forward_tile(G, C, S)
    wrap_triton(group_norm_kernel)[(cdiv(G, tile["BLOCK_G"]) * cdiv(B, tile["BLOCK_B"]),)](
        x, weight, bias, y, stats, B, G, C, S, eps, **tile
    )


def short_backward(
    dy: Tensor, x: Tensor | None, weight: Tensor | None, stats: Tensor, dx: Tensor | None,
    sizes: tuple[int, int, int, int], need_dw: bool, need_db: bool,
) -> Tensor | None:  # fmt: skip
    """Fill dx, if given; return the partials of the weight's and the bias's gradient that are needed, if any."""
    B, G, C, S = sizes
    tile = _backward_tile(G, C, S, dy.element_size())
    shares = _shares(B, G, tile, dy.device)
    partials = None
    if need_dw or need_db:
        partials = empty((shares, need_dw + need_db, G * C), torch.float32, dy.device)
    wrap_triton(group_norm_backward_kernel)[(cdiv(G, tile["BLOCK_G"]) * shares,)](
        dy, x, weight, stats, dx, partials, B, G, C, S, HAS_DW=need_dw, HAS_DB=need_db, **tile
    )
    return partials
