"""The kernels of the cross entropy of rows of logits; `cross_entropy.py` has the formulas.

A tile holds several rows of few classes. With a program for each row these are all latency: a program waits for the
logits, then for the target, then for the target's logit and weight, and has little to do in between. In a tile nothing
waits for the target but its weight: the target's logit is picked from the tile in registers.

One program takes a longer row forward, whatever its length, and a block of one backward. Both directions in one
program, the second reading from L2, were tried on an H200: of 4096x128256 logits in bf16 the two kernels take 0.79 ms,
the one 0.79 to 1.6; rows split over programs that wait for each other, which read once, 0.95 to 1.4.
"""

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.math import LOG2E, cap, cap_slope, everywhere
from llmk.ops.common.rows import as_rows
from llmk.ops.common.sums import mean_of_rows, sum_pair, sum_to_scalar
from llmk.ops.loss.cross_entropy_options import CrossEntropyOptions, RowLoss, RowResults
from llmk.registry import cdiv, empty, grid_cap, jit, next_power_of_2, num_programs, wrap_triton


@jit
def capped(logits, softcap):
    """x in float32; a softcap of None is off."""
    x = logits.to(tl.float32)
    if softcap is not None:
        x = cap(x, softcap, logits.dtype == tl.float32)
    return x


@jit
def counts_of(target, weight_ptr, num_classes, ignore_index):
    """Return whether a row's int64 target counts, whether it is a class, and its class weight."""
    counts = target != ignore_index
    valid = counts & (target >= 0) & (target < num_classes)
    w_t = tl.cast(counts, tl.float32)
    if weight_ptr is not None:
        w_t = tl.load(weight_ptr + target, mask=valid, other=0.0).to(tl.float32)
    return counts, valid, w_t


@jit
def loss_of(
    m, logsum, weight_sum, below, x_t, w_t, counts, valid, num_classes, smoothing, z_loss, SMOOTH: tl.constexpr
):
    """The loss of rows from their statistics and their targets' x."""
    loss = w_t * (logsum - (x_t - m))
    if SMOOTH:
        loss = (1.0 - smoothing) * loss + smoothing / num_classes * (weight_sum * logsum + below)
    loss += z_loss * (m + logsum) * (m + logsum)
    return tl.where(valid, loss, tl.where(counts, float("nan"), 0.0))  # out of range: NaN, and nothing was read there


@jit
def _target_column(target, V):
    """Return the rows' target columns, -1 for none: in 32 bits, which compare in half the instructions of 64."""
    return tl.where((target >= 0) & (target < V), target, -1).to(tl.int32)


