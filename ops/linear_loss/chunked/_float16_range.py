"""The gradient of the logits within float16's range, whatever its size.

Numbers below 6e-8 are 0 in float16, and those below 6e-5 have less than its 11 digits. Training in float16 scales the
loss for that reason, but a gradient that is made in the forward pass is made before its factor is known. So it is
scaled here by the power of two that takes the largest number it can have to the end of the range, and float32 sums of
its products are divided by that again. No number leaves the range: the largest is bounded by a formula, or measured.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

END = 15
"""Scaled numbers are at most 2**15, half of what float16 ends at, of which a rounding error is a small part."""
BIAS = 127
"""Of a float32's exponent."""
LARGEST_EXPONENT = 100
"""Beyond 2**100 gradients are not scaled further: float32's range ends."""


def largest(numbers: Tensor) -> Tensor:
    """Return the largest size of the numbers, float32 `[]`; of none it is 0."""
    return torch.nn.functional.pad(numbers.detach().reshape(-1).float().abs(), (0, 1)).amax()


def float16_scale(dtype: torch.dtype, need: Sequence[bool], bound: Callable[[], Tensor]) -> Tensor | None:
    """Return the power of two for a gradient of logits that `bound()`, float32 `[]`, bounds; None outside of float16.

    It is 1 where the bound is not finite, as gradients then are not. Its bits are made from the bound's: no rounding
    of an exponential is in it.
    """
    if dtype != torch.float16 or not any(need):
        return None
    size = bound()
    exponent = (size.view(torch.int32) >> 23) - (BIAS - 1)  # size < 2**exponent
    exponent = torch.where(size.isfinite(), (END - exponent).clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT), 0)
    return ((exponent + BIAS) << 23).view(torch.float32)


def scaled(grad: Tensor, scale: Tensor | None) -> Tensor:
    return grad if scale is None else grad * scale
