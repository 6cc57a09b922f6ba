"""Judges a case of the search by two rules.

A result is wrong if the float64 reference of neighbouring inputs does not explain it: what it moves by there, and what
PyTorch's composition loses, is what the accuracy rule allows. A jump is where two neighbours differ by much. Beside one
a rounding decides, which is no fault; but where the composition decides as the reference does on all neighbours, so
does the operator. At ties and at what an option says, inputs that move by a unit of their own are on both sides, so the
neighbours of a decision move equal numbers together.

Nothing is said where float32 or the result's dtype overflows: of an element for which the composition is not finite and
the reference is, of NaN that finite inputs give the reference itself, of gradients made from a result that is lost, and
of calls whose products leave float32 in some order.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from llmk.accuracy.neighbours import Change, copy_to_move, copy_with_layout, move
from llmk.accuracy.rule import SUBNORMAL
from llmk.opcheck.calls import call, device_of, float_dtype, tolerance_of, violation_of
from llmk.opcheck.inputs import BrokenPromise, Outcome, all_finite, first_where, largest, mapped, rebound
from llmk.opcheck.interpreted.loops import EndlessLoop
from llmk.opcheck.patience import TookTooLong
from llmk.opcheck.promises.gradients import require_finite
from llmk.opcheck.reference import MORE_DRAWS, REFUSALS, Reference, reference_for
from llmk.opcheck.search.cases import Case
from llmk.opcheck.search.derivatives import derivative_violation
from llmk.opcheck.search.refusals import fault_of_error, nan_in_silence, refused_on_cpu, time_limit
from llmk.registry import Op
from llmk.registry.devices import INTERPRET

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


def judge(op: Op, case: Case, seconds: float | None = None) -> Finding | None:
    """Return what is wrong with the operator on a case; None if nothing is, or if it refuses the arguments."""
    if _runs_kernels(op, case) and refused_on_cpu(op, case):
        return None
    try:
        with time_limit(seconds):
            outcome = call(op, case.sample, grads=case.grads)
    except (TookTooLong, EndlessLoop) as error:
        return Finding("does not end", "", str(error))
    except BrokenPromise as error:
        return None if "requires a gradient" in str(error) else Finding("memory", "", str(error))
    except Exception as error:
        fault = fault_of_error(op, case, error)
        return None if fault is None else Finding("raises", type(error).__name__, fault)
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
        or _nan(op, case, outcome)
        or (_wrong_decision(op, case, outcome, reference) if case.decides else None)
        or _wrong_derivative(op, case, reference)
    )


def _runs_kernels(op: Op, case: Case) -> bool:
    return INTERPRET or device_of(op, case.sample).type != "cpu"


class Neighbours(Reference):
    """The reference with more neighbours: a search shows the worst of thousands of calls, as the composition has it."""

    count = 64


def _wrong_values(op: Op, case: Case, outcome: Outcome, reference: Reference) -> Finding | None:
    factor = tolerance_of(op, float_dtype(op, case.sample)).factor
    formula_bound = None if op.error_bound is None else op.error_bound(**(op.bind(case.sample) | outcome.inputs))
    neighbours = Neighbours(op, case.sample, reference.given)
    for i, name, actual, exact in _judged(reference, outcome):
        bound = None if i else formula_bound
        violation = violation_of(reference, i, actual, factor, formula_bound=bound, draws=FIRST_DRAWS)
        if violation is not None and math.isfinite(violation.error):
            beside = (actual.double() - exact).abs() <= factor * _jumps(reference, i, MORE_DRAWS)
            actual = torch.where(beside, exact.to(actual.dtype), actual)
            violation = violation_of(neighbours, i, actual, factor, formula_bound=bound)
        if violation is not None:
            return Finding("value", name, f"{name}: {violation}")
    return None


def _jumps(reference: Reference, result: int, draws: int) -> Tensor:
    """Return what each element of the reference jumps by where its inputs move by a unit; 0 where it moves as they do.

    At a jump it moves as far however small the step is, and beside one only where the step is larger than the distance.
    """
    exact, unit, part = reference.exact[result], reference.unit(result), 16
    assert exact is not None
    moves, rests = [], []
    for seed in range(draws):
        far, near = (reference.run(reference.nudge(seed, torch.float64, by))[result] for by in (unit, unit / part))
        assert far is not None
        assert near is not None
        moves.append((far - exact).abs())
        rests.append((far - exact - part * (near - exact)).square())
    moved = torch.stack(moves)
    smooth = torch.stack(rests).sum(0) <= 0.25 * moved.square().sum(0)
    return torch.where(smooth, 0.0, moved.amax(0))


def _judged(reference: Reference, outcome: Outcome) -> Iterator[tuple[int, str, Tensor, Tensor]]:
    """Yield the floating-point results, with what is right where an element is not to be judged.

    That is what overflows, and what kernels lose of numbers that are not normal. Gradients of a choice that PyTorch's
    composition does not make as the reference does are not judged at all.
    """
    if all_finite(outcome.inputs.values()) and _products_overflow(outcome, reference):
        return
    nan_inputs = any(bool(tensor.isnan().any()) for tensor in outcome.inputs.values())
    chosen_alike = _same_integers(reference.composition, reference.exact)
    results = zip(outcome.names(), outcome.results(), reference.composition, reference.exact, strict=True)
    for i, (name, actual, composition, exact) in enumerate(results):
        is_gradient = i >= len(outcome.outputs)
        if is_gradient and (not chosen_alike or _step_is_lost(outcome, reference)):
            return
        if actual is None or composition is None or exact is None or not actual.is_floating_point():
            continue
        actual = actual.detach()
        if actual.shape == exact.shape:
            lost = ~composition.isfinite() & ~exact.isnan()
            if INTERPRET or not actual.is_cpu:
                lost |= (actual.double() - exact).abs() <= _flushed(outcome, reference, is_gradient)
            nan = exact.isnan() & (actual.isfinite() | (not nan_inputs))
            actual = torch.where(nan, math.nan, torch.where(lost, exact.to(actual.dtype), actual))
        yield i, name, actual, exact


def _step_is_lost(outcome: Outcome, reference: Reference) -> bool:
    """Return True if gradients need not be right: a result is too large for its dtype, or no output is made without it.

    The optimizer, or its scaler, sees it; or on the way to an output the operator and the composition left float32.
    """
    results = zip(outcome.results(), reference.composition, reference.exact, strict=True)
    for i, (actual, composition, exact) in enumerate(results):
        if actual is None or composition is None or exact is None or not actual.is_floating_point():
            continue
        lost = exact.abs() > torch.finfo(actual.dtype).max
        if i < len(outcome.outputs) and actual.shape == exact.shape:
            lost |= ~actual.detach().isfinite() & ~composition.isfinite()
        if bool((exact.isfinite() & lost).any()):
            return True
    return False


def _flushed(outcome: Outcome, reference: Reference, is_gradient: bool) -> float:
    """Return what kernels may lose in a result that is a sum of terms p log(p), as an entropy is.

    A p below SUBNORMAL may be 0 there, and -p log(p) is at most SUBNORMAL times 87.3 for such a p. A sum has at most as
    many terms as the largest argument has elements, and those of a gradient are multiplied by an incoming one.
    """
    terms = max((tensor.numel() for tensor in outcome.inputs.values()), default=0)
    incoming = max([1.0, *map(largest, reference.given)]) if is_gradient else 1.0
    return SUBNORMAL * -math.log(SUBNORMAL) * max(1, terms) * incoming


HUGE = 2.0**60
"""Products of such numbers leave float32, so that a formula that PyTorch's composition fails at as well is excused."""


