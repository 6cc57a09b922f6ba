"""The promises about numbers and sizes that no sample has; the form is that of results.py."""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from llmk.opcheck.calls import call, device_of, few_kinds, first_line, representatives, require_no_gross_error, resized
from llmk.opcheck.inputs import BrokenPromise, NothingToCheck, Outcome, as_list, note, rebound
from llmk.opcheck.promises.nan_fill import nan_filled
from llmk.opcheck.reference import REFUSALS, reference_for
from llmk.registry import Op, Sample
from llmk.registry.devices import INTERPRET

ORDINARY = 1000.0
"""A sample with larger numbers is harsh already."""
LENGTHS = (1, 2, 1025, 4097)
"""Numbers of rows and columns: one, two, and past every block."""
ROWS = (1025,) if INTERPRET else (1025, 4097)


def _with_nan(x: Tensor) -> Tensor:
    """Return a copy whose middle row begins with NaN."""
    x = x.clone(memory_format=torch.contiguous_format)
    x.view(-1, x.shape[-1])[x.numel() // x.shape[-1] // 2, 0] = torch.nan
    return x


def _with_zeros(x: Tensor) -> Tensor:
    """Return a copy with every third number 0, where functions have kinks."""
    x = x.clone(memory_format=torch.contiguous_format)
    x.view(-1)[::3] = 0
    return x


HARSH = {
    "times 64": lambda x: x * 64,
    "far below 0": lambda x: x - 2.0**15,
    "far from 0": lambda x: x + 1000,
    "times 2^-14": lambda x: x * 2.0**-14,
    "with a NaN": _with_nan,
}
"""The changes of the first floating-point argument: exponents overflow, variances cancel, and `eps` counts."""


def harsh_values(op: Op, samples: Sequence[Sample]) -> str:
    """2: large, tiny and NaN inputs, and such as are far from 0, where PyTorch's composition has no overflow; numbers
    that the operator refuses are noted.
    """
    note = ""
    for sample in few_kinds(op, samples):
        for harsh in _changed(op, sample, HARSH):
            outcome = _taken(op, harsh, ())
            if isinstance(outcome, str):
                note = note or outcome
            elif outcome is not None:
                require_no_gross_error(op, harsh, _without_overflow(op, harsh, outcome, judges_nan=False))
        for zeros in _changed(op, sample, {"0 in places": _with_zeros}):
            require_no_gross_error(op, zeros, call(op, zeros))
    return note


def _taken(op: Op, sample: Sample, wanted: Sequence[str] | None = None) -> Outcome | str | None:
    """Return the outcome of a call; words if the operator refuses it, and None if the reference does."""
    if device_of(op, sample).type != "cpu" and has_index_past_the_end(op, sample):
        return None
    try:
        call(op, sample, (), fn=op.reference)
    except REFUSALS:
        return None
    try:
        return call(op, sample, wanted)
    except BrokenPromise:
        raise
    except Exception as error:
        return f"{sample}: it raises {first_line(error)}"


def has_index_past_the_end(op: Op, sample: Sample) -> bool:
    """Return True if the reference says on a CPU that there is one: on a GPU an assertion ends the process."""
    values = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in op.bind(sample).items()}
    try:
        call(op, rebound(op, sample, values, sample.why), (), fn=op.reference)
    except REFUSALS as error:
        return isinstance(error, IndexError) or "out of bounds" in str(error)
    return False


def _changed(op: Op, sample: Sample, changes: Mapping[str, Callable[[Tensor], Tensor]]) -> Iterator[Sample]:
    """The sample with its first floating-point argument changed in each of some ways."""
    for name, value in op.bind(sample).items():
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel() and value.dim():
            if bool((value.abs() > ORDINARY).any()):
                return
            for words, change in changes.items():
                changed = change(value.detach().float()).to(value.dtype)
                yield rebound(op, sample, op.bind(sample) | {name: changed}, f"{sample.why}, {name} {words}")
            return


def _without_overflow(op: Op, sample: Sample, outcome: Outcome, *, judges_nan: bool = True) -> Outcome:
    """Return the outcome with the reference's value where that is not to be judged: PyTorch's composition overflows.

    Without `judges_nan` the reference may overflow too, or be NaN in a row that has one, or a choice that was made
    beside NaN.
    """
    reference = reference_for(op, sample, outcome, lambda outputs: [])
    has_nan = not judges_nan and any(bool(x.isnan().any()) for x in outcome.inputs.values() if x.is_floating_point())
    outputs = []
    for output, composition, exact in zip(outcome.outputs, reference.composition, reference.exact, strict=True):
        assert composition is not None
        assert exact is not None
        if output.shape == exact.shape and output.is_floating_point():
            lost = ~composition.isfinite() & exact.isfinite()
            if not judges_nan:
                lost |= output.isnan() & _rows_with_nan(exact) if has_nan else exact.isnan()
            output = torch.where(lost, exact.to(output.dtype), output)
        elif has_nan and not output.is_floating_point() and output.shape == composition.shape:
            output = composition.to(output.dtype)
        outputs.append(output)
    return Outcome(outcome.inputs, outputs, {})


