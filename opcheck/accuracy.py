"""The rule for being right.

Against a float64 reference on the same inputs, the error of an operator's result must not exceed `factor` (1.5) times
the error of PyTorch's own composition in the same dtype, plus one unit in the last place of the result. It is asked of
the largest error over the elements, with the unit of the largest element, and of the root mean square of the errors,
with each element's own unit. In float32, where both errors are a few roundings in different places, a few elements say
little about the composition's: below FEW of them it is taken to be two units at least, and as large as on any of a few
neighbouring inputs, whose elements differ in their last place.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FEW = 1024


@dataclass(frozen=True)
class Violation:
    """By how much the rule was broken, and where."""

    what: str
    error: float
    allowed: float

    def __str__(self) -> str:
        return f"{self.what}: error {self.error:.3g}, allowed {self.allowed:.3g}"


def unit_in_last_place(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between neighbours of `dtype` at the float64 values x."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(x.abs().clamp(min=info.tiny, max=info.max)).exponent - 1
    return torch.ldexp(torch.full_like(x, info.eps), exponent)


def accuracy_violation(
    actual: Tensor,
    composition: Tensor,
    exact: Tensor,
    factor: float = 1.5,
    neighbours: Sequence[tuple[Tensor, Tensor]] = (),
) -> Violation | None:
    """None if the rule holds.

    Args:
        actual: The operator's result.
        composition: The result of PyTorch's composition in the same dtype.
        exact: The float64 reference.
        factor: How much larger than the composition's error the operator's may be.
        neighbours: The composition's result and the reference on neighbouring inputs, for results of few elements.
    """
    if actual.shape != exact.shape:
        return Violation(f"shape {tuple(actual.shape)} where {tuple(exact.shape)} is right", float("inf"), 0.0)
    dtype, actual, composition = actual.dtype, actual.detach().double(), composition.detach().double()
    exact = exact.detach()
    beyond = exact.abs() > torch.finfo(dtype).max  # where dtype overflows, the result is infinite as PyTorch's is
    exact = torch.where(beyond, exact.sign() * float("inf"), exact)
    special = ~exact.isfinite()
    wrong = special & ~((actual == exact) | (actual.isnan() & exact.isnan()) | (actual == composition))
    if bool(wrong.any()):
        value, right = actual[wrong][0].item(), exact[wrong][0].item()
        return Violation(f"{value} where {right} is right", float("inf"), 0.0)
    actual, composition, exact = actual[~special], composition[~special], exact[~special]
    if exact.numel() == 0:
        return None
    error, ulp = (actual - exact).abs(), unit_in_last_place(exact, dtype)
    yardsticks = [_finite_error(composition, exact)]
    if has_few(actual, dtype):
        yardsticks[0] = torch.maximum(yardsticks[0], 2 * ulp)
        yardsticks += [_finite_error(near.detach().double(), truth.detach()) for near, truth in neighbours]
    allowed = factor * max(float(yardstick.max()) for yardstick in yardsticks) + float(ulp.max())
    # NaN compares false with everything: it must not pass.
    if not bool((error <= allowed).all()):
        worst = int(torch.where(error.isnan(), float("inf"), error).argmax())
        what = f"element {worst} is {actual[worst]:.6g}, right is {exact[worst]:.6g}"
        return Violation(what, float(error[worst]), allowed)
    rms, allowed = _rms(error), factor * max(_rms(yardstick) for yardstick in yardsticks) + _rms(ulp)
    return Violation("root mean square over all elements", rms, allowed) if rms > allowed else None


def has_few(result: Tensor, dtype: torch.dtype) -> bool:
    """Whether one input says too little about the composition's error."""
    return dtype == torch.float32 and result.numel() < FEW


def _finite_error(composition: Tensor, exact: Tensor) -> Tensor:
    error = (composition - exact).abs()
    return torch.where(error.isfinite(), error, 0.0)


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())
