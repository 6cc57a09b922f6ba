r"""Activations: one name, its function and its derivative, for kernels and for CPU versions.

With s(z) = 1 / (1 + exp(-z)), Phi and phi the normal distribution and its density:

    name          f(x)                                f'(x)
    none          x                                   1
    relu          x if x > 0 else 0                   1 if x > 0 else 0
    relu_squared  relu(x)^2                           2 relu(x)
    gelu          x Phi(x)                            Phi(x) + x phi(x)
    gelu_tanh     x s(z)                              s(z) + x z' s(z) s(-z)
    silu          x s(x)                              s(x) (1 + x s(-x))
    sigmoid       s(x)                                s(x) s(-x)

The tanh form of GELU, x (1 + tanh(u)) / 2 with u = sqrt(2/pi) (x + 0.044715 x^3), is x s(z) with z = 2u: the same
function, without the sum 1 + tanh(u) that cancels where x is negative. Kernels compute x s(z) as x / (1 + exp(-z)), one
rounding less, and Phi in a form of Abramowitz and Stegun's, 7.1.26, which does not cancel there either.

Sources: GELU and SiLU, Hendrycks and Gimpel, 2016, https://arxiv.org/abs/1606.08415; the squared ReLU, So et al., 2021,
https://arxiv.org/abs/2109.08668.
"""

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.math import LOG2E
from llmk.registry import jit

ACTIVATIONS = ("none", "relu", "relu_squared", "gelu", "gelu_tanh", "silu")
"""Those that follow a linear layer."""
GATES = ("silu", "sigmoid")
"""Those of a gate."""


@jit
def _normal_cdf(x):
    """Phi(x), from float32 to float32."""
    # Phi(-a) = exp(-a^2 / 2) t P(t) with t = 1 / (1 + 0.35 a), P a minimax fit (relative error 3.2e-8). Good to 5 units
    # in the last place down to x = -3, where (1 + erf(x / sqrt(2))) / 2 is off by a thousand.
    t = 1.0 / (1.0 + 0.35 * tl.abs(x))
    p = -0.029157886 * t + 0.14403091
    p = p * t - 0.25583899
    p = p * t + 0.1593197
    p = p * t - 0.023212353
    p = p * t + 0.1055525
    p = p * t + 0.11982129
    p = p * t + 0.13986352
    p = p * t + 0.1396213
    tail = tl.exp(-0.5 * x * x) * (p * t)
    return tl.where(x < 0.0, tail, 1.0 - tail)


@jit
def _exp_minus(x):
    """exp(-x) for a sum with 1, from float32 to float32: results below the smallest normal number may be 0."""
    return tl.exp2(x * -LOG2E)  # tl.exp, without what that does for those


@jit
def activate(x, ACTIVATION: tl.constexpr):
    """f(x), from float32 to float32."""
    if ACTIVATION == "relu":
        y = tl.where(x <= 0.0, 0.0, x)  # NaN is not <= 0 and stays
    elif ACTIVATION == "relu_squared":
        y = tl.where(x <= 0.0, 0.0, x * x)
    elif ACTIVATION == "gelu":
        y = x * _normal_cdf(x)
    elif ACTIVATION == "gelu_tanh":
        y = x / (1.0 + _exp_minus(x * (1.5957691216057308 + 0.07135481627260025 * x * x)))
    elif ACTIVATION == "silu":
        y = x / (1.0 + _exp_minus(x))
    elif ACTIVATION == "sigmoid":
        y = 1.0 / (1.0 + _exp_minus(x))
    else:
        tl.static_assert(ACTIVATION == "none", "ACTIVATION is one of ACTIVATIONS or GATES")
        y = x
    return y


