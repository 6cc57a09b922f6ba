"""Functions of one value that Triton has no portable or no exact form of."""

import torch
import triton.language as tl
from torch import Tensor

from llmk.registry import jit

LOG2E = tl.constexpr(1.4426950408889634)
LOG2E_LOW = tl.constexpr(1.925963033500997e-08)  # what float32 cuts off it
LN2 = tl.constexpr(0.6931471805599453)


@jit
def everywhere(condition, cols):
    """A condition as a mask of the shape of `cols`. Triton 3.9's interpreter makes no mask of one truth value."""
    return tl.broadcast_to(condition.to(tl.int32), cols.shape) != 0


@jit
def tanh(x):
    """Hyperbolic tangent in float32, good to 3 units in the last place for arguments of any size."""
    size = tl.abs(x)
    far = 1.0 - 2.0 / (tl.exp(2.0 * size) + 1.0)
    return tl.where(size < 0.6, _tanh_near_zero(x), tl.where(x < 0, -far, far))


@jit
def _tanh_near_zero(x):
    # Up to 0.6 the exponential form cancels: tanh(u) = u + u^3 P(u^2), P a Chebyshev fit (relative error 1.3 * 2^-24).
    z = x * x
    p = -0.00627638 * z + 0.02111621
    p = p * z - 0.05387514
    p = p * z + 0.13332924
    p = p * z - 0.3333333
    return x + x * z * p


@jit
def exp(x):
    """Exponential in float32; exp2 of a rounded product would lose the digits of large x."""
    product = x * LOG2E
    low = tl.fma(x, LOG2E, -product) + x * LOG2E_LOW
    e = tl.exp2(product)
    return tl.where(tl.abs(product) < 128.0, e + e * (low * LN2), e)  # beyond, e is 0, inf or NaN


@jit
def exp_of_decay(x):
    """Exponential in float32, to 1.1 units in the last place and on average to none; infinite from 88.4 on.

    It is for what multiplies a state again and again: an H200's approximate exp2, in `exp`, is 0.6 units too small on
    average.
    """
    x = tl.where(x < -128.0, -128.0, x)  # of which the exponential is 0
    n = tl.floor(x * LOG2E + 0.5)
    r = (x - n * 0.693145751953125) - n * 1.4286068203094173e-06  # LN2 in two parts: the first product is exact
    p = r * (1.0 / 5040.0) + 1.0 / 720.0
    p = p * r + 1.0 / 120.0
    p = p * r + 1.0 / 24.0
    p = p * r + 1.0 / 6.0
    p = p * r + 0.5
    return (1.0 + (r + r * (r * p))) * tl.exp2(n)


@jit
def expm1(x):
    """exp(x) - 1 in float32, to a few units in the last place."""
    # The Taylor series where exp(x) - 1 cancels; what it leaves out is x^7 / 8! of the result.
    p = x * (1.0 / 5040.0) + 1.0 / 720.0
    p = p * x + 1.0 / 120.0
    p = p * x + 1.0 / 24.0
    p = p * x + 1.0 / 6.0
    p = p * x + 0.5
    return tl.where(tl.abs(x) < 0.35, x + x * (x * p), exp(x) - 1.0)


@jit
def log_for_product(x):
    """Logarithm in float32, to 1.1 units in the last place, of an x >= 0 that the result is multiplied by.

    So it may be any number at 0, at inf and where x is subnormal, which makes it cheaper than a general one.
    """
    exponent, f = _reduced(x)
    return _log_of_reduced(exponent, f)


@jit
def log1p_for_product(x):
    """log(1 + x) as `log_for_product` has the logarithm, to 1.1 units in the last place for any x > -1."""
    exponent, f = _reduced(1.0 + x)
    return _log_of_reduced(exponent, tl.where(exponent == 0, x, f))  # x before 1 + x rounded it


@jit
def log1p(x):
    """log(1 + x) in float32, to 1.1 units in the last place: -inf at -1, NaN below."""
    y = tl.where(x < float("inf"), log1p_for_product(x), x)  # inf and NaN are themselves
    y = tl.where(x == -1.0, -float("inf"), y)
    return tl.where(x < -1.0, float("nan"), y)


@jit
def softplus(x):
    """log(1 + exp(x)) in float32, for an x of any size."""
    return tl.where(x < 0.0, 0.0, x) + log1p_for_product(exp(-tl.abs(x)))


