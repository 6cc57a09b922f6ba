r"""The generalized Jensen-Shannon divergence of two log-probabilities, and the total variation, of one class.

With Q = exp(x), the student's, P = exp(y), the teacher's, and M = beta * P + (1 - beta) * Q:

    0 < beta < 1:  f = beta * P * (y - log(M)) + (1 - beta) * Q * (x - log(M))    df/dx = (1 - beta) * Q * (x - log(M))
    beta = 0:      f = P * (y - x)                                                df/dx = -P
    beta = 1:      f = Q * (x - y)                                                df/dx = Q * (x - y + 1)

where 0 * log(0) = 0. df/dx of 0 < beta < 1 leaves out what adds up to no gradient of M: its derivative by M is
-(beta * P + (1 - beta) * Q) / M = -1 for each, times dM, and the 1 of the product rule is the same again.

    total variation:  f = |x - y| / 2     df/dx = sign(x - y) / 2     of probabilities x and y
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmk.ops.common.math import LOG2E, exp, log_for_product

TOTAL_VARIATION = tl.constexpr(-1.0)
"""In place of a beta."""


class Mixture(NamedTuple):
    """A beta from 0 to 1, or TOTAL_VARIATION, as kernels take it."""

    beta: float

    def constants(self) -> dict[str, float]:
        between = 0.0 < self.beta < 1.0
        return {
            "BETA": self.beta,
            "LOG_BETA": math.log(self.beta) if between else 0.0,
            "LOG_REST": math.log1p(-self.beta) if between else 0.0,
        }


@triton.jit
def exp_of(x, EXACT: tl.constexpr):
    """Exponential in float32, to what 16 bits can tell without EXACT."""
    if EXACT:  # noqa: SIM108  a call in each branch
        e = exp(x)
    else:
        e = tl.exp2(x * LOG2E)
    return e


@triton.jit
def _times_log(p, log_ratio):
    """p * log(p / q), 0 where p is."""
    return tl.where(p == 0.0, 0.0, p * log_ratio)


@triton.jit
def _finite(x):
    """A logarithm whose exponential is 0 in place of -inf; NaN stays."""
    return tl.maximum(x, -1e4, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def divergence_of(x, y, BETA: tl.constexpr, LOG_BETA: tl.constexpr, LOG_REST: tl.constexpr, EXACT: tl.constexpr):
    """f and df/dx, in float32. Without EXACT to what 16 bits can tell."""
    if BETA == TOTAL_VARIATION:
        d = x - y
        f = 0.5 * tl.abs(d)
        slope = tl.where(d > 0.0, 0.5, tl.where(d < 0.0, -0.5, d))  # 0 or NaN
    elif BETA == 0.0:
        p = exp_of(y, EXACT)
        f = _times_log(p, y - x)  # type: ignore[misc]
        slope = -p
    elif BETA == 1.0:
        q = exp_of(x, EXACT)
        f = _times_log(q, x - y)  # type: ignore[misc]
        slope = f + q
    elif EXACT:
        a, b = y + LOG_BETA, x + LOG_REST
        high, low = tl.maximum(a, b), tl.minimum(a, b)
        u = exp(tl.where(high == float("-inf"), 0.0, low - high))
        log_m = high + log_for_product(1.0 + u)
        slope = (1.0 - BETA) * _times_log(exp(x), x - log_m)  # type: ignore[misc]
        f = BETA * _times_log(exp(y), y - log_m) + slope  # type: ignore[misc]
    else:
        # As few instructions as a GPU has time for while it reads: two exponentials and the logarithm of M itself. What
        # stands for -inf leaves 0 times a number where it would be 0 times inf.
        x, y = _finite(x), _finite(y)  # type: ignore[misc]
        q, p = tl.exp2(x * LOG2E), tl.exp2(y * LOG2E)
        log_m = log_for_product(BETA * p + (1.0 - BETA) * q)
        slope = (1.0 - BETA) * (q * (x - log_m))
        f = BETA * (p * (y - log_m)) + slope
    return f, slope


def divergence_of_cpu(x: Tensor, y: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """`divergence_of` in plain PyTorch."""

    def times_log(p: Tensor, log_ratio: Tensor) -> Tensor:
        return torch.where(p == 0, 0.0, p * log_ratio)

    if beta == TOTAL_VARIATION.value:
        d = x - y
        return 0.5 * d.abs(), 0.5 * d.sgn()
    if beta == 0:
        p = y.exp()
        return times_log(p, y - x), -p
    if beta == 1:
        q = x.exp()
        f = times_log(q, x - y)
        return f, f + q
    # log(M) - x and log(M) - y from their difference, in which what x and y are large by is gone.
    d = y - x
    nearer = torch.where(d > 0, torch.log1p((1 - beta) * torch.expm1(-d)), torch.log1p(beta * torch.expm1(d)))
    above_x, above_y = torch.where(d > 0, nearer + d, nearer), torch.where(d > 0, nearer, nearer - d)
    slope = (1 - beta) * times_log(x.exp(), -above_x)
    return beta * times_log(y.exp(), -above_y) + slope, slope
