"""A look whether an operator runs at all on the path that a process takes."""

import contextlib
import re
import traceback
from types import FrameType

import torch
import triton.language as tl

from llmk.opcheck.calls import call, device_of, float_dtype, words_of
from llmk.opcheck.inputs import BrokenPromise
from llmk.registry import Op, Sample
from llmk.registry.devices import INTERPRET

_NAMES_DEVICE = re.compile(r"active drivers|'CPU' backend|cpu tensor|\b(is_)?cuda\b|\bgpus?\b", re.IGNORECASE)
_ON_A_CPU = "no CPU version: `--path interpreter`, or a GPU"
_IN_THE_INTERPRETER = "does not run in Triton's interpreter: a GPU"

BFLOAT16 = (
    "not checked: Triton's interpreter adds the bits of bfloat16; `--dtype bfloat16` if kernels cast it, or a GPU"
)


def what_else_runs_it(op: Op, sample: Sample) -> str | None:
    """Return what to do where an operator has no code for a CPU; None where it has, right or wrong.

    It has none if a plain call on a CPU raises an error that names a device, or a line of code that asks for one does,
    or if a kernel uses what Triton's interpreter lacks. So does a GPU's kernel that raises any error there: whether it
    runs, the GPU says.
    """
    on_gpu = device_of(op, sample).type != "cpu"
    if on_gpu and not INTERPRET:
        return None
    try:
        call(op, sample, ())
    except Exception as error:
        if (on_gpu and not isinstance(error, BrokenPromise)) or names_device(error) or _interpreter_lacks(error):
            advice = _IN_THE_INTERPRETER if INTERPRET else _ON_A_CPU
            first = (str(error).strip() or words_of(error)).partition("\n")[0]
            return f"{advice} ({type(error).__name__}: {first})"
    return None


def names_device(error: BaseException) -> bool:
    """Return True if an error, or the line of code that raised it, asks for another device."""
    return bool(_NAMES_DEVICE.search(words_of(error)))


def _interpreter_lacks(error: BaseException) -> bool:
    """Return True if a kernel that a GPU may run ends in the interpreter for what that has not.

    A scalar argument is a Python number there, without the methods of a tensor, and what `libdevice` names does
    nothing and returns None.
    """
    causes: list[BaseException] = [error]
    while causes[-1].__cause__ is not None and causes[-1].__cause__ not in causes:  # an error may be its own cause
        causes.append(causes[-1].__cause__)
    cause = causes[-1]
    if isinstance(cause, AttributeError):
        return isinstance(cause.obj, bool | int | float) and hasattr(tl.tensor, str(cause.name))
    if isinstance(cause, TypeError) and "NoneType" in str(cause):
        return any(_names_libdevice(frame) for frame, _ in traceback.walk_tb(cause.__traceback__))
    return False


def _names_libdevice(frame: FrameType) -> bool:
    """Return True if the code of a frame names a function of `libdevice`, or the module."""
    named = [frame.f_globals.get(name) for name in frame.f_code.co_names]
    homes = [getattr(value, "__module__", None) or getattr(value, "__name__", "") for value in named]
    return any(home.startswith("triton.language.extra") for home in homes)


def interprets_bfloat16(op: Op, sample: Sample) -> bool:
    """Return True if a call launches a kernel in Triton's interpreter on bfloat16, whose sums are those of its bits."""
    if not INTERPRET or float_dtype(op, sample) != torch.bfloat16:
        return False
    from llmk.opcheck.interpreted.interpreter import watched  # it needs numpy

    with watched() as watch, contextlib.suppress(Exception):
        call(op, sample, ())
    return watch.launches > 0
