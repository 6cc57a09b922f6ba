"""The promises about where and under which of PyTorch's settings a call is made; the form is that of promises.py."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from llmk.opcheck.calls import call, device_of, float_dtype, one_of_each, require_accurate
from llmk.opcheck.inputs import (
    BrokenPromise,
    NothingToCheck,
    Outcome,
    same_results,
    with_default_device,
    with_default_dtype,
)
from llmk.registry import Op, Sample

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
    for sample in one_of_each(op, samples):
        plain = call(op, sample)
        if not _same(plain, _call_under(op, sample, op.overload, setting)):
            raise BrokenPromise(f"{sample}: {what} changes the result")


def _require_accurate_compiled(op: Op, samples: Sequence[Sample], setting: Setting) -> None:
    """Check one sample: the same Python is traced that every kind has run in eager mode."""
    sample = one_of_each(op, samples)[0]
    torch.compiler.reset()
    fn = torch.compile(lambda *args, **kwargs: op.overload(*args, **kwargs), backend="aot_eager", fullgraph=True)
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
    """6: a call from another thread gives the same bits."""
    for sample in one_of_each(op, samples):
        plain, found = call(op, sample), _in_thread(lambda sample=sample: call(op, sample))
        if not same_results(plain, found):
            raise BrokenPromise(f"{sample}: another thread gets different bits")


def _in_thread(make: Callable[[], Outcome]) -> Outcome:
    found: list[Outcome] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            found.append(make())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise BrokenPromise(f"in another thread it raises {type(errors[0]).__name__}: {errors[0]}") from errors[0]
    return found[0]


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
