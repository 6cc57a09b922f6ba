"""The rule for being right.

Against a float64 reference on the same inputs, the error of an operator's result must not exceed `factor` (1.5) times
the error of PyTorch's own composition in the same dtype, plus one unit in the last place of the result. It is asked at
every scale that the result has:

- of the whole tensor: of the largest error over the elements, with the unit of the largest element, and of the root
  mean square of the errors, with each element's own unit;
- of each element and of each row, with errors divided by the element's error bound, which is how far the reference
  moves when every input moves by one unit in its last place, plus the element's own unit. In that measure every element
  is of one size, so that the composition's largest error is a baseline for all of them, and one such unit more is
  allowed.

The second catches what the first cannot see: a small row that is zeroed beside large ones, small entries of a softmax
that are left out, one small element that is wrong. An error bound is estimated from a few draws of random signs
(`Reference` in reference.py makes them), and so needs no formula of its own for any operator.

Few elements say little about the composition's error. Below FEW of them in float32, where both errors are a few
roundings in different places, it is taken to be at least ROUNDINGS times the element's error bound; and the
composition's errors on neighbouring inputs can be further baselines. A gradient has the incoming ones among its inputs.
The gradient of a bias has no others: where its terms cancel, two orders of one sum are each off by the luck of a few
roundings, and neighbours with the same incoming gradient repeat the composition's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmk.registry.devices import INTERPRET

FEW = 1024
ROUNDINGS = 3
"""The least error of a composition in float32; 51,000 elements of giou_loss's gradients reach 3.3 error bounds."""
SUBNORMAL = torch.finfo(torch.float32).tiny
"""Smaller numbers may be zero in kernels, which compute in float32 whatever the result's dtype.

A GPU's approximate exponential, `ex2.approx.ftz`, gives 0 for what is no normal number of float32. That is an error of
less than 2^-126 in the exponential, and in a result that it is a term or, times what is at most 1, a factor of. Results
in float16 lose nothing by it: their own subnormal numbers are multiples of 2^-24.
"""


@dataclass(frozen=True)
class Violation:
    """The size of a violation of the rule, and its place."""

    what: str
    error: float
    allowed: float

    def __str__(self) -> str:
        return f"{self.what}: error {self.error:.3g}, allowed {self.allowed:.3g}"