def _numbers(outcome: Outcome, reference: Reference) -> list[Tensor]:
    """The floating-point numbers that a call is given, incoming gradients too."""
    given = [*outcome.inputs.values(), *reference.given]
    return [tensor.detach() for tensor in given if tensor is not None and tensor.is_floating_point()]


def _products_overflow(outcome: Outcome, reference: Reference) -> bool:
    """Return True if an order of operations overflows that no promise rules out.

    A term of a sum is a product of one number from each of several arguments, in whatever order they are multiplied:
    the largest numbers first, and where a factor below one would come last. A sum has at most as many terms as the
    largest argument has elements. Powers of one argument are not excused: a formula can scale it. What comes of an
    infinite term may be finite: a softmax makes 0 of a score of -inf.
    """
    tensors = _numbers(outcome, reference)
    terms = max((tensor.numel() for tensor in tensors), default=0)
    size = sum(math.log2(max(1.0, largest(tensor))) for tensor in tensors) + math.log2(max(1, terms))
    return size >= math.log2(torch.finfo(torch.float32).max)


def _not_finite(op: Op, case: Case, outcome: Outcome, reference: Reference) -> Finding | None:
    is_huge = any(bool((tensor.abs() > HUGE).any()) for tensor in _numbers(outcome, reference))
    if (is_huge and not all_finite(reference.composition)) or _products_overflow(outcome, reference):
        return None
    try:
        require_finite(op, case.sample, outcome, case.grads)
    except BrokenPromise as error:
        return Finding("gradient not finite", "", str(error).removeprefix(f"{case.sample}: "))
    return None


def _nan(op: Op, case: Case, outcome: Outcome) -> Finding | None:
    i = nan_in_silence(op, case, outcome)
    words = f"output {i} is NaN for {' and '.join(case.changed)}, without an error"
    return None if i is None else Finding("nan", f"output {i}", words)


