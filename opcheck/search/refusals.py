"""What an operator may refuse: errors that name an argument, and options that have no answer."""

import contextlib
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from llmk.opcheck.calls import call, device_of, float_dtype
from llmk.opcheck.foreign.adapters import Adapted
from llmk.opcheck.inputs import Outcome, all_finite, prepare, rebound
from llmk.opcheck.patience import patience
from llmk.opcheck.reference import REFUSALS, Reference, refusing
from llmk.opcheck.search.cases import Case
from llmk.registry import Op, Sample
from llmk.registry.devices import INTERPRET, use_kernels_on_cpu

PATIENCE = 20.0
"""Seconds that a call may take, far more than any sample does."""


def time_limit(seconds: float | None = None) -> AbstractContextManager[None]:
    """Limit the time of a call, but not in the interpreter: it is slow, and there the turns of loops are counted."""
    return contextlib.nullcontext() if INTERPRET else patience(seconds or PATIENCE)


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
    args, kwargs, _ = prepare(op, sample, (), lambda tensor: tensor.detach().cpu())
    try:
        with time_limit(), use_kernels_on_cpu(False):
            refusing(function, args, kwargs)
    except Exception as error:
        return error
    return None


def fault_of_error(op: Op, case: Case, error: Exception) -> str | None:
    """Return what is wrong with an error; nothing where it names an argument, or the reference refuses the call too."""
    line = _first_words(error)
    if _names_argument(op, error):
        return None
    bare = isinstance(error, ValueError) and line == "math domain error"
    if not bare and _right(op, case.sample) is None:
        return None
    return f"{type(error).__name__}: {line}, which names no argument"


def _right(op: Op, sample: Sample) -> list[Tensor | None] | None:
    """Return the reference's outputs; None where it refuses the call."""
    try:
        return Reference(op, sample, [None] * len(op.schema.returns)).exact
    except REFUSALS:
        return None


def _names_argument(op: Op, error: Exception) -> bool:
    # An operator says `xs[0]` where its record in the one form has `xs_0`.
    form = op.overload.form if isinstance(op.overload, Adapted) else None
    arguments = op.argument_names() if form is None else [argument.name for argument in form.arguments]
    line = _first_words(error)
    return any(re.search(rf"\b{argument}\b", line) for argument in arguments)


def _first_words(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def nan_in_silence(op: Op, case: Case, outcome: Outcome) -> int | None:
    """Return an output that is NaN throughout where only options changed and the numbers are a sample's own.

    It is none where an index says to ignore all, whose mean is NaN, nor where the reference has an answer to these
    options for another sample: as of layer_norm with an eps of 0, which only a row of one value, of no variance, turns
    into NaN.
    """
    only_options = all("=" in change and "index" not in change for change in case.changed)
    if not (case.changed and only_options and all_finite(outcome.inputs.values())):
        return None
    if not all(tensor.numel() for tensor in outcome.inputs.values()):
        return None
    for i, output in enumerate(outcome.outputs):
        if output.numel() and bool(output.isnan().all()) and _finite_before(op, case):
            return None if _finite_elsewhere(op, case) else i
    return None


def _finite_before(op: Op, case: Case) -> bool:
    """Return True if all is finite with the sample's own options: a mean of no rows is not."""
    with time_limit():
        return all_finite(call(op, case.template, grads=case.grads).outputs)


def _finite_elsewhere(op: Op, case: Case) -> bool:
    before, after = op.bind(case.template), op.bind(case.sample)
    changed = {n: value for n, value in after.items() if not isinstance(value, Tensor) and value != before.get(n)}
    for sample in op.samples(device_of(op, case.template), float_dtype(op, case.template)):
        values = {n: value for n, value in op.bind(sample).items() if n in after or n not in before} | changed
        outputs = _right(op, rebound(op, sample, values, ""))
        if outputs is not None and all(o is not None and o.numel() for o in outputs) and all_finite(outputs):
            return True
    return False
