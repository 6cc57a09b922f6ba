r"""Vocabulary-parallel cross entropy, where each rank of a group has a shard of the classes of every row.

From the x of its own logits, of the classes C, a rank computes for each row

    m_C = max(x), s_C = sum(exp(x - m_C)), x_t if t is in C, else -inf
    and for smoothing w_C = sum(w_c), b_C = sum_c(w_c * (m_C - x_c))

which the ranks gather: three or five numbers a row, however many classes there are. Over all shards then

    m = max_C(m_C), s = sum_C(s_C * exp(m_C - m)), x_t = max_C(x_t)
    sum_c(w_c * (m - x_c)) = sum_C(b_C + w_C * (m - m_C))

from which the loss follows, and with m and s the gradient of any shard. Every rank adds in the order of the ranks, so
all have the same bits. A class in no shard leaves x_t at -inf: the loss of such a target is infinite.

Source: Shoeybi et al., "Megatron-LM", 2019, https://arxiv.org/abs/1909.08053, for sharing numbers of a row instead of
logits.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.math import LOG2E
from llmk.ops.loss.cross_entropy_cpu import capped_cpu, class_index, z_loss_cpu
from llmk.ops.loss.cross_entropy_kernels import capped, counts_of, loss_of, row_block, row_statistics, unaligned
from llmk.ops.loss.cross_entropy_options import Options, Rows
from llmk.registry import cdiv, empty, jit, wrap_triton

STATISTICS, STATISTICS_SMOOTH = 3, 5
"""The number of values a rank computes for a row: m, s, x_t, and with smoothing b and w."""


@jit
def slice_statistics_kernel(
    x_ptr, target_ptr, weight_ptr, out_ptr, M, V, x_stride, first_class, num_classes, ignore_index, softcap,
    SMOOTH: tl.constexpr, UNALIGNED: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row).to(tl.int64)
    here = (target != ignore_index) & (target >= first_class) & (target < num_classes) & (target - first_class < V)
    x_t = capped(tl.load(x_ptr + row * x_stride + target - first_class, mask=here, other=float("-inf")), softcap)
    if weight_ptr is not None:
        weight_ptr += first_class
    m, total, weight_sum, below = row_statistics(
        x_ptr, row * x_stride, weight_ptr, V, target != ignore_index, softcap, SMOOTH, UNALIGNED, BLOCK_V
    )
    tl.store(out_ptr + row, m)
    tl.store(out_ptr + M + row, total)
    tl.store(out_ptr + 2 * M + row, tl.where(here, x_t, float("-inf")))
    if SMOOTH:
        tl.store(out_ptr + 3 * M + row, below)
        tl.store(out_ptr + 4 * M + row, weight_sum)


@jit
def combine_slices_kernel(
    parts_ptr, target_ptr, weight_ptr, loss_ptr, count_ptr, stats_ptr,
    M, R, num_classes, ignore_index, smoothing, z_loss, SMOOTH: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    smoothing = tl.cast(smoothing, tl.float32)
    z_loss = tl.cast(z_loss, tl.float32)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask = rows < M
    m = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    x_t = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    weight_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
    below = tl.zeros((BLOCK_M,), dtype=tl.float32)
    part_ptrs = parts_ptr + rows
    for _ in range(0, R):
        m_r = tl.load(part_ptrs, mask=mask, other=0.0)
        new_m = tl.maximum(m, m_r)
        # As for the blocks of a row: nothing finite may have been seen yet.
        base = tl.where(new_m == float("-inf"), 0.0, new_m)
        total = total * tl.exp2((m - base) * LOG2E)
        total += tl.load(part_ptrs + M, mask=mask, other=1.0) * tl.exp2((m_r - base) * LOG2E)
        x_t = tl.maximum(x_t, tl.load(part_ptrs + 2 * M, mask=mask, other=0.0))
        if SMOOTH:
            w = tl.load(part_ptrs + 4 * M, mask=mask, other=0.0)
            below += tl.where(m == float("-inf"), 0.0, weight_sum * (base - m))
            below += tl.load(part_ptrs + 3 * M, mask=mask, other=0.0)
            below += tl.where(m_r == float("-inf"), 0.0, w * (base - m_r))
            weight_sum += w
            part_ptrs += 5 * M
        else:
            part_ptrs += 3 * M
        m = new_m
    target = tl.load(target_ptr + rows, mask=mask, other=0).to(tl.int64)
    counts, valid, w_t = counts_of(target, weight_ptr, num_classes, ignore_index)
    logsum = tl.log(total)
    loss = loss_of(m, logsum, weight_sum, below, x_t, w_t, counts, valid, num_classes, smoothing, z_loss, SMOOTH)
    tl.store(loss_ptr + rows, loss, mask=mask)
    tl.store(count_ptr + rows, w_t, mask=mask)
    tl.store(stats_ptr + rows, m, mask=mask)
    tl.store(stats_ptr + M + rows, total, mask=mask)


def _numbers(options: Options) -> int:
    return STATISTICS_SMOOTH if options.smoothing > 0 else STATISTICS


def slice_statistics(logits: Tensor, target: Tensor, options: Options) -> Tensor:
    """Compute a rank's statistics, `[3 or 5, M]`, from its shard of the rows, `[M, V]`."""
    M, V = logits.shape
    assert options.columns is not None
    out = empty((_numbers(options), M), torch.float32, logits.device)
    wrap_triton(slice_statistics_kernel)[(M,)](
        logits, target, options.contiguous_weight(), out, M, V, logits.stride(0),
        *options.columns, options.ignore_index, options.softcap or None,
        SMOOTH=options.smoothing > 0, UNALIGNED=unaligned(logits), **row_block(max(V, 1)),
    )  # fmt: skip
    return out


