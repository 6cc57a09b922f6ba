r"""Log-probabilities of some classes of rows of logits, and their gradients: the kernels.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, https://arxiv.org/abs/1805.02867, for
one pass over a row.

For a row of logits z of V classes, K candidates t_k, y = cap(scale * z) / temperature with cap(u) = c * tanh(u / c):

    m = max(y)    s = sum(exp(y - m))    logp_k = y[t_k] - m - log(s)

Only m and s of a row are saved. With shards C of the classes on the ranks:

    m = max(m_C)    s = sum(s_C * exp(m_C - m))

so that the ranks gather 2 + K numbers of a row.

Backward, given the gradients g_k of logp_k, with p = exp(y - m) / s and G = sum(g_k):

    dy_j = sum_k(g_k * [t_k = j]) - p_j * G
    dz_j = dy_j * (1 - tanh(scale * z_j / c)^2) * scale / temperature

One kernel computes the candidates' gradients from the logits, before another writes those of all classes, which may be
over them; a third puts the candidates' in. So the pass over all classes does not depend on the number of candidates.

A row none of whose candidates counts is not read in either direction.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.math import LOG2E, cap, cap_cpu, cap_slope, cap_slope_cpu
from llmk.registry import cdiv, empty, jit, next_power_of_2, wrap_triton

STATISTICS = 2
"""The number of float32 values saved for a row: m and s."""
MOST_SUPPORT = 1024
"""The most ids of a row's support, which one program holds and compares with each other."""


COLUMNS = tl.constexpr(8)
"""Consecutive columns that one thread reads and reduces by itself: threads synchronize once a row, not once a block."""


