"""The promises about settings of PyTorch's, other calls and threads, and what a call leaves behind.

The form is that of results.py.
"""

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError, checkpoint

from llmk.accuracy.neighbours import nudged, with_default_dtype
from llmk.opcheck.calls import (
    call,
    device_of,
    few_kinds,
    first_line,
    float_dtype,
    incoming_gradients,
    representatives,
    require_accurate,
    require_no_gross_error,
)
from llmk.opcheck.inputs import (
    BrokenPromise,
    NothingToCheck,
    Outcome,
    as_list,
    comparable,
    differentiable_inputs,
    prepare,
    same_results,
    with_default_device,
)
from llmk.opcheck.promises.compiled import compiled_call
from llmk.opcheck.promises.process_state import functions, random_state, restore, restore_functions, seeded, settings
from llmk.opcheck.reference import REFUSALS
from llmk.registry import Op, Sample
from llmk.registry.devices import INTERPRET

Setting = Callable[[], AbstractContextManager[Any]]


def default_dtype(op: Op, samples: Sequence[Sample]) -> None:
    """6: another default dtype changes no bit, and no result when compiled."""
    for dtype in (torch.bfloat16, torch.float64):
        _require_unchanged(op, samples, partial(with_default_dtype, dtype), f"the default dtype {dtype}")
    _require_accurate_compiled(op, samples, partial(with_default_dtype, torch.bfloat16))


def default_device(op: Op, samples: Sequence[Sample]) -> None:
    """6: another default device changes no bit, and no result when compiled."""
    _require_unchanged(op, samples, partial(with_default_device, "meta:0"), "the default device meta")
    _require_accurate_compiled(op, samples, partial(with_default_device, "meta:0"))


def _require_unchanged(op: Op, samples: Sequence[Sample], setting: Setting, what: str) -> None:
    for sample in representatives(op, samples):
        plain = call(op, sample)
        if not _same(plain, _call_under(op, sample, op.overload, setting)):
            raise BrokenPromise(f"{sample}: {what} changes the result")


def _require_accurate_compiled(op: Op, samples: Sequence[Sample], setting: Setting) -> None:
    """Check one sample: the same Python is traced that every kind has run in eager mode."""
    sample = representatives(op, samples)[0]
    torch.compiler.reset()
    fn = compiled_call(op, backend="aot_eager")
    outcome = _call_under(op, sample, fn, setting)
    try:
        require_accurate(op, sample, outcome)
    except BrokenPromise as error:
        raise BrokenPromise(f"compiled under another default: {error}", error.wrong) from None


def _call_under(op: Op, sample: Sample, fn: Any, setting: Setting) -> Outcome:
    """A call whose forward and backward passes both run under a setting, with inputs that were made before."""
    with contextlib.ExitStack() as stack:

        def forward(*args: Any, **kwargs: Any) -> Any:
            stack.enter_context(setting())
            return fn(*args, **kwargs)

        return call(op, sample, fn=forward)


def _same(a: Outcome, b: Outcome) -> bool:
    kinds = [[None if t is None else (t.dtype, t.device, t.shape) for t in outcome.results()] for outcome in (a, b)]
    return kinds[0] == kinds[1] and same_results(a, b)


def another_thread(op: Op, samples: Sequence[Sample]) -> None:
    """6: a call from another thread, beside one in this, gives the same bits; the interpreter runs them in turn."""
    for sample in few_kinds(op, samples):
        given = (sample, _with_other_numbers(op, sample))
        alone = [call(op, each) for each in given]
        with ThreadPoolExecutor(1) as thread:
            there = [thread.submit(call, op, sample) for _ in range(AT_ONCE)]
            beside = [call(op, given[1]) for _ in range(AT_ONCE)] if not INTERPRET else []
        try:
            results = [made.result() for made in there]
        except Exception as error:
            raise BrokenPromise(f"in another thread it raises {type(error).__name__}: {error}") from error
        for each, expected, made in zip(given, alone, (results, beside), strict=True):
            for found in made:
                _require_alike(op, each, expected, found, "beside another thread")


AT_ONCE = 2
"""Calls that two threads make at once."""


def _other_numbers(tensor: Tensor) -> Tensor:
    """Return the same other numbers every time: each moved by a quarter of itself, up or down."""
    return nudged(0, by=0.25)(tensor)


def two_calls(op: Op, samples: Sequence[Sample]) -> None:
    """1: two forward passes before the first backward pass give the gradients of each alone."""
    for sample in few_kinds(op, samples):
        wanted = differentiable_inputs(op, sample)
        if not wanted:
            continue
        given = (sample, _with_other_numbers(op, sample))
        alone = [call(op, each) for each in given]
        prepared = [prepare(op, each, wanted) for each in given]
        outputs = [as_list(op.overload(*args, **kwargs)) for args, kwargs, _ in prepared]
        for each, expected, made, (_, _, tensors) in zip(given, alone, outputs, prepared, strict=True):
            wanting = [output for output in made if output.requires_grad]
            torch.autograd.backward(wanting, incoming_gradients(wanting))  # type: ignore[arg-type]
            found = Outcome(tensors, made, {name: tensors[name].grad for name in wanted})
            _require_alike(op, each, expected, found, "two calls, and then their backward passes")


