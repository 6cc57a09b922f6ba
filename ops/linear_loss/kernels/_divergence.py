r"""The divergence of rows of a student's logits and a teacher's, and the gradient of the student's: the kernels.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, https://arxiv.org/abs/1805.02867, for
the first pass over a row.

With z the student's logits of a row and w the teacher's, each of which becomes y = cap(logits) / temperature with a cap
and a temperature of its own:

    m, s = max(y), sum(exp(y - m))                        of both, in a first pass
    x    = y - m - log(s)                                 the log-probabilities of both
    loss = sum_j(f_j),  S = sum_j(df_j/dx_j)              in a second: `divergence_math.py` has f and its derivative
    r_j  = df_j/dx_j - exp(x_j) * S,  R = sum_j(r_j)      in a third
    dy_j = g * (r_j - exp(x_j) * R)                       the student's, in the last
    dz_j = dy_j * (1 - tanh(z_j / c)^2) / temperature    the student's; the factor of the cap only with one

R would be 0 without rounding. Where the student's probability of a class is near 1, that class's r is the
difference of two numbers that nearly cancel, and R is the rounding error; where the gradient is rounded to 16 bits that
rounding is larger, and the third pass is skipped.

With a cross entropy of the student besides, of targets t and at temperature 1, with m and s of u = cap(z):

    dz_j = ... + h * (exp(u_j - m) / s - [j = t]) * (1 - tanh(z_j / c)^2)

That of log-probabilities of some classes is such a term too: of all classes -p_j G, with G the sum of the classes'
gradients, and for each class its own more.

The gradient for several teachers is a sum: the pass of each but the first adds to that of the one before, in float32.

Between the passes vocabulary-parallel ranks gather four numbers of a row, then two, then two. A row that does not
count is not read.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.math import LOG2E, cap, cap_cpu, cap_slope, cap_slope_cpu
from llmk.ops.linear_loss.kernels.transform import Transform
from llmk.ops.loss.divergence_math import Mixture, divergence_of, divergence_of_cpu, exp_of
from llmk.registry import cdiv, empty, jit, next_power_of_2, wrap_triton


class Softmaxes(NamedTuple):
    """The transform of both rows of logits to log-probabilities, and their divergence."""

    mixture: Mixture
    temperature: float
    teacher_temperature: float
    softcap: float
    teacher_softcap: float
    exact: bool = False  # the logits carry no rounding but their own sums': in float32, of float32 inputs


class BothRows(NamedTuple):
    """Rows of logits of a student and a teacher, which of them count, and how they are compared."""

    z: Tensor  # [M, V], the student's
    w: Tensor  # [M, V]
    counts: Tensor  # float32 [M]
    softmaxes: Softmaxes


class CrossEntropyTerm(NamedTuple):
    """A cross entropy of the student's rows that is added to the divergence."""

    target: Tensor  # [M], among all classes
    first_class: int  # the class of the first column
    grad: Tensor  # [M]
    stats: Tensor  # [2, M], the maximum and the sum


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
def softmax_statistics_kernel(z_ptr, count_ptr, part_ptr, M, V, z_stride, outer, softcap, BLOCK_V: tl.constexpr):
    """Compute the maximum and the sum of a row: part `[2, M]`."""
    row = tl.program_id(0).to(tl.int64)
    end = tl.where(tl.load(count_ptr + row) != 0.0, V, 0)
    m, s = maximum_and_sum(z_ptr + row * z_stride, end, 1.0, tl.cast(outer, tl.float32), softcap, BLOCK_V)
    tl.store(part_ptr + row, m)
    tl.store(part_ptr + M + row, s)


