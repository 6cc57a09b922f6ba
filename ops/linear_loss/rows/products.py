r"""The three products of a loss over a vocabulary, each with what stands around it in its epilogue.

A chunk of C rows x [C, H] meets the weight W [V, H] three times:

    P  = exp(y - reference), y the transformed x W^T + b      [C, V]   `launch_logits`
    dx = r (P W) + e W_t                                      [C, H]   `input_gradient`
    dW = P^T (r x)                                            [V, H]   `weight_gradient`

No logits are stored. P has the dtype of x: it is rounded once, where it is made, and its column of the row's own class
is 0 until `scale_rows` puts what belongs there. A row past the count, which is read from the device, is not computed,
and a row whose reference is +inf is zeros, whatever it holds.

A product has one float32 sum along its whole contraction: a row's bits depend neither on the tile nor on the number of
rows. Sums of a row are made in parts of COLUMNS classes, which `combine` adds in their order.

Operands are read through tensor descriptors, which are bulk copies on Hopper and Blackwell, where addresses and strides
are multiples of 16 bytes; by pointers elsewhere.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from llmk.ops.linear_loss.kernels.tiles import are_paired, gradient_tile, listed_tile, logits_tile, pair_tiles
from llmk.ops.linear_loss.kernels.transform import Transform
from llmk.ops.linear_loss.rows._gradients_kernels import (
    bias_gradient_kernel,
    both_gradients_kernel,
    input_gradient_kernel,
    weight_gradient_kernel,
)
from llmk.ops.linear_loss.rows._products_kernels import (
    classes_kernel,
    coefficients_kernel,
    combine_kernel,
    exponentials_kernel,
    logits_kernel,
    put_entries_kernel,
    scale_rows_kernel,
    statistics_kernel,
)
from llmk.ops.linear_loss.rows.classes import Classes, Numbering
from llmk.ops.linear_loss.rows.softmax import STATISTICS, RowGradients
from llmk.registry import cdiv, empty, next_power_of_2, num_programs, wrap_triton
from llmk.registry.devices import INTERPRET
from llmk.registry.launch import describable, descriptor

FLOAT16_SCALE = 2.0**15
"""The factor of a float16 P as it is stored: its numbers are at most 1, and the small ones are kept."""
COMBINED_ROWS = 8
"""The rows of a program that adds up their parts: so many float32 numbers are what a GPU reads at a time.
On an H200, with the parts of four blocks read together, 0.7 to 0.9 of the time of 16 rows, block by block."""
LEAST_FACTOR = 2.0**-30
"""A row's factor is no smaller part of its own class's gradient: so the entry of that, their ratio, is a number."""


def row_block(H: int) -> int:
    return min(1024, next_power_of_2(H))


def located_classes(
    x: Tensor, weights: "Weights", ids: Tensor, numbering: Numbering, transform: Transform | None
) -> Classes:
    """Find the ids `[M, K]` of rows x `[M, H]` among the classes of a weight, and compute their logits.

    A transform of None leaves it to `Classes.of_ranks`.
    """
    (M, K), (V, H), weight, ids = ids.shape, weights.weight.shape, weights.weight, ids.contiguous()
    columns, y = empty((M, K), torch.int32, x.device), empty((M, K), torch.float32, x.device)
    counts = empty((M, K), torch.int8, x.device)
    numbers = (None, None, None) if transform is None else transform.numbers
    slopes = empty((M, K), torch.float32, x.device) if transform is not None and transform.softcap else None
    if M * K > 0:
        wrap_triton(classes_kernel)[(M * K,)](
            x, weight, weights.bias, ids, columns, counts, y, slopes, K, V, H, x.stride(0), *weight.stride(),
            *numbering, *numbers, RAW=transform is None, ROUNDED=weights.transform.rounded,
            BLOCK_H=row_block(H), num_warps=4,
        )  # fmt: skip
    return Classes(ids, columns, counts.view(torch.bool), y, slopes)


class Rows(NamedTuple):
    """Some rows of a projection, x `[M, H]`, contiguous in its last dimension, of which the first `end` count.

    `numbers [4, M]` has their references and the coefficients of `gradients`, and `own` the column of the class that is
    left out, negative for none; gradients may have no such column.
    """

    x: Tensor
    numbers: Tensor  # float32
    own: Tensor | None  # int32 [M]
    end: Tensor  # int32 [1]


class Weights(NamedTuple):
    """The weight of a projection and what a logit's epilogue takes besides it, contiguous."""

    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    class_weight: Tensor | None  # [V]
    transform: Transform

    def of_classes(self, columns: Tensor) -> Tensor | None:
        """Return the class weights of these columns in float32, 0 of a negative one; None where there are none."""
        if self.class_weight is None:
            return None
        if self.class_weight.numel() == 0:  # a rank without classes
            return torch.zeros(columns.shape, dtype=torch.float32, device=columns.device)
        return self.class_weight[columns.clamp(min=0).long()].float().masked_fill(columns < 0, 0.0)