@jit
def cross_entropy_short_kernel(
    x_ptr, target_ptr, weight_ptr, loss_ptr, count_ptr, stats_ptr,
    M, V, x_stride, ignore_index, smoothing, z_loss, softcap,
    SMOOTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    smoothing = tl.cast(smoothing, tl.float32)
    z_loss = tl.cast(z_loss, tl.float32)
    cols = tl.arange(0, BLOCK_V)
    w = 1.0
    weight_sum = tl.cast(V, tl.float32)
    if SMOOTH and weight_ptr is not None:
        w = tl.load(weight_ptr + cols, mask=cols < V, other=0.0).to(tl.float32)[None, :]
        weight_sum = tl.sum(w)
    # Persistent: the next rows are prefetched while these are computed.
    first = tl.program_id(0).to(tl.int64) * BLOCK_M
    for start in tl.range(first, M, tl.num_programs(0) * BLOCK_M, num_stages=NUM_STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        rows = start + tl.arange(0, BLOCK_M)
        row_mask = rows < M
        mask = row_mask[:, None] & (cols < V)[None, :]
        target = tl.load(target_ptr + rows, mask=row_mask, other=0).to(tl.int64)
        x = capped(tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=float("-inf")), softcap)
        if softcap is not None:
            x = tl.where(mask, x, float("-inf"))  # again: capped, it is -c
        counts, valid, w_t = counts_of(target, weight_ptr, V, ignore_index)
        is_target = cols[None, :] == _target_column(target, V)[:, None]
        m = tl.max(x, axis=1)
        total, x_t = sum_pair(tl.exp2((x - m[:, None]) * LOG2E), tl.where(is_target, x, 0.0), 1)
        below = 0.0
        if SMOOTH:
            below = tl.sum(tl.where(mask, w * (m[:, None] - x), 0.0), axis=1)
        loss = loss_of(m, tl.log(total), weight_sum, below, x_t, w_t, counts, valid, V, smoothing, z_loss, SMOOTH)
        tl.store(loss_ptr + rows, loss, mask=row_mask)
        tl.store(count_ptr + rows, w_t, mask=row_mask)
        tl.store(stats_ptr + rows, m, mask=row_mask)
        tl.store(stats_ptr + M + rows, total, mask=row_mask)


@jit
def cross_entropy_short_backward_kernel(
    grad_ptr, denominator_ptr, x_ptr, target_ptr, weight_ptr, weight_sum_ptr, stats_ptr, dx_ptr,
    M, V, grad_stride, x_stride, dx_stride, ignore_index, smoothing, z_loss, softcap,
    SMOOTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    smoothing = tl.cast(smoothing, tl.float32)
    z_loss = tl.cast(z_loss, tl.float32)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_V)
    row_mask = rows < M
    mask = row_mask[:, None] & (cols < V)[None, :]
    target = tl.load(target_ptr + rows, mask=row_mask, other=0).to(tl.int64)
    # Rows that do not count are read too: to leave them out would be to wait for the targets.
    logits = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0)
    x = capped(logits, softcap)
    m = tl.load(stats_ptr + rows, mask=row_mask, other=0.0)
    total = tl.load(stats_ptr + M + rows, mask=row_mask, other=1.0)
    g = tl.load(grad_ptr + rows * grad_stride, mask=row_mask, other=0.0)
    if denominator_ptr is not None:
        g = g / tl.load(denominator_ptr)
    counts, valid, w_t = counts_of(target, weight_ptr, V, ignore_index)
    g = tl.where(valid, g, float("nan"))  # of a target out of range
    is_target = cols[None, :] == _target_column(target, V)[:, None]
    p = tl.exp2((x - m[:, None]) * LOG2E) * tl.div_rn(1.0, total)[:, None]
    # Differences first: where p is near 1 each nearly cancels, and what else p carries must not be rounded with them.
    dx = w_t[:, None] * (p - tl.where(is_target, 1.0, 0.0))
    if SMOOTH:
        weight_sum = tl.cast(V, tl.float32)
        w = 1.0
        if weight_ptr is not None:
            weight_sum = tl.load(weight_sum_ptr)
            w = tl.load(weight_ptr + cols, mask=cols < V, other=0.0).to(tl.float32)[None, :]
        dx = (1.0 - smoothing) * dx + smoothing / V * (weight_sum * p - w)
    dx += (2.0 * z_loss * (m + tl.log(total)))[:, None] * p
    if softcap is not None:
        dx *= cap_slope(logits, softcap)
    dx = tl.where(counts[:, None], g[:, None] * dx, 0.0)  # whatever a row holds that does not count
    tl.store(dx_ptr + rows[:, None] * dx_stride + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)


LONGEST_SHORT = 1024
"""Classes of the longest row that these kernels take."""
MOST_ROWS = 128
"""The most rows of a tile: with more than one a thread, what is kept of each row takes the registers."""