def _rows_with_nan(x: Tensor) -> Tensor:
    return x.isnan().any(-1, keepdim=True) if x.dim() > 1 else x.isnan().any()


FRESH: ContextVar[int | None] = ContextVar("FRESH", default=None)
"""The seed of `fresh_numbers`; None for another one every time."""


def fresh_numbers(op: Op, samples: Sequence[Sample]) -> None:
    """2: other numbers in the memory of the call before give their own results, call after call.

    A cache finds the address, the shape and the first element that it knows. The numbers are of a new seed every time,
    unless one is to be replayed; where they make PyTorch's composition overflow the operator may too.
    """
    asked = FRESH.get()
    seed = secrets.randbelow(2**31) if asked is None else asked
    for sample in few_kinds(op, samples):
        generator = torch.Generator().manual_seed(seed)  # anew: no sample's numbers depend on which came before
        bound = {name: _own_memory(value) for name, value in op.bind(sample).items()}
        given = rebound(op, sample, bound, sample.why)
        outputs = as_list(op.overload(*given.args, **given.kwargs))
        for _ in range(CALLS):
            for value in bound.values():
                if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
                    _change_in_place(value, generator)
            note(sample)
            outputs = as_list(op.overload(*given.args, **given.kwargs))
        why = f"{sample.why}, after {CALLS} calls with other numbers in the same memory, of seed {seed}"
        changed, outcome = rebound(op, given, bound, why), Outcome({}, [each.detach().clone() for each in outputs], {})
        require_no_gross_error(op, changed, _without_overflow(op, changed, outcome))


CALLS = 5


def _own_memory(value: Any) -> Any:
    return value.detach().clone(memory_format=torch.contiguous_format) if isinstance(value, Tensor) else value


def _change_in_place(x: Tensor, generator: torch.Generator) -> None:
    """Multiply each number but the first by up to a half more or less, where autograd does not see it."""
    factor = 0.5 + torch.rand(x.shape, generator=generator, dtype=torch.float64, device="cpu")
    factor.view(-1)[0] = 1
    x.data.copy_(x.double() * factor.to(x.device))


def other_sizes(op: Op, samples: Sequence[Sample]) -> str:
    """2: rows of length 1 and 2 and past every block, and as many rows; of other operators than llmk's, whose samples
    have them. A size that the operator refuses is noted. New memory holds NaN, so that no row's result of the call
    before stands in for one that is not written.
    """
    if op.is_own:
        raise NothingToCheck
    note = ""
    first = representatives(op, samples)[:1]
    others = resized(op, samples, ROWS) if op.resized else _of_other_lengths(op, first, 0)
    for sample in (*_of_other_lengths(op, first, -1), *others):
        with nan_filled():
            outcome = _taken(op, sample)
        if isinstance(outcome, str):
            note = note or outcome
        elif outcome is not None:
            require_no_gross_error(op, sample, outcome)
    return note


def _of_other_lengths(op: Op, samples: Sequence[Sample], axis: int) -> Iterator[Sample]:
    """The samples with an axis of their first tensor at another length, and every axis that is as long."""
    for sample in samples:
        bound = op.bind(sample)
        first = next(value for value in bound.values() if isinstance(value, Tensor))
        if first.dim() < 2 or first.shape.count(first.shape[axis]) > 1:
            continue
        for length in LENGTHS:
            values = {name: _lengthened(value, first.shape[axis], length) for name, value in bound.items()}
            yield rebound(op, sample, values, f"{sample.why}, {'a width' if axis else 'rows'} of {length}")


def _lengthened(value: Any, length: int, wanted: int) -> Any:
    """Return a tensor whose axes of one length have another: its numbers again, each moved by up to a quarter.

    A module's parameter has the size that the module gave it.
    """
    if not isinstance(value, Tensor) or isinstance(value, torch.nn.Parameter):
        return value
    for axis, size in enumerate(value.shape):
        if size == length:
            value = value.index_select(axis, torch.arange(wanted, device=value.device) % length)
    if not value.is_floating_point():
        return value
    generator = torch.Generator().manual_seed(wanted)
    moved = 1 + torch.rand(value.shape, generator=generator, dtype=torch.float64, device="cpu") / 4
    return (value.double() * moved.to(value.device)).to(value.dtype)