@jit
def activate_with_grad(x, ACTIVATION: tl.constexpr):
    """(f(x), f'(x)), from float32 to float32."""
    if ACTIVATION == "relu":
        y = tl.where(x <= 0.0, 0.0, x)
        grad = tl.where(x <= 0.0, 0.0, 1.0)
    elif ACTIVATION == "relu_squared":
        positive = tl.where(x <= 0.0, 0.0, x)
        y = positive * positive
        grad = 2.0 * positive
    elif ACTIVATION == "gelu":
        cdf = _normal_cdf(x)
        y = x * cdf
        grad = cdf + x * (0.3989422804014327 * tl.exp(-0.5 * x * x))  # the exponential of the CDF again
    elif ACTIVATION == "gelu_tanh":
        z = x * (1.5957691216057308 + 0.07135481627260025 * x * x)
        # From exp(-|z|), which is at most 1, both s(z) and s(z) s(-z) come without cancellation or overflow.
        e = tl.exp(-tl.abs(z))
        r = 1.0 / (1.0 + e)
        s = tl.where(z < 0.0, e * r, r)
        y = x * s
        # Past 32 the last factor is 0, and times a z' that overflows it would be NaN, as it is for an infinite x.
        near = tl.minimum(tl.maximum(x, -32.0), 32.0) + 0.0 * x
        grad = s + near * (1.5957691216057308 + 0.21406444881780076 * near * near) * (e * r * r)
    elif ACTIVATION == "silu":
        s = 1.0 / (1.0 + _exp_minus(x))
        y = x * s
        grad = s * (1.0 + x * (1.0 - s))
    elif ACTIVATION == "sigmoid":
        y = 1.0 / (1.0 + tl.exp(-x))
        grad = y / (1.0 + tl.exp(x))
    else:
        tl.static_assert(ACTIVATION == "none", "ACTIVATION is one of ACTIVATIONS or GATES")
        y = x
        grad = tl.full(x.shape, 1.0, tl.float32)
    return y, grad


@jit
def times_slope(dy, slope, ACTIVATION: tl.constexpr):
    """dy f'(x), in PyTorch's way: 0 where a relu is, whatever dy, and elsewhere 0 times infinity is NaN."""
    dx = dy * slope
    if ACTIVATION == "relu" or ACTIVATION == "relu_squared":
        dx = tl.where(slope == 0.0, 0.0, dx)
    return dx


def activation(x: Tensor, name: str) -> Tensor:
    """`activate` in plain PyTorch: float32 to float32."""
    if name == "relu":
        return torch.relu(x)
    if name == "relu_squared":
        return torch.relu(x).square()
    if name == "gelu":
        return x * _cdf(x)
    if name == "gelu_tanh":
        return x * torch.sigmoid(x * (1.5957691216057308 + 0.07135481627260025 * x * x))
    if name == "sigmoid":
        return torch.sigmoid(x)
    return torch.nn.functional.silu(x) if name == "silu" else x


def activation_with_grad(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """`activate_with_grad` in plain PyTorch: float32 to float32."""
    y = activation(x, name)
    if name == "relu":
        return y, torch.where(x <= 0, 0.0, torch.ones_like(x))
    if name == "relu_squared":
        return y, 2 * torch.relu(x)
    if name == "gelu":
        return y, _cdf(x) + x * (0.3989422804014327 * torch.exp(-0.5 * x * x))
    if name == "gelu_tanh":
        z = x * (1.5957691216057308 + 0.07135481627260025 * x * x)
        s, rest = torch.sigmoid(z), torch.sigmoid(-z)
        near = x.clamp(-32.0, 32.0) + 0 * x  # as in the kernel
        return y, s + near * (1.5957691216057308 + 0.21406444881780076 * near * near) * (s * rest)
    if name == "silu":
        s = torch.sigmoid(x)
        return y, s * (1 + x * (1 - s))
    if name == "sigmoid":
        return y, y * torch.sigmoid(-x)
    return y, torch.ones_like(x)


def times_slope_reference(dy: Tensor, slope: Tensor, name: str) -> Tensor:
    """`times_slope` in plain PyTorch."""
    return torch.where(slope == 0, 0.0, dy * slope) if name in ("relu", "relu_squared") else dy * slope


def gelu_reference(x: Tensor, approximate: str) -> Tensor:
    """PyTorch's GELU; in float64, where it is what is right, without its sums 1 + tanh and 1 + erf, which cancel."""
    if x.dtype != torch.float64:
        return torch.nn.functional.gelu(x, approximate=approximate)
    return activation(x, "gelu_tanh" if approximate == "tanh" else "gelu")


def _cdf(x: Tensor) -> Tensor:
    return 0.5 * torch.erfc(x * -0.7071067811865476)
