r"""The largest logits of rows, their log-probabilities and the logarithm of the softmax's denominator: the kernels.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, https://arxiv.org/abs/1805.02867,
section 4, for a top-k in the pass that makes the softmax.

For a row of transformed logits y of V classes:

    m = max(y)    s = sum(exp(y - m))    logsumexp = m + log(s)    logp_j = y_j - m - log(s)

An element comes before another one if it is larger, or equal and of a lower class. The K first are found so:

1. The product that makes the row computes m, s and the largest y of each tile of neighbouring classes.
2. The K tiles with the largest maxima, of equal ones the lower tile, hold the K first elements: if an element's tile is
   not among them, the maximum of each of the K is larger than the element, or equal and of a lower class, because its
   tile is lower. So K elements come before it.
3. The least of the K maxima is a bound: at least K elements reach it, so that a smaller one is not among the K first.
   Of the elements of the K tiles those that reach it are collected. They are few more than K, unless the largest logits
   are neighbours or many are equal. Where they are more than the SLOTS that a row has, the K-th element's number is
   found by bisection, and exactly K are collected: what is larger, and of equal ones the first.
4. The rank of a collected element is the number of those that come before it. It writes its results at its rank.

So a small part of the logits is read, once they are made. A float32 is compared as an int32 of the same
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

from llmk.ops.common.math import LOG2E, merged_sums_cpu
from llmk.ops.linear_loss.kernels.tiles import logits_tile
from llmk.registry import empty, jit, next_power_of_2, wrap_triton

MAX_K = 256
"""The largest K."""
LOWEST = tl.constexpr(-(2**31))  # below the order of any number
HIGHEST = tl.constexpr(2**31 - 1)  # of NaN
NOT_SIGN = tl.constexpr(0x7FFFFFFF)
NOTHING = -(2**63)
"""A key below those of all numbers."""
BITS = tl.constexpr(32)
TILE = 256
"""The classes of a tile where no product has made its maxima."""
TILES_A_WARP, MOST_WARPS = 512, 16
COLLECT_WARPS = 1
"""A prefix sum within one warp waits for no other: 0.6 of the time of 2048 elements and four warps (H200)."""
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
def topk_tiles_kernel(largest_ptr, sum_ptr, chosen_ptr, bound_ptr, M, T, C, K, BLOCK_T: tl.constexpr):
    """Choose the C tiles with the largest maxima, ascending, and an order that K elements of them reach.

    The maxima are `[T, M]`, and with sums of exponentials like them a maximum may have missed a NaN, which the sum has.
    """
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, BLOCK_T)
    mask = tiles < T
    at = tiles.to(tl.int64) * M + row
    largest = tl.load(largest_ptr + at, mask=mask, other=float("-inf"))
    if sum_ptr is not None:
        total = tl.load(sum_ptr + at, mask=mask, other=0.0)
        largest = tl.where(total != total, total, largest)
    order = tl.where(mask, _order(largest), LOWEST)
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
def _elements(y_ptr, chosen_ptr, place, V, TILE: tl.constexpr):
    """Return the orders and columns of a chosen tile's elements; past the end it is LOWEST."""
    # The first column of a tile is one number: so neighbours are read together, and a thread has neighbours to add up.
    cols = tl.load(chosen_ptr + place) * TILE + tl.arange(0, TILE)
    mask = cols < V
    return tl.where(mask, _order(tl.load(y_ptr + cols, mask=mask, other=0.0)), LOWEST), cols


@jit
def _count(bound, y_ptr, chosen_ptr, V, C, TILE: tl.constexpr):
    """Return the number of elements of the C chosen tiles that are above a bound."""
    count = tl.zeros((TILE,), dtype=tl.int32)
    for place in range(0, C):
        order, _ = _elements(y_ptr, chosen_ptr, place, V, TILE)
        count += (order > bound).to(tl.int32)
    return tl.sum(count, axis=0)


@jit
def _highest(y_ptr, chosen_ptr, V, C, TILE: tl.constexpr):
    """Return the largest order of the C chosen tiles' elements."""
    highest = tl.full((TILE,), LOWEST, dtype=tl.int32)
    for place in range(0, C):
        order, _ = _elements(y_ptr, chosen_ptr, place, V, TILE)
        highest = tl.maximum(highest, order)
    return tl.max(highest, axis=0)


