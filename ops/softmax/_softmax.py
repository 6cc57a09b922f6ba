"""Functions that the kernels of softmax share."""

import triton.language as tl

from llmk.ops.common.math import LOG2E
from llmk.registry import jit


@jit
def finite_rest(s, rest):
    """The rest that s leaves: none where s is infinite, and dy - s is what PyTorch gives."""
    return tl.where(tl.abs(s) < float("inf"), rest, 0.0)


@jit
def add_exponentials(m, total, x, axis: tl.constexpr):
    """The running maximum m and sum of exp(x - m), with the values of x along `axis` counted in."""
    new_m = tl.maximum(m, tl.max(x, axis=axis))
    # Subtracting -inf from -inf would be NaN where nothing finite has been seen yet.
    base = tl.where(new_m == float("-inf"), 0.0, new_m)
    e = tl.exp2((x - tl.expand_dims(base, axis)) * LOG2E)
    return new_m, total * tl.exp2((m - base) * LOG2E) + tl.sum(e, axis=axis)
