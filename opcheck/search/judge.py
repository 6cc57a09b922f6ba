"""Judges a case of the search by the accuracy rule, with what only extreme inputs need.

The float64 reference decides. Where PyTorch's own composition overflows and the reference does not, an element is
excused, as where finite inputs make the reference itself NaN; all numbers, where products of the arguments can leave
float32; and all gradients where one is not finite and one of the exact ones too large for its dtype: that
optimizer step is lost whatever the others are. Gradients are not judged either where both the operator and the
composition chose other integers than the reference, of numbers that are equal in float32 alone.

At ties and next to a decision, inputs that move by a unit cross it, and everything would be excused; so there a second
rule moves equal numbers together and takes the error bound from draws that did not cross. It refuses only what the
composition gets right on all neighbours as well, and only where a result does not move as far as its inputs do:
elsewhere the first rule has judged it.
"""

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from llmk.accuracy.neighbours import Change, copy_to_move, copy_with_layout, move
from llmk.accuracy.rule import SUBNORMAL
from llmk.opcheck.calls import call, device_of, float_dtype, tolerance_of, violation_of
from llmk.opcheck.foreign.adapters import Adapted
from llmk.opcheck.inputs import BrokenPromise, Outcome, prepare, rebound
from llmk.opcheck.interpreted.loops import EndlessLoop
from llmk.opcheck.patience import TookTooLong, patience
from llmk.opcheck.promises.gradients import gradient_overflows, require_finite
from llmk.opcheck.reference import MORE_DRAWS, REFUSALS, Reference, reference_for, refusing
from llmk.opcheck.search.cases import Case
from llmk.opcheck.search.derivatives import derivative_violation
from llmk.registry import Op, Sample
from llmk.registry.devices import INTERPRET, use_kernels_on_cpu

PATIENCE = 20.0
"""Seconds that a call may take, far more than any sample does."""

FIRST_DRAWS = 2
"""The draws for an error bound, before one is estimated as for a promise."""


@dataclass(frozen=True)
class Finding:
    """A fault: its kind, the result that has it, and words."""

    kind: str
    where: str
    message: str

    @property
    def key(self) -> tuple[str, str]:
        return self.kind, self.where


def _time_limit(seconds: float) -> AbstractContextManager[None]:
    """Limit the time of a call, but not in the interpreter: it is slow, and there the turns of loops are counted."""
    return contextlib.nullcontext() if INTERPRET else patience(seconds)


def judge(op: Op, case: Case, seconds: float | None = None) -> Finding | None:
    """Return what is wrong with the operator on a case; None if nothing is, or if it refuses the arguments."""
    if _runs_kernels(op, case) and refused_on_cpu(op, case):
        return None
    try:
        with _time_limit(seconds or PATIENCE):
            outcome = call(op, case.sample, grads=case.grads)
    except (TookTooLong, EndlessLoop) as error:
        return Finding("does not end", "", str(error))
    except BrokenPromise as error:
        return None if "requires a gradient" in str(error) else Finding("memory", "", str(error))
    except Exception as error:
        return _raised(op, case, error)
    try:
        reference = reference_for(op, case.sample, outcome, case.grads)
        exact, composition = reference.exact, reference.composition
    except REFUSALS:  # the reference does not take this call, so nothing says what is right
        return None
    if len(exact) != len(outcome.results()) or any(value is None for value in (*exact, *composition)):
        return None
    return (
        _wrong_values(op, case, outcome, reference)
        or _not_finite(op, case, outcome, reference)
        or _nan_in_silence(op, case, outcome)
        or (_wrong_decision(op, case, outcome, reference) if case.decides else None)
        or _wrong_derivative(op, case, reference)
    )


def _runs_kernels(op: Op, case: Case) -> bool:
    return INTERPRET or device_of(op, case.sample).type != "cpu"


def refused_on_cpu(op: Op, case: Case) -> bool:
    """Return True if the reference or the operator's CPU implementation refuses the arguments.

    Kernels do not refuse indices: one out of range ends the process in PyTorch's, and the operator's give what it
    documents for such an index, which the reference does not say.
    """
    if isinstance(_error_on_cpu(op, case.sample, op.reference), REFUSALS):
        return True
    error = _error_on_cpu(op, case.sample, op.overload)
    if error is None or not _names_argument(op, error):
        return False
    return _error_on_cpu(op, case.template, op.overload) is None  # else there is no CPU implementation


