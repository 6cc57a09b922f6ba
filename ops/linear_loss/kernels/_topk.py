r"""The largest logits of rows, their log-probabilities and the logarithm of the softmax's denominator: the kernels.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, https://arxiv.org/abs/1805.02867, for
one pass over a row, and its section 4 for a top-k in the same pass.

For a row of logits z of V classes and y = cap(scale * z) / temperature with cap(u) = c * tanh(u / c):

    m = max(y)    s = sum(exp(y - m))    logsumexp = m + log(s)    logp_j = y_j - m - log(s)

An element comes before another one if it is larger, or equal and of a lower class. The K first are found so:

1. One pass over the row computes m, s and the largest y of each tile of TILE neighbouring classes.
2. The K tiles with the largest maxima, of equal ones the lower tile, hold the K first elements: if an element's tile is
   not among them, the maximum of each of the K is larger than the element, or equal and of a lower class, because its
   tile is lower. So K elements come before it.
3. The least of the K maxima is a bound: at least K elements reach it, so that a smaller one is not among the K first.
   Of the elements of the K tiles those that reach it are collected. They are few more than K, unless the largest logits
   are neighbours or many are equal. Where they are more than the SLOTS that a row has, the K-th element's number is
   found by bisection, and exactly K are collected: what is larger, and of equal ones the first.
4. The rank of a collected element is the number of those that come before it. It writes its results at its rank.

So the logits are read once, and a small part of them a second time. A float32 is compared as an int32 of the same
order, where NaN is the largest number, as in PyTorch, and -0 equals 0. An element is collected as an int64: that int32
above the bits of the class, inverted. All are different, and the larger one comes first. A bisection of the int32 takes
32 turns at most.

With shards of the classes on the ranks, a rank collects its own, and the ranks gather what was collected.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.math import LOG2E
from llmk.ops.linear_loss.kernels._logprobs import STATISTICS, LogitTransform, logit_transform, transform_cpu
from llmk.registry import cdiv, empty, jit, next_power_of_2, wrap_triton

MAX_K = 256
"""The largest K."""
LOWEST = tl.constexpr(-(2**31))  # below the order of any number
HIGHEST = tl.constexpr(2**31 - 1)  # of NaN
NOT_SIGN = tl.constexpr(0x7FFFFFFF)
NOTHING = -(2**63)
"""A key below those of all numbers."""
BITS = tl.constexpr(32)
VECTOR = tl.constexpr(4)
"""Neighbouring columns that one thread reads and reduces by itself."""

TILE = 128
MOST_TILES = 8192
"""The tiles whose maxima a program holds: tiles are larger where a row has more of them."""
STATISTICS_BLOCK, STATISTICS_WARPS = 2048, 4
TILES_A_WARP = 512
COLLECT_BLOCK, COLLECT_WARPS = 2048, 4
RANK_BLOCK, RANK_WARPS = 64, 2
FEWEST_SLOTS, MOST_SLOTS, SLOTS_FACTOR = 128, 1024, 8
"""The slots of a row are so many times K, within these bounds."""


@jit
def _order(y):
    """Return int32 in the order of the float32 numbers."""
    bits = (y + 0.0).to(tl.int32, bitcast=True)
    return tl.where(y != y, HIGHEST, bits ^ ((bits >> 31) & NOT_SIGN))


@jit
def _number(order):
    """Return the float32 number of an order."""
    return (order ^ ((order >> 31) & NOT_SIGN)).to(tl.float32, bitcast=True)


@jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def _add_tiles(m, s, z, mask, inner, outer, softcap, MASKED: tl.constexpr):
    """Update each thread's maximum and sum, and return the order of each tile's maximum."""
    y, _ = logit_transform(z, inner, outer, softcap)
    if MASKED:
        y = tl.where(mask, y, float("-inf"))
    largest = tl.reduce(y, 2, _larger)
    new_m = _larger(m, largest)
    # Subtracting -inf from -inf would be NaN where nothing finite has been seen yet.
    base = tl.where(new_m == float("-inf"), 0.0, new_m)
    new_s = tl.sum(tl.exp2((y - base[:, :, None]) * LOG2E), axis=2)
    return new_m, tl.exp2((m - base) * LOG2E) * s + new_s, tl.max(_order(largest), axis=1)


@jit
def topk_statistics_kernel(
    z_ptr, part_ptr, tile_ptr, M, V, T, z_stride, inner, outer, softcap, TILE: tl.constexpr, TILES: tl.constexpr
):
    """Compute m and s of a row's columns, part `[2, M]`, and the order of the maximum of each of its T tiles."""
    inner = tl.cast(inner, tl.float32)
    outer = tl.cast(outer, tl.float32)
    BLOCK: tl.constexpr = TILES * TILE
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * z_stride
    tile_ptr += row * T
    m = tl.full((TILES, TILE // VECTOR), float("-inf"), dtype=tl.float32)
    s = tl.zeros((TILES, TILE // VECTOR), dtype=tl.float32)
    tiles = tl.arange(0, TILES)
    in_tile = tl.arange(0, TILE // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    cols = tiles[:, None, None] * TILE + in_tile[None, :, :]
    whole = V // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):  # a mask whose end is no multiple of 16 prevents vectorized loads
        m, s, largest = _add_tiles(m, s, tl.load(z_ptr + start + cols), None, inner, outer, softcap, False)
        tl.store(tile_ptr + start // TILE + tiles, largest)
    for start in range(whole, V, BLOCK):  # once, or not at all
        mask = start + cols < V
        z = tl.load(z_ptr + start + cols, mask=mask, other=0.0)
        m, s, largest = _add_tiles(m, s, z, mask, inner, outer, softcap, True)
        tl.store(tile_ptr + start // TILE + tiles, largest, mask=start // TILE + tiles < T)
    row_m = _number(tl.max(tl.max(_order(m), axis=1), axis=0))  # NaN if there is one
    fade = tl.exp2((m - tl.where(row_m == float("-inf"), 0.0, row_m)) * LOG2E)
    tl.store(part_ptr + row, row_m)
    tl.store(part_ptr + M + row, tl.sum(tl.sum(fade * s, axis=1), axis=0))


@jit
def topk_tiles_kernel(tile_ptr, chosen_ptr, bound_ptr, T, C, K, BLOCK_T: tl.constexpr):
    """Choose the C tiles with the largest maxima, ascending, and an order that K elements of them reach."""
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, BLOCK_T)
    mask = tiles < T
    order = tl.where(mask, tl.load(tile_ptr + row * T + tiles, mask=mask, other=0), LOWEST)
    low = tl.min(tl.where(mask, order, HIGHEST), axis=0).to(tl.int64)  # C reach it
    high = tl.max(order, axis=0).to(tl.int64) + 1  # fewer reach it
    turn = 0
    while (turn < BITS) & (high - low > 1):
        turn += 1
        middle = (low + high) >> 1
        reached = tl.sum((order >= middle.to(tl.int32)).to(tl.int32), axis=0)
        low = tl.where(reached >= C, middle, low)
        high = tl.where(reached > C, high, middle + (reached == C).to(tl.int64))  # exactly C: it ends
    bound = low.to(tl.int32)
    above, equal = order > bound, order == bound
    left = C - tl.sum(above.to(tl.int32), axis=0)
    chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= left))
    place = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    tl.store(chosen_ptr + row * C + place, tiles, mask=chosen)
    tl.store(bound_ptr + row, tl.where(C < K, LOWEST + 1, bound))  # every number reaches the lowest


@jit
def _elements(z_ptr, chosen_ptr, start, V, N, inner, outer, softcap, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the orders and columns of a part of the chosen tiles' elements; past the end it is LOWEST."""
    places = start + tl.arange(0, BLOCK)
    mask = places < N
    cols = tl.load(chosen_ptr + places // TILE, mask=mask, other=0) * TILE + places % TILE
    mask = mask & (cols < V)
    y, _ = logit_transform(tl.load(z_ptr + cols, mask=mask, other=0.0), inner, outer, softcap)
    return tl.where(mask, _order(y), LOWEST), cols


@jit
def _count(
    bound, z_ptr, chosen_ptr, V, N, inner, outer, softcap, TILE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Return the number of elements of the chosen tiles that are above a bound."""
    count = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, N, BLOCK):
        order, _ = _elements(z_ptr, chosen_ptr, start, V, N, inner, outer, softcap, TILE, BLOCK)
        count += (order > bound).to(tl.int32)
    return tl.sum(count, axis=0)


@jit
def _highest(z_ptr, chosen_ptr, V, N, inner, outer, softcap, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest order of the chosen tiles' elements."""
    highest = tl.full((BLOCK,), LOWEST, dtype=tl.int32)
    for start in range(0, N, BLOCK):
        order, _ = _elements(z_ptr, chosen_ptr, start, V, N, inner, outer, softcap, TILE, BLOCK)
        highest = tl.maximum(highest, order)
    return tl.max(highest, axis=0)


@jit
def _collect(
    bound, left, key_ptr, first_class, SLOTS, z_ptr, chosen_ptr, V, N, inner, outer, softcap,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the elements above a bound, and the first `left` of those that are equal to it; return their number."""
    count = tl.cast(0, tl.int32)
    for start in range(0, N, BLOCK):
        order, cols = _elements(z_ptr, chosen_ptr, start, V, N, inner, outer, softcap, TILE, BLOCK)
        equal = (order == bound).to(tl.int32)
        kept = (order > bound) | ((equal != 0) & (tl.cumsum(equal, axis=0) <= left))
        left -= tl.sum(equal, axis=0)
        place = count + tl.cumsum(kept.to(tl.int32), axis=0) - 1
        key = (order.to(tl.int64) << 32) | ((first_class + cols) ^ NOT_SIGN).to(tl.int64)
        tl.store(key_ptr + place, key, mask=kept & (place < SLOTS))
        count += tl.sum(kept.to(tl.int32), axis=0)
    return count


@jit
def topk_collect_kernel(
    z_ptr, chosen_ptr, bound_ptr, key_ptr, count_ptr, V, C, K, SLOTS, z_stride, first_class, inner, outer, softcap,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Collect the elements of a row's chosen tiles that may be among the K largest, K to SLOTS, in any order."""
    inner = tl.cast(inner, tl.float32)
    outer = tl.cast(outer, tl.float32)
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * z_stride
    chosen_ptr += row * C
    key_ptr += row * SLOTS
    N = C * TILE
    bound, left = tl.load(bound_ptr + row) - 1, tl.cast(0, tl.int32)
    count = _collect(
        bound, left, key_ptr, first_class, SLOTS, z_ptr, chosen_ptr, V, N, inner, outer, softcap, TILE, BLOCK
    )
    if (count < K) | (count > SLOTS):  # fewer, if a compiler rounded a logit otherwise than in another kernel
        low = tl.where(count < K, LOWEST, bound).to(tl.int64) + 1  # K elements reach it
        high = _highest(z_ptr, chosen_ptr, V, N, inner, outer, softcap, TILE, BLOCK).to(tl.int64) + 1
        turn = 0
        while (turn < BITS) & (high - low > 1):
            turn += 1
            middle = (low + high) >> 1
            below = (middle - 1).to(tl.int32)
            reached = _count(below, z_ptr, chosen_ptr, V, N, inner, outer, softcap, TILE, BLOCK)
            low = tl.where(reached >= K, middle, low)
            high = tl.where(reached > K, high, middle + (reached == K).to(tl.int64))
        bound = low.to(tl.int32)
        left = K - _count(bound, z_ptr, chosen_ptr, V, N, inner, outer, softcap, TILE, BLOCK)
        count = _collect(
            bound, left, key_ptr, first_class, SLOTS, z_ptr, chosen_ptr, V, N, inner, outer, softcap, TILE, BLOCK
        )
    tl.store(count_ptr + row, count)


@jit
def topk_combine_kernel(
    part_ptr, key_ptr, count_ptr, logprob_ptr, index_ptr, logsumexp_ptr, stats_ptr, M, R, K, SLOTS, BLOCK: tl.constexpr
):
    """Compute a row's results from what was collected of its R slices, which are one below the other."""
    row = tl.program_id(0).to(tl.int64)
    m = tl.cast(float("-inf"), tl.float32)
    for r in range(0, R):
        m_r = tl.load(part_ptr + 2 * tl.cast(r, tl.int64) * M + row)
        m = tl.maximum(m, m_r, propagate_nan=tl.PropagateNan.ALL)
    base = tl.where(m == float("-inf"), 0.0, m)
    s = tl.cast(0.0, tl.float32)
    for r in range(0, R):
        parts = part_ptr + 2 * tl.cast(r, tl.int64) * M + row
        s += tl.exp2((tl.load(parts) - base) * LOG2E) * tl.load(parts + M)
    logsum = tl.log(s)
    tl.store(logsumexp_ptr + row, tl.where(tl.abs(m) == float("inf"), m, m + logsum))
    tl.store(stats_ptr + row, m)
    tl.store(stats_ptr + M + row, s)
    slots = tl.arange(0, BLOCK)
    for r in range(0, R):
        slice = r * tl.cast(M, tl.int64) + row
        count = tl.load(count_ptr + slice)
        for start in range(0, count, BLOCK):
            mask = start + slots < count
            key = tl.load(key_ptr + slice * SLOTS + start + slots, mask=mask, other=0)
            rank = tl.zeros((BLOCK,), dtype=tl.int32)
            for q in range(0, R):
                other_slice = q * tl.cast(M, tl.int64) + row
                other_count = tl.load(count_ptr + other_slice)
                for other_start in range(0, other_count, BLOCK):
                    others = other_start + slots < other_count
                    other = tl.load(key_ptr + other_slice * SLOTS + other_start + slots, mask=others, other=0)
                    rank += tl.sum(((other[None, :] > key[:, None]) & others[None, :]).to(tl.int32), axis=1)
            mask = mask & (rank < K)
            y = _number((key >> 32).to(tl.int32))
            tl.store(logprob_ptr + row * K + rank, (y - m) - logsum, mask=mask)
            tl.store(index_ptr + row * K + rank, (key & NOT_SIGN) ^ NOT_SIGN, mask=mask)


class Candidates(NamedTuple):
    """The keys that may be among the K largest logits of M rows, and the rows' statistics.

    The slices of several ranks are one below the other.
    """

    part: Tensor  # m and s, float32 [2, M]
    keys: Tensor  # int64 [M, SLOTS]
    counts: Tensor  # of keys, int32 [M]


def tile_of(V: int) -> int:
    """Return the columns of a tile."""
    return max(TILE, next_power_of_2(cdiv(V, MOST_TILES)))


def slots_of(k: int) -> int:
    """Return how many candidates a row may have."""
    return max(FEWEST_SLOTS, min(MOST_SLOTS, SLOTS_FACTOR * next_power_of_2(k)))


def candidates(logits: Tensor, k: int, transform: LogitTransform) -> Candidates:
    """Collect the candidates of rows `[M, V]`, or of this rank's columns: the row's K largest are among them."""
    (M, V), tile, slots = logits.shape, tile_of(logits.shape[1]), slots_of(k)
    T, K, device = cdiv(V, tile), min(k, V), logits.device
    part = empty((2, M), torch.float32, device)
    tiles = empty((M, T), torch.int32, device)
    block = max(tile, min(STATISTICS_BLOCK, next_power_of_2(V)))
    wrap_triton(topk_statistics_kernel)[(M,)](
        logits, part, tiles, M, V, T, logits.stride(0), *transform.factors(), transform.softcap or None,
        TILE=tile, TILES=block // tile, num_warps=STATISTICS_WARPS,
    )  # fmt: skip
    C = min(K, T)
    chosen, bound = empty((M, C), torch.int32, device), empty((M,), torch.int32, device)
    block_t = next_power_of_2(max(T, 32))
    wrap_triton(topk_tiles_kernel)[(M,)](
        tiles, chosen, bound, T, C, K, BLOCK_T=block_t, num_warps=max(1, block_t // TILES_A_WARP)
    )
    keys, counts = empty((M, slots), torch.int64, device), empty((M,), torch.int32, device)
    wrap_triton(topk_collect_kernel)[(M,)](
        logits, chosen, bound, keys, counts, V, C, K, slots, logits.stride(0), transform.first_class,
        *transform.factors(), transform.softcap or None, TILE=tile, BLOCK=COLLECT_BLOCK, num_warps=COLLECT_WARPS,
    )  # fmt: skip
    return Candidates(part, keys, counts)


def combine(parts: Candidates, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities and classes `[M, K]`, logsumexp `[M]` and statistics `[2, M]` from the parts of all ranks."""
    R, M, device = parts.part.shape[0] // 2, parts.part.shape[1], parts.part.device
    logprobs, indices = empty((M, k), torch.float32, device), empty((M, k), torch.int64, device)
    logsumexp, stats = empty((M,), torch.float32, device), empty((STATISTICS, M), torch.float32, device)
    wrap_triton(topk_combine_kernel)[(M,)](
        *parts, logprobs, indices, logsumexp, stats, M, R, k, parts.keys.shape[1],
        BLOCK=RANK_BLOCK, num_warps=RANK_WARPS,
    )  # fmt: skip
    return logprobs, indices, logsumexp, stats


def _order_cpu(y: Tensor) -> Tensor:
    """`_order` in plain PyTorch."""
    bits = (y + 0.0).view(torch.int32)
    return (bits ^ ((bits >> 31) & NOT_SIGN.value)).masked_fill_(y.isnan(), HIGHEST.value)


def _number_cpu(order: Tensor) -> Tensor:
    """`_number` in plain PyTorch."""
    return (order ^ ((order >> 31) & NOT_SIGN.value)).view(torch.float32)


def candidates_cpu(logits: Tensor, k: int, transform: LogitTransform) -> Candidates:
    """`candidates` in plain PyTorch: the K largest themselves."""
    (M, V), device = logits.shape, logits.device
    keys = torch.full((M, k), NOTHING, dtype=torch.int64, device=device)
    counts = torch.full((M,), min(k, V), dtype=torch.int32, device=device)
    if V == 0:
        part = torch.zeros((2, M), dtype=torch.float32, device=device)
        part[0] = float("-inf")
        return Candidates(part, keys, counts)
    y = transform_cpu(logits, transform)
    m = y.amax(-1)
    base = torch.where(m == float("-inf"), 0.0, m).unsqueeze(-1)
    # In float32 a sum of small terms, one after the other, rounds the largest one's 1 in one direction.
    s = (y - base).exp_().sum(-1, dtype=torch.float64).float()
    classes = transform.first_class + torch.arange(V, dtype=torch.int64, device=device)
    key = (_order_cpu(y).long() << 32) | (classes ^ NOT_SIGN.value)
    keys[:, : min(k, V)] = key.topk(min(k, V)).values
    return Candidates(torch.stack((m, s)), keys, counts)


def combine_cpu(parts: Candidates, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`combine` in plain PyTorch."""
    R, M = parts.part.shape[0] // 2, parts.part.shape[1]
    m_r, s_r = parts.part.view(R, 2, M).unbind(1)
    m = m_r.amax(0)
    s = ((m_r - torch.where(m == float("-inf"), 0.0, m)).exp() * s_r).sum(0)
    logsum = s.log()
    key = parts.keys.view(R, M, k).movedim(0, 1).reshape(M, R * k).topk(k).values
    logprobs = (_number_cpu((key >> 32).int()) - m.unsqueeze(-1)) - logsum.unsqueeze(-1)
    logsumexp = torch.where(m.isinf(), m, m + logsum)
    return logprobs, (key & NOT_SIGN.value) ^ NOT_SIGN.value, logsumexp, torch.stack((m, s))


class TopkFunctions(NamedTuple):
    """The steps from rows of logits to the largest ones."""

    candidates: Callable[[Tensor, int, LogitTransform], Candidates]
    combine: Callable[[Candidates, int], tuple[Tensor, Tensor, Tensor, Tensor]]


KERNELS = TopkFunctions(candidates, combine)
PYTORCH = TopkFunctions(candidates_cpu, combine_cpu)