def _with_other_numbers(op: Op, sample: Sample) -> Sample:
    args, kwargs, _ = prepare(op, sample, (), _other_numbers)
    return Sample(tuple(args), kwargs, why=sample.why)


def _require_alike(op: Op, sample: Sample, expected: Outcome, found: Outcome, how: str) -> None:
    """The same bits as a call alone gives, or others that are right too: atomics on a GPU make some of every call."""
    if not same_results(expected, found):
        require_no_gross_error(op, replace(sample, why=f"{sample.why}; {how}"), found)


def checkpointed(op: Op, samples: Sequence[Sample]) -> str:
    """5: recomputed in the backward pass by torch.utils.checkpoint, it gives the same results; a backward pass that
    asks for its saved tensors twice, which raises there, is noted.
    """

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(op.overload, *args, use_reentrant=False, **kwargs)

    for sample in few_kinds(op, samples):
        if not differentiable_inputs(op, sample):
            continue
        plain = call(op, sample)
        try:
            found = call(op, sample, fn=recomputed)
        except CheckpointError as error:
            words = f"{sample}: recomputed under checkpoint it raises {first_line(error)}"
            if "already unpacked" in words:
                return words
            raise BrokenPromise(words) from error
        _require_alike(op, sample, plain, found, "recomputed under checkpoint")
    return ""


def autocast(op: Op, samples: Sequence[Sample]) -> str:
    """5: under autocast another's operator than llmk's is as right as PyTorch's composition to a tenth, and so are its
    gradients; that it raises is noted.
    """
    if op.is_own:  # what it casts is its own promise, and tested as such
        raise NothingToCheck
    for sample in few_kinds(op, samples):
        try:
            expected = _under_autocast(op, sample, op.reference)
        except REFUSALS:
            continue
        try:
            found = _under_autocast(op, sample, op.overload)
        except BrokenPromise:
            raise
        except Exception as error:
            return f"{sample}: under autocast it raises {first_line(error)}"
        plain = call(op, sample, fn=op.reference)
        results = zip(found.names(), found.results(), expected.results(), plain.results(), strict=True)
        for name, a, b, exact in results:
            if not (a is None or b is None or exact is None) and not _within_a_tenth(a, b, exact):
                raise BrokenPromise(f"{sample}: under autocast {name} is off by more than a tenth", name)
    return ""


def _within_a_tenth(a: Tensor, b: Tensor, exact: Tensor) -> bool:
    """Return True if finite floating-point numbers are as far apart as roundings make them, beside the largest.

    Where terms cancel, as in the gradient of a bias before a normalization, only roundings are left: `b` is off by them
    from what is exact beside it, and `a` by others as large, so that the two are twice as far apart.
    """
    if not (b.is_floating_point() or b.is_complex()):
        return True
    a, b, exact = (comparable(x.detach()).double() for x in (a, b, exact))
    if a.shape != b.shape or not b.numel() or not bool(b.isfinite().all()):
        return a.shape == b.shape
    allowed = 0.1 * b.abs().max() + 2 * (b - exact).abs().max() + 1e-3
    return bool(((a - b).abs() <= allowed).all())


def _under_autocast(op: Op, sample: Sample, fn: Callable[..., Any]) -> Outcome:
    """A call whose forward pass alone runs under autocast, as PyTorch recommends it."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_of(op, sample).type, torch.bfloat16):
            return fn(*args, **kwargs)

    return call(op, sample, fn=forward)


_settings: dict[str, Any] = {}
_functions: dict[str, Any] = {}


def remember_state() -> None:
    """Note PyTorch's settings and functions before an operator is called for the first time."""
    _settings.update(settings())
    _functions.clear()
    _functions.update(functions())


def restore_state() -> list[str]:
    """Put back PyTorch's settings and functions, and return which had changed."""
    changed = [f"it changes {name}" for name in restore(_settings)]
    return changed + [f"it replaces {name}" for name in restore_functions(_functions)]


def side_effects(op: Op, samples: Sequence[Sample]) -> None:
    """1: a call seeds no random numbers, changes no setting of PyTorch's and replaces none of its functions."""
    for sample in few_kinds(op, samples):
        states = []
        for number in (1, 2):  # random numbers that are only drawn leave different states behind
            with seeded(number):
                call(op, sample)
                states.append(random_state())
        found = restore_state()
        found += [f"it seeds {whose} random numbers" for whose in states[0] if states[0][whose] == states[1][whose]]
        for words in found:
            raise BrokenPromise(f"{sample}: {words}")


def other_device(op: Op, samples: Sequence[Sample]) -> None:
    """2: on a GPU that is not the current one."""
    device = device_of(op, samples[0])
    others = [i for i in range(torch.cuda.device_count()) if i != torch.cuda.current_device()]
    if device.type != "cuda" or not others:
        raise NothingToCheck
    place, current = torch.device("cuda", others[0]), torch.cuda.current_device()
    for sample in op.samples(place, float_dtype(op, samples[0])):
        outcome = call(op, sample)
        require_accurate(op, sample, outcome)
        if any(result is not None and result.device != place for result in outcome.results()):
            raise BrokenPromise(f"{sample}: a result is not on {place}")
        if torch.cuda.current_device() != current:
            raise BrokenPromise(f"{sample}: the current device is another one afterwards")