class Decided(Neighbours):
    """The reference near a decision: equal numbers move together, and error bounds leave out what crossed it.

    Of some neighbours one number of 2, 4 or 8 moves. Where all do, every neighbour may be farther from the decision
    than the composition's roundings reach.
    """

    def nudge(self, seed: int, dtype: torch.dtype | None = None, by: float | None = None) -> Change:
        return nudged_together(seed, dtype, by, still=1 + seed % 3)

    def error_bound(self, result: int, draws: int) -> Tensor:
        exact = self.exact[result]
        moves = [(moved[result] - exact).abs() for moved in self.moved(result, draws)]  # type: ignore[operator]
        return 4 * torch.stack(moves).quantile(0.25, dim=0)

    @cached_property
    def neighbours(self) -> list[tuple[list[Tensor | None], list[Tensor | None]]]:
        """Those, and where kernels run the composition without subnormal numbers beside the reference."""
        runs_kernels = INTERPRET or device_of(self.op, self.sample).type != "cpu"
        return super().neighbours + ([(self._without_subnormals(), self.exact)] if runs_kernels else [])

    def _without_subnormals(self) -> list[Tensor | None]:
        """Return what the composition gives on a CPU that makes zeros of numbers that are not normal, as kernels may.

        Such zeros are equal, of two scores of which one was larger.
        """
        device, on_cpu = device_of(self.op, self.sample), mapped(Tensor.cpu, self.op.bind(self.sample))
        composition = Reference(self.op, rebound(self.op, self.sample, on_cpu, ""), mapped(Tensor.cpu, self.given))
        torch.set_flush_denormal(True)
        try:
            return mapped(lambda found: found.to(device), composition.run())
        finally:
            torch.set_flush_denormal(False)

    def is_sure(self) -> bool:
        """Return True if the composition chooses the reference's integers here and on all neighbours."""
        return all(_same_integers(*results) for results in [(self.composition, self.exact), *self.neighbours])


def _same_integers(some: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> bool:
    """Return True if the results that are integers or booleans, and so no gradients, are equal."""
    return all(
        x is None or y is None or x.is_floating_point() or torch.equal(x, y) for x, y in zip(some, others, strict=True)
    )


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


FAINT = 1e-4
"""The faint share of a result: more than float32 loses in a sum that cancels, less than what a decision moves."""


def _wrong_decision(op: Op, case: Case, outcome: Outcome, reference: Reference) -> Finding | None:
    """Integers, and values at a jump, where PyTorch's composition decides as the reference does on all neighbours."""
    decided = Decided(op, case.sample, reference.given)
    found = _wrong_integer(outcome, reference) or _wrong_side(op, case, outcome, decided, reference)
    return found if found is not None and decided.is_sure() else None


def _wrong_integer(outcome: Outcome, reference: Reference) -> Finding | None:
    for i, (actual, exact) in enumerate(zip(outcome.outputs, reference.exact, strict=False)):
        if exact is not None and not actual.is_floating_point() and not torch.equal(actual, exact.to(actual.dtype)):
            return Finding("decision", f"output {i}", f"output {i}: {first_where(actual != exact, actual, exact)}")
    return None


def _wrong_side(op: Op, case: Case, outcome: Outcome, decided: Decided, reference: Reference) -> Finding | None:
    """Values at a jump; in 16 bits a sum that cancels at ties loses as much as a decision is worth."""
    if float_dtype(op, case.sample) != torch.float32:
        return None
    for i, name, actual, exact in _judged(reference, outcome):
        # At ties all of a result may cancel, but not where its inputs move.
        sizes = (results[i] for results in (reference.exact, *reference.moved(i, FIRST_DRAWS)))
        faint = FAINT * max(map(largest, sizes))
        if actual.shape == exact.shape and largest(actual.double() - exact) > faint:
            jumps = _jumps(reference, i, 2 * FIRST_DRAWS) > 0
            actual = torch.where(jumps, actual, exact.to(actual.dtype))
        if actual.shape == exact.shape and largest(actual.double() - exact) <= faint:
            continue
        pairs = [(reference.composition[i], exact), *decided.near(i)]
        if any(largest(near.double() - right) > faint for near, right in pairs if near is not None):
            continue  # the composition decides otherwise
        violation = violation_of(decided, i, actual, tolerance_of(op, torch.float32).factor, draws=2 * FIRST_DRAWS)
        if violation is not None:
            return Finding("decision", name, f"{name}, at a decision: {violation}")
    return None


def _wrong_derivative(op: Op, case: Case, reference: Reference) -> Finding | None:
    """Compare the reference's own gradient with differences of its forward pass, which share no formula with it."""
    found = derivative_violation(op, case.sample, reference, case.seed)
    return None if found is None else Finding("derivative", found[0], found[1])