@jit
def _terms(
    z, w, stats_ptr, M, outer, teacher_outer, softcap, teacher_softcap, beta, rest,
    FORM: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Compute f and df/dx of a block of classes, the student's log-probabilities and its capped logits."""
    y, u = logit_transform(z, 1.0, outer, softcap)
    x = (y - tl.load(stats_ptr)) - tl.load(stats_ptr + M)
    y, _ = logit_transform(w, 1.0, tl.cast(teacher_outer, tl.float32), teacher_softcap)
    t = (y - tl.load(stats_ptr + 2 * M)) - tl.load(stats_ptr + 3 * M)
    f, df = divergence_of(x, t, beta, rest, FORM, EXACT)
    return f, df, x, u


@jit
def divergence_sums_kernel(
    z_ptr, w_ptr, count_ptr, stats_ptr, shift_ptr, sum_ptr, M, V, z_stride, w_stride, outer, teacher_outer,
    softcap, teacher_softcap, beta, rest, FORM: tl.constexpr, EXACT: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute the sums of f and of df/dx over a row, or with shifts S of r: `[2, M]`."""
    outer = tl.cast(outer, tl.float32)
    row = tl.program_id(0).to(tl.int64)
    end = tl.where(tl.load(count_ptr + row) != 0.0, V, 0)
    total = tl.zeros((BLOCK_V,), dtype=tl.float32)
    total_df = tl.zeros((BLOCK_V,), dtype=tl.float32)
    for start in range(0, end, BLOCK_V):
        cols = start + tl.arange(0, BLOCK_V)
        mask = cols < end
        z = tl.load(z_ptr + row * z_stride + cols, mask=mask, other=0.0)
        w = tl.load(w_ptr + row * w_stride + cols, mask=mask, other=0.0)
        f, df, x, _ = _terms(
            z, w, stats_ptr + row, M, outer, teacher_outer, softcap, teacher_softcap, beta, rest, FORM, EXACT
        )
        if shift_ptr is not None:
            df = tl.fma(-exp_of(x, EXACT), tl.load(shift_ptr + row), df)
        total += tl.where(mask, f, 0.0)
        total_df += tl.where(mask, df, 0.0)
    tl.store(sum_ptr + row, tl.sum(total, axis=0))
    tl.store(sum_ptr + M + row, tl.sum(total_df, axis=0))


@jit
def divergence_gradient_kernel(
    z_ptr, w_ptr, count_ptr, grad_ptr, stats_ptr, sum_ptr, target_ptr, first_class, ce_grad_ptr, ce_stats_ptr,
    prior_ptr, dz_ptr,
    M, V, z_stride, w_stride, prior_stride, dz_stride, outer, teacher_outer, softcap, teacher_softcap,
    beta, rest, FORM: tl.constexpr, EXACT: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the student's logits plus a prior, a block of a row a program; dz may be z or the prior."""
    outer = tl.cast(outer, tl.float32)
    program, blocks = tl.program_id(0), tl.cdiv(V, BLOCK_V)
    row, block = (program // blocks).to(tl.int64), program % blocks
    cols = block * BLOCK_V + tl.arange(0, BLOCK_V)
    mask = cols < V
    g = tl.load(grad_ptr + row)
    read = cols < tl.where(tl.load(count_ptr + row) != 0.0, V, 0)
    z = tl.load(z_ptr + row * z_stride + cols, mask=read, other=0.0)
    w = tl.load(w_ptr + row * w_stride + cols, mask=read, other=0.0)
    _, df, x, u = _terms(
        z, w, stats_ptr + row, M, outer, teacher_outer, softcap, teacher_softcap, beta, rest, FORM, EXACT
    )
    e = exp_of(x, EXACT)  # as in df/dx: the two nearly cancel
    # fma rounds no product. Else the compiler is free not to round df/dx, which was rounded when summed: for a
    # class with a probability near 1 the gradient would be the rounding error.
    r = tl.fma(-e, tl.load(sum_ptr + M + row), df)
    dz = (g * outer) * (r - e * tl.load(sum_ptr + 2 * M + row))
    if target_ptr is not None:
        p = tl.exp2((u - tl.load(ce_stats_ptr + row)) * LOG2E) / tl.load(ce_stats_ptr + M + row)
        dz += tl.load(ce_grad_ptr + row) * tl.where(first_class + cols == tl.load(target_ptr + row), p - 1.0, p)
    if softcap is not None:
        dz *= cap_slope(z, softcap)
    dz = tl.where(read, dz, 0.0)
    if prior_ptr is not None:
        dz += tl.load(prior_ptr + row * prior_stride + cols, mask=mask, other=0.0)
    tl.store(dz_ptr + row * dz_stride + cols, dz.to(dz_ptr.dtype.element_ty), mask=mask)


@jit
def softmax_gradient_kernel(
    z_ptr, count_ptr, grad_ptr, stats_ptr, out_ptr, M, V, z_stride, out_stride, outer, softcap,
    ADD: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Write the softmax of a row times a number, through the transform to its logits, or add it to what is there."""
    outer = tl.cast(outer, tl.float32)
    program, blocks = tl.program_id(0), tl.cdiv(V, BLOCK_V)
    row, block = (program // blocks).to(tl.int64), program % blocks
    cols = block * BLOCK_V + tl.arange(0, BLOCK_V)
    mask = cols < V
    read = cols < tl.where(tl.load(count_ptr + row) != 0.0, V, 0)
    z = tl.load(z_ptr + row * z_stride + cols, mask=read, other=0.0)
    y, _ = logit_transform(z, 1.0, outer, softcap)
    factor = (outer / tl.load(stats_ptr + M + row)) * tl.load(grad_ptr + row)
    dz = tl.exp2((y - tl.load(stats_ptr + row)) * LOG2E) * factor
    if softcap is not None:
        dz *= cap_slope(z, softcap)
    dz = tl.where(read, dz, 0.0)
    out_ptrs = out_ptr + row * out_stride + cols
    if ADD:
        dz += tl.load(out_ptrs, mask=mask, other=0.0)
    tl.store(out_ptrs, dz, mask=mask)


def _block(V: int) -> dict[str, int]:
    # A guess after the row kernels of cross entropy, with half the columns of two tensors.
    if V <= 8192:
        return {"BLOCK_V": min(1024, next_power_of_2(max(V, COLUMNS.value))), "num_warps": 2}
    return {"BLOCK_V": 2048, "num_warps": 4}


def _transforms(softmaxes: Softmaxes) -> tuple[float | None, ...]:
    outer, teacher_outer = 1.0 / softmaxes.temperature, 1.0 / softmaxes.teacher_temperature
    return outer, teacher_outer, softmaxes.softcap or None, softmaxes.teacher_softcap or None


def statistics(z: Tensor, counts: Tensor, temperature: float, softcap: float) -> Tensor:
    """Compute maximum and sum of the columns of a model's rows: `[2, M]`."""
    M, V = z.shape
    part = empty((2, M), torch.float32, z.device)
    wrap_triton(softmax_statistics_kernel)[(M,)](
        z, counts, part, M, V, z.stride(0), 1.0 / temperature, softcap or None, **_block(V)
    )
    return part


def sums(rows: BothRows, stats: Tensor, shift: Tensor | None) -> Tensor:
    """Compute the sums of f and of its derivative over the columns, or with shifts `[M]` of r: `[2, M]`."""
    z, w, counts, softmaxes = rows
    M, V = z.shape
    out = empty((2, M), torch.float32, z.device)
    wrap_triton(divergence_sums_kernel)[(M,)](
        z, w, counts, stats, shift, out, M, V, z.stride(0), w.stride(0), *_transforms(softmaxes),
        *softmaxes.mixture.numbers(),
        FORM=softmaxes.mixture.form(), EXACT=softmaxes.exact, **_block(V),
    )  # fmt: skip
    return out


def gradients(
    rows: BothRows, grad: Tensor, stats: Tensor, total: Tensor, ce: CrossEntropyTerm | None, prior: Tensor | None,
    dz: Tensor,
) -> None:  # fmt: skip
    """Write the gradient of the student's logits `[M, V]`, for that of each row's loss `[M]`, plus a float32 prior.

    dz may be z, or the prior.
    """
    z, w, counts, softmaxes = rows
    (M, V), block = z.shape, _block(z.shape[1])
    wrap_triton(divergence_gradient_kernel)[(M * cdiv(V, block["BLOCK_V"]),)](
        z, w, counts, grad, stats, total, *((None, 0, None, None) if ce is None else ce), prior, dz,
        M, V, z.stride(0), w.stride(0), 0 if prior is None else prior.stride(0), dz.stride(0),
        *_transforms(softmaxes), *softmaxes.mixture.numbers(),
        FORM=softmaxes.mixture.form(), EXACT=softmaxes.exact, **block,
    )  # fmt: skip


def softmax_gradient(
    z: Tensor, counts: Tensor, grad: Tensor, stats: Tensor, out: Tensor, transform: Transform, add: bool
) -> None:  # fmt: skip
    """Write softmaxes times numbers `[M]`, as gradients of logits `[M, V]`, to a float32 `out`, or add them to it."""
    (M, V), block = z.shape, _block(z.shape[1])
    wrap_triton(softmax_gradient_kernel)[(M * cdiv(V, block["BLOCK_V"]),)](
        z, counts, grad, stats, out, M, V, z.stride(0), out.stride(0), transform.outer, transform.softcap or None,
        ADD=add, **block,
    )  # fmt: skip


def _transform_cpu(z: Tensor, softcap: float, temperature: float) -> tuple[Tensor, Tensor]:
    u = cap_cpu(z.float(), softcap) if softcap else z.float()
    return u / temperature, u


def statistics_cpu(z: Tensor, counts: Tensor, temperature: float, softcap: float) -> Tensor:
    """`statistics` in plain PyTorch."""
    if z.shape[1] == 0:
        nothing = torch.zeros((2, z.shape[0]), dtype=torch.float32, device=z.device)
        nothing[0] = float("-inf")
        return nothing
    y, _ = _transform_cpu(z, softcap, temperature)
    m = y.amax(-1)
    e = (y - torch.where(m == float("-inf"), 0.0, m).unsqueeze(-1)).exp_()
    # In float32 a sum of small terms, one after the other, rounds the largest one's 1 in one direction.
    return torch.stack((m, e.sum(-1, dtype=torch.float64).float()))


def _terms_cpu(rows: BothRows, stats: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    z, w, _, softmaxes = rows
    m, logsum, teacher_m, teacher_logsum = (each.unsqueeze(-1) for each in stats.unbind())
    y, u = _transform_cpu(z, softmaxes.softcap, softmaxes.temperature)
    t, _ = _transform_cpu(w, softmaxes.teacher_softcap, softmaxes.teacher_temperature)
    x = y - m - logsum
    return *divergence_of_cpu(x, t - teacher_m - teacher_logsum, softmaxes.mixture.beta), x, u


def sums_cpu(rows: BothRows, stats: Tensor, shift: Tensor | None) -> Tensor:
    """`sums` in plain PyTorch."""
    f, df, x, _ = _terms_cpu(rows, stats)
    df = df if shift is None else df - x.exp() * shift.unsqueeze(-1)
    return torch.where(rows.counts != 0, torch.stack((f.sum(-1), df.sum(-1))), 0.0)


def gradients_cpu(
    rows: BothRows, grad: Tensor, stats: Tensor, total: Tensor, ce: CrossEntropyTerm | None, prior: Tensor | None,
    dz: Tensor,
) -> None:  # fmt: skip
    """`gradients` in plain PyTorch."""
    (z, _, counts, softmaxes), (_, df, x, u) = rows, _terms_cpu(rows, stats)
    e, (_, shift, rest) = x.exp(), total.unsqueeze(-1).unbind()
    dy = (df - e * shift) - e * rest
    dy.mul_(grad.unsqueeze(-1) / softmaxes.temperature)
    if ce is not None:
        m, s = ce.stats.unsqueeze(-1).unbind()
        p = (u - m).exp_().div_(s)
        column = ce.target.long() - ce.first_class
        here = (counts != 0) & (column >= 0) & (column < z.shape[1])
        column = torch.where(here, column, 0).unsqueeze(-1)
        dy.addcmul_(p.scatter_(-1, column, p.gather(-1, column) - here.unsqueeze(-1).float()), ce.grad.unsqueeze(-1))
    if softmaxes.softcap:
        dy.mul_(cap_slope_cpu(z.float(), softmaxes.softcap))
    dy.masked_fill_(counts.unsqueeze(-1) == 0, 0.0)  # also NaN in a row that does not count
    dz.copy_(dy if prior is None else dy.add_(prior))


def softmax_gradient_cpu(
    z: Tensor, counts: Tensor, grad: Tensor, stats: Tensor, out: Tensor, transform: Transform, add: bool
) -> None:  # fmt: skip
    """`softmax_gradient` in plain PyTorch."""
    (y, slope), (m, s) = transform(z), stats.unsqueeze(-1).unbind()
    dz = (y - m).exp_().div_(s).mul_(grad.unsqueeze(-1)).mul_(transform.factor if slope is None else slope)
    dz.masked_fill_(counts.unsqueeze(-1) == 0, 0.0)  # also NaN in a row that does not count
    out.copy_(out + dz if add else dz)


class DivergenceFunctions(NamedTuple):
    """The passes over a chunk of both models' logits."""

    statistics: Callable[[Tensor, Tensor, float, float], Tensor]
    sums: Callable[[BothRows, Tensor, Tensor | None], Tensor]
    gradients: Callable[[BothRows, Tensor, Tensor, Tensor, CrossEntropyTerm | None, Tensor | None, Tensor], None]
    softmax_gradient: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Transform, bool], None]


KERNELS = DivergenceFunctions(statistics, sums, gradients, softmax_gradient)
PYTORCH = DivergenceFunctions(statistics_cpu, sums_cpu, gradients_cpu, softmax_gradient_cpu)
