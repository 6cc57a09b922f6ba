"""The kernels of `products.py`: the product of logits with its epilogues, and what stands between the three products.

Tiles are numbered in groups of GROUP_M rows of tiles, so that the programs that run at the same time share blocks of
both operands.
"""

import triton.language as tl

from llmk.ops.common.math import LOG2E, cap, cap_slope, exp, log1p
from llmk.ops.common.products import column_eighths, column_halves, column_quarters, grouped_tile, product
from llmk.registry import jit

NEAR: tl.constexpr = tl.constexpr(8.0)
"""Exponentials of numbers up to it lose three bits to the rounding of their arguments."""
FAR: tl.constexpr = tl.constexpr(60.0)
"""A row whose own logit is so many nats below its largest has exponentials relative to that one. Beyond, r x leaves
bfloat16's normal numbers; the exponentials themselves leave its range at 88."""
LEAST_DISTANCE: tl.constexpr = tl.constexpr(-1e4)
"""Exponentials of what is below are 0."""


@jit
def transformed(z, bias_ptr, cols, V, inner, outer, softcap, ROUNDED: tl.constexpr, LOW: tl.constexpr):
    """Return y and dy / dz of a tile's logits without the factor that all have in common."""
    if bias_ptr is not None:
        z += tl.load(bias_ptr + cols, mask=cols < V, other=0.0).to(tl.float32)[None, :]
    if ROUNDED:
        z = z.to(LOW).to(tl.float32)
    return capped(z, inner, outer, softcap, ROUNDED)


@jit
def capped(z, inner, outer, softcap, ROUNDED: tl.constexpr):
    """Return y and dy / dz of logits as numbers of `Transform.numbers`, without the factor that all have in common."""
    if inner is not None:
        z *= tl.cast(inner, tl.float32)
    y, slope = z, 1.0
    if softcap is not None:
        outer = tl.cast(outer, tl.float32)
        y, slope = cap(z, softcap, not ROUNDED) * outer, cap_slope(z, softcap) * (tl.cast(inner, tl.float32) * outer)
    return y, slope


@jit
def base_of(reference, m):
    """Return what sums of exponentials of numbers up to m are relative to: the reference unless m is far above it."""
    return finite_base(tl.where(m > reference + NEAR, m, reference))


@jit
def finite_base(m):
    """Return what numbers up to m are made relative to: -inf minus -inf would be NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


@jit
def relative_to(m, base, total, moment):
    """Return sums of exponentials relative to `base` that were relative to m, and their moment."""
    distance = tl.where(total > 0.0, m - base, 0.0)  # NaN stays
    fade = tl.exp2(distance * LOG2E)
    distance = tl.where(fade > 0.0, distance, 0.0)  # 0 times infinity would be NaN
    return fade * total, fade * (moment + distance * total)


@jit
def add_exponentials(y, reference, m, total, moment, MOMENTS: tl.constexpr, BRANCHLESS: tl.constexpr):
    """Return the exponentials of some columns relative to a reference; and m, total and moment with theirs.

    m is the largest number, and total and moment are sums of exponentials and of these times the distance to m, both
    relative to `base_of(reference, m)`.
    """
    base, new_m = base_of(reference, m), tl.maximum(m, tl.max(y, axis=1))
    new_base = base_of(reference, new_m)
    e = tl.exp2((y - new_base[:, None]) * LOG2E)
    fade = tl.where(base == new_base, 1.0, tl.exp2((base - new_base) * LOG2E))  # infinity minus infinity would be NaN
    if MOMENTS:
        top = finite_base(new_m)
        moved = tl.where(total > 0.0, m - top, 0.0)
        distance = tl.maximum(y - top[:, None], LEAST_DISTANCE)  # 0 times infinity would be NaN
        moment = fade * (moment + moved * total) + tl.sum(e * distance, axis=1)
    total = fade * total + tl.sum(e, axis=1)
    is_far = new_base != reference
    has_far = 1 if BRANCHLESS else tl.max(is_far.to(tl.int32), axis=0)
    if has_far > 0:
        e *= tl.where(is_far, tl.exp2((new_base - reference) * LOG2E), 1.0)[:, None]
    return e, new_m, total, moment


@jit
def gradients_of(y, reference, a, b):
    """Return E (a + b log E) of some columns, E their exponentials relative to a reference."""
    distance = y - reference[:, None]
    e = tl.exp2(distance * LOG2E)
    return e * (a[:, None] + b[:, None] * tl.maximum(distance, LEAST_DISTANCE))  # 0 times infinity would be NaN


@jit
def is_other(cols, limit, own):
    """Return the mask of the columns below a row's limit that are not its own."""
    return (cols[None, :] < limit[:, None]) & (cols[None, :] != own[:, None])