@jit
def _collect(
    bound, left, key_ptr, first_class, SLOTS, y_ptr, chosen_ptr, V, C, EQUAL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store the elements above a bound, with EQUAL the first `left` of those equal to it too; return their number."""
    count = tl.cast(0, tl.int32)
    for chosen in range(0, C):
        order, cols = _elements(y_ptr, chosen_ptr, chosen, V, TILE)
        kept = order > bound
        if EQUAL:
            equal = (order == bound).to(tl.int32)
            kept |= (equal != 0) & (tl.cumsum(equal, axis=0) <= left)
            left -= tl.sum(equal, axis=0)
        place = count + tl.cumsum(kept.to(tl.int32), axis=0) - 1
        key = (order.to(tl.int64) << 32) | ((first_class + cols) ^ NOT_SIGN).to(tl.int64)
        tl.store(key_ptr + place, key, mask=kept & (place < SLOTS))
        count += tl.sum(kept.to(tl.int32), axis=0)
    return count


@jit
def topk_collect_kernel(
    y_ptr, chosen_ptr, bound_ptr, key_ptr, count_ptr, V, C, K, SLOTS, y_stride, first_class, TILE: tl.constexpr,
):  # fmt: skip
    """Collect the elements of a row's chosen tiles that may be among the K largest, K to SLOTS, in any order."""
    row = tl.program_id(0).to(tl.int64)
    y_ptr += row * y_stride
    chosen_ptr += row * C
    key_ptr += row * SLOTS
    bound = tl.load(bound_ptr + row) - 1
    count = _collect(bound, 0, key_ptr, first_class, SLOTS, y_ptr, chosen_ptr, V, C, False, TILE)
    if (count < K) | (count > SLOTS):  # fewer, where the maximum of a tile is NaN for an infinity
        low = tl.where(count < K, LOWEST, bound).to(tl.int64) + 1  # K elements reach it
        high = _highest(y_ptr, chosen_ptr, V, C, TILE).to(tl.int64) + 1
        turn = 0
        while (turn < BITS) & (high - low > 1):
            turn += 1
            middle = (low + high) >> 1
            below = (middle - 1).to(tl.int32)
            reached = _count(below, y_ptr, chosen_ptr, V, C, TILE)
            low = tl.where(reached >= K, middle, low)
            high = tl.where(reached > K, high, middle + (reached == K).to(tl.int64))
        bound = low.to(tl.int32)
        left = K - _count(bound, y_ptr, chosen_ptr, V, C, TILE)
        count = _collect(bound, left, key_ptr, first_class, SLOTS, y_ptr, chosen_ptr, V, C, True, TILE)
    tl.store(count_ptr + row, count)


@jit
def topk_combine_kernel(
    part_ptr, key_ptr, count_ptr, logprob_ptr, index_ptr, logsumexp_ptr, stats_ptr, M, R, K, SLOTS, BLOCK: tl.constexpr
):
    """Compute a row's results from what was collected of its R slices, which are one below the other."""
    row = tl.program_id(0).to(tl.int64)
    m = tl.cast(float("-inf"), tl.float32)
    for r in range(0, R):
        m_r = tl.load(part_ptr + (2 * tl.cast(r, tl.int64) + 1) * M + row)
        m = tl.maximum(m, m_r, propagate_nan=tl.PropagateNan.ALL)
    base = tl.where(m == float("-inf"), 0.0, m)
    s = tl.cast(0.0, tl.float32)
    for r in range(0, R):
        parts = part_ptr + 2 * tl.cast(r, tl.int64) * M + row
        s += tl.exp2((tl.load(parts + M) - base) * LOG2E) * tl.load(parts)
    logsum = tl.log(s)
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
            # m has no NaN, the largest element has.
            logsumexp = tl.where(tl.abs(y) == float("inf"), y, m + logsum)
            tl.store(logsumexp_ptr + row + tl.zeros_like(rank), logsumexp, mask=mask & (rank == 0))
            tl.store(logprob_ptr + row * K + rank, (y - m) - logsum, mask=mask)
            tl.store(index_ptr + row * K + rank, (key & NOT_SIGN) ^ NOT_SIGN, mask=mask)


class Candidates(NamedTuple):
    """The keys that may be among the K largest logits of M rows, and the rows' statistics.

    The slices of several ranks are one below the other.
    """

    part: Tensor  # s and m, float32 [2, M]
    keys: Tensor  # int64 [M, SLOTS]
    counts: Tensor  # of keys, int32 [M]


def slots_of(k: int) -> int:
    """Return how many candidates a row may have."""
    return max(FEWEST_SLOTS, min(MOST_SLOTS, SLOTS_FACTOR * next_power_of_2(k)))


def _tile_maxima(y: Tensor) -> Tensor:
    """Return the largest logits of each tile of rows `[M, V]`, `[tiles, M]`, in plain PyTorch."""
    whole = y.shape[1] // TILE * TILE
    maxima = [y[:, :whole].unflatten(1, (-1, TILE)).amax(-1)] if whole else []
    return torch.cat([*maxima, y[:, whole:].amax(-1, keepdim=True)] if whole < y.shape[1] else maxima, 1).t()


def candidates(y: Tensor, part: Tensor, tiles: Tensor | None, k: int, first_class: int) -> Candidates:
    """Collect the candidates of rows `[M, V]`, or of this rank's columns: the row's K largest are among them.

    Args:
        y: Transformed logits, float32.
        part: The rows' sums of exponentials and their largest logits, `[2, M]`.
        tiles: The same of tiles, of equally many columns but the last, `[2 or more, T, M]`, None where not known.
        k: K.
        first_class: The class of the first column.
    """
    (M, V), slots, device = y.shape, slots_of(k), y.device
    keys, counts = empty((M, slots), torch.int64, device), empty((M,), torch.int32, device)
    if V == 0:
        return Candidates(part, keys, counts.zero_())
    sums, largest = (None, _tile_maxima(y).contiguous()) if tiles is None else (tiles[0], tiles[1])
    T, K, tile = largest.shape[0], min(k, V), TILE if tiles is None else logits_tile(V, device).columns
    C = min(K, T)
    chosen, bound = empty((M, C), torch.int32, device), empty((M,), torch.int32, device)
    block_t = next_power_of_2(max(T, 32))
    wrap_triton(topk_tiles_kernel)[(M,)](
        largest, sums, chosen, bound, M, T, C, K,
        BLOCK_T=block_t, num_warps=min(max(1, block_t // TILES_A_WARP), MOST_WARPS),
    )  # fmt: skip
    wrap_triton(topk_collect_kernel)[(M,)](
        y, chosen, bound, keys, counts, V, C, K, slots, y.stride(0), first_class,
        TILE=tile, num_warps=COLLECT_WARPS,
    )  # fmt: skip
    return Candidates(part, keys, counts)


def combine(parts: Candidates, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities and classes `[M, K]`, logsumexp `[M]` and statistics `[2, M]` from the parts of all ranks."""
    R, M, device = parts.part.shape[0] // 2, parts.part.shape[1], parts.part.device
    logprobs, indices = empty((M, k), torch.float32, device), empty((M, k), torch.int64, device)
    logsumexp, stats = empty((M,), torch.float32, device), empty((2, M), torch.float32, device)
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


def candidates_cpu(y: Tensor, part: Tensor, tiles: Tensor | None, k: int, first_class: int) -> Candidates:
    """`candidates` in plain PyTorch: the K largest themselves."""
    (M, V), device = y.shape, y.device
    keys = torch.full((M, k), NOTHING, dtype=torch.int64, device=device)
    counts = torch.full((M,), min(k, V), dtype=torch.int32, device=device)
    classes = first_class + torch.arange(V, dtype=torch.int64, device=device)
    key = (_order_cpu(y).long() << 32) | (classes ^ NOT_SIGN.value)
    keys[:, : min(k, V)] = key.topk(min(k, V)).values
    return Candidates(part, keys, counts)


def combine_cpu(parts: Candidates, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`combine` in plain PyTorch."""
    R, M = parts.part.shape[0] // 2, parts.part.shape[1]
    s_r, m_r = parts.part.view(R, 2, M).unbind(1)
    m, s = merged_sums_cpu(m_r, s_r)
    logsum = s.log()
    key = parts.keys.view(R, M, k).movedim(0, 1).reshape(M, R * k).topk(k).values
    logprobs = (_number_cpu((key >> 32).int()) - m.unsqueeze(-1)) - logsum.unsqueeze(-1)
    logsumexp = torch.where(m.isinf(), m, m + logsum)
    return logprobs, (key & NOT_SIGN.value) ^ NOT_SIGN.value, logsumexp, torch.stack((m, s))


class TopkFunctions(NamedTuple):
    """The steps from rows of logits to the largest ones."""

    candidates: Callable[[Tensor, Tensor, Tensor | None, int, int], Candidates]
    combine: Callable[[Candidates, int], tuple[Tensor, Tensor, Tensor, Tensor]]


KERNELS = TopkFunctions(candidates, combine)
PYTORCH = TopkFunctions(candidates_cpu, combine_cpu)