def unit_in_last_place(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between neighbours of `dtype` at the float64 values x."""
    info = torch.finfo(dtype)
    normal = x.abs().clamp(min=info.tiny, max=info.max)
    return normal / (2 * torch.frexp(normal).mantissa) * info.eps  # exact: the quotient is a power of two


def unit_of(result: Tensor, exact: Tensor) -> Tensor:
    """The unit in the last place of a result where it is right, and in kernels no less than SUBNORMAL."""
    unit = unit_in_last_place(exact, result.dtype)
    loses = (INTERPRET or not result.is_cpu) and result.dtype != torch.float64
    return unit.clamp(min=SUBNORMAL) if loses else unit


def accuracy_violation(
    actual: Tensor,
    composition: Tensor,
    exact: Tensor,
    factor: float = 1.5,
    neighbours: Sequence[tuple[Tensor, Tensor]] = (),
    error_bound: Tensor | None = None,
) -> Violation | None:
    """None if the rule holds.

    Args:
        actual: The operator's result.
        composition: The result of PyTorch's composition in the same dtype.
        exact: The float64 reference.
        factor: How much larger than the composition's error the operator's may be.
        neighbours: The composition's result and the reference on neighbouring inputs.
        error_bound: How far each element of the reference moves when the inputs move by a unit in their last place,
            float64, in the reference's shape. Without it only the tensor as a whole is looked at.
    """
    if actual.shape != exact.shape:
        return Violation(f"shape {tuple(actual.shape)} where {tuple(exact.shape)} is right", float("inf"), 0.0)
    result, dtype, exact = actual.detach(), actual.dtype, exact.detach().double()
    actual, composition = result.double(), composition.detach().double()
    beyond = exact.isfinite() & (exact.abs() > torch.finfo(dtype).max)  # there the result is infinite, as PyTorch's is
    largest = exact.sign() * torch.finfo(dtype).max
    at_the_end = beyond & ((exact - largest).abs() <= unit_in_last_place(largest, dtype))  # or one unit less than that
    exact = torch.where(beyond, exact.sign() * float("inf"), exact)
    special = ~exact.isfinite()
    as_good = (actual == composition) & (beyond | ~composition.isfinite())
    as_good |= at_the_end & (actual == largest)
    as_good |= beyond & ~at_the_end & composition.isfinite() & ~actual.isnan()  # the composition's error is infinite
    wrong = special & ~((actual == exact) | (actual.isnan() & exact.isnan()) | as_good)
    if bool(wrong.any()):
        value, right = actual[wrong][0].item(), exact[wrong][0].item()
        return Violation(f"{value} where {right} is right", float("inf"), 0.0)
    if bool(special.all()):  # without any element too
        return None
    error = torch.where(special, 0.0, (actual - exact).abs())
    ulp = torch.where(special, 0.0, unit_of(result, torch.where(special, 0.0, exact)))
    bound = ulp
    if error_bound is not None:
        bound = ulp + torch.where(special, 0.0, error_bound) + _float64_error(exact)
    baselines = [_finite_error(composition, exact)]
    if dtype == torch.float32 and actual.numel() < FEW:
        baselines[0] = torch.maximum(baselines[0], ROUNDINGS * bound)
    baselines += [_finite_error(near.detach().double(), reference.detach().double()) for near, reference in neighbours]
    found = _of_the_whole(error, baselines, ulp, factor, actual, exact)
    if found is None and error_bound is not None:
        found = _of_rows_and_elements(error, baselines, bound, factor, actual, exact)
    return found


def rounded_once(actual: Tensor, exact: Tensor) -> bool:
    """Return True where an element is within one unit in the last place; the composition does not matter there."""
    if actual.shape != exact.shape:
        return False
    exact = exact.detach().double()
    error = (actual.detach().double() - exact).abs()
    return bool((error <= unit_of(actual, exact)).all())


def _of_the_whole(
    error: Tensor, baselines: Sequence[Tensor], ulp: Tensor, factor: float, actual: Tensor, exact: Tensor
) -> Violation | None:
    allowed = factor * max(float(baseline.max()) for baseline in baselines) + float(ulp.max())
    # NaN compares false with everything: it must not pass.
    if not bool((error <= allowed).all()):
        worst = int(torch.where(error.isnan(), float("inf"), error).argmax())
        return Violation(_element(worst, actual, exact), float(error.flatten()[worst]), allowed)
    rms, allowed = _rms(error), factor * max(_rms(baseline) for baseline in baselines) + _rms(ulp)
    return Violation("root mean square over all elements", rms, allowed) if rms > allowed else None


def _of_rows_and_elements(
    error: Tensor, baselines: Sequence[Tensor], bound: Tensor, factor: float, actual: Tensor, exact: Tensor
) -> Violation | None:
    """Apply the rule to errors in units of their error bounds; one unit more than the baseline is allowed."""
    bound = torch.where(bound == 0, 1.0, bound)  # special elements of a row that has no other
    error, baselines = error / bound, [baseline / bound for baseline in baselines]
    allowed = factor * max(float(baseline.max()) for baseline in baselines) + 1
    if bool((error > allowed).any()):
        worst = int(error.argmax())
        what = f"{_element(worst, actual, exact)}, in units of its error bound"
        return Violation(what, float(error.flatten()[worst]), allowed)
    rows = _rms_of_rows(error)
    allowed = factor * max(float(_rms_of_rows(baseline).max()) for baseline in baselines) + 1
    if bool((rows > allowed).any()):
        worst = int(rows.argmax())
        return Violation(f"row {worst}, in units of its elements' error bounds", float(rows.flatten()[worst]), allowed)
    return None


def _float64_error(exact: Tensor) -> Tensor:
    """Return the reference's own error: a few of float64's roundings of the largest element in a row."""
    rows = torch.where(exact.isfinite(), exact, 0.0).abs()
    largest = rows.amax(-1, keepdim=True) if rows.dim() > 1 else rows.max()
    return 8 * torch.finfo(torch.float64).eps * largest


def _element(index: int, actual: Tensor, exact: Tensor) -> str:
    return f"element {index} is {actual.flatten()[index]:.6g}, right is {exact.flatten()[index]:.6g}"


def _finite_error(composition: Tensor, exact: Tensor) -> Tensor:
    error = (composition - exact).abs()
    return torch.where(error.isfinite(), error, 0.0)


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def _rms_of_rows(x: Tensor) -> Tensor:
    """Return the root mean square over the last axis, or over all of a tensor with fewer than two."""
    return (x if x.dim() > 1 else x.reshape(1, -1)).square().mean(-1).sqrt()
