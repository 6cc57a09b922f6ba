"""The moments of a row and the partial affine gradients, which layer_norm and group_norm scale.

Squares of values past 2^64 overflow, and sums of values near float32's largest. A row with such values is multiplied by
an overflow scale of 2^-80, so that there is room for 2^32 squares, and its moments are those of the scaled values;
elsewhere the scale is 1. The squares tell whether a row needs it. Where one program has the whole row, it then writes
the row again (`normalize_if_huge`); pieces of a row are gone through again before they are merged (`piece_moments`). A
row of equal values has no squares, and its moments are not scaled. The variance's sign tells the backward pass.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmk.ops.common.sums import sum_pair
from llmk.registry import empty, jit, no_gradient

OVERFLOW_SCALE = tl.constexpr(2.0**-80)
INVERSE_SCALE = tl.constexpr(2.0**80)


@jit
def overflow_scale(squares):
    """Return OVERFLOW_SCALE where these squares of unscaled values are infinite or NaN, else 1."""
    return tl.where(squares < float("inf"), 1.0, OVERFLOW_SCALE)


@jit
def overflowed(squares):
    """Return True if any of a block of squares is infinite or NaN."""
    return tl.sum((squares < float("inf")).to(tl.int32), axis=0) < squares.shape[0]


@jit
def unscaled_if_equal(mean, spread, scale):
    """Return the mean and the scale of a row; equal values, which have no spread, are not scaled."""
    equal = spread == 0.0
    return tl.where(equal & (scale < 1.0), mean * INVERSE_SCALE, mean), tl.where(equal, 1.0, scale)


@jit
def kept_variance(spread, eps, scale):
    """Return spread + eps of unscaled values; it is negative where they are scaled."""
    return tl.where(scale < 1.0, -(spread + eps * scale * scale), spread + eps)


@jit
def scale_and_rstd(var):
    """Return a row's overflow scale, and 1 / sqrt(var) of the scaled row, from the variance that was kept."""
    return tl.where(var < 0.0, OVERFLOW_SCALE, 1.0), tl.div_rn(1.0, tl.sqrt_rn(tl.abs(var)))


@jit
def coarse_mean(mean, var):
    """The mean to about twelve binary digits of a deviation.

    x - mean rounds alike for every x of a binade, and a sum over thousands of values shows it; x minus this is exact.
    """
    grid = 2048.0 * tl.sqrt(var)
    return (mean + grid) - grid


@jit
def known_rest(rest, var):
    """Return the remainder of a mean, sum(x - mean) / N, where it is more than the rounding of x - mean; else 0.

    x - mean rounds alike for every x of a binade: a rest below half a unit of a deviation may be nothing but that.
    """
    return tl.where(tl.abs(rest) > 2.0**-24 * tl.sqrt_rn(var), rest, 0.0)