def combine_slices(parts: Tensor, target: Tensor, options: Options) -> Rows:
    """Compute the rows' losses from the concatenated statistics of all ranks, `[R * 3 or 5, M]`."""
    M = parts.shape[1]
    assert options.columns is not None
    loss, count = (empty((M,), torch.float32, parts.device) for _ in range(2))
    stats = empty((2, M), torch.float32, parts.device)
    wrap_triton(combine_slices_kernel)[(cdiv(M, 128),)](
        parts, target, options.contiguous_weight(), loss, count, stats,
        M, parts.shape[0] // _numbers(options), options.columns.num_classes,
        options.ignore_index, options.smoothing, options.z_loss,
        SMOOTH=options.smoothing > 0, BLOCK_M=128, num_warps=4,
    )  # fmt: skip
    return Rows(loss, count, stats)


def slice_statistics_cpu(logits: Tensor, target: Tensor, options: Options) -> Tensor:
    """`slice_statistics` in plain PyTorch; a target that is in no shard raises."""
    M, V = logits.shape
    assert options.columns is not None
    first_class, num_classes = options.columns
    counts, index = class_index(target, num_classes, options.ignore_index)
    if V == 0:
        empty_slice = [float("-inf"), 0.0, float("-inf"), 0.0, 0.0]
        nothing = torch.tensor(empty_slice, dtype=torch.float32, device=logits.device)
        return nothing[: _numbers(options), None].repeat(1, M)
    x = capped_cpu(logits, options.softcap)
    maximum = x.amax(-1)
    base = torch.where(maximum == float("-inf"), 0.0, maximum).unsqueeze(-1)
    total = (x - base).exp_().sum(-1)
    here = counts & (index >= first_class) & (index < first_class + V)
    column = torch.where(here, index - first_class, 0).unsqueeze(-1)
    x_t = torch.where(here, x.gather(-1, column).squeeze(-1), float("-inf"))
    parts = [maximum, total, x_t]
    if options.smoothing:
        w = options.class_weights(num_classes, x.device)[first_class : first_class + V]
        parts += [(w * (base - x)).sum(-1), w.sum().expand(M)]
    return torch.stack(parts)


def combine_slices_cpu(parts: Tensor, target: Tensor, options: Options) -> Rows:
    """`combine_slices` in plain PyTorch."""
    weight, ignore_index, smoothing, _, z_loss, columns, _ = options
    assert columns is not None
    num_classes = columns.num_classes
    counts, index = class_index(target, num_classes, ignore_index)
    numbers = _numbers(options)
    parts = parts.view(parts.shape[0] // numbers, numbers, parts.shape[1])
    maxima, totals, targets = parts[:, 0], parts[:, 1], parts[:, 2]
    maximum = maxima.amax(0)
    base = torch.where(maximum == float("-inf"), 0.0, maximum)
    total = (totals * (maxima - base).exp()).sum(0)
    logsum = total.log()
    w_t = counts.float() if weight is None else torch.where(counts, weight[index].float(), 0.0)
    loss = w_t * (logsum - (targets.amax(0) - maximum))
    if smoothing:
        below, weights = parts[:, 3], parts[:, 4]
        below = below + torch.where(maxima == float("-inf"), 0.0, weights * (base - maxima))
        loss = (1 - smoothing) * loss + smoothing / num_classes * (weights.sum(0) * logsum + below.sum(0))
    loss = torch.where(counts, loss + z_loss_cpu(maximum + logsum, z_loss), 0.0)
    return Rows(loss, w_t, torch.stack((maximum, total)))


class VocabParallelCrossEntropy(NamedTuple):
    """The steps before and after the ranks exchange their statistics; the gradients are those of whole rows."""

    statistics: Callable[[Tensor, Tensor, Options], Tensor]
    combine: Callable[[Tensor, Tensor, Options], Rows]


KERNELS = VocabParallelCrossEntropy(slice_statistics, combine_slices)
PYTORCH = VocabParallelCrossEntropy(slice_statistics_cpu, combine_slices_cpu)