def _short_tile(V: int) -> dict[str, int]:
    """Whole rows, to make up 1024 elements, 16 of a thread."""
    # H200, bf16, 2^26 elements, times the floor of the gradient: 1.28 at 256 classes, 1.40 at 1000, where a program for
    # each row took 3.18 and 1.63; twice the elements and warps 1.29 and 1.41.
    block_v = next_power_of_2(V)
    block_m = min(MOST_ROWS, max(1, 1024 // block_v))
    return {"BLOCK_M": block_m, "BLOCK_V": block_v, "num_warps": max(1, block_m * block_v // 512)}


def _short_launch(M: int, V: int, device: torch.device) -> tuple[int, dict[str, int]]:
    """The number of programs, 64 warps on each multiprocessor, and their tile and prefetch."""
    # As above, times the floor of the loss: 2.29 at 256 classes, 2.36 at 1000, where a program for each row took 7.57
    # and 2.81; twice the elements and warps 2.29 and 2.78, twice the elements alone 2.15 and 2.14, but they spill with
    # all options. Rows of 2048 classes are as fast in the kernels of long rows.
    tile = _short_tile(V)
    programs = grid_cap(cdiv(M, tile["BLOCK_M"]), num_programs(device, 64 // tile["num_warps"]))
    return programs, tile | {"NUM_STAGES": 3}


ALIGNED = tl.constexpr(16)
"""Elements: Triton takes a number for a multiple of 16 or for no multiple of anything."""


@jit
def _first_aligned(start, V, UNALIGNED: tl.constexpr):
    """Columns before the first that Triton may take to be ALIGNED elements from the tensor's beginning or a multiple.

    From there on a thread reads 16 bytes at a time, where no mask cuts a block short.
    """
    head = tl.cast(0, tl.int32)
    if UNALIGNED:
        head = tl.minimum((-start) & (ALIGNED - 1), V).to(tl.int32)
        start = tl.multiple_of(start + head, ALIGNED)
    return head, start


@jit
def _add_block(statistics, x_ptr, weight_ptr, cols, end, softcap, SMOOTH: tl.constexpr, MASKED: tl.constexpr):
    """A row's running statistics with the columns below `end` counted in; all are, unless MASKED."""
    m, total, weight_sum, below = statistics
    mask = cols < end if MASKED else None
    x = capped(tl.load(x_ptr + cols, mask=mask, other=float("-inf") if MASKED else None), softcap)
    if MASKED:
        x = tl.where(mask, x, float("-inf"))
    new_m = tl.maximum(m, tl.max(x, axis=0))
    # Subtracting -inf from -inf would be NaN where nothing finite has been seen yet.
    base = tl.where(new_m == float("-inf"), 0.0, new_m)
    total = total * tl.exp2((m - base) * LOG2E) + tl.sum(tl.exp2((x - base) * LOG2E), axis=0)
    if SMOOTH:
        w = tl.cast(cols < end, tl.float32)
        if weight_ptr is not None:
            w = tl.load(weight_ptr + cols, mask=cols < end, other=0.0).to(tl.float32)
        below += tl.where(m == float("-inf"), 0.0, weight_sum * (base - m))
        below += tl.sum(tl.where(cols < end, w * (base - x), 0.0), axis=0)
        weight_sum += tl.sum(w, axis=0)
    return new_m, total, weight_sum, below


@jit
def row_statistics(
    x_ptr, start, weight_ptr, V, counts, softcap, SMOOTH: tl.constexpr, UNALIGNED: tl.constexpr, BLOCK_V: tl.constexpr
):
    """A row's maximum and sum, and with smoothing sum_c(w_c) and sum_c(w_c * (m - x_c)): small where x is large.

    A row that does not count is not read: it has no maximum and no sum.
    """
    m = tl.full((), float("-inf"), dtype=tl.float32)
    total = tl.full((), 0.0, dtype=tl.float32)
    weight_sum = tl.full((), 0.0, dtype=tl.float32)
    below = tl.full((), 0.0, dtype=tl.float32)
    head, first = _first_aligned(start, V, UNALIGNED)
    if UNALIGNED:
        cols, end = tl.arange(0, ALIGNED), tl.where(counts, head, 0)
        m, total, weight_sum, below = _add_block(
            (m, total, weight_sum, below), x_ptr + start, weight_ptr, cols, end, softcap, SMOOTH, True
        )
        if weight_ptr is not None:
            weight_ptr += head
    x_ptr += first
    V -= head
    end = tl.where(counts, V, 0)
    whole = end // BLOCK_V * BLOCK_V
    for col in range(0, whole, BLOCK_V):
        m, total, weight_sum, below = _add_block(
            (m, total, weight_sum, below), x_ptr, weight_ptr, col + tl.arange(0, BLOCK_V), V, softcap, SMOOTH, False
        )
    for col in range(whole, end, BLOCK_V):  # once, or not at all
        m, total, weight_sum, below = _add_block(
            (m, total, weight_sum, below), x_ptr, weight_ptr, col + tl.arange(0, BLOCK_V), V, softcap, SMOOTH, True
        )
    return m, total, weight_sum, below


@jit
def cross_entropy_kernel(
    x_ptr, target_ptr, weight_ptr, loss_ptr, count_ptr, stats_ptr,
    M, V, x_stride, ignore_index, smoothing, z_loss, softcap,
    SMOOTH: tl.constexpr, UNALIGNED: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    smoothing = tl.cast(smoothing, tl.float32)
    z_loss = tl.cast(z_loss, tl.float32)
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row).to(tl.int64)
    counts, valid, w_t = counts_of(target, weight_ptr, V, ignore_index)
    x_t = capped(tl.load(x_ptr + row * x_stride + target, mask=valid, other=0.0), softcap)
    m, total, weight_sum, below = row_statistics(
        x_ptr, row * x_stride, weight_ptr, V, counts, softcap, SMOOTH, UNALIGNED, BLOCK_V
    )
    logsum = tl.log(total)
    loss = loss_of(m, logsum, weight_sum, below, x_t, w_t, counts, valid, V, smoothing, z_loss, SMOOTH)
    tl.store(loss_ptr + row, loss)
    tl.store(count_ptr + row, w_t)
    tl.store(stats_ptr + row, m)
    tl.store(stats_ptr + M + row, total)


@jit
def _store_gradient(
    x_ptr,
    dx_ptr,
    cols,
    end,
    classes,
    num_classes,
    row_values,
    weights,
    options,
    SMOOTH: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The gradient of a row's columns below `end`; all are, unless MASKED."""
    target, counts, valid, w_t, g, m, total = row_values
    weight_ptr, weight_sum_ptr = weights
    smoothing, z_loss, softcap = options
    mask = cols < end if MASKED else None
    read = everywhere(counts, cols)
    # A row that does not count is not read: its gradient is zero whatever it holds.
    logits = tl.load(x_ptr + cols, mask=mask & read if MASKED else read, other=0.0)
    x = capped(logits, softcap)
    p = tl.exp2((x - m) * LOG2E) / total
    # Differences first: where p is near 1 each nearly cancels, and what else p carries must not be rounded with them.
    dx = w_t * (p - tl.where(classes == target, 1.0, 0.0))
    if SMOOTH:
        weight_sum = tl.cast(num_classes, tl.float32)
        w = 1.0
        if weight_ptr is not None:
            weight_sum = tl.load(weight_sum_ptr)
            w = tl.load(weight_ptr + classes, mask=cols < end, other=0.0).to(tl.float32)
        dx = (1.0 - smoothing) * dx + smoothing / num_classes * (weight_sum * p - w)
    dx += 2.0 * z_loss * (m + tl.log(total)) * p
    if softcap is not None:
        dx *= cap_slope(logits, softcap)
    dx = tl.where(valid, g * dx, tl.where(counts, float("nan"), 0.0))
    tl.store(dx_ptr + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@jit
def cross_entropy_backward_kernel(
    grad_ptr, denominator_ptr, x_ptr, target_ptr, weight_ptr, weight_sum_ptr, stats_ptr, dx_ptr,
    M, V, grad_stride, x_stride, dx_stride, ignore_index, smoothing, z_loss, softcap,
    SMOOTH: tl.constexpr, UNALIGNED: tl.constexpr, RAGGED: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    smoothing = tl.cast(smoothing, tl.float32)
    z_loss = tl.cast(z_loss, tl.float32)
    program, blocks = tl.program_id(0), tl.cdiv(V, BLOCK_V)  # neighbours in time are neighbours in memory
    row, block = (program // blocks).to(tl.int64), program % blocks
    num_classes = V
    target = tl.load(target_ptr + row).to(tl.int64)
    counts, valid, w_t = counts_of(target, weight_ptr, num_classes, ignore_index)
    m = tl.load(stats_ptr + row)
    total = tl.load(stats_ptr + M + row)
    g = tl.load(grad_ptr + row * grad_stride)
    if denominator_ptr is not None:
        g = g / tl.load(denominator_ptr)  # div_rn's slow path would cost 40 registers
    row_values = (target, counts, valid, w_t, g, m, total)
    weights, options = (weight_ptr, weight_sum_ptr), (smoothing, z_loss, softcap)
    head, x_first = _first_aligned(row * x_stride, V, UNALIGNED)
    _, dx_first = _first_aligned(row * dx_stride, V, UNALIGNED)
    if UNALIGNED and block == 0:
        cols = tl.arange(0, ALIGNED)
        x_row, dx_row = x_ptr + row * x_stride, dx_ptr + row * dx_stride
        _store_gradient(x_row, dx_row, cols, head, cols, num_classes, row_values, weights, options, SMOOTH, True)
    x_ptr += x_first
    dx_ptr += dx_first
    V -= head
    cols = block * BLOCK_V + tl.arange(0, BLOCK_V)
    # A mask whose end is no multiple of 16 takes vectors apart, so whole blocks go without.
    if RAGGED and block * BLOCK_V + BLOCK_V <= V:
        _store_gradient(x_ptr, dx_ptr, cols, V, head + cols, num_classes, row_values, weights, options, SMOOTH, False)
    else:
        _store_gradient(x_ptr, dx_ptr, cols, V, head + cols, num_classes, row_values, weights, options, SMOOTH, True)


def row_block(V: int) -> dict[str, int]:
    """Return the block and the warps for long rows, forward and backward."""
    # H200, bf16, times the floor, forward and the gradient: 1.10 and 1.02 at 8192x32000, .98 and 1.01 at 8192x128256;
    # half the block 1.12 and 1.17, 1.00 and 1.12; twice the block and warps forward 1.13 and 1.00. At 13107x5120, where
    # blocks of 4096 are half empty, 1.44 and 1.24, with those 1.81 and 1.39.
    if V <= 8192:
        return {"BLOCK_V": min(1024, next_power_of_2(V)), "num_warps": 2}
    return {"BLOCK_V": 4096, "num_warps": 4}


def unaligned(*rows: Tensor) -> bool:
    """Return True if rows `[M, V]` of aligned tensors begin at any element, in each tensor at the same."""
    stride = rows[0].stride(0)
    return stride % ALIGNED.value != 0 and all(
        (x.stride(0) - stride) % ALIGNED.value == 0 and x.storage_offset() * x.element_size() % 16 == 0 for x in rows
    )


def row_losses(logits: Tensor, target: Tensor, options: CrossEntropyOptions) -> RowResults:
    """Compute the rows' losses of `[..., V]` logits and `[...]` targets by the kernels."""
    logits, target = as_rows(logits), target.contiguous()
    M, V = logits.shape
    loss, count = (empty(target.shape, torch.float32, logits.device) for _ in range(2))
    stats = empty((2, *target.shape), torch.float32, logits.device)
    rows = logits, target, options.contiguous_weight(), loss, count, stats
    sizes, smooth = (M, V, logits.stride(0)), options.smoothing > 0
    if V <= LONGEST_SHORT:
        programs, tile = _short_launch(M, V, logits.device)
        wrap_triton(cross_entropy_short_kernel)[(programs,)](*rows, *sizes, *options.numbers(), SMOOTH=smooth, **tile)
    else:
        switches = {"SMOOTH": smooth, "UNALIGNED": unaligned(logits)}
        wrap_triton(cross_entropy_kernel)[(M,)](*rows, *sizes, *options.numbers(), **switches, **row_block(V))
    return RowResults(loss, count, stats)


def row_gradients(
    grad: Tensor,
    denominator: Tensor | None,
    logits: Tensor,
    target: Tensor,
    stats: Tensor,
    options: CrossEntropyOptions,
) -> Tensor:
    """Compute dlogits by the kernels, for the gradient of each row `[...]` or of all `[]`, divided by `denominator`."""
    gradient = empty(logits.shape, logits.dtype, logits.device)
    grad, logits, dlogits = grad.reshape(-1) if grad.dim() else grad, as_rows(logits), as_rows(gradient)
    M, V = logits.shape
    weights = options.contiguous_weight(), options.weight_sum()
    rows = grad, denominator, logits, target.contiguous(), *weights, stats.contiguous(), dlogits
    sizes = M, V, grad.stride(0) if grad.dim() else 0, logits.stride(0), dlogits.stride(0)
    numbers, smooth = options.numbers(), options.smoothing > 0
    if V <= LONGEST_SHORT:
        tile = _short_tile(V)
        grid = (cdiv(M, tile["BLOCK_M"]),)
        wrap_triton(cross_entropy_short_backward_kernel)[grid](*rows, *sizes, *numbers, SMOOTH=smooth, **tile)
    else:
        block = row_block(V)
        switches = {"SMOOTH": smooth, "UNALIGNED": unaligned(logits, dlogits), "RAGGED": V % ALIGNED.value != 0}
        grid = (M * cdiv(V, block["BLOCK_V"]),)
        wrap_triton(cross_entropy_backward_kernel)[grid](*rows, *sizes, *numbers, **switches, **block)
    return gradient


KERNELS = RowLoss(row_losses, row_gradients, sum_to_scalar, mean_of_rows)