@jit
def _reduced(x):
    """The exponent of x times 2^23, such that x / 2^exponent - 1 is in [-1/3, 1/3), and that difference."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F2AAAAB) & -0x800000
    return exponent, (bits - exponent).to(tl.float32, bitcast=True) - 1.0


@jit
def _log_of_reduced(exponent, f):
    # log(1 + f) = f + f^2 P(f), P a minimax fit (relative error 0.44 * 2^-24).
    p = 0.14026383 * f - 0.15388556
    p = p * f + 0.13995802
    p = p * f - 0.16415958
    p = p * f + 0.20011169
    p = p * f - 0.2500782
    p = p * f + 0.33333197
    p = p * f - 0.49999937
    return exponent.to(tl.float32) * (LN2 / 8388608.0) + (f + f * (f * p))


@jit
def cap(x, softcap, EXACT: tl.constexpr):
    """softcap * tanh(x / softcap) in float32, for an x that comes of 16 bits unless EXACT."""
    softcap = tl.cast(softcap, tl.float32)
    far = softcap - softcap * _one_minus_tanh(x, softcap)
    y = tl.where(x < 0, -far, far)
    # Without it, a third of the instructions, which took longer than the memory. Digits of small x are lost that 16
    # bits cannot tell: where c = 30 the error is 6e-6 at most.
    if EXACT:
        ratio = x / softcap
        y = tl.where(tl.abs(ratio) < 0.6, softcap * _tanh_near_zero(ratio), y)
    return y


@jit
def cap_slope(x, softcap):
    """The derivative of `cap` at x: 1 - tanh(x / softcap)^2 = d (2 - d) with the d of `_one_minus_tanh`.

    No difference of numbers that are nearly equal, as of 1 and the square of a tanh that has been rounded.
    """
    d = _one_minus_tanh(x.to(tl.float32), tl.cast(softcap, tl.float32))
    return d * (2.0 - d)


@jit
def _one_minus_tanh(x, softcap):
    """1 - tanh(|x| / softcap), to its own last places; the cap and its derivative share the exponential."""
    return 2.0 / (tl.exp2(tl.abs(x) * (2.0 * LOG2E / softcap)) + 1.0)


def tanh_reference(x: Tensor) -> Tensor:
    """PyTorch's tanh; in float64, where it is what is right, with a derivative that does not cancel.

    That of torch.tanh is 1 - tanh(x)^2, which past 20 is 0. Of 1 - 2 s(-2 |x|) it is 4 s(-2 |x|) s(2 |x|).
    """
    if x.dtype != torch.float64:
        return torch.tanh(x)
    return torch.where(x.abs() < 1, torch.tanh(x), x.sign() * (1 - 2 * torch.sigmoid(-2 * x.abs())))


def cap_reference(x: Tensor, softcap: float) -> Tensor:
    """softcap * tanh(x / softcap) as `tanh_reference` has it, or x where softcap is 0."""
    return softcap * tanh_reference(x / softcap) if softcap else x


def logsumexp_reference(x: Tensor) -> Tensor:
    """PyTorch's logsumexp over the last axis, with a derivative that adds up to 1 however large the numbers are.

    That of torch.logsumexp is exp(x - result), and a result of 1e26 has no room for the logarithm of the sum.
    """
    largest = x.detach().amax(-1, keepdim=True)
    largest = largest.masked_fill(largest.isinf(), 0.0)
    return (x - largest).logsumexp(-1) + largest.squeeze(-1)


def logsumexp_cpu(x: Tensor) -> Tensor:
    """PyTorch's logsumexp over the last axis, kept. PyTorch's own needs to know whether there are rows."""
    largest = x.amax(-1, keepdim=True)
    largest = largest.masked_fill(largest.isinf(), 0.0)
    return (x - largest).exp().sum(-1, keepdim=True).log() + largest


def merged_sums_cpu(m: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Merge parts `[T, ...]` of softmaxes: their maxima, and the sums of exponentials relative to these."""
    largest = m.amax(0)
    base = largest.masked_fill(largest == float("-inf"), 0.0)  # where all are
    return largest, (s * (m - base).exp()).sum(0)


def cap_cpu(x: Tensor, softcap: float) -> Tensor:
    """`cap` in plain PyTorch."""
    return softcap * torch.tanh(x / softcap)


def cap_slope_cpu(x: Tensor, softcap: float) -> Tensor:
    """`cap_slope` in plain PyTorch: 1 / cosh(x / softcap)^2."""
    return torch.cosh(x / softcap).square_().reciprocal_()