def moments_cpu(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scaled x less its mean, the mean and the variance as the kernels keep them, over the last axis."""
    huge = x.abs().amax(-1, keepdim=True) >= 2.0**62
    c, mean = centered(x * _scale_where(huge))
    spread = c.square().mean(-1, keepdim=True)
    equal = huge & (spread == 0)
    var = torch.where(huge & ~equal, -(spread + eps * OVERFLOW_SCALE.value**2), spread + eps)
    return c, torch.where(equal, mean * INVERSE_SCALE.value, mean), var


def scale_cpu(var: Tensor) -> tuple[Tensor, Tensor]:
    """Return a row's overflow scale, and the variance of the scaled row, from the variance that was kept."""
    return _scale_where(var < 0), var.abs()


def _scale_where(huge: Tensor) -> Tensor:
    return torch.where(huge, torch.full((), OVERFLOW_SCALE.value, dtype=torch.float32, device=huge.device), 1.0)


def centered(x: Tensor) -> tuple[Tensor, Tensor]:
    """x less its mean over the last axis, and the mean, corrected as `known_rest` has it."""
    mean = x.mean(-1, keepdim=True)
    c = x - mean
    rest = c.mean(-1, keepdim=True)
    mean = mean + torch.where(rest.abs() > 2**-24 * c.square().mean(-1, keepdim=True).sqrt(), rest, 0.0)
    return x - mean, mean


@jit
def _centered_scaled(x_ptr, mean, cols, N):
    """Return the scaled x less a mean, and 0 past the row's end."""
    x = tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    return tl.where(cols < N, x * OVERFLOW_SCALE - mean, 0.0)


@triton.jit(noinline=True)
def normalize_if_huge(x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, var_ptr, near_ptr, N, S, eps):
    """Write y and the statistics of a row again where its squares overflowed, which its variance tells.

    S neighbours have the same weight and bias; where near_ptr is given, the coarse mean goes there.

    A function of its own, which is called: its registers are not taken from the rows that need none of it. Of 16,384
    columns a thread keeps 64 registers so; 85 where the row's largest value were looked for beforehand.
    """
    COLS: tl.constexpr = tl.constexpr(512)
    var = tl.load(var_ptr)
    if (var < float("inf")) == 0:
        mean = tl.cast(0.0, tl.float32)
        for _ in range(3):  # the last two correct it: of equal values it is that value
            rest = tl.zeros((COLS,), dtype=tl.float32)
            for first in range(0, N, COLS):
                rest += _centered_scaled(x_ptr, mean, first + tl.arange(0, COLS), N)
            mean += tl.sum(rest, axis=0) / N
        squares = tl.zeros((COLS,), dtype=tl.float32)
        for first in range(0, N, COLS):
            c = _centered_scaled(x_ptr, mean, first + tl.arange(0, COLS), N)
            squares += c * c
        spread = tl.sum(squares, axis=0) / N
        kept, scale = unscaled_if_equal(mean, spread, OVERFLOW_SCALE)
        var = kept_variance(spread, eps, scale)
        _, rstd = scale_and_rstd(var)
        for first in range(0, N, COLS):
            cols = first + tl.arange(0, COLS)
            y = rstd * _centered_scaled(x_ptr, mean, cols, N)
            if w_ptr is not None:
                y *= tl.load(w_ptr + cols // S, mask=cols < N, other=0.0).to(tl.float32)
            if b_ptr is not None:
                y += tl.load(b_ptr + cols // S, mask=cols < N, other=0.0).to(tl.float32)
            tl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty), mask=cols < N)
        tl.store(mean_ptr, kept)
        tl.store(var_ptr, var)
        if near_ptr is not None:
            tl.store(near_ptr, coarse_mean(kept, spread))


@jit
def normalize_group_if_huge(x_ptr, w_ptr, b_ptr, y_ptr, stats_ptr, row, B, G, C, S, eps):
    """`normalize_if_huge` of a sample's group of C channels with S positions each."""
    if w_ptr is not None:
        w_ptr += row % G * C
    if b_ptr is not None:
        b_ptr += row % G * C
    var_ptr = stats_ptr + B * G + row
    normalize_if_huge(
        x_ptr + row * C * S, w_ptr, b_ptr, y_ptr + row * C * S, stats_ptr + row, var_ptr, var_ptr + B * G, C * S, S, eps
    )


@jit
def merge_moments(near, mean, squares, count, N):
    """Return the mean and the sum of squared deviations of N values in parts with counts, and means near + mean."""
    total_mean = tl.sum((near + mean) * count, axis=0) / N
    apart = (near - total_mean) + mean
    # Corrected it is the float nearest to the mean; of equal values it is that value.
    rest, spread = sum_pair(apart * count, squares + apart * apart * count, 0)
    rest = known_rest(rest / N, spread / N)
    apart -= rest
    return total_mean + rest, tl.sum(squares + apart * apart * count, axis=0)


@jit
def merge_pieces(means, squares, count, N):
    """Merge `piece_moments` of pieces, each with its count, mean and squares, which are negative where it is scaled."""
    unscaled = tl.where(squares < 0.0, float("inf"), squares)
    mean, total = merge_moments(means, 0.0, unscaled, count, N)
    scale = overflow_scale(total)
    if scale < 1.0:
        part = tl.where(squares < 0.0, 1.0, OVERFLOW_SCALE)
        mean, total = merge_moments(means * part, 0.0, tl.abs(squares) * part * part, count, N)
    mean, scale = unscaled_if_equal(mean, total, scale)
    return mean, total, scale


@jit
def piece_moments(x_ptr, N, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr):
    """Return the mean and the sum of squared deviations of x_ptr[:N], scaled if need be, and the scale.

    The same code goes through the piece, and through it scaled where squares overflowed: a second copy of it takes
    registers from the pieces that need none.
    """
    mean, squares, scale = tl.cast(0.0, tl.float32), tl.cast(0.0, tl.float32), tl.cast(1.0, tl.float32)
    tries = tl.cast(2, tl.int32)
    while tries > 0:
        scale = tl.where(tries == 2, 1.0, OVERFLOW_SCALE)
        mean, squares = column_moments(x_ptr, N, scale, BLOCK_N, NUM_STAGES)
        tries = tl.where(squares < float("inf"), 0, tries - 1)
    mean, scale = unscaled_if_equal(mean, squares, scale)
    return mean, squares, scale


@jit
def column_moments(x_ptr, N, scale, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr):
    """Return the mean and the sum of squared deviations of x_ptr[:N] times scale.

    Each of BLOCK_N thread columns follows its own by Welford's formula: no thread waits for another before the end.
    """
    cols = tl.arange(0, BLOCK_N)
    # Means are kept as differences to the column's first value, so that a large common offset costs no digits.
    first = tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) * scale
    mean = tl.zeros((BLOCK_N,), dtype=tl.float32)
    squares = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for start in tl.range(BLOCK_N, N, BLOCK_N, num_stages=NUM_STAGES):
        mask = start + cols < N
        x = tl.load(x_ptr + start + cols, mask=mask, other=0.0).to(tl.float32) * scale
        fraction = 1.0 / tl.cast(start // BLOCK_N + 1, tl.float32)
        delta = tl.where(mask, (x - first) - mean, 0.0)
        mean += delta * fraction
        squares += delta * delta * (1.0 - fraction)
    whole = (N - 1) // BLOCK_N
    count = tl.where(cols < N - whole * BLOCK_N, whole + 1, whole).to(tl.float32)
    return merge_moments(first, mean, squares, count, N)


def affine_gradient(like: Tensor | None, wanted: bool, grad: Tensor) -> Tensor:
    """Return an empty gradient of a weight or bias, or where it is not wanted what stands for it."""
    if like is None or not wanted:
        return no_gradient(grad)
    return empty(like.shape, like.dtype, like.device)