def launch_logits(
    rows: Rows, weights: Weights, p: Tensor | None, parts: Tensor | None = None, *, moments: bool = False,
    gradients: bool = False, logits: bool = False, place: Tensor | None = None, left_out: Tensor | None = None,
) -> None:  # fmt: skip
    """Write to P `[M, V]` exponentials, and their sums to `parts`, or gradients; or transformed logits, in float32.

    With `place` the rows are those of all others, and P has all. Columns `left_out [M, K]`, int32 and in their order,
    negative for none, are not in the sums.
    """
    weight, bias, class_weight, transform = weights
    (M, H), V = rows.x.shape, weight.shape[0]
    tile = logits_tile(V, rows.x.device) if place is None else listed_tile(V)
    described = place is None and describable(rows.x) and describable(weight)
    p_described = p is not None and described and describable(p)
    tiles, capped = cdiv(M, tile.rows) * cdiv(V, tile.columns), bool(transform.softcap)
    # The operands of the next tile are read while the epilogue of one is computed, if no loop is in that. H200, 4096
    # rows, of cuBLAS's time for the bare product: 1.00 at 4096 features, 1.03 at 2048, 1.10 at 896; not so, and with
    # sums corrected tile by tile, 1.08, 1.12 and 1.23 (benchmarks/results/vocabulary-products-h200.json).
    flatten = described and left_out is None
    # Few registers are left beside two tiles, coefficients or a cap.
    pieces = 8 if capped else 4 if logits else 2 if flatten or gradients else 1
    programs = tiles
    if place is not None:  # there are mostly no rows: starting a program for each tile would take longer than to end
        programs = min(tiles, num_programs(rows.x.device, 4))
    elif flatten:
        programs = min(tiles, num_programs(rows.x.device, 1))
    first_left_out = None if left_out is None else _first_of_tiles(left_out, V, tile.columns)
    wrap_triton(logits_kernel)[(programs,)](
        descriptor(rows.x, [tile.rows, tile.depth]) if described else rows.x,
        descriptor(weight, [tile.columns, tile.depth]) if described else weight,
        descriptor(p, [tile.rows, tile.columns // pieces]) if p is not None and p_described else p,
        bias, class_weight, rows.numbers, rows.own, rows.end, place, parts, left_out, first_left_out,
        0 if left_out is None else left_out.shape[1], rows.numbers.shape[1], V, H, rows.x.stride(0), *weight.stride(),
        0 if p is None else p.stride(0),
        *transform.numbers,
        GRADIENTS=gradients, LOGITS=logits, MOMENTS=moments,
        DIRECT=not logits and are_direct(moments, left_out), ROUNDED=transform.rounded,
        FLOAT16=rows.x.dtype == torch.float16,
        DESCRIBED=described, P_DESCRIBED=p_described, WIDEN=INTERPRET,
        PROGRAMS=programs, PIECES=pieces, FLATTEN=flatten, **tile.arguments(),
    )  # fmt: skip


def _first_of_tiles(columns: Tensor, V: int, width: int) -> Tensor:
    """Return where the columns `[M, K]`, in their order, of each tile begin, and where the last one ends.

    `[tiles + 1, M]`, int32.
    """
    tiles = cdiv(V, width)
    ends = torch.arange(tiles + 1, dtype=torch.int32, device=columns.device) * width
    return torch.searchsorted(columns, ends.repeat(columns.shape[0], 1), out_int32=True).t().contiguous()


def part_sums(rows: Rows, V: int) -> Tensor:
    """Return an uninitialized buffer for the parts of the rows' sums, `[4, tiles, M]`."""
    tiles = cdiv(V, logits_tile(V, rows.x.device).columns)
    return empty((4, tiles, rows.numbers.shape[1]), torch.float32, rows.x.device)


def are_direct(moments: bool, left_out: Tensor | None) -> bool:
    """Return True if parts of sums are relative to their rows' references, and those of rows that are far no sums.

    Moments lose more to the rounding of exponents, and a tail has no reference.
    """
    return not moments and left_out is None


def combined(parts: Tensor, rows: Rows, *, moments: bool, weighted: bool, direct: bool) -> tuple[Tensor, Tensor]:
    """Add up the parts of the rows' sums, `[4, M]`: exponentials, what they are relative to, moments, weighted logits.

    They are relative to the larger one of the row's reference and its largest logit. Also return which rows are far
    below their largest logits, int8 `[M]`.
    """
    _, tiles, M = parts.shape
    out, far = empty((4, M), torch.float32, parts.device), empty((M,), torch.int8, parts.device)
    wrap_triton(combine_kernel)[(cdiv(M, COMBINED_ROWS),)](
        parts, rows.numbers, rows.end, None, out, far, M, tiles,
        MOMENTS=moments, WEIGHTED=weighted, DIRECT=direct, BLOCK_M=COMBINED_ROWS, BLOCK_T=32, AHEAD=4, num_warps=4,
    )  # fmt: skip
    return out, far


def combine_listed(parts: Tensor, rows: Rows, place: Tensor, sums: Tensor, *, weighted: bool) -> None:
    """Put the sums of the rows that `place` lists, whose parts are relative to their references, among all sums."""
    _, tiles, M = parts.shape
    wrap_triton(combine_kernel)[(cdiv(M, COMBINED_ROWS),)](
        parts, rows.numbers, rows.end, place, sums, None, M, tiles,
        MOMENTS=False, WEIGHTED=weighted, DIRECT=True, BLOCK_M=COMBINED_ROWS, BLOCK_T=32, AHEAD=4, num_warps=4,
    )  # fmt: skip


def row_statistics(sums: Tensor, y_own: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return statistics `[5, M]`, results `[4, M]` and flags, int8 `[2, M]`, of rows from their sums `[4, M]`."""
    M = y_own.shape[0]
    stats, results = (empty((n, M), torch.float32, sums.device) for n in (STATISTICS, 4))
    flags = empty((2, M), torch.int8, sums.device)
    wrap_triton(statistics_kernel)[(cdiv(M, 128),)](
        sums, y_own, mask, stats, results, flags, M, BLOCK_M=128, num_warps=4
    )
    return stats, results, flags


class OwnClasses(NamedTuple):
    """The one class of each of some rows."""

    mask: Tensor  # bool [M], the rows that count
    column: Tensor  # int32 [M], negative where it is elsewhere
    y: Tensor  # float32 [M], its transformed logit
    slope: Tensor | None  # float32 [M], dy / dz of it; None where that is the factor that all logits have in common


def coefficients(
    stats: Tensor, own: OwnClasses, weights: Weights, grads: RowGradients, size: Tensor | None = None, *,
    exponentials: bool,
) -> Tensor:  # fmt: skip
    """Return numbers `[4, M]` of `Rows` for gradients, r, what rounding the own entries loses, and these: `[7, M]`.

    Args:
        stats: The statistics `[5, M]` of rows with one class each.
        own: These classes.
        weights: What the logits are of.
        grads: The gradients of the rows' results.
        size: The numbers are over the rows' sizes `[M]`.
        exponentials: P has exponentials that are the gradient: the first four numbers are not written.
    """
    M = own.column.shape[0]
    out = empty((7, M), torch.float32, stats.device)
    grad = None if grads.logprobs is None else grads.logprobs.squeeze(1)
    others = (None if each is None else each.contiguous() for each in (grads.entropy, grads.logsumexp, grads.weighted))
    wrap_triton(coefficients_kernel)[(cdiv(M, 128),)](
        stats, *own, weights.class_weight, size, grad, *others, out, M, stats.stride(0),
        0 if grad is None else grad.stride(0), weights.transform.factor, LEAST_FACTOR,
        EXPONENTIALS=exponentials, FLOAT16=weights.weight.dtype == torch.float16, BLOCK_M=128, num_warps=4,
    )  # fmt: skip
    return out


def gradients_of_exponentials(
    e: Tensor, scale: Tensor, a: Tensor, u: Tensor | None, class_weight: Tensor | None, p: Tensor, count: Tensor
) -> None:  # fmt: skip
    """Write a E + u w to P `[M, V]`, given E / scale, which P may be, and the rows' a and u.

    Without a u there is no w. What it reads and writes takes 3% of the time of three products of 4096 features, where
    the logits made again would take a third.
    """
    (M, V), block = e.shape, 4096
    wrap_triton(exponentials_kernel)[(cdiv(V, block), M)](
        e, p, scale, a, u, None if u is None else class_weight, count, V, e.stride(0), p.stride(0),
        LOGITS=False, TILE_M=128, BLOCK_V=block, num_warps=8,
    )  # fmt: skip


def gradients_of_logits(y: Tensor, reference: Tensor, a: Tensor, p: Tensor, count: Tensor) -> None:
    """Write a E to P `[M, V]`, given transformed logits y, float32, with exponentials E relative to the references."""
    (M, V), block = y.shape, 4096
    if p.dtype == torch.float16:
        a = a * FLOAT16_SCALE
    wrap_triton(exponentials_kernel)[(cdiv(V, block), M)](
        y, p, reference, a, None, None, count, V, y.stride(0), p.stride(0),
        LOGITS=True, TILE_M=128, BLOCK_V=block, num_warps=8,
    )  # fmt: skip


def scale_rows(
    rows: Rows, p: Tensor, scaled: Tensor, factor: Tensor, entry: Tensor | None, scale: Tensor | None = None
) -> None:
    """Write r x to `scaled`, r times `scale` where given, and the entries `[M]` of own classes into P."""
    M, H = rows.x.shape
    wrap_triton(scale_rows_kernel)[(M,)](
        rows.x, p, scaled, factor, rows.own, entry, rows.end, scale, H, rows.x.stride(0), p.stride(0),
        BLOCK_H=row_block(H), num_warps=4,
    )  # fmt: skip


def put_entries(p: Tensor, columns: Tensor, entries: Tensor, count: Tensor) -> None:
    """Put entries `[M, K]` into P at the columns `[M, K]`, int32; a negative one is elsewhere."""
    M, K = columns.shape
    wrap_triton(put_entries_kernel)[(M,)](
        p, columns, entries, count, K, p.stride(0), BLOCK_K=next_power_of_2(K), num_warps=1
    )


def input_gradient(
    rows: Rows, p: Tensor, weight: Tensor, factors: Tensor, dx: Tensor, place: Tensor | None = None
) -> None:
    """Write r (P W) + e W_t, given r and e as `factors [2, M]`, to the rows of dx, or to those that `place` says."""
    (M, H), V = rows.x.shape, weight.shape[0]
    tile = gradient_tile(M, H, V, p.device)
    described = describable(p) and describable(weight)
    wrap_triton(input_gradient_kernel)[(cdiv(M, tile.rows) * cdiv(H, tile.columns),)](
        descriptor(p, [tile.rows, tile.depth]) if described else p,
        descriptor(weight, [tile.depth, tile.columns]) if described else weight,
        weight, dx, factors, rows.own, rows.end, place, V, H, M, p.stride(0), *weight.stride(),
        DESCRIBED=described, WIDEN=INTERPRET, **tile.arguments(),
    )  # fmt: skip


def weight_gradient(
    p: Tensor, scaled: Tensor, total: Tensor, count: Tensor, *, add: bool, scale: Tensor | None = None
) -> None:
    """Write P^T (r x), times `scale` where given, to `total [V, H]`, or add it to what is there, rounded once."""
    V, H = total.shape
    tile = gradient_tile(V, H, None, p.device)
    described = describable(p) and describable(scaled)
    # A float32 tile stored through a descriptor takes up to 4% more time than one stored by pointers (H200).
    total_described = described and total.dtype == p.dtype and describable(total)
    if not total_described:
        # Of tiles of 128 x 128 two fit a multiprocessor then, and one is multiplied while the other is added: with 896
        # features and float32 sums 1.07 of cuBLAS's time to add bfloat16 ones, with a fourth stage 1.17 (H200).
        tile = replace(tile, stages=min(tile.stages, 3))
    programs = tiles = cdiv(V, tile.rows) * cdiv(H, tile.columns)
    if total_described:  # the operands of the next tile are read while one is added: 1.02 for 1.04 to 1.06 of cuBLAS's
        programs = min(tiles, num_programs(total.device, 1))
    wrap_triton(weight_gradient_kernel)[(programs,)](
        descriptor(p, [tile.depth, tile.rows]) if described else p,
        descriptor(scaled, [tile.depth, tile.columns]) if described else scaled,
        descriptor(total, [tile.rows, tile.columns // 2]) if total_described else total,
        count, scale, V, H, p.stride(0), scaled.stride(0),
        ADD=add, DESCRIBED=described, T_DESCRIBED=total_described, WIDEN=INTERPRET, PROGRAMS=programs,
        **tile.arguments(),
    )  # fmt: skip


class InputGradient(NamedTuple):
    """What the gradient of the input is besides P W, and where it belongs."""

    factors: Tensor  # float32 [2, M], r and e
    dx: Tensor
    place: Tensor | None  # int64 [M], the rows of dx; None for the first ones


def fit_one_launch(rows: Rows, p: Tensor, scaled: Tensor, weight: Tensor, total: Tensor) -> bool:
    """Return True if both gradients are made in one launch, which takes less time."""
    (M, H), V = rows.x.shape, weight.shape[0]
    described = p.dtype == total.dtype and all(map(describable, (p, scaled, weight, total)))
    return described and are_paired(M, H, V, p.device)


def both_gradients(
    rows: Rows, p: Tensor, weight: Tensor, of_input: InputGradient, scaled: Tensor, total: Tensor, *, add: bool
) -> None:
    """Do what `input_gradient` and `weight_gradient` do."""
    (M, H), V, (factors, dx, place) = rows.x.shape, weight.shape[0], of_input
    of_x, of_w = pair_tiles(M, H, V)
    programs = num_programs(p.device, 1)
    wrap_triton(both_gradients_kernel)[(programs,)](
        descriptor(p, [of_x.rows, of_x.depth]), descriptor(p, [of_w.depth, of_w.rows]),
        descriptor(weight, [of_x.depth, of_x.columns]), descriptor(scaled, [of_w.depth, of_w.columns]),
        descriptor(total, [of_w.rows, of_w.columns // 2]),
        weight, dx, factors, rows.own, rows.end, place, V, H, M, p.stride(0), *weight.stride(), scaled.stride(0),
        ADD=add, DESCRIBED=True, WIDEN=INTERPRET, PROGRAMS=programs, GROUP_M=of_x.group, NUM_STAGES=of_x.stages,
        X_BLOCK_M=of_x.rows, X_BLOCK_N=of_x.columns, X_BLOCK_K=of_x.depth,
        W_BLOCK_M=of_w.rows, W_BLOCK_N=of_w.columns, W_BLOCK_K=of_w.depth, num_warps=of_x.warps,
    )  # fmt: skip


def bias_gradient(p: Tensor, factor: Tensor, total: Tensor, count: Tensor, *, scale: float, add: bool) -> None:
    """Write the sums over the rows of r P times `scale` to `total [V]`, float32, or add them to what is there."""
    V = total.shape[0]
    wrap_triton(bias_gradient_kernel)[(cdiv(V, 128),)](
        p, factor, total, count, V, p.stride(0), scale, ADD=add, BLOCK_M=32, BLOCK_V=128, num_warps=4
    )
