"""The cross entropy of rows that one tile holds, several rows to a program; `row_loss.py` has the formulas.

With a program for each row, rows of few classes are all latency: a program waits for the logits, then for the target,
then for the target's logit and weight, and has little to do in between. Here nothing waits for the target but its
weight: the target's logit is picked from the tile in registers.
"""

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.math import LOG2E, cap_slope
from llmk.ops.common.sums import sum_pair
from llmk.ops.loss.row_loss_math import Options, capped, classes_of, counts_of, loss_of
from llmk.registry import cdiv, grid_cap, jit, next_power_of_2, num_programs, wrap_triton


@jit
def _target_column(target, first_class, V):
    """Where the rows' targets are, -1 where in no column: 32 bits, which compare in half the instructions of 64."""
    column = target
    if first_class is not None:
        column -= first_class
    return tl.where((column >= 0) & (column < V), column, -1).to(tl.int32)


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
        hit = cols[None, :] == _target_column(target, None, V)[:, None]
        m = tl.max(x, axis=1)
        total, x_t = sum_pair(tl.exp2((x - m[:, None]) * LOG2E), tl.where(hit, x, 0.0), 1)
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
    grad_ptr, divisor_ptr, x_ptr, target_ptr, weight_ptr, weight_sum_ptr, stats_ptr, dx_ptr,
    M, V, grad_stride, x_stride, dx_stride, ignore_index, smoothing, z_loss, softcap, first_class, num_classes,
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
    if divisor_ptr is not None:
        g = g / tl.load(divisor_ptr)
    classes, num_classes = classes_of(cols, V, first_class, num_classes)
    counts, valid, w_t = counts_of(target, weight_ptr, num_classes, ignore_index)
    g = tl.where(valid, g, float("nan"))  # of a target out of range
    hit = cols[None, :] == _target_column(target, first_class, V)[:, None]
    p = tl.exp2((x - m[:, None]) * LOG2E) * tl.div_rn(1.0, total)[:, None]
    # Differences first: where p is near 1 each nearly cancels, and what else p carries must not be rounded with them.
    dx = w_t[:, None] * (p - tl.where(hit, 1.0, 0.0))
    if SMOOTH:
        weight_sum = tl.cast(num_classes, tl.float32)
        w = 1.0
        if weight_ptr is not None:
            weight_sum = tl.load(weight_sum_ptr)
            w = tl.load(weight_ptr + classes, mask=cols < V, other=0.0).to(tl.float32)[None, :]
        dx = (1.0 - smoothing) * dx + smoothing / num_classes * (weight_sum * p - w)
    dx += (2.0 * z_loss * (m + tl.log(total)))[:, None] * p
    if softcap is not None:
        dx *= cap_slope(logits, softcap)
    dx = tl.where(counts[:, None], g[:, None] * dx, 0.0)  # whatever a row holds that does not count
    tl.store(dx_ptr + rows[:, None] * dx_stride + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)


LONGEST_SHORT = 1024
"""Classes of the longest row that these kernels take."""
MOST_ROWS = 128
"""The most rows of a tile: with more than one a thread, what is kept of each row takes the registers."""


def is_short(V: int) -> bool:
    return V <= LONGEST_SHORT


def _tile(V: int) -> dict[str, int]:
    """Whole rows, to make up 1024 elements, 16 of a thread."""
    # H200, bf16, 2^26 elements, times the floor of the gradient: 1.28 at 256 classes, 1.40 at 1000, where a program for
    # each row took 3.18 and 1.63; twice the elements and warps 1.29 and 1.41.
    block_v = next_power_of_2(V)
    block_m = min(MOST_ROWS, max(1, 1024 // block_v))
    return {"BLOCK_M": block_m, "BLOCK_V": block_v, "num_warps": max(1, block_m * block_v // 512)}


def _forward_launch(M: int, V: int, device: torch.device) -> tuple[int, dict[str, int]]:
    """The number of programs, 64 warps on each multiprocessor, and their tile and prefetch."""
    # As above, times the floor of the loss: 2.29 at 256 classes, 2.36 at 1000, where a program for each row took 7.57
    # and 2.81; twice the elements and warps 2.29 and 2.78, twice the elements alone 2.15 and 2.14, but they spill with
    # all options. Rows of 2048 classes are as fast in the kernels of long rows.
    tile = _tile(V)
    programs = grid_cap(cdiv(M, tile["BLOCK_M"]), num_programs(device, 64 // tile["num_warps"]))
    return programs, tile | {"NUM_STAGES": 3}


def short_losses(logits: Tensor, target: Tensor, loss: Tensor, count: Tensor, stats: Tensor, options: Options) -> None:
    """Fill the loss, the count and the statistics of the rows of logits `[M, V]`."""
    M, V = logits.shape
    programs, tile = _forward_launch(M, V, logits.device)
    wrap_triton(cross_entropy_short_kernel)[(programs,)](
        logits, target, options.contiguous_weight(), loss, count, stats,
        M, V, logits.stride(0), options.ignore_index, options.smoothing, options.z_loss, options.softcap or None,
        SMOOTH=options.smoothing > 0, **tile,
    )  # fmt: skip


def short_gradients(
    grad: Tensor, divisor: Tensor | None, logits: Tensor, target: Tensor, stats: Tensor, dlogits: Tensor,
    options: Options,
) -> None:  # fmt: skip
    """Fill dlogits `[M, V]`, which may be the logits, for the gradient of each row `[M]` or of all of them `[]`."""
    M, V = logits.shape
    tile = _tile(V)
    first_class, num_classes = options.columns or (None, None)
    wrap_triton(cross_entropy_short_backward_kernel)[(cdiv(M, tile["BLOCK_M"]),)](
        grad, divisor, logits, target.contiguous(), options.contiguous_weight(), options.weight_sum(),
        stats.contiguous(), dlogits,
        M, V, grad.stride(0) if grad.dim() else 0, logits.stride(0), dlogits.stride(0),
        options.ignore_index, options.smoothing, options.z_loss, options.softcap or None, first_class, num_classes,
        SMOOTH=options.smoothing > 0, **tile,
    )  # fmt: skip
