"""What layer_norm and group_norm share: the moments of a row, and room for the affine gradients."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmk.ops.common.sums import sum_pair
from llmk.registry import empty, no_gradient


@triton.jit
def coarse_mean(mean, var):
    """The mean to about twelve binary digits of a deviation.

    x - mean rounds alike for every x of a binade, and a sum over thousands of places shows it; x minus this is exact.
    """
    grid = 2048.0 * tl.sqrt_rn(var)
    return (mean + grid) - grid


@triton.jit
def known_rest(rest, var):
    """What is left of a mean, sum(x - mean) / N, where it is more than the rounding of x - mean; else 0.

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


@triton.jit
def merge_moments(near, mean, squares, count, N):
    """Mean and sum of squared deviations of N values in parts: of each its count, and its mean as near + mean."""
    whole = tl.sum((near + mean) * count, axis=0) / N
    apart = (near - whole) + mean
    # Corrected it is the float nearest to the mean; of equal values it is that value.
    rest, spread = sum_pair(apart * count, squares + apart * apart * count, 0)  # type: ignore[misc]
    rest = known_rest(rest / N, spread / N)
    apart -= rest
    return whole + rest, tl.sum(squares + apart * apart * count, axis=0)


@triton.jit
def row_moments(x_ptr, N, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr):
    """Mean and sum of squared deviations of x_ptr[:N].

    Each of BLOCK_N lanes follows its own by Welford's formula, and no thread waits for another before the end.
    """
    cols = tl.arange(0, BLOCK_N)
    # Means are kept as differences to the lane's first value, so that a large common offset costs no digits.
    first = tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    mean = tl.zeros((BLOCK_N,), dtype=tl.float32)
    squares = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for start in tl.range(BLOCK_N, N, BLOCK_N, num_stages=NUM_STAGES):
        mask = start + cols < N
        x = tl.load(x_ptr + start + cols, mask=mask, other=0.0).to(tl.float32)
        share = tl.div_rn(1.0, tl.cast(start // BLOCK_N + 1, tl.float32))
        delta = tl.where(mask, (x - first) - mean, 0.0)
        mean += delta * share
        squares += delta * delta * (1.0 - share)
    count = tl.where(cols < N, (N - 1 - cols) // BLOCK_N + 1, 0).to(tl.float32)
    return merge_moments(first, mean, squares, count, N)  # type: ignore[misc]


def affine_gradient(like: Tensor | None, wanted: bool, grad: Tensor) -> Tensor:
    """Room for the gradient of a weight or bias, or where it is not wanted what stands for it."""
    if like is None or not wanted:
        return no_gradient(grad)
    return empty(like.shape, like.dtype, like.device)
