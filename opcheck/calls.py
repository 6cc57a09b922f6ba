"""Running an operator on a sample: fresh inputs, the chosen ones wanting gradients, and what came out."""

import math
import re
import traceback
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from llmk.accuracy.neighbours import copy_with_layout
from llmk.accuracy.rule import ROUNDINGS, Violation, accuracy_violation, rounded_once, unit_of
from llmk.opcheck.inputs import (
    BrokenPromise,
    Outcome,
    all_finite,
    as_list,
    comparable,
    differentiable_inputs,
    first_where,
    prepare,
    same_bits,
    tensors_of,
)
from llmk.opcheck.reference import DRAWS, MORE_DRAWS, Reference, reference_for
from llmk.registry import RULE, Op, Sample, Tolerance
from llmk.registry.devices import INTERPRET


def incoming_gradients(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the same normal numbers every time, contiguous."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(output.shape, generator=generator, dtype=_widest(output), device="cpu").to(
            output.device, output.dtype
        )
        for output in outputs
    ]


def _widest(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def call(
    op: Op,
    sample: Sample,
    wanted: Sequence[str] | None = None,
    *,
    fn: Callable[..., Any] | None = None,
    grads: Callable[[Sequence[Tensor]], list[Tensor]] = incoming_gradients,
    change: Callable[[Tensor], Tensor] = copy_with_layout,
) -> Outcome:
    """Call the operator (or `fn` with its signature), and backward if any input wants a gradient."""
    wanted = differentiable_inputs(op, sample) if wanted is None else wanted
    args, kwargs, tensors = prepare(op, sample, wanted, change)
    outputs = as_list((fn or op.overload)(*args, **kwargs))
    if wanted:
        torch.autograd.backward(*_with_gradients(outputs, wanted, grads))
    return Outcome(tensors, outputs, {name: tensors[name].grad for name in wanted})


class _WantsOtherStrides(Exception):
    """An operator refused inputs for their strides."""


def call_unless_strides_refused(op: Op, sample: Sample, **options: Any) -> Outcome | None:
    """Call the operator; None where another's than llmk's refuses inputs that are not contiguous in words.

    What it takes it has to differentiate: an error of its backward pass is no refusal.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return op.overload(*args, **kwargs)
        except BrokenPromise:
            raise
        except Exception as error:
            if op.is_own or not re.search("contiguous|stride", words_of(error)):
                raise
            raise _WantsOtherStrides from error

    try:
        return call(op, sample, fn=forward, **options)
    except _WantsOtherStrides:
        return None


def _with_gradients(
    outputs: Sequence[Tensor], wanted: Sequence[str], grads: Callable[[Sequence[Tensor]], list[Tensor]]
) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs that have a gradient, and their incoming ones."""
    differentiable = [output for output in outputs if output.requires_grad]
    if not differentiable:
        raise BrokenPromise(f"no output requires a gradient although {', '.join(wanted)} want one")
    return differentiable, [grad.detach() for grad in grads(differentiable)]


def device_of(op: Op, sample: Sample) -> torch.device:
    return next(tensor.device for tensor in tensors_of(op, sample).values())


def float_dtype(op: Op, sample: Sample) -> torch.dtype:
    floats = (tensor.dtype for tensor in tensors_of(op, sample).values() if tensor.is_floating_point())
    return next(floats, torch.float32)


def resized(op: Op, samples: Sequence[Sample], rows: Sequence[int]) -> Iterator[Sample]:
    if op.resized is None:
        return
    for count in rows:
        yield op.resized(count, device_of(op, samples[0]), float_dtype(op, samples[0]))


def representatives(op: Op, samples: Sequence[Sample], *, layouts: bool = False) -> list[Sample]:
    """A small sample of each choice of options, of tensors given and of their number of axes.

    With `layouts` also of each choice of tensors that are not contiguous.
    """
    found: dict[Any, Sample] = {}
    for sample in sorted(samples, key=lambda sample: _simplicity(op, sample)):
        tensors = tensors_of(op, sample).values()
        if all(tensor.numel() for tensor in tensors):
            layout = [tensor.is_contiguous() for tensor in tensors] if layouts else []
            found.setdefault((kind_of(op, sample), *layout), sample)
    return list(found.values())


def every_kind(op: Op, samples: Sequence[Sample]) -> list[Sample]:
    """Return `representatives` of each layout too, and one of each width that these have not."""
    kinds = representatives(op, samples, layouts=True)
    return kinds + of_other_widths(op, samples, kinds)


def traced_kinds(op: Op, samples: Sequence[Sample], *, layouts: bool = False) -> list[Sample]:
    """Return `representatives`, or with `layouts` those of `every_kind`.

    In 16 bits, whose formulas are those of float32, so many of them that each choice, layout and width is in one, those
    with the most first.
    """
    kinds = every_kind(op, samples) if layouts else representatives(op, samples)
    if float_dtype(op, samples[0]).itemsize >= 4:
        return kinds
    choices = {id(sample): {*kind_of(op, sample), *(_looks(op, sample) if layouts else ())} for sample in kinds}
    left, found = set[Any]().union(*choices.values()), list[Sample]()
    while left:
        found.append(max(kinds, key=lambda sample: len(choices[id(sample)] & left)))
        left -= choices[id(found[-1])]
    return found


def _looks(op: Op, sample: Sample) -> Iterator[Any]:
    """Yield a sample's width, and the tensors that are not contiguous."""
    yield _width(op, sample)
    yield from ((name, "strided") for name, x in tensors_of(op, sample).items() if not x.is_contiguous())


MOST_KINDS = 2


def few_kinds(op: Op, samples: Sequence[Sample]) -> list[Sample]:
    """The first of `representatives`, for what hardly depends on options."""
    return representatives(op, samples)[:MOST_KINDS]


WIDTHS = (1, 512, 16384)
"""Upper limits of one-column, short and wide rows; longer ones are long. Each width may run another kernel or sum."""


def of_other_widths(op: Op, samples: Sequence[Sample], than: Sequence[Sample]) -> list[Sample]:
    """The smallest sample of each width that none of some has."""
    found = {_width(op, sample): sample for sample in than}
    for sample in sorted(samples, key=lambda sample: elements(op, sample)):
        if all(tensor.numel() for tensor in tensors_of(op, sample).values()):
            found.setdefault(_width(op, sample), sample)
    return [sample for sample in found.values() if not any(sample is known for known in than)]


def _width(op: Op, sample: Sample) -> int:
    """Return the index in WIDTHS of the longest axis, or the last one of the first tensor where it is one column."""
    tensors = list(tensors_of(op, sample).values())
    longest = max((size for tensor in tensors for size in tensor.shape), default=1)
    return bisect_left(WIDTHS, 1 if tensors[0].shape[-1:] == (1,) else longest)


def is_contiguous(op: Op, sample: Sample) -> bool:
    return all(tensor.is_contiguous() for tensor in tensors_of(op, sample).values())


def elements(op: Op, sample: Sample) -> int:
    return sum(tensor.numel() for tensor in tensors_of(op, sample).values())


def _simplicity(op: Op, sample: Sample) -> tuple[bool, bool, int]:
    """A sort key: samples with few elements, or none that is finite, come last, then the smaller come first."""
    tensors, size = tensors_of(op, sample).values(), elements(op, sample)
    finite = all(bool(tensor.isfinite().all()) for tensor in tensors)
    return not finite, size < 30 or any(tensor.shape[-1:] == (1,) for tensor in tensors), size


def kind_of(op: Op, sample: Sample) -> Any:
    """Return what tells kinds of calls apart; for a number, only that it is given."""
    return tuple(
        (name, value.dim() if isinstance(value, Tensor) else value if isinstance(value, bool | str) else value is None)
        for name, value in sorted(op.bind(sample).items())
    )


def words_of(error: BaseException) -> str:
    """Return an error's text and the line of code that raised it, which is all that an `assert` may have."""
    raised_by = traceback.extract_tb(error.__traceback__)[-1:]
    return " ".join([str(error), *(frame.line or "" for frame in raised_by)]).strip()


def first_line(error: Any) -> str:
    """Return an error's type and first line, with the next where that only says that something raised it."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    more = f" {lines[1].strip()}" if lines[0].endswith("raised:") and len(lines) > 1 else ""
    return f"{type(error).__name__}: {lines[0].strip()}{more}"


INTERPRETED = Tolerance(
    3.0,
    "Triton's interpreter adds n numbers of a column one after the other, which loses sqrt(n / 3) roundings of the "
    "sum, 10 of 300, where a tree loses sqrt(log2(n)), 3",
)
"""The tolerance of float32: a result of 16 bits loses more by its own rounding."""


def tolerance_of(op: Op, dtype: torch.dtype) -> Tolerance:
    if INTERPRET and dtype == torch.float32:
        return INTERPRETED
    return op.tolerances.get(dtype, RULE)


Judge = Callable[..., Violation | None]
"""The type of `violation_of`, a function of a reference, a result's index, the result and a factor."""


def require_accurate(
    op: Op,
    sample: Sample,
    actual: Outcome,
    grads: Callable[[Sequence[Tensor]], list[Tensor]] = incoming_gradients,
    compositions: Callable[[], Sequence[Outcome]] = tuple,
) -> None:
    """The accuracy rule for every output and gradient of a call.

    `compositions` gives more outcomes of PyTorch's own composition on these inputs, every gradient included, whose
    errors count as its too: where tensors are split among processes, products of fewer rows add up in another order. It
    is called if need be.
    """
    formula_bound = None if op.error_bound is None else op.error_bound(**(op.bind(sample) | actual.inputs))

    def judge(reference: Reference, i: int, result: Tensor, factor: float) -> Violation | None:
        return violation_of(reference, i, result, factor, compositions, None if i else formula_bound)

    _require(op, sample, actual, grads, judge)


GROSS = 16.0
"""The ratio of a gross error to PyTorch's own."""
GROSS_IN_FLOAT32 = 64.0
"""The same where sums show: 4097 numbers that are added one after the other, as atomics add them, lose 9 times what
roundings of the numbers move the sum by, as the root mean square, and some of 4096 such sums lose 60 times that."""


def require_no_gross_error(op: Op, sample: Sample, actual: Outcome) -> None:
    """Hold every result against the reference where what is asked is whether it is right, not how exact.

    An error may be GROSS times the composition's largest, the largest error bound, or what roundings within
    the formula move the result by.
    """

    def judge(reference: Reference, i: int, result: Tensor, factor: float) -> Violation | None:
        composition, exact = reference.composition[i], reference.exact[i]
        assert composition is not None
        assert exact is not None
        gross = GROSS_IN_FLOAT32 if result.dtype == torch.float32 else GROSS
        if accuracy_violation(result, composition, exact, gross) is None:
            return None
        moved = [exact + bound for bound in (reference.error_bound(i, DRAWS), reference.moved_within(i))]
        return accuracy_violation(result, composition, exact, gross, [(near, exact) for near in moved])

    _require(op, sample, actual, incoming_gradients, judge)


def _require(
    op: Op,
    sample: Sample,
    actual: Outcome,
    grads: Callable[[Sequence[Tensor]], list[Tensor]],
    judge: Judge,
) -> None:
    factor = tolerance_of(op, float_dtype(op, sample)).factor
    reference = reference_for(op, sample, actual, grads)
    for place, (name, result) in enumerate(zip(actual.names(), actual.results(), strict=True)):
        i = place if place < len(actual.outputs) else reference.index_of(name.removeprefix("gradient of "))
        exact = reference.exact[i]
        if result is None or exact is None:
            raise BrokenPromise(f"{sample}: {name} is missing", name)
        result = comparable(result) if result.is_complex() else result
        if op.exact:
            violation = _other_bits(result, reference.composition[i])
        elif result.is_floating_point():
            violation = judge(reference, i, result, factor)
        else:
            violation = _wrong_integer(reference, i, result)
        if violation is not None:
            has_same_shape = result.is_floating_point() and result.shape == exact.shape
            bound = reference.error_bound(i, DRAWS) if has_same_shape else None
            first = "" if bound is None else _first_wrong(result, exact, actual.inputs, bound, factor)
            size = violation.error / max(violation.allowed, 1e-300) if isinstance(violation, Violation) else math.inf
            raise BrokenPromise(f"{sample}: {name}: {violation}{first}{_blame(exact, actual)}", name, size)


def _blame(exact: Tensor, actual: Outcome) -> str:
    """Return words about a reference that is NaN where no input is, such as one that overflows in float64."""
    is_to_blame = all_finite(actual.inputs.values()) and bool(exact.isnan().any())
    return "; the reference itself is NaN for finite inputs" if is_to_blame else ""


def _first_wrong(
    actual: Tensor, exact: Tensor, inputs: Mapping[str, Tensor], error_bound: Tensor, factor: float
) -> str:
    """Return the first element that differs by more than roundings, and the numbers that inputs have there."""
    allowed = (ROUNDINGS * factor + 1) * (error_bound + unit_of(actual, exact))
    actual = actual.detach().double()
    wrong = ~((actual - exact).abs() <= allowed) & ~((actual == exact) | (actual.isnan() & exact.isnan()))
    places = wrong.nonzero()
    if not len(places):
        return ""
    place = tuple(places[0].tolist())
    there = [f"{name} is {tensor[place]:.6g}" for name, tensor in inputs.items() if tensor.shape == actual.shape]
    where = f", where {' and '.join(there)}" if there else ""
    found = f"is {actual[place]:.6g}, expected {exact[place]:.6g}{where}"
    return f"; the first of {len(places)} wrong elements, {list(place)}, {found}"


def _other_bits(actual: Tensor, right: Tensor | None) -> str | None:
    if same_bits(actual, right):
        return None
    assert right is not None
    if actual.shape != right.shape:
        return f"the shape is {tuple(actual.shape)} where {tuple(right.shape)} is right"
    return first_where(actual != right, actual, right)


def _wrong_integer(reference: Reference, i: int, actual: Tensor) -> str | None:
    """Return how integers or booleans differ from the reference's where those do not depend on the inputs' rounding."""
    composition, exact = reference.composition[i], reference.exact[i]
    assert composition is not None
    assert exact is not None
    if actual.shape != composition.shape:
        return f"the shape is {tuple(actual.shape)} where {tuple(composition.shape)} is right"
    wrong = (actual != composition) & (actual != exact)
    if not bool(wrong.any()):
        return None
    for results in reference.near(i):
        for result in results:
            wrong &= result == composition
    return first_where(wrong, actual, composition) if bool(wrong.any()) else None


def violation_of(
    reference: Reference,
    i: int,
    actual: Tensor,
    factor: float,
    compositions: Callable[[], Sequence[Outcome]] = tuple,
    formula_bound: Tensor | None = None,
    draws: int = DRAWS,
) -> Violation | None:
    """Return how result `i` breaks the accuracy rule, if it does.

    `formula_bound` is the record's own error bound, added to that of the inputs' rounding; `draws` are those of the
    first look.
    """

    def error_bound(draws: int) -> Tensor:
        moved = reference.error_bound(i, draws)
        return moved if formula_bound is None else moved + formula_bound

    exact = reference.exact[i]
    assert exact is not None
    if rounded_once(actual, exact):
        return None
    composition = reference.composition[i]
    assert composition is not None
    if accuracy_violation(actual, composition, exact, factor, error_bound=error_bound(draws)) is None:
        return None
    # The rest may be chance: the errors of a composition on one input, or an error bound of a few draws.
    given = [outcome.results()[i] for outcome in compositions()]
    others = reference.near(i) + [(result, exact) for result in given if result is not None]
    if accuracy_violation(actual, composition, exact, factor, others, error_bound(MORE_DRAWS)) is None:
        return None
    # Or all these inputs have one rounding in common, of a number of which little is left.
    others, bound = others + reference.far(i), error_bound(MORE_DRAWS) + reference.roundings(i)
    violation = accuracy_violation(actual, composition, exact, factor, others, bound)
    if violation is None:
        return None
    # Or terms cancel, of which another order of the sums leaves another rounding.
    cancelled = reference.cancelled(i)
    others, bound = [*others, (exact + ROUNDINGS * cancelled, exact)], torch.maximum(bound, cancelled)
    return accuracy_violation(actual, composition, exact, factor, others, bound)