def _error_on_cpu(op: Op, sample: Sample, function: Callable[..., Any]) -> Exception | None:
    def on_cpu(tensor: Tensor) -> Tensor:
        return tensor.detach().cpu()

    args, kwargs, _ = prepare(op, sample, (), on_cpu)
    try:
        with _time_limit(PATIENCE), use_kernels_on_cpu(False):
            refusing(function, args, kwargs)
    except Exception as error:
        return error
    return None


def _raised(op: Op, case: Case, error: Exception) -> Finding | None:
    """An error that names an argument refuses it. Any other is a fault, if the reference takes the call."""
    if _names_argument(op, error):
        return None
    name, line = type(error).__name__, _first_words(error)
    bare = isinstance(error, ValueError) and line == "math domain error"
    if not bare:
        try:
            Reference(op, case.sample, [None] * len(op.schema.returns)).exact  # noqa: B018
        except REFUSALS:
            return None
    return Finding("raises", name, f"{name}: {line}, which names no argument")


def _names_argument(op: Op, error: Exception) -> bool:
    # An operator says `xs[0]` where its record in the one form has `xs_0`.
    form = op.overload.form if isinstance(op.overload, Adapted) else None
    arguments = op.argument_names() if form is None else [argument.name for argument in form.arguments]
    line = _first_words(error)
    return any(re.search(rf"\b{argument}\b", line) for argument in arguments)


