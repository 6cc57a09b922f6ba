"""Running the promises over operators, dtypes and paths."""

import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from llmk.opcheck.inputs import BrokenPromise, watched_by
from llmk.opcheck.promises import GPU_PROMISES, PROMISES, Promise
from llmk.registry import Op, Sample
from llmk.registry.launch import INTERPRET

Check = tuple[str, str, str]
"""Operator, dtype and promise."""


@dataclass(frozen=True)
class Result:
    """Whether one operator keeps one promise in one dtype on one path; with no calls there was nothing to check."""

    op: str
    device: str
    dtype: str
    path: str
    promise: str
    passed: bool
    message: str
    seconds: float
    calls: int

    @property
    def check(self) -> Check:
        return self.op, self.dtype, self.promise

    @property
    def verdict(self) -> str:
        return "broken" if not self.passed else "kept" if self.calls else "empty"


@dataclass(frozen=True)
class Doing:
    """A check that has begun, and the sample that it has come to."""

    op: str
    dtype: str
    promise: str
    sample: str = ""

    @property
    def check(self) -> Check:
        return self.op, self.dtype, self.promise

    def __str__(self) -> str:
        return f"{self.op} {self.dtype} {self.promise}"


def path_taken(device: torch.device) -> str:
    """What runs on a device in this process: the plain PyTorch reference, Triton's interpreter or the GPU kernels."""
    if device.type != "cpu":
        return "GPU kernel"
    return "interpreter" if INTERPRET else "reference"


def check(
    op: Op,
    *,
    device: torch.device | str = "cpu",
    dtypes: Sequence[torch.dtype] | None = None,
    promises: Sequence[str] | None = None,
    progress: Callable[[str], None] = lambda message: None,
) -> list[Result]:
    """Check every promise of an operator.

    Args:
        op: Its record; for an operator of your own, build a `llmk.registry.Op`.
        device: Where.
        dtypes: In which dtypes; all of the record's by default.
        promises: Which promises, by name; all by default.
        progress: Called with a line before each check.

    Returns:
        A result for each dtype and promise, broken ones with a message.

    Raises:
        ValueError: There is no promise of such a name.
    """

    def doing(now: Doing) -> None:
        if not now.sample:
            progress(str(now))

    return list(checks(op, torch.device(device), dtypes, promises, doing))


def promise_named(name: str) -> Promise:
    known = {promise.__name__: promise for promise in PROMISES + GPU_PROMISES}
    if name not in known:
        raise ValueError(f"no promise {name!r}; there are {', '.join(known)}")
    return known[name]


def promises_for(device: torch.device, names: Sequence[str] | None = None) -> list[Promise]:
    known = PROMISES + (GPU_PROMISES if device.type == "cuda" else ())
    wanted = known if names is None else [promise_named(name) for name in names]
    return [promise for promise in known if promise in wanted]


def checks(
    op: Op,
    device: torch.device,
    dtypes: Sequence[torch.dtype] | None,
    names: Sequence[str] | None,
    doing: Callable[[Doing], None],
    done: Collection[Check] = (),
) -> Iterator[Result]:
    """The results one by one, but for checks that are done; `doing` hears what begins and each sample of it."""
    for dtype in dtypes or op.dtypes:
        dtype_name = str(dtype).removeprefix("torch.")
        torch.manual_seed(0)
        samples = list(op.samples(device, dtype))
        for promise in promises_for(device, names):
            name = promise.__name__
            if (op.name, dtype_name, name) in done:
                continue
            doing(Doing(op.name, dtype_name, name))
            calls = 0

            def watch(sample: Sample, dtype_name: str = dtype_name, name: str = name) -> None:
                nonlocal calls
                calls += 1
                doing(Doing(op.name, dtype_name, name, str(sample)))

            start = time.perf_counter()
            with watched_by(watch):
                message = _broken(promise, op, samples)
            seconds = time.perf_counter() - start
            path = path_taken(device)
            yield Result(op.name, str(device), dtype_name, path, name, message is None, message or "", seconds, calls)


def _broken(promise: Promise, op: Op, samples: Sequence[Sample]) -> str | None:
    if not samples:
        return "the record yields no samples"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own; a wrong result is what counts here
            promise(op, samples)
    except BrokenPromise as error:
        return str(error)
    except Exception as error:  # an operator that raises where it should not is broken as well
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})"
    return None
