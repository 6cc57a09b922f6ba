"""The reference's gradient held against differences of its own forward pass, both in float64.

What the reference detaches stays constant: it is computed once, at the call's own inputs, and given again to the calls
beside it.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from llmk.accuracy.neighbours import to_float64
from llmk.opcheck.inputs import as_list, prepare
from llmk.opcheck.reference import Reference
from llmk.registry import Op, Sample

STEP = 2.0**-20
"""The step relative to an element: its third order and a rounding of float64 both lose less than 1e-9 of it."""
LONGER = tuple(STEP * 4.0**k for k in range(1, 8))
"""Steps for what a rounding of the forward pass may explain."""
AGREES = 1e-3
LARGEST = 1e6
"""The largest magnitude at which float64 has digits left for differences."""


class _Constants(TorchFunctionMode):
    """Records what is detached, or gives it again in the order in which it was made."""

    def __init__(self, known: list[Tensor] | None = None) -> None:
        super().__init__()
        self.given = None if known is None else iter(known)
        self.made: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (Tensor.detach, torch.detach) or not result.is_floating_point():
            return result
        if self.given is not None:
            return next(self.given)
        self.made.append(result.detach().clone())
        return result


def derivative_violation(op: Op, sample: Sample, reference: Reference, seed: int) -> tuple[str, str] | None:
    """The gradient of which argument is wrong, and how; None where differences do not say."""
    if any(e is not None and not bool(e.isfinite().all()) for e in reference.exact):
        return None
    tensors = [value for value in op.bind(sample).values() if isinstance(value, Tensor) and value.is_floating_point()]
    if any(bool((tensor.detach().abs() > LARGEST).any()) for tensor in tensors):
        return None
    generator = torch.Generator().manual_seed(seed)
    for name in reference.wanted:
        gradient = reference.exact[reference.index_of(name)]
        if gradient is None or not gradient.numel():
            continue
        for only_one in (False, True):
            direction = _direction(op.bind(sample)[name], gradient, generator, only_one)
            words = _compare(op, sample, reference, name, gradient, direction)
            if words is not None:
                return f"gradient of {name}", f"gradient of {name} in the reference: {words}"
    return None


def _direction(value: Tensor, gradient: Tensor, generator: torch.Generator, only_one: bool) -> Tensor:
    """Each element by a random part of itself, or of the tensor's size where it is 0; or one element alone."""
    size = value.detach().double()
    usual = size.square().mean().sqrt()
    signs = torch.rand(value.shape, generator=generator, dtype=torch.float64, device="cpu").to(value.device) + 0.5
    direction = torch.where(size == 0, usual, size) * signs
    if only_one:
        index = torch.randint(gradient.numel(), (1,), generator=generator, device="cpu")
        chosen = torch.zeros(gradient.numel(), dtype=torch.bool, device=value.device)
        chosen[index] = True
        direction = direction * chosen.reshape(value.shape)
    return direction


def _compare(
    op: Op, sample: Sample, reference: Reference, name: str, gradient: Tensor, direction: Tensor
) -> str | None:
    terms = gradient * direction
    analytic, size = float(terms.sum()), float(terms.abs().sum())
    value = _forward(op, sample, reference, name)
    constants, here, scale = value(None, direction, 0.0)
    slopes: list[float] = []
    for step in (STEP, -STEP, STEP / 4, -STEP / 4):
        _, beside, _ = value(constants, direction, step)
        if here is None or beside is None:
            return None
        slopes.append(float((beside - here).sum()) / step)
    size, wide, middle = max(size, abs(slopes[0])), (slopes[0] + slopes[1]) / 2, (slopes[2] + slopes[3]) / 2
    noise = 1e-14 * scale / STEP + 1e-12 * sum(float(g.double().abs().sum()) for g in reference.given if g is not None)
    apart = max(slopes) - min(slopes)  # at a corner those on its sides differ
    if not size > 0 or apart > AGREES * size / 10 or noise > AGREES * size / 10:
        return None
    # A step that leaves behind what changes, as from one side of a narrow tanh to the other, gives the height of the
    # jump over the step: a quarter of the step gives four times that, where a tangent's slope stays.
    if abs(middle) > 2 * abs(wide) + 4 * noise:
        return None
    if abs(middle - analytic) <= AGREES * size:
        return None
    if any(abs(slope - analytic) <= AGREES * size for slope in _over_longer_steps(value, constants, direction)):
        return None
    return f"its product with a direction is {analytic:.6g}, differences of the forward pass give {middle:.6g}"


def _over_longer_steps(value: Callable[..., Any], constants: list[Tensor], direction: Tensor) -> Iterator[float]:
    """Yield the slopes of differences that lose less by rounding.

    A loss of 1 minus nearly 1 moves by few units of 1 over a step, and by as few at every time that it is asked.
    """
    for step in LONGER:
        (_, after, _), (_, before, _) = value(constants, direction, step), value(constants, direction, -step)
        if after is not None and before is not None:
            yield float((after - before).sum()) / (2 * step)


def _forward(op: Op, sample: Sample, reference: Reference, name: str) -> Callable[..., Any]:
    """The weighted terms of the outputs at a step along a direction, with the constants that were recorded."""

    def value(constants: list[Tensor] | None, direction: Tensor, step: float) -> tuple[list[Tensor], Any, float]:
        args, kwargs, tensors = prepare(op, sample, reference.wanted, to_float64)
        with torch.no_grad():
            tensors[name].add_(step * direction)
        with _Constants(constants) as mode:
            outputs = as_list(op.reference(*args, **kwargs))
        terms = [t.flatten() for t in _weighted(outputs, reference)]
        together = torch.cat(terms) if terms else None
        scale = 0.0 if together is None else float(together.abs().sum())
        ok = together is not None and bool(together.isfinite().all())
        return mode.made, together if ok else None, scale

    return value


def _weighted(outputs: list[Tensor], reference: Reference) -> Iterator[Tensor]:
    for output, grad in zip(outputs, reference.given, strict=True):
        if grad is not None:
            yield output.detach() * grad.to(output.dtype)