@jit
def logits_kernel(
    x, w, p, bias_ptr, class_weight_ptr, row_ptr, own_ptr, count_ptr, place_ptr, part_ptr, out_ptr, first_out_ptr,
    K, M, V, H, x_stride, w_stride_v, w_stride_h, p_stride, inner, outer, softcap,
    GRADIENTS: tl.constexpr, LOGITS: tl.constexpr, MOMENTS: tl.constexpr, DIRECT: tl.constexpr, ROUNDED: tl.constexpr,
    FLOAT16: tl.constexpr, DESCRIBED: tl.constexpr, P_DESCRIBED: tl.constexpr, WIDEN: tl.constexpr,
    PROGRAMS: tl.constexpr, PIECES: tl.constexpr, FLATTEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Compute tiles of x W^T, and of their rows either exponentials with their sums, or GRADIENTS.

    With LOGITS p gets the transformed logits instead of exponentials, in float32.

    `row [4, M]` has the rows' references and the coefficients of gradients; a reference of +inf is a row that does not
    count. `part [4, tiles, M]` gets the sums of exponentials, the largest logit of the tile, with MOMENTS their
    moments, and with class weights weighted logits. The sums are relative to the reference with DIRECT, which takes
    less time but is of no use for a row that is FAR, else as `add_exponentials` has them. With a `place` a row of x is
    that row of all others.
    Columns `out [M, K]` are left out besides a row's own, those of a tile from `first_out [tiles + 1, M]` on.
    """
    end = tl.load(count_ptr)
    tiles_m, tiles_n = tl.cdiv(end, BLOCK_M), tl.cdiv(V, BLOCK_N)
    WIDTH: tl.constexpr = BLOCK_N // PIECES  # a piece of a tile at a time: an epilogue has few registers left
    LOW: tl.constexpr = tl.float16 if FLOAT16 else tl.bfloat16
    SCALE: tl.constexpr = 32768.0 if FLOAT16 else 1.0
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=FLATTEN):
        row_tile, col_tile = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        first_row, first_col = row_tile * BLOCK_M, col_tile * BLOCK_N
        z = product(
            x, w, first_row, first_col, end, V, H, x_stride, 1, w_stride_v, w_stride_h,
            DESCRIBED, False, True, WIDEN, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES,
        )  # fmt: skip
        rows = first_row + tl.arange(0, BLOCK_M)
        inside = rows < end
        place = rows
        if place_ptr is not None:
            place = tl.load(place_ptr + rows, mask=inside, other=0)
        reference = tl.load(row_ptr + place, mask=inside, other=float("inf"))
        own = tl.load(own_ptr + place, mask=inside, other=-1)
        limit = tl.where(inside & (reference < float("inf")), V, 0)  # no column of a row that does not count
        if GRADIENTS:
            a = tl.load(row_ptr + M + place, mask=inside, other=0.0)
            b = tl.load(row_ptr + 2 * M + place, mask=inside, other=0.0)
            u = tl.load(row_ptr + 3 * M + place, mask=inside, other=0.0)
        if out_ptr is not None:
            first_out = tl.load(first_out_ptr + col_tile.to(tl.int64) * M + place, mask=inside, other=0)
            number_out = tl.load(first_out_ptr + (col_tile + 1).to(tl.int64) * M + place, mask=inside, other=0)
            number_out -= first_out
            most_out = tl.max(number_out, axis=0)
            out_ptrs = out_ptr + place.to(tl.int64) * K + first_out
        # Most tiles have no column that is left out: comparing them all would take a third of the epilogue.
        is_own = (own >= first_col) & (own < first_col + BLOCK_N)
        # LLVM takes minutes for a branch in each of many pieces.
        has_others = 1 if PIECES > 2 else tl.max((is_own | (limit < first_col + BLOCK_N)).to(tl.int32), axis=0)
        if PIECES == 8:
            pieces = column_eighths(z)
        elif PIECES == 4:
            pieces = column_quarters(z)
        elif PIECES == 2:
            pieces = column_halves(z)
        else:
            pieces = (z,)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)
        moment = tl.zeros((BLOCK_M,), dtype=tl.float32)
        weighted = tl.zeros((BLOCK_M,), dtype=tl.float32)
        largest = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        for i in tl.static_range(PIECES):  # pyright: ignore[reportGeneralTypeIssues]
            col = first_col + i * WIDTH
            cols = col + tl.arange(0, WIDTH)
            y, slope = transformed(pieces[i], bias_ptr, cols, V, inner, outer, softcap, ROUNDED, LOW)
            kept = y
            if has_others > 0:
                kept = tl.where(is_other(cols, limit, own), y, float("-inf"))
            if out_ptr is not None:
                for k in range(most_out):
                    out = tl.load(out_ptrs + k, mask=k < number_out, other=-1)
                    kept = tl.where(cols[None, :] == out[:, None], float("-inf"), kept)
            if GRADIENTS:
                value = gradients_of(kept, reference, a, b)
            elif DIRECT:
                value = tl.exp2((kept - reference[:, None]) * LOG2E)
                total += tl.sum(value, axis=1)
                largest = tl.maximum(largest, tl.max(kept, axis=1))
            else:
                value, largest, total, moment = add_exponentials(
                    kept, reference, largest, total, moment, MOMENTS, PIECES > 2
                )
            if class_weight_ptr is not None:
                class_weight = tl.load(class_weight_ptr + cols, mask=cols < V, other=0.0).to(tl.float32)[None, :]
                others = is_other(cols, limit, own)
                if GRADIENTS:
                    value += tl.where(others, u[:, None] * class_weight, 0.0)
                else:
                    weighted += tl.sum(tl.where(others, class_weight * y, 0.0), axis=1)
            if p is not None:
                stored = y if LOGITS else (value * slope * SCALE).to(LOW)
                if P_DESCRIBED:
                    p.store([first_row, col], stored)
                else:
                    is_stored = inside if place_ptr is not None else rows < M
                    p_ptrs = p + place.to(tl.int64)[:, None] * p_stride + cols[None, :]
                    tl.store(p_ptrs, stored, mask=is_stored[:, None] & (cols < V)[None, :])
        if part_ptr is not None:
            part_ptrs = part_ptr + col_tile.to(tl.int64) * M + place
            step = tiles_n.to(tl.int64) * M
            tl.store(part_ptrs, total, mask=inside)
            tl.store(part_ptrs + step, largest, mask=inside)
            if MOMENTS:
                tl.store(part_ptrs + 2 * step, moment, mask=inside)
            if class_weight_ptr is not None:
                tl.store(part_ptrs + 3 * step, weighted, mask=inside)


@jit
def pair_sums(x):
    """Add up the first axis, of 32, pair by pair: a sum whose order depends on no layout of threads."""
    N: tl.constexpr = x.shape[1]
    for i in tl.static_range(5):  # pyright: ignore[reportGeneralTypeIssues]
        low, high = tl.split(tl.permute(tl.reshape(x, (2, 16 >> i, N)), (1, 2, 0)))
        x = low + high
    return tl.reshape(x, (N,))


@jit
def combine_kernel(
    part_ptr, row_ptr, count_ptr, place_ptr, out_ptr, far_ptr, M, tiles, MOMENTS: tl.constexpr, WEIGHTED: tl.constexpr,
    DIRECT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Add the parts of rows, `[4, tiles, M]`, in the order of the tiles: out `[4, M]`.

    They are relative to the second, the larger one of the row's reference, `row [M]`, and its largest logit. `far [M]`
    says which rows are FAR; with a `place` only the rows that it lists are added up. The parts of AHEAD blocks of tiles
    are read together: there are few programs, each of which would wait for one block after the other.
    """
    WIDE: tl.constexpr = AHEAD * BLOCK_T
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = rows < tl.load(count_ptr)
    if place_ptr is not None:
        rows = tl.load(place_ptr + rows, mask=inside, other=0)
    step = tl.cast(tiles, tl.int64) * M
    largest = tl.full((WIDE, BLOCK_M), float("-inf"), dtype=tl.float32)
    for start in range(0, tiles, WIDE):
        t = start + tl.arange(0, WIDE)
        mask = (t < tiles)[:, None] & inside[None, :]
        part_ptrs = part_ptr + (t.to(tl.int64)[:, None] * M + rows[None, :])
        largest = tl.maximum(largest, tl.load(part_ptrs + step, mask=mask, other=float("-inf")))
    m, reference = tl.max(largest, axis=0), tl.load(row_ptr + rows, mask=inside, other=0.0)
    if far_ptr is not None:
        tl.store(far_ptr + rows, (inside & (m - reference >= FAR)).to(tl.int8), mask=rows < M)
    m = tl.where(m > reference, m, reference)  # NaN of a reference stays
    top = finite_base(m)[None, :]
    total = tl.zeros((BLOCK_T, BLOCK_M), dtype=tl.float32)
    moment = tl.zeros((BLOCK_T, BLOCK_M), dtype=tl.float32)
    weighted = tl.zeros((BLOCK_T, BLOCK_M), dtype=tl.float32)
    for start in tl.range(0, tiles, BLOCK_T, loop_unroll_factor=AHEAD):
        t = start + tl.arange(0, BLOCK_T)
        mask = (t < tiles)[:, None] & inside[None, :]
        part_ptrs = part_ptr + (t.to(tl.int64)[:, None] * M + rows[None, :])
        part_total = tl.load(part_ptrs, mask=mask, other=0.0)
        part_m = tl.load(part_ptrs + step, mask=mask, other=float("-inf"))
        base = reference[None, :] if DIRECT else base_of(reference[None, :], part_m)
        distance = tl.where(part_total > 0.0, base - top, 0.0)
        fade = tl.exp2(distance * LOG2E)
        if MOMENTS:
            part_moment = tl.load(part_ptrs + 2 * step, mask=mask, other=0.0)
            moved = tl.where(part_total > 0.0, part_m - top, 0.0)
            moment += fade * (part_moment + moved * part_total)
        if WEIGHTED:
            weighted += tl.load(part_ptrs + 3 * step, mask=mask, other=0.0)
        total += fade * part_total
    tl.store(out_ptr + rows, pair_sums(total), mask=inside)
    tl.store(out_ptr + M + rows, m, mask=inside)
    tl.store(out_ptr + 2 * M + rows, pair_sums(moment), mask=inside)
    tl.store(out_ptr + 3 * M + rows, pair_sums(weighted), mask=inside)


@jit
def statistics_kernel(
    sums_ptr, own_ptr, mask_ptr, stats_ptr, results_ptr, flags_ptr, M, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Compute from the sums of rows `[4, M]` and the logits of their own classes what `softmax.py` says of them.

    Out are statistics `[5, M]`, results `[4, M]` and flags `[2, M]`: the own class is the largest, and it is so far
    below that exponentials relative to it would overflow.
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = rows < M
    counts = tl.load(mask_ptr + rows, mask=inside, other=0) != 0
    y = tl.load(own_ptr + rows, mask=counts, other=0.0)
    total = tl.load(sums_ptr + rows, mask=counts, other=0.0)
    m = tl.load(sums_ptr + M + rows, mask=counts, other=0.0)
    moment = tl.load(sums_ptr + 2 * M + rows, mask=counts, other=0.0)
    weighted = tl.load(sums_ptr + 3 * M + rows, mask=counts, other=0.0)
    reference = tl.where(m > y, m, y)
    rest, moment = relative_to(m, reference, total, moment)
    distance = y - reference
    own = exp(distance)
    moment += tl.where(own > 0.0, own * distance, 0.0)
    total = own + rest
    log_total = tl.where(own == 1.0, log1p(rest), tl.log(total))
    tl.store(stats_ptr + rows, tl.where(counts, reference, 0.0), mask=inside)
    tl.store(stats_ptr + M + rows, tl.where(counts, rest, 0.0), mask=inside)
    tl.store(stats_ptr + 2 * M + rows, tl.where(counts, own, 1.0), mask=inside)
    tl.store(stats_ptr + 3 * M + rows, tl.where(counts, moment, 0.0), mask=inside)
    tl.store(results_ptr + rows, tl.where(counts, distance - log_total, 0.0), mask=inside)
    tl.store(results_ptr + M + rows, tl.where(counts, log_total - moment / total, 0.0), mask=inside)
    tl.store(results_ptr + 2 * M + rows, tl.where(counts, reference + log_total, 0.0), mask=inside)
    tl.store(results_ptr + 3 * M + rows, tl.where(counts, weighted, 0.0), mask=inside)
    near = reference - y < FAR
    tl.store(stats_ptr + 4 * M + rows, tl.where(counts & near, own, 1.0), mask=inside)
    tl.store(flags_ptr + rows, (counts & (m <= y)).to(tl.int8), mask=inside)
    tl.store(flags_ptr + M + rows, (counts & (near == 0)).to(tl.int8), mask=inside)


@jit
def coefficients_kernel(
    stats_ptr, mask_ptr, own_ptr, y_ptr, slope_ptr, class_weight_ptr, size_ptr, grad_ptr, entropy_grad_ptr,
    lse_grad_ptr, weighted_grad_ptr, out_ptr, M, stats_stride, grad_stride, factor, least,
    EXPONENTIALS: tl.constexpr, FLOAT16: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Compute for rows of one class what `coefficients` of `softmax.py` does, and what is read beside P.

    Out is `[7, M]`: a row's reference, a, b and u, over its size; r, what rounding its own entry loses, and that entry,
    of which r times is the own class's gradient. With EXPONENTIALS in P, a is in r, and the first four are not written.
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = rows < M
    counts = tl.load(mask_ptr + rows, mask=inside, other=0) != 0
    rest = tl.load(stats_ptr + stats_stride + rows, mask=counts, other=0.0)
    own = tl.load(stats_ptr + 2 * stats_stride + rows, mask=counts, other=1.0)
    column = tl.load(own_ptr + rows, mask=inside, other=-1)
    g = tl.zeros((BLOCK_M,), dtype=tl.float32)
    if grad_ptr is not None:
        g = tl.load(grad_ptr + rows * grad_stride, mask=counts, other=0.0)
    f = tl.zeros((BLOCK_M,), dtype=tl.float32)
    if lse_grad_ptr is not None:
        f = tl.load(lse_grad_ptr + rows, mask=counts, other=0.0)
    total = own + rest
    p = own / total
    a, b, u = f - g, tl.zeros((BLOCK_M,), dtype=tl.float32), tl.zeros((BLOCK_M,), dtype=tl.float32)
    entry = g * (rest / total) + p * f
    if entropy_grad_ptr is not None:
        mean = tl.load(stats_ptr + 3 * stats_stride + rows, mask=counts, other=0.0) / total
        h = tl.load(entropy_grad_ptr + rows, mask=counts, other=0.0)
        distance = tl.load(y_ptr + rows, mask=counts, other=0.0) - tl.load(stats_ptr + rows, mask=counts, other=0.0)
        entry -= h * tl.where(p > 0.0, p * (distance - mean), 0.0)
        a += h * mean
        b = -h / total
    if weighted_grad_ptr is not None:
        u = tl.load(weighted_grad_ptr + rows, mask=counts, other=0.0)
        here = counts & (column >= 0)
        entry += u * tl.load(class_weight_ptr + column, mask=here, other=0.0).to(tl.float32)
    a = a / total
    r = tl.zeros((BLOCK_M,), dtype=tl.float32) + tl.cast(factor, tl.float32)
    slope = r
    if slope_ptr is not None:
        slope = tl.load(slope_ptr + rows, mask=counts, other=0.0)
    entry *= slope
    if EXPONENTIALS:
        scale = tl.load(stats_ptr + 4 * stats_stride + rows, mask=counts, other=1.0)
        r = a * (r * scale)
        if lse_grad_ptr is not None:
            smallest = tl.abs(entry) * tl.cast(least, tl.float32) * scale / total
            r = tl.where(tl.abs(r) < smallest, smallest, r)
            stored = tl.where(r == 0.0, 0.0, entry / r)
        else:
            stored = -rest / scale
            if slope_ptr is not None:
                stored *= slope
    else:
        if size_ptr is not None:
            size = tl.load(size_ptr + rows, mask=inside, other=1.0)
            a, b, u, r = a / size, b / size, u / size, r * size
        stored = entry / r
        reference = tl.load(stats_ptr + rows, mask=counts, other=0.0)
        tl.store(out_ptr + rows, tl.where(counts, reference, float("inf")), mask=inside)
        tl.store(out_ptr + M + rows, a, mask=inside)
        tl.store(out_ptr + 2 * M + rows, b, mask=inside)
        tl.store(out_ptr + 3 * M + rows, u, mask=inside)
    UNIT: tl.constexpr = 32768.0 if FLOAT16 else 1.0
    LOW: tl.constexpr = tl.float16 if FLOAT16 else tl.bfloat16
    rounded = (stored * UNIT).to(LOW).to(tl.float32) / UNIT
    lost = tl.where(counts & (column >= 0), entry - r * rounded, 0.0)
    tl.store(out_ptr + 4 * M + rows, tl.where(counts, r, 0.0), mask=inside)
    tl.store(out_ptr + 5 * M + rows, lost, mask=inside)
    tl.store(out_ptr + 6 * M + rows, stored, mask=inside)


@jit
def exponentials_kernel(
    e_ptr, p_ptr, scale_ptr, a_ptr, u_ptr, class_weight_ptr, count_ptr, V, e_stride, p_stride,
    LOGITS: tl.constexpr, TILE_M: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute a E + u w of some columns of a row, E its exponentials times a scale.

    With LOGITS e has logits, and E is relative to the scale.
    """
    row, count = tl.program_id(1).to(tl.int64), tl.load(count_ptr)
    if row >= tl.cdiv(count, TILE_M) * TILE_M:
        return
    cols = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask = cols < V
    if row >= count:  # products read the rest of a tile, and multiply it by 0
        tl.store(p_ptr + row * p_stride + cols, tl.zeros((BLOCK_V,), p_ptr.dtype.element_ty), mask=mask)
        return
    e, scale = tl.load(e_ptr + row * e_stride + cols, mask=mask, other=0.0).to(tl.float32), tl.load(scale_ptr + row)
    e = tl.exp2((e - scale) * LOG2E) if LOGITS else e * scale
    value = e * tl.load(a_ptr + row)
    if class_weight_ptr is not None:
        value += tl.load(u_ptr + row) * tl.load(class_weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(p_ptr + row * p_stride + cols, value.to(p_ptr.dtype.element_ty), mask=mask)


@jit
def classes_kernel(
    x_ptr, w_ptr, bias_ptr, id_ptr, column_ptr, counts_ptr, y_ptr, slope_ptr, K, V, H, x_stride, w_stride_v,
    w_stride_h, ignore_index, first_class, num_classes, inner, outer, softcap,
    RAW: tl.constexpr, ROUNDED: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Find one class of a row among those of the weight, and compute its logit: see `Classes`."""
    at = tl.program_id(0).to(tl.int64)
    row, id = at // K, tl.load(id_ptr + at).to(tl.int64)
    counts = id != tl.cast(ignore_index, tl.int64)
    column = id - tl.cast(first_class, tl.int64)
    valid = (id >= 0) & (id < num_classes)
    here = counts & valid & (column >= 0) & (column < V)
    place = tl.where(here, column, 0)
    end = tl.where(here, H, 0)
    total = tl.zeros((BLOCK_H,), dtype=tl.float32)
    for start in range(0, H, BLOCK_H):
        cols = start + tl.arange(0, BLOCK_H)
        mask = cols < end
        x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + place * w_stride_v + cols.to(tl.int64) * w_stride_h, mask=mask, other=0.0).to(tl.float32)
        total += x * w
    z = tl.zeros((1,), dtype=tl.float32) + tl.sum(total, axis=0)
    if bias_ptr is not None:
        z += tl.load(bias_ptr + place, mask=here, other=0.0).to(tl.float32)
    if ROUNDED:
        z = z.to(x_ptr.dtype.element_ty).to(tl.float32)
    y = z
    if RAW == 0:
        y, slope = capped(z, inner, outer, softcap, ROUNDED)
        if slope_ptr is not None:
            slope = tl.where(here, slope, 0.0)
            tl.store(slope_ptr + at + tl.arange(0, 1), slope)
        y = tl.where(y == float("inf"), float("nan"), y)
    y = tl.where(here, y, float("-inf"))
    y = tl.where(counts, tl.where(valid, y, float("nan")), 0.0)
    tl.store(y_ptr + at + tl.arange(0, 1), y)
    tl.store(column_ptr + at, tl.where(here, column, -1).to(tl.int32))
    tl.store(counts_ptr + at, counts.to(tl.int8))


@jit
def scale_rows_kernel(
    x_ptr, p_ptr, scaled_ptr, factor_ptr, own_ptr, entry_ptr, count_ptr, scale_ptr, H, x_stride, p_stride,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Write r x, zeros where r is 0 or the row is past the count, and put the entry of its own class into P."""
    row = tl.program_id(0).to(tl.int64)
    inside = row < tl.load(count_ptr)
    r = tl.load(factor_ptr + row, mask=inside, other=0.0)
    if scale_ptr is not None:
        r *= tl.load(scale_ptr)
    end = tl.where(inside & (r != 0.0), H, 0)
    for start in range(0, H, BLOCK_H):
        cols = start + tl.arange(0, BLOCK_H)
        x = tl.load(x_ptr + row * x_stride + cols, mask=cols < end, other=0.0).to(tl.float32)
        tl.store(scaled_ptr + row * H + cols, (x * r).to(scaled_ptr.dtype.element_ty), mask=cols < H)
    if entry_ptr is not None:
        own = tl.load(own_ptr + row, mask=inside, other=-1).to(tl.int64)
        entry = tl.load(entry_ptr + row, mask=inside, other=0.0)
        tl.store(p_ptr + row * p_stride + own, entry.to(p_ptr.dtype.element_ty), mask=inside & (own >= 0))


@jit
def put_entries_kernel(p_ptr, column_ptr, entry_ptr, count_ptr, K, p_stride, BLOCK_K: tl.constexpr):
    """Put the entries `[M, K]` of a row into their columns of P; one that is elsewhere is negative."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    inside = k < tl.where(row < tl.load(count_ptr), K, 0)
    column = tl.load(column_ptr + row * K + k, mask=inside, other=-1).to(tl.int64)
    entry = tl.load(entry_ptr + row * K + k, mask=inside, other=0.0)
    tl.store(p_ptr + row * p_stride + column, entry.to(p_ptr.dtype.element_ty), mask=inside & (column >= 0))