def _first_words(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else ""


def names_of(reference: Reference) -> list[str]:
    return [f"output {i}" for i in range(len(reference.given))] + [f"gradient of {name}" for name in reference.wanted]


def _excused(actual: Tensor, composition: Tensor, exact: Tensor, nan_inputs: bool, floor: float) -> Tensor:
    """The result with the reference's value where it is not to be judged.

    Where that is NaN and no input is, infinities met in it: another order of the sums, or a dtype that overflows
    sooner, may meet one alone. A NaN of an input is no infinity in the result.
    """
    here = ~composition.isfinite() & (exact.isfinite() | exact.isinf())
    here |= (actual.double() - exact).abs() <= floor
    nan = exact.isnan() & (actual.isfinite() | (not nan_inputs))
    filled = torch.where(here, exact.to(actual.dtype), actual)
    return torch.where(nan, float("nan"), filled)


def _inputs_nan(outcome: Outcome) -> bool:
    return any(bool(t.isnan().any()) for t in outcome.inputs.values() if t.is_floating_point())


def _inputs_finite(outcome: Outcome) -> bool:
    return all(bool(t.isfinite().all()) for t in outcome.inputs.values() if t.is_floating_point())


def _floating(reference: Reference, outcome: Outcome) -> Iterator[tuple[int, str, Tensor, Tensor, Tensor]]:
    nan_inputs, overflowed = _inputs_nan(outcome), _overflowed(outcome, reference)
    if _inputs_finite(outcome) and _products_overflow(outcome, reference):
        return
    given_up = overflowed or _step_is_lost(outcome, reference) or _chose_otherwise(outcome, reference)
    for i, (name, actual) in enumerate(zip(names_of(reference), outcome.results(), strict=True)):
        composition, exact = reference.composition[i], reference.exact[i]
        if actual is None or composition is None or exact is None or not actual.is_floating_point():
            continue
        if i >= len(outcome.outputs) and given_up:
            return
        if actual.shape == exact.shape:
            floor = _float64_floor(reference, outcome, name) if i >= len(outcome.outputs) else 0.0
            if INTERPRET or not actual.is_cpu:
                floor = max(floor, _flushed(outcome, reference, gradient=i >= len(outcome.outputs)))
            actual = _excused(actual.detach(), composition, exact, nan_inputs, floor)
        yield i, name, actual, composition, exact


def _step_is_lost(outcome: Outcome, reference: Reference) -> bool:
    """Return True if a gradient is not finite and an exact one too large: the optimizer, or its scaler, sees it."""
    gradients = [gradient for gradient in outcome.gradients.values() if gradient is not None]
    return not all(bool(g.isfinite().all()) for g in gradients) and gradient_overflows(reference, outcome)


def _chose_otherwise(outcome: Outcome, reference: Reference) -> bool:
    """Return True if both the operator and PyTorch's composition have other integers than the reference.

    Gradients are those of a choice then, of one class among some that are equal in float32 and not in float64.
    """

    def differs(actual: Tensor | None, exact: Tensor | None) -> bool:
        return actual is not None and exact is not None and not torch.equal(actual, exact.to(actual.dtype))

    results = zip(outcome.outputs, reference.composition, reference.exact, strict=False)
    return any(
        not output.is_floating_point() and differs(output, exact) and differs(composition, exact)
        for output, composition, exact in results
    )


def _overflowed(outcome: Outcome, reference: Reference) -> bool:
    """Return True if an output does not hold what is right: gradients that are made from it need not be right then.

    It is too large for its dtype, or on the way to it both the operator and PyTorch's composition left float32.
    """
    results = zip(outcome.outputs, reference.composition, reference.exact, strict=False)
    return any(
        composition is not None and exact is not None and _is_lost(output.detach(), composition, exact)
        for output, composition, exact in results
        if output.is_floating_point()
    )


def _is_lost(output: Tensor, composition: Tensor, exact: Tensor) -> bool:
    lost = exact.abs() > torch.finfo(output.dtype).max
    if output.shape == exact.shape:
        lost |= ~output.isfinite() & ~composition.isfinite()
    return bool((exact.isfinite() & lost).any())


def _float64_floor(reference: Reference, outcome: Outcome, name: str) -> float:
    """Return float64's own error in a gradient whose terms cancel: some roundings of outputs by inputs."""
    outputs = max(map(_largest, reference.exact[: len(reference.given)]))
    size = _largest(outcome.inputs[name.removeprefix("gradient of ")])
    floor = 64 * torch.finfo(torch.float64).eps * max(map(_largest, reference.given)) * outputs
    return floor * (max(1 / size, 1e-3) if size else 1.0)


def _flushed(outcome: Outcome, reference: Reference, *, gradient: bool) -> float:
    """Return what kernels may lose in a result that is a sum of terms p log(p), as an entropy is.

    A p below SUBNORMAL may be 0 there, and -p log(p) is at most SUBNORMAL times 87.3 for such a p. A sum has at most as
    many terms as the largest argument has elements, and those of a gradient are multiplied by an incoming one.
    """
    terms = max((tensor.numel() for tensor in outcome.inputs.values()), default=0)
    incoming = max([1.0, *map(_largest, reference.given)]) if gradient else 1.0
    return SUBNORMAL * -math.log(SUBNORMAL) * max(1, terms) * incoming


def _saturation_floor(op: Op, case: Case, reference: Reference, argument: str) -> float:
    """Return float64's own error in a gradient that is small as a softmax is saturated: a few roundings of its terms.

    A weight of 1e-17 has no part in float64's sum of 1, nor in the gradient of its logit or of what that is made of.
    The terms that cancel are as large as the gradient where the argument is so much smaller that nothing saturates.
    """
    value = op.bind(case.sample)[argument]
    sizes = []
    for factor in (2.0**-3, 2.0**-6, 2.0**-9):
        sample = rebound(op, case.sample, op.bind(case.sample) | {argument: value.detach() * factor}, "")
        smaller = Reference(op, sample, reference.given)
        sizes.append(_largest(smaller.exact[reference.index_of(argument)]))
    return 64 * torch.finfo(torch.float64).eps * max(sizes)


def _largest(tensor: Tensor | None) -> float:
    """The largest size of a finite number in a floating tensor."""
    if tensor is None or not tensor.is_floating_point() or tensor.numel() == 0:
        return 0.0
    return float(tensor.detach().double().nan_to_num(0.0, 0.0, 0.0).abs().max())


def _wrong_values(op: Op, case: Case, outcome: Outcome, reference: Reference) -> Finding | None:
    factor = tolerance_of(op, _dtype(outcome)).factor
    formula_bound = None if op.error_bound is None else op.error_bound(**(op.bind(case.sample) | outcome.inputs))
    more = MoreNeighbours(op, case.sample, reference.given)
    for i, name, actual, _, exact in _floating(reference, outcome):
        lost = None if i else formula_bound
        violation = violation_of(reference, i, actual, factor, formula_bound=lost, draws=FIRST_DRAWS)
        if violation is not None and math.isfinite(violation.error):
            violation = violation_of(more, i, actual, factor, formula_bound=lost)
        if violation is not None and i >= len(outcome.outputs):
            floor = _saturation_floor(op, case, reference, name.removeprefix("gradient of "))
            actual = torch.where((actual.double() - exact).abs() <= floor, exact.to(actual.dtype), actual)
            violation = violation_of(more, i, actual, factor, formula_bound=lost)
        if violation is not None and math.isfinite(violation.error):
            actual = torch.where(_at_a_jump(reference, i, actual, factor), exact.to(actual.dtype), actual)
            violation = violation_of(more, i, actual, factor, formula_bound=lost)
        if violation is not None:
            return Finding("value", name, f"{name}: {violation}")
    return None


def _at_a_jump(reference: Reference, result: int, actual: Tensor, factor: float) -> Tensor:
    """Return which elements are off by what the reference jumps by where its inputs move by a unit.

    There a rounding decides, such as that of a sum which a limit then cuts: the rule allows it to be about as large as
    such a move. The composition may round less, and decide as the reference does on most neighbours: by a limit of
    experts on 1 to 12 of 64, where the reference crosses it on a third. A tensor of few elements has these jumps in its
    baseline; among many, an error bound of the element is none for the whole.
    """
    exact = reference.exact[result]
    assert exact is not None
    jumps = torch.stack([(moved[result] - exact).abs() for moved in reference.moved(result, MORE_DRAWS)])  # type: ignore[operator]
    error = (actual.double() - exact).abs()
    return (error <= factor * jumps.amax(0)) & ~_is_smooth(reference, result, MORE_DRAWS)


class MoreNeighbours(Reference):
    """The same with more neighbours: a search shows the worst of thousands of calls, where the composition is bad too.

    Where one entry of a softmax is nearly all, its gradient is a few roundings of one sum. In most calls they are fewer
    than they can be, the composition's on 16 neighbours too. And a rounding error is up to twice as large a part of a
    number at the begin of a binade as at its end, where the composition's may all be: so their incoming gradients are
    1 to 2 times larger.
    """

    count = 64

    @cached_property
    def neighbours(self) -> list[tuple[list[Tensor | None], list[Tensor | None]]]:
        return [self._larger(2.0 ** (seed / self.count), seed) for seed in range(self.count)]

    def _larger(self, factor: float, seed: int) -> tuple[list[Tensor | None], list[Tensor | None]]:
        larger = Reference(self.op, self.sample, [None if grad is None else grad * factor for grad in self.given])
        composition, exact = (larger.run(self.nudge(seed, dtype)) for dtype in (None, torch.float64))
        for results in (composition, exact):
            for i in range(len(self.given), len(results)):
                results[i] = None if results[i] is None else results[i].double() / factor  # type: ignore[union-attr]
        return composition, exact


def _dtype(outcome: Outcome) -> torch.dtype:
    return next((t.dtype for t in outcome.inputs.values() if t.is_floating_point()), torch.float32)


HUGE = 2.0**60
"""Products of such numbers leave float32, so that a formula that PyTorch's composition fails at as well is excused."""


def _products_overflow(outcome: Outcome, reference: Reference) -> bool:
    """Return True if an order of operations overflows that no promise rules out.

    A term of a sum is a product of one number from each of several arguments, in whatever order they are multiplied:
    the largest numbers first, and where a factor below one would come last. A sum has at most as many terms as the
    largest argument has elements. Powers of one argument are not excused: a formula can scale it. What comes of an
    infinite term may be finite: a softmax makes 0 of a score of -inf.
    """
    tensors = [t for t in (*outcome.inputs.values(), *reference.given) if t is not None and t.is_floating_point()]
    terms = max((t.numel() for t in tensors), default=0)
    size = sum(math.log2(max(1.0, _largest(t))) for t in tensors) + math.log2(max(1, terms))
    return size >= math.log2(torch.finfo(torch.float32).max)


def _not_finite(op: Op, case: Case, outcome: Outcome, reference: Reference) -> Finding | None:
    numbers = [t for t in (*outcome.inputs.values(), *reference.given) if t is not None and t.is_floating_point()]
    huge = any(bool((t.detach().abs() > HUGE).any()) for t in numbers)
    if huge and any(t is not None and not bool(t.isfinite().all()) for t in reference.composition):
        return None
    if _products_overflow(outcome, reference):
        return None
    try:
        require_finite(op, case.sample, outcome, case.grads)
    except BrokenPromise as error:
        return Finding("gradient not finite", "", str(error).removeprefix(f"{case.sample}: "))
    return None


def _nan_in_silence(op: Op, case: Case, outcome: Outcome) -> Finding | None:
    """Only options changed, the numbers are a sample's own, and still an output is NaN throughout."""
    ordinary = case.changed and all("=" in change for change in case.changed) and _inputs_finite(outcome)
    ordinary = ordinary and not any("index" in change for change in case.changed)  # a mean of what is ignored
    ordinary = ordinary and all(tensor.numel() for tensor in outcome.inputs.values())
    for i, output in enumerate(outcome.outputs if ordinary else ()):
        if (
            output.numel()
            and bool(output.isnan().all())
            and _finite_before(op, case)
            and not _finite_elsewhere(op, case)
        ):
            return Finding(
                "nan", f"output {i}", f"output {i} is NaN for {' and '.join(case.changed)}, without an error"
            )
    return None


def _finite_before(op: Op, case: Case) -> bool:
    """Return True if all is finite with the sample's own options: a mean of no rows is not."""
    with _time_limit(PATIENCE):
        before = call(op, case.template, grads=case.grads)
    return all(bool(output.isfinite().all()) for output in before.outputs)


def _finite_elsewhere(op: Op, case: Case) -> bool:
    """Return True if the reference has an answer to these options for another sample: so they are no mistake.

    As of layer_norm with an eps of 0, which only a row of one value, of no variance, turns into NaN.
    """
    before, after = op.bind(case.template), op.bind(case.sample)
    left = {name for name in before if name not in after}
    changed = {
        name: value for name, value in after.items() if not isinstance(value, Tensor) and value != before.get(name)
    }
    device, dtype = device_of(op, case.template), float_dtype(op, case.template)
    for sample in op.samples(device, dtype):
        values = {name: value for name, value in op.bind(sample).items() if name not in left} | changed
        try:
            outputs = Reference(op, rebound(op, sample, values, ""), [None] * len(op.schema.returns)).exact
        except REFUSALS:
            continue
        if all(output is not None and output.numel() and bool(output.isfinite().all()) for output in outputs):
            return True
    return False


class Decided(Reference):
    """The reference near a decision: equal numbers move together, and error bounds leave out what crossed it."""

    def nudge(self, seed: int, dtype: torch.dtype | None = None, by: float | None = None) -> Change:
        return nudged_together(seed, dtype, by)

    def error_bound(self, result: int, draws: int) -> Tensor:
        exact = self.exact[result]
        moves = [(moved[result] - exact).abs() for moved in self.moved(result, draws)]  # type: ignore[operator]
        return 4 * torch.stack(moves).quantile(0.25, dim=0)


class MoreDecided(Decided):
    """The same with more neighbours, most of them nearer: there one number of 2, 4 or 8 moves.

    Where all numbers move, every neighbour may be farther from the decision than the composition's roundings reach.
    """

    count = MoreNeighbours.count

    def nudge(self, seed: int, dtype: torch.dtype | None = None, by: float | None = None) -> Change:
        return nudged_together(seed, dtype, by, still=1 + seed % 3)


def nudged_together(seed: int, dtype: torch.dtype | None = None, by: float | None = None, *, still: int = 0) -> Change:
    """`nudged`, with one direction for all elements that are equal; only one number of 2^still moves."""

    def change(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return copy_with_layout(tensor)
        copy, memory = copy_to_move(tensor, dtype, by)
        bits = memory.double().view(torch.int64)
        mixed = (bits ^ (bits >> 29)) * -7046029254386353131 + seed * 1442695040888963407 % 2**63
        mixed = (mixed ^ (mixed >> 31)) * -4658895280553007687
        signs = 2.0 * ((mixed >> 40) & 1).double() - 1
        moves = (mixed >> 41) & (2**still - 1) == 0
        move(memory, signs * moves, by)
        return copy if dtype is None else copy.to(dtype)

    return change


def _wrong_decision(op: Op, case: Case, outcome: Outcome, reference: Reference) -> Finding | None:
    """Integers, and values at a decision, where PyTorch's composition decides as the reference does throughout."""
    found = _decided_otherwise(op, outcome, reference, Decided(op, case.sample, reference.given))
    if found is not None and _runs_kernels(op, case):
        decides = _same_integers(reference.given, _without_subnormals(op, reference), reference.exact)
        found = found if decides else None
    if found is None:
        return None
    return _decided_otherwise(op, outcome, reference, MoreDecided(op, case.sample, reference.given))


def _without_subnormals(op: Op, reference: Reference) -> list[Tensor | None]:
    """Return what the composition gives on a CPU that makes zeros of numbers that are not normal, as kernels may.

    Such zeros are equal, of two scores of which one was larger.
    """
    values = op.bind(reference.sample).items()
    on_cpu = {name: value.detach().cpu() if isinstance(value, Tensor) else value for name, value in values}
    composition = Reference(op, rebound(op, reference.sample, on_cpu, ""), [None] * len(reference.given))
    torch.set_flush_denormal(True)
    try:
        return [None if found is None else found.to(device_of(op, reference.sample)) for found in composition.run()]
    finally:
        torch.set_flush_denormal(False)


def _decided_otherwise(op: Op, outcome: Outcome, reference: Reference, decided: Decided) -> Finding | None:
    if not all(
        _same_integers(reference.given, *pair)
        for pair in [(reference.composition, reference.exact), *decided.neighbours]
    ):
        return None
    for i, (actual, exact) in enumerate(zip(outcome.outputs, reference.exact, strict=False)):
        if exact is not None and not actual.is_floating_point() and not torch.equal(actual, exact.to(actual.dtype)):
            index = int((actual != exact).flatten().nonzero()[0])
            words = f"element {index} is {actual.flatten()[index]}, right is {exact.flatten()[index]}"
            return Finding("decision", f"output {i}", f"output {i}: {words}")
    if _dtype(outcome) != torch.float32:  # a sum that cancels at ties loses as much as a decision is worth
        return None
    factor = tolerance_of(op, _dtype(outcome)).factor
    for i, name, actual, composition, exact in _floating(reference, outcome):
        faint = FAINT * _size(reference, i)
        pairs = [(composition, exact), *decided.near(i)]
        if any(_largest(near.double() - exacts) > faint for near, exacts in pairs):  # it decides otherwise
            continue
        if actual.shape == exact.shape:
            actual = torch.where(_is_smooth(reference, i, 2 * FIRST_DRAWS), exact.to(actual.dtype), actual)
            if _largest(actual.double() - exact) <= faint:
                continue
        violation = violation_of(decided, i, actual, factor, draws=2 * FIRST_DRAWS)
        if violation is not None:
            return Finding("decision", name, f"{name}, at a decision: {violation}")
    return None


def _is_smooth(reference: Reference, result: int, draws: int) -> Tensor:
    """Return which elements move as far as the inputs do: no decision is between them and the error bound's draws.

    At a jump they move by it however small the step is, and beside one only where the step is larger than the distance.
    """
    exact, unit, part = reference.exact[result], reference.unit(result), 16
    assert exact is not None
    moves, rests = [], []
    for seed in range(draws):
        far, near = (reference.run(reference.nudge(seed, torch.float64, by))[result] for by in (unit, unit / part))
        assert far is not None
        assert near is not None
        moves.append((far - exact).square())
        rests.append((far - exact - part * (near - exact)).square())
    return torch.stack(rests).sum(0) <= 0.25 * torch.stack(moves).sum(0)


FAINT = 1e-4
"""The faint share of a result: more than float32 loses in a sum that cancels, less than what a decision moves."""


def _size(reference: Reference, result: int) -> float:
    """Return the largest size of a result, also when its inputs move: at ties all of it may cancel."""
    found = (reference.exact, *reference.moved(result, FIRST_DRAWS))
    return max(_largest(results[result]) for results in found)


def _same_integers(given: Sequence[Any], a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> bool:
    outputs = zip(a[: len(given)], b[: len(given)], strict=True)
    return all(x is None or y is None or x.is_floating_point() or torch.equal(x, y) for x, y in outputs)


def _wrong_derivative(op: Op, case: Case, reference: Reference) -> Finding | None:
    """Compare the reference's own gradient with differences of its forward pass, which share no formula with it."""
    found = derivative_violation(op, case.sample, reference, case.seed)
    return None if found is None else Finding("derivative", found[0], found[1])