@jit
def thread_columns(BLOCK_V: tl.constexpr):
    """Return the columns of a block, `[BLOCK_V / COLUMNS, COLUMNS]`."""
    return tl.arange(0, BLOCK_V // COLUMNS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@jit
def logit_transform(z, inner, outer, softcap):
    """Return outer * cap(inner * z) and the cap alone, in float32; a softcap of None is off."""
    u = z.to(tl.float32) * inner
    if softcap is not None:
        u = cap(u, softcap, z.dtype == tl.float32)
    return u * outer, u


class LogitTransform(NamedTuple):
    """The transform of logits before their softmax, and the range of their classes."""

    ignore_index: int
    scale: float
    softcap: float
    temperature: float
    first_class: int
    num_classes: int

    def factors(self) -> tuple[float, float]:
        """Return the factors before and after the cap; without a cap their product is the first."""
        if self.softcap:
            return self.scale, 1.0 / self.temperature
        return self.scale / self.temperature, 1.0


@jit
def _candidates(target_ptr, offsets, mask, first_class, V, num_classes, ignore_index):
    """Load candidates and masks: it counts, it is a class, and that class is one of the columns."""
    target = tl.load(target_ptr + offsets, mask=mask, other=0).to(tl.int64)
    counts = mask & (target != ignore_index)
    valid = counts & (target >= 0) & (target < num_classes)
    return target, counts, valid, valid & (target >= first_class) & (target - first_class < V)


@jit
def _add_block(m, s, z, mask, inner, outer, softcap, MASKED: tl.constexpr):
    """Update each thread's maximum and sum; threads synchronize once a row."""
    y, _ = logit_transform(z, inner, outer, softcap)
    if MASKED:
        y = tl.where(mask, y, float("-inf"))
    new_m = tl.maximum(m, tl.max(y, axis=1))
    # Subtracting -inf from -inf would be NaN where nothing finite has been seen yet.
    base = tl.where(new_m == float("-inf"), 0.0, new_m)
    return new_m, s * tl.exp2((m - base) * LOG2E) + tl.sum(tl.exp2((y - base[:, None]) * LOG2E), axis=1)


@jit
def maximum_and_sum(z_ptr, end, inner, outer, softcap, BLOCK_V: tl.constexpr):
    """Return the maximum of a row's first `end` transformed logits, and the sum of exp(y - m)."""
    m = tl.full((BLOCK_V // COLUMNS,), float("-inf"), dtype=tl.float32)
    s = tl.zeros((BLOCK_V // COLUMNS,), dtype=tl.float32)
    cols = thread_columns(BLOCK_V)
    whole = end // BLOCK_V * BLOCK_V
    for start in range(0, whole, BLOCK_V):  # a mask whose end is no multiple of 16 prevents vectorized loads
        m, s = _add_block(m, s, tl.load(z_ptr + start + cols), None, inner, outer, softcap, False)
    for start in range(whole, end, BLOCK_V):  # once, or not at all
        mask = start + cols < end
        z = tl.load(z_ptr + start + cols, mask=mask, other=0.0)
        m, s = _add_block(m, s, z, mask, inner, outer, softcap, True)
    row_m = tl.max(m, axis=0)
    # Threads that have seen nothing finite have sums of 0.
    base = tl.where(row_m == float("-inf"), 0.0, row_m)
    return row_m, tl.sum(s * tl.exp2((m - base) * LOG2E), axis=0)


@jit
def logprob_statistics_kernel(
    z_ptr, target_ptr, part_ptr,
    M, V, K, z_stride, first_class, num_classes, ignore_index, inner, outer, softcap,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute m and s of a row's columns and y of its candidates, -inf if elsewhere: part `[2 + K, M]`."""
    inner = tl.cast(inner, tl.float32)
    outer = tl.cast(outer, tl.float32)
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    target, counts, _, here = _candidates(target_ptr, row * K + k, k < K, first_class, V, num_classes, ignore_index)
    z_ptr += row * z_stride
    end = tl.where(tl.max(counts.to(tl.int32), axis=0) != 0, V, 0)
    z_t = tl.load(z_ptr + (target - first_class), mask=here, other=0.0)
    y_t, _ = logit_transform(z_t, inner, outer, softcap)
    tl.store(part_ptr + (2 + k).to(tl.int64) * M + row, tl.where(here, y_t, float("-inf")), mask=k < K)
    m, s = maximum_and_sum(z_ptr, end, inner, outer, softcap, BLOCK_V)
    tl.store(part_ptr + row, m)
    tl.store(part_ptr + M + row, s)


@jit
def logprob_combine_kernel(
    part_ptr, target_ptr, logprob_ptr, stats_ptr, M, R, K, num_classes, ignore_index, BLOCK_M: tl.constexpr
):
    """Compute rows' results from the parts of all slices, one below the other: `[R * (2 + K), M]`."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask = rows < M
    m = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    s = tl.zeros((BLOCK_M,), dtype=tl.float32)
    slice_stride = tl.cast(2 + K, tl.int64) * M
    for r in range(0, R):
        parts = part_ptr + r * slice_stride + rows
        m_r = tl.load(parts, mask=mask, other=0.0)
        s_r = tl.load(parts + M, mask=mask, other=1.0)
        new_m = tl.maximum(m, m_r)
        base = tl.where(new_m == float("-inf"), 0.0, new_m)
        s = tl.exp2((m - base) * LOG2E) * s + tl.exp2((m_r - base) * LOG2E) * s_r
        m = new_m
    logsum = tl.log(s)
    for k in range(0, K):
        _, counts, valid, _ = _candidates(target_ptr, rows * K + k, mask, 0, num_classes, num_classes, ignore_index)
        y = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        for r in range(0, R):
            y = tl.maximum(
                y, tl.load(part_ptr + r * slice_stride + tl.cast(2 + k, tl.int64) * M + rows, mask=mask, other=0.0)
            )
        # Out of range: NaN, and nothing was read there.
        logprob = tl.where(valid, (y - m) - logsum, tl.where(counts, float("nan"), 0.0))
        tl.store(logprob_ptr + rows * K + k, logprob, mask=mask)
    tl.store(stats_ptr + rows, m, mask=mask)
    tl.store(stats_ptr + M + rows, s, mask=mask)


@jit
def logprob_candidates_kernel(
    z_ptr, target_ptr, grad_ptr, stats_ptr, candidate_ptr, factor_ptr,
    M, V, K, z_stride, grad_stride, grad_stride_k, first_class, num_classes, ignore_index,
    inner, outer, softcap, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a row's candidates `[M, K]`, and what the other classes' are made of: `[2, M]`.

    The two are G, and 1 if the others' gradients are to be computed or 0 if they are zeros.
    """
    inner = tl.cast(inner, tl.float32)
    outer = tl.cast(outer, tl.float32)
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    target, counts, valid, here = _candidates(target_ptr, row * K + k, k < K, first_class, V, num_classes, ignore_index)
    m, s = tl.load(stats_ptr + row), tl.load(stats_ptr + M + row)
    grad_ptr += row * grad_stride
    g = tl.load(grad_ptr + k * grad_stride_k, mask=valid & (k < K), other=0.0)
    total = tl.sum(g, axis=0)
    alike = tl.zeros((BLOCK_K,), dtype=tl.float32)
    for other in range(0, K):  # a class that is a candidate twice gets both gradients in both places
        other_target = tl.load(target_ptr + row * K + other).to(tl.int64)
        same = (target == other_target) & (other_target != ignore_index)
        alike += tl.where(same, tl.load(grad_ptr + other * grad_stride_k), 0.0)
    # A class out of range makes the row's gradient NaN.
    wrong = tl.max((counts & (valid == 0)).to(tl.int32), axis=0) != 0
    total = tl.where(wrong, float("nan"), total)
    row_counts = tl.max(counts.to(tl.int32), axis=0) != 0
    tl.store(factor_ptr + row, total)
    tl.store(factor_ptr + M + row, tl.where(row_counts, 1.0, 0.0))
    z = tl.load(z_ptr + row * z_stride + (target - first_class), mask=here, other=0.0)
    y, _ = logit_transform(z, inner, outer, softcap)
    # Where p is near 1 the two nearly cancel: their difference first.
    p = tl.exp2((y - m) * LOG2E) / s
    dz = (alike - p * total) * (inner * outer)
    if softcap is not None:
        dz *= cap_slope(z.to(tl.float32) * inner, softcap)
    tl.store(candidate_ptr + row * K + k, dz, mask=k < K)


@jit
def logprob_gradient_kernel(
    z_ptr, stats_ptr, factor_ptr, dz_ptr, M, V, z_stride, dz_stride, inner, outer, softcap, BLOCK_V: tl.constexpr
):
    """Write the gradient of the classes that are no candidates, a block of a row a program; dz may be z."""
    inner = tl.cast(inner, tl.float32)
    outer = tl.cast(outer, tl.float32)
    program, blocks = tl.program_id(0), tl.cdiv(V, BLOCK_V)  # consecutive programs read consecutive memory
    row, block = (program // blocks).to(tl.int64), program % blocks
    row_counts = tl.load(factor_ptr + M + row)
    cols = block * BLOCK_V + tl.arange(0, BLOCK_V)
    mask = cols < V
    z_ptr += row * z_stride
    dz_ptr += row * dz_stride
    if row_counts != 0.0:
        m, s = tl.load(stats_ptr + row), tl.load(stats_ptr + M + row)
        z = tl.load(z_ptr + cols, mask=mask, other=0.0)
        y, _ = logit_transform(z, inner, outer, softcap)
        dz = tl.exp2((y - m) * LOG2E) * ((-inner * outer) / s) * tl.load(factor_ptr + row)
        if softcap is not None:
            dz *= cap_slope(z.to(tl.float32) * inner, softcap)
        tl.store(dz_ptr + cols, dz.to(dz_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(dz_ptr + cols, tl.zeros((BLOCK_V,), dtype=dz_ptr.dtype.element_ty), mask=mask)


@jit
def logprob_scatter_kernel(
    candidate_ptr, target_ptr, dz_ptr, V, K, dz_stride, first_class, num_classes, ignore_index, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Store the candidates' gradients; classes that occur twice store the same value."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    target, _, _, here = _candidates(target_ptr, row * K + k, k < K, first_class, V, num_classes, ignore_index)
    dz = tl.load(candidate_ptr + row * K + k, mask=here, other=0.0)
    tl.store(dz_ptr + row * dz_stride + (target - first_class), dz.to(dz_ptr.dtype.element_ty), mask=here)


def _row_block(V: int) -> dict[str, int]:
    # As the kernels of cross entropy have it, whose figures are in `cross_entropy_kernels.py`.
    if V <= 8192:
        return {"BLOCK_V": min(1024, next_power_of_2(max(V, COLUMNS.value))), "num_warps": 2}
    return {"BLOCK_V": 4096, "num_warps": 4}


def _candidate_block(K: int) -> dict[str, int]:
    return {"BLOCK_K": next_power_of_2(K), "num_warps": 1 if K <= 256 else 4}


def statistics(logits: Tensor, target: Tensor, transform: LogitTransform) -> Tensor:
    """Compute a rank's statistics, `[2 + K, M]`, from its columns of the rows `[M, V]`."""
    (M, V), K = logits.shape, target.shape[1]
    part = empty((STATISTICS + K, M), torch.float32, logits.device)
    wrap_triton(logprob_statistics_kernel)[(M,)](
        logits, target, part, M, V, K, logits.stride(0),
        transform.first_class, transform.num_classes, transform.ignore_index, *transform.factors(),
        transform.softcap or None, BLOCK_K=next_power_of_2(K), **_row_block(V),
    )  # fmt: skip
    return part


def combine(parts: Tensor, target: Tensor, transform: LogitTransform) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities `[M, K]` and statistics `[2, M]` from the parts of all ranks."""
    M, K = target.shape
    logprobs = empty((M, K), torch.float32, parts.device)
    stats = empty((STATISTICS, M), torch.float32, parts.device)
    wrap_triton(logprob_combine_kernel)[(cdiv(M, 128),)](
        parts, target, logprobs, stats,
        M, parts.shape[0] // (STATISTICS + K), K, transform.num_classes, transform.ignore_index,
        BLOCK_M=128, num_warps=4,
    )  # fmt: skip
    return logprobs, stats


def gradients(
    grad: Tensor, logits: Tensor, target: Tensor, stats: Tensor, dlogits: Tensor, transform: LogitTransform
) -> None:
    """Write the gradient of logits `[M, V]`, which may be over them, given that of log-probabilities `[M, K]`."""
    (M, V), K = logits.shape, target.shape[1]
    of_candidates = empty((M, K), torch.float32, logits.device)
    factors = empty((2, M), torch.float32, logits.device)
    stats = stats.contiguous()
    wrap_triton(logprob_candidates_kernel)[(M,)](
        logits, target, grad, stats, of_candidates, factors,
        M, V, K, logits.stride(0), *grad.stride(),
        transform.first_class, transform.num_classes, transform.ignore_index, *transform.factors(),
        transform.softcap or None, **_candidate_block(K),
    )  # fmt: skip
    block = _row_block(V)
    wrap_triton(logprob_gradient_kernel)[(M * cdiv(V, block["BLOCK_V"]),)](
        logits, stats, factors, dlogits, M, V, logits.stride(0), dlogits.stride(0),
        *transform.factors(), transform.softcap or None, **block,
    )  # fmt: skip
    wrap_triton(logprob_scatter_kernel)[(M,)](
        of_candidates, target, dlogits, V, K, dlogits.stride(0),
        transform.first_class, transform.num_classes, transform.ignore_index, **_candidate_block(K),
    )  # fmt: skip


def transform_cpu(logits: Tensor, transform: LogitTransform) -> Tensor:
    """`logit_transform` in plain PyTorch."""
    inner, outer = transform.factors()
    u = logits.float() * inner
    return (cap_cpu(u, transform.softcap) if transform.softcap else u) * outer


def _candidates_cpu(target: Tensor, transform: LogitTransform, V: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return masks of the candidates that count and of those among the columns, and their column, else 0.

    A candidate that is no class raises, unless it is a fake tensor's.
    """
    target = target.long()  # int32 would wrap an ignore_index that it does not hold
    counts = target != transform.ignore_index
    valid = (target >= 0) & (target < transform.num_classes)
    if type(target) is Tensor and bool((counts & ~valid).any()):
        bad = int(target[counts & ~valid][0])
        raise IndexError(
            f"target: expected class indices in [0, {transform.num_classes}) or ignore_index {transform.ignore_index}, "
            f"got {bad}"
        )
    here = counts & valid & (target >= transform.first_class) & (target - transform.first_class < V)
    return counts, here, torch.where(here, target - transform.first_class, 0)


def statistics_cpu(logits: Tensor, target: Tensor, transform: LogitTransform) -> Tensor:
    """`statistics` in plain PyTorch."""
    M, V = logits.shape
    _, here, column = _candidates_cpu(target, transform, V)
    if V == 0:
        shape = (STATISTICS + target.shape[1], M)
        nothing = torch.full(shape, float("-inf"), dtype=torch.float32, device=logits.device)
        nothing[1] = 0.0
        return nothing
    y = transform_cpu(logits, transform)
    m = y.amax(-1)
    e = (y - torch.where(m == float("-inf"), 0.0, m).unsqueeze(-1)).exp_()
    # In float32 a sum of small terms, one after the other, rounds the largest one's 1 in one direction.
    s = e.sum(-1, dtype=torch.float64).float()
    y_t = torch.where(here, y.gather(-1, column), float("-inf"))
    return torch.cat((torch.stack((m, s)), y_t.t()))


def combine_cpu(parts: Tensor, target: Tensor, transform: LogitTransform) -> tuple[Tensor, Tensor]:
    """`combine` in plain PyTorch."""
    M, K = target.shape
    counts = target.long() != transform.ignore_index
    parts = parts.view(parts.shape[0] // (STATISTICS + K), STATISTICS + K, M)
    m_r, s_r = parts[:, 0], parts[:, 1]
    m = m_r.amax(0)
    s = ((m_r - torch.where(m == float("-inf"), 0.0, m)).exp() * s_r).sum(0)
    logprobs = torch.where(counts, (parts[:, STATISTICS:].amax(0) - m - s.log()).t(), 0.0).contiguous()
    return logprobs, torch.stack((m, s))


def gradients_cpu(
    grad: Tensor, logits: Tensor, target: Tensor, stats: Tensor, dlogits: Tensor, transform: LogitTransform
) -> None:
    """`gradients` in plain PyTorch."""
    counts, here, column = _candidates_cpu(target, transform, logits.shape[1])
    m, s = (x.unsqueeze(-1) for x in stats.unbind())
    p = (transform_cpu(logits, transform) - m).exp_().div_(s)
    total = torch.where(counts, grad, 0.0).sum(-1, keepdim=True)
    dy = -p * total
    # Where p is near 1 the two nearly cancel: their difference first.
    alike = (target.unsqueeze(-1) == target.unsqueeze(-2)).float() @ torch.where(here, grad, 0.0).unsqueeze(-1)
    values = alike.squeeze(-1) - p.gather(-1, column) * total
    for k in range(target.shape[1]):  # a candidate that is elsewhere keeps what is in column 0
        at = column[:, k : k + 1]
        dy.scatter_(-1, at, torch.where(here[:, k : k + 1], values[:, k : k + 1], dy.gather(-1, at)))
    inner, outer = transform.factors()
    dy.mul_(inner * outer)
    if transform.softcap:
        dy.mul_(cap_slope_cpu(logits.float() * inner, transform.softcap))
    dlogits.copy_(dy.masked_fill_(~counts.any(-1, keepdim=True), 0.0))  # also NaN in a row that does not count


class LogprobFunctions(NamedTuple):
    """The steps from rows of logits to their results, and from gradients of these to the logits'."""

    statistics: Callable[[Tensor, Tensor, LogitTransform], Tensor]
    combine: Callable[[Tensor, Tensor, LogitTransform], tuple[Tensor, Tensor]]
    gradients: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, LogitTransform], None]


KERNELS = LogprobFunctions(statistics, combine, gradients)
PYTORCH = LogprobFunctions(statistics_cpu, combine_cpu, gradients_cpu)
