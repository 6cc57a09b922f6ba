"""The moments of rows, and the partial affine gradients, of layer_norm and group_norm."""

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.sums import sum_pair
from llmk.registry import empty, jit, no_gradient


@jit
def coarse_mean(mean, var):
    """The mean to about twelve binary digits of a deviation.

    x - mean rounds alike for every x of a binade, and a sum over thousands of values shows it; x minus this is exact.
    """
    grid = 2048.0 * tl.sqrt(var)
    return tl.where(var < float("inf"), (mean + grid) - grid, mean)


@jit
def known_rest(rest, var):
    """Return the remainder of a mean, sum(x - mean) / N, where it is more than the rounding of x - mean; else 0.

    x - mean rounds alike for every x of a binade: a rest below half a unit of a deviation may be nothing but that.
    """
    return tl.where(tl.abs(rest) > 2.0**-24 * tl.sqrt_rn(var), rest, 0.0)


def centered(x: Tensor) -> tuple[Tensor, Tensor]:
    """x less its mean over the last axis, and the mean, corrected as `known_rest` has it."""
    mean = x.mean(-1, keepdim=True)
    c = x - mean
    rest = c.mean(-1, keepdim=True)
    mean = mean + torch.where(rest.abs() > 2**-24 * c.square().mean(-1, keepdim=True).sqrt(), rest, 0.0)
    return x - mean, mean


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
def column_moments(x_ptr, N, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr):
    """Return the mean and the sum of squared deviations of x_ptr[:N].

    Each of BLOCK_N thread columns follows its own by Welford's formula: no thread waits for another before the end.
    """
    cols = tl.arange(0, BLOCK_N)
    # Means are kept as differences to the column's first value, so that a large common offset costs no digits.
    first = tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    mean = tl.zeros((BLOCK_N,), dtype=tl.float32)
    squares = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for start in tl.range(BLOCK_N, N, BLOCK_N, num_stages=NUM_STAGES):
        mask = start + cols < N
        x = tl.load(x_ptr + start + cols, mask=mask, other=0.0).to(tl.float32)
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
