"""The reference results of a call, and the baselines of the accuracy rule: how accurate PyTorch's own composition is.

All come from running the operator's reference: in float64 on the sample's inputs, where it is what is right; in the
sample's dtype, where it is PyTorch's composition; and in float64 on inputs that each moved by one unit in their last
place, up or down by chance. The distance that an element of the result then moves is its error bound: no order of
operations in the inputs' dtype can be expected to do better. A float32 result of 16-bit inputs comes from float32
arithmetic, which rounds none of what it computes to 16 bits: for it the inputs move by a unit of float32. A record may
add what a formula loses (`Op.error_bound`).

The composition's error is measured on neighbouring inputs too, first on such as these. They can repeat one rounding all
the same: with p = 0.99, p - 1 is what is left of two numbers a hundred times its size, and moves by less than the last
place of p where the inputs move by theirs, so that every neighbour has the same p, and what it lost. So others are FAR
enough to round it anew, and count where a result moves about as far as its error bound says: as a tangent goes.

Where a result cancels, the composition may lose nothing and another order of the same sums something. So before a
result is called wrong, the reference also runs with the error of every operation followed (`Roundings` in
roundings.py).
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from llmk.accuracy.neighbours import FAR, NEIGHBOURS, Change, copy_with_layout, nudged, to_float64
from llmk.opcheck.inputs import BrokenPromise, Outcome, as_list, comparable, differentiable_inputs, prepare, tensors_of
from llmk.opcheck.roundings import Roundings
from llmk.registry import Op, Sample

REFUSALS = (ValueError, TypeError, RuntimeError, IndexError, ArithmeticError)
"""The errors that a reference raises where it does not take a call; any other is a fault in the reference."""

DRAWS = 8
"""The draws for an error bound. It is their root mean square, so that few elements get one that is far too small."""
MORE_DRAWS = 32
"""The draws before a result is called wrong."""
CANCELS = 16
"""The roundings by which a result moves whose terms are so much larger that four bits of it are lost, or more."""
RMS_OF_ROUNDING = 12**-0.5
"""The root mean square of the errors of rounding to the nearest number, in units in the last place."""
_MOST_KEPT = 64


class Reference:
    """The reference's outputs and gradients for a sample and an incoming gradient for each output (None for none)."""

    count = 2 * NEIGHBOURS
    """The count of neighbours: on 8 the errors of a softmax that is nearly all one class may all be small by chance."""

    def __init__(self, op: Op, sample: Sample, given: Sequence[Tensor | None]) -> None:
        self.op, self.sample = op, sample
        self.given = [grad if grad is None else grad.detach().clone() for grad in given]
        self.wanted = differentiable_inputs(op, sample) if any(grad is not None for grad in given) else []
        self._moved: dict[float, list[list[Tensor | None]]] = {}
        self._errors: dict[float, list[Tensor | None]] = {}

    def nudge(self, seed: int, dtype: torch.dtype | None = None, by: float | None = None) -> Change:
        return nudged(seed, dtype, by)

    def run(self, change: Change = copy_with_layout) -> list[Tensor | None]:
        """Outputs, then the gradients in the order of `names`."""
        args, kwargs, tensors = prepare(self.op, self.sample, self.wanted, change)
        outputs = as_list(refusing(self.op.reference, args, kwargs))
        if len(outputs) != len(self.given):
            raise BrokenPromise(
                f"{self.sample}: the results are {len(self.given)}, where the reference returns {len(outputs)}"
            )
        wanting = [(o, change(g).to(o.dtype)) for o, g in zip(outputs, self.given, strict=True) if g is not None]
        if wanting:
            torch.autograd.backward([output for output, _ in wanting], [grad for _, grad in wanting])
        gradients = [tensors[name].grad for name in self.wanted]
        return [None if found is None else comparable(found.detach()) for found in (*outputs, *gradients)]

    @cached_property
    def composition(self) -> list[Tensor | None]:
        return self.run()

    @cached_property
    def exact(self) -> list[Tensor | None]:
        return self.run(to_float64)

    @cached_property
    def neighbours(self) -> list[tuple[list[Tensor | None], list[Tensor | None]]]:
        """The composition and the reference on inputs near the sample's."""
        return [(self.run(self.nudge(seed)), self.run(self.nudge(seed, torch.float64))) for seed in range(self.count)]

    @cached_property
    def farther(self) -> list[tuple[list[Tensor | None], list[Tensor | None]]]:
        """The same on inputs that are `FAR` from it."""
        seeds = range(self.count, 2 * self.count)
        return [(self.run(self.nudge(seed, by=FAR)), self.run(self.nudge(seed, torch.float64, FAR))) for seed in seeds]

    def near(self, result: int) -> list[tuple[Tensor, Tensor]]:
        """Return a result of the composition and of the reference, on each of the neighbours."""
        return [(composition[result], exact[result]) for composition, exact in self.neighbours]  # type: ignore[misc]

    def far(self, result: int) -> list[tuple[Tensor, Tensor]]:
        """Return the same on the far inputs, without an error where an element moves by more than its error bound."""
        here, pairs = self.exact[result], []
        assert here is not None
        linear = 4 * FAR / self.unit(result) * self.error_bound(result, MORE_DRAWS)  # few draws are beyond 4 rms
        for compositions, references in self.farther:
            composition, exact = compositions[result], references[result]
            assert composition is not None
            assert exact is not None
            pairs.append((torch.where((exact - here).abs() <= linear, composition.double(), exact), exact))
        return pairs

    def roundings(self, result: int) -> Tensor:
        """Return the composition's own rounding error in each element, the root mean square over the far inputs."""
        errors = [(composition - exact).square() for composition, exact in self.far(result)]
        return torch.stack(errors).mean(0).sqrt().nan_to_num(0.0, posinf=0.0)

    def cancelled(self, result: int) -> Tensor:
        """Return the error that roundings within the formula leave in each element whose terms cancel, 0 in the others.

        Terms cancel where the roundings of float32, in which kernels compute, move a result by more than CANCELS of its
        own: a chain of n operations without it moves its result by some sqrt(n).
        """
        exact = self.exact[result]
        assert exact is not None
        moved = self.moved_within(result)
        cancels = moved > CANCELS * torch.finfo(torch.float32).eps * exact.abs()
        return torch.where(cancels, RMS_OF_ROUNDING * moved, 0.0)

    def moved_within(self, result: int) -> Tensor:
        """Return what roundings within the formula move each element by: of a unit of float32 each.

        Of an element that roundings to the result's dtype move by more than itself nothing is left to say how large its
        terms are: it may be off by as much as any other such.
        """
        exact = self.exact[result]
        assert exact is not None
        moved = self._moved_within(result, self.unit(result))
        lost = RMS_OF_ROUNDING * moved > exact.abs()
        largest = torch.where(lost, moved, 0.0).max() if moved.numel() else moved
        return torch.where(lost, largest, self._moved_within(result, torch.finfo(torch.float32).eps))

    def _moved_within(self, result: int, unit: float) -> Tensor:
        """Return the errors of a result whose formula rounds to such a unit in each operation."""
        if unit not in self._errors:
            with Roundings(unit) as roundings:
                found = self.run(to_float64)
            self._errors[unit] = [None if value is None else roundings.error_of(value) for value in found]
        errors = self._errors[unit][result]
        assert errors is not None
        return errors

    def unit(self, result: int) -> float:
        """Return the relative distance by which the inputs move for a result's error bound: the finest dtype's."""
        floats = [
            t.dtype for t in (*tensors_of(self.op, self.sample).values(), self.composition[result]) if t is not None
        ]
        return min((torch.finfo(dtype).eps for dtype in floats if dtype.is_floating_point), default=FAR)

    def moved(self, result: int, draws: int) -> list[list[Tensor | None]]:
        """Return the results on so many inputs that moved by the unit of one of the results."""
        unit = self.unit(result)
        floating = [t.dtype for t in tensors_of(self.op, self.sample).values() if t.is_floating_point()]
        own = min((torch.finfo(dtype).eps for dtype in floating), default=FAR)  # of integers alone nothing moves
        found = self._moved.setdefault(unit, [])
        while len(found) < draws:
            found.append(self.run(self.nudge(len(found), torch.float64, unit if unit < own else None)))
        return found[:draws]

    def error_bound(self, result: int, draws: int) -> Tensor:
        """Return how far each element moves with its inputs, as the root mean square of so many draws."""
        exact = self.exact[result]
        assert exact is not None
        squares = [(moved[result] - exact).square() for moved in self.moved(result, draws)]  # type: ignore[operator]
        return torch.stack(squares).mean(0).sqrt()

    def index_of(self, gradient: str) -> int:
        return len(self.given) + self.wanted.index(gradient)

    def is_for(self, given: Sequence[Tensor | None]) -> bool:
        return all(
            (a is None) == (b is None) and (a is None or b is None or (a.dtype == b.dtype and torch.equal(a, b)))
            for a, b in zip(self.given, given, strict=True)
        )


def refusing(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function; where PyTorch's own refuse arguments by an `assert`, it is a ValueError, one of REFUSALS."""
    try:
        return function(*args, **kwargs)
    except BrokenPromise:
        raise
    except AssertionError as error:
        raise ValueError(str(error)) from error


_kept: "OrderedDict[tuple[int, int], list[Reference]]" = OrderedDict()


def reference_for(
    op: Op, sample: Sample, outcome: Outcome, grads: Callable[[Sequence[Tensor]], list[Tensor]]
) -> Reference:
    """Return the reference for a call's outcome; every check of the same sample shares it."""
    if outcome.gradients:
        wanting = [output for output in outcome.outputs if output.requires_grad]
        made = iter(grads(wanting))
        given = [next(made) if output.requires_grad else None for output in outcome.outputs]
    else:
        given: list[Any] = [None] * len(outcome.outputs)
    references = _kept.setdefault((id(op), id(sample)), [])  # each holds its sample, whose id is then nobody else's
    _kept.move_to_end((id(op), id(sample)))
    if len(_kept) > _MOST_KEPT:
        _kept.popitem(last=False)
    for reference in references:
        if not outcome.gradients or reference.is_for(given):
            return reference
    references.append(Reference(op, sample, given))
    return references[-1]
