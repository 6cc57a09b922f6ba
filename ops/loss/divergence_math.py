r"""The generalized Jensen-Shannon divergence of two log-probabilities, and the total variation, of one class.

With Q = exp(x), the student's, P = exp(y), the teacher's, and M = beta * P + (1 - beta) * Q:

    0 < beta < 1:  f = beta * P * (y - log(M)) + (1 - beta) * Q * (x - log(M))    df/dx = (1 - beta) * Q * (x - log(M))
    beta = 0:      f = P * (y - x)                                                df/dx = -P
    beta = 1:      f = Q * (x - y)                                                df/dx = Q * (x - y + 1)

where 0 * log(0) = 0, as of a P or Q that is 0 in float32. df/dx of 0 < beta < 1 leaves out what adds up to no gradient
of M: its derivative by M is -(beta * P + (1 - beta) * Q) / M = -1 for each, times dM, and the 1 of the product rule is
the same again.

log(M) - x is log1p(beta * (exp(y - x) - 1)), and computed so for a beta near 0 or 1, and in float32 for any of them:
log(M) itself would have nothing left of what the smaller part adds.

    total variation:  f = |x - y| / 2     df/dx = sign(x - y) / 2     of probabilities x and y
"""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.math import LOG2E, exp, expm1, log1p_for_product, log_for_product
from llmk.registry import jit

TOTAL_VARIATION = tl.constexpr(-1.0)
"""The total variation, in place of a beta."""
BETWEEN = tl.constexpr(2)
"""The form of a beta that is neither 0 nor 1."""
NEAR_AN_END = tl.constexpr(3)
"""The form of a beta so near to 0 or 1 that 16 bits too can tell what a logarithm of M loses."""
NEAR = 1 / 32


class Mixture(NamedTuple):
    """A beta from 0 to 1, or TOTAL_VARIATION, as kernels take it."""

    beta: float

    def form(self) -> int:
        """Return the number of the formula: -1, 0 or 1 for that beta, 2 between 0 and 1, 3 next to them."""
        if not 0.0 < self.beta < 1.0:
            return int(self.beta)
        return BETWEEN.value if NEAR <= self.beta <= 1.0 - NEAR else NEAR_AN_END.value

    def numbers(self) -> tuple[float, float]:
        """beta, and 1 - beta, of which float32 would cut digits off."""
        return self.beta, 1.0 - self.beta


@jit
def exp_of(x, EXACT: tl.constexpr):
    """Exponential in float32, to what 16 bits can tell without EXACT."""
    if EXACT:  # noqa: SIM108  a call in each branch
        e = exp(x)
    else:
        e = tl.exp2(x * LOG2E)
    return e


@jit
def _times_log(p, log_ratio):
    """p * log(p / q), 0 where p is."""
    return tl.where(p == 0.0, 0.0, p * log_ratio)


@jit
def _finite(x):
    """A logarithm whose exponential is 0 in place of -inf; NaN stays."""
    return tl.maximum(x, -1e4, propagate_nan=tl.PropagateNan.ALL)


@jit
def _logs_of_mixture(x, y, beta, rest):
    """log(M) - x and log(M) - y, to a few units in the last place.

    With w = exp(-|y - x|) they are log1p(share * (w - 1)) of the larger, and log1p(share * (1 / w - 1)) of the smaller,
    each with the other's share of M. Where a logarithm's argument is far from 1 its parts are added up instead.
    """
    d = tl.where(x == y, 0.0, tl.abs(y - x))  # also of two -inf
    y_is_larger = y > x
    share, others = tl.where(y_is_larger, beta, rest), tl.where(y_is_larger, rest, beta)
    w, below = exp(-d), -expm1(-d)
    less = others * below
    larger = tl.where(less > 0.5, log_for_product(share + others * w), log1p_for_product(-less))
    more, near = share * below, share * below < w
    smaller = tl.where(near, log1p_for_product(more / tl.where(near, w, 1.0)), d + larger)
    return tl.where(y_is_larger, smaller, larger), tl.where(y_is_larger, larger, smaller)


@jit
def divergence_of(x, y, beta, rest, FORM: tl.constexpr, EXACT: tl.constexpr):
    """f and df/dx, in float32, of a mixture's numbers and form. Without EXACT to what 16 bits can tell."""
    beta, rest = tl.cast(beta, tl.float32), tl.cast(rest, tl.float32)
    if FORM == TOTAL_VARIATION:
        d = x - y
        f = 0.5 * tl.abs(d)
        df = tl.where(d > 0.0, 0.5, tl.where(d < 0.0, -0.5, d))  # 0 or NaN
    elif FORM == 0:
        p = exp_of(y, EXACT)
        f = _times_log(p, y - x)
        df = -p
    elif FORM == 1:
        q = exp_of(x, EXACT)
        f = _times_log(q, x - y)
        df = f + q
    elif EXACT or FORM == NEAR_AN_END:
        above_x, above_y = _logs_of_mixture(x, y, beta, rest)
        df = rest * _times_log(exp_of(x, EXACT), -above_x)
        f = beta * _times_log(exp_of(y, EXACT), -above_y) + df
    else:
        # As few instructions as a GPU has time for while it reads: two exponentials and the logarithm of M itself. What
        # stands for -inf leaves 0 times a number where it would be 0 times inf.
        x, y = _finite(x), _finite(y)
        q, p = tl.exp2(x * LOG2E), tl.exp2(y * LOG2E)
        log_m = tl.where(x == y, x, log_for_product(beta * p + rest * q))  # equal: no rounding
        df = rest * (q * (x - log_m))
        f = beta * (p * (y - log_m)) + df
    return f, df


def divergence_of_cpu(x: Tensor, y: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """`divergence_of` in plain PyTorch. Autograd's derivative of f by x is df/dx, to the same digits."""

    def times_log(p: Tensor, log_ratio: Tensor) -> Tensor:
        return p * torch.where(p == 0, 0.0, log_ratio)  # before the product, whose derivative would be infinite

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
    # log(M) - x and log(M) - y from their difference, in which what x and y are large by is gone. They are constants:
    # that leaves out of the derivative what adds up to none of M.
    d = y.detach() - x.detach()
    above_x, above_y = _log_of_sum(d, beta, 1 - beta), _log_of_sum(-d, 1 - beta, beta)
    df = (1 - beta) * times_log(x.exp(), -above_x)
    return beta * times_log(y.exp(), -above_y) + df, df


def _log_of_sum(d: Tensor, share: float, rest: float) -> Tensor:
    """log(rest + share * exp(d)) with rest + share = 1, good to a few units in the last place for any d.

    Each formula is evaluated where it is accurate, so that no derivative of the others is infinite.
    """
    bounded = d.clamp(max=60.0)
    more = share * torch.expm1(bounded)  # than 1; where little is left of that, the parts are added up instead
    near = torch.where(more < -0.5, (rest + share * torch.exp(bounded)).log(), torch.log1p(more.clamp(min=-0.5)))
    return torch.where(d > 60.0, d + torch.log(share + rest * torch.exp(-d.clamp(min=60.0))), near)
