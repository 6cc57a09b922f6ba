"""Running the promises over operators, dtypes and paths."""

import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from llmk.opcheck.calls import BrokenPromise
from llmk.opcheck.promises import GPU_PROMISES, PROMISES, Promise
from llmk.registry import Op
from llmk.registry.launch import INTERPRET


@dataclass(frozen=True)
class Result:
    """Whether one operator keeps one promise in one dtype on one path."""

    op: str
    device: str
    dtype: str
    path: str
    promise: str
    passed: bool
    message: str
    seconds: float


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
    """
    return list(_results(op, torch.device(device), dtypes or op.dtypes, promises, progress))


def promises_for(device: torch.device, names: Sequence[str] | None = None) -> list[Promise]:
    known = PROMISES + (GPU_PROMISES if device.type == "cuda" else ())
    return [promise for promise in known if names is None or promise.__name__ in names]


def _results(
    op: Op,
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    names: Sequence[str] | None,
    progress: Callable[[str], None],
) -> Iterator[Result]:
    for dtype in dtypes:
        torch.manual_seed(0)
        samples = list(op.samples(device, dtype))
        for promise in promises_for(device, names):
            dtype_name = str(dtype).removeprefix("torch.")
            progress(f"{op.name} {dtype_name} {promise.__name__}")
            start = time.perf_counter()
            message = _broken(promise, op, samples)
            seconds = time.perf_counter() - start
            path = path_taken(device)
            yield Result(
                op.name, str(device), dtype_name, path, promise.__name__, message is None, message or "", seconds
            )


def _broken(promise: Promise, op: Op, samples: Sequence) -> str | None:
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
