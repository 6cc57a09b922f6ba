"""A look whether an operator runs at all on the path that a process takes."""

import contextlib
import re
import traceback
from collections.abc import Iterator
from types import FrameType

import triton.language as tl

from llmk.opcheck.calls import call, device_of, words_of
from llmk.opcheck.foreign.adapters import registered
from llmk.opcheck.inputs import BrokenPromise
from llmk.opcheck.interpreted.loops import kernels_of
from llmk.registry import Op, Sample
from llmk.registry.devices import INTERPRET
from llmk.registry.private.operators import defined_for_a_cpu, definition_of, functions_of

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


@contextlib.contextmanager
def own_functions_on_a_cpu() -> Iterator[None]:
    """Have operators that launch kernels do so on a CPU too, and not run what they have registered for one."""
    with contextlib.ExitStack() as stack:
        for definition in defined_for_a_cpu():
            if kernels_of(functions_of(definition)[:1]):
                stack.enter_context(definition.set_kernel_enabled("cpu", False))
        yield


def without_kernels(op: Op) -> str:
    """Return why no kernel is checked where no call of an operator has launched one; a BrokenPromise if it has some."""
    names = ", ".join(sorted({kernel.fn.__name__ for kernel in kernels_of([op.overload, registered(op)])}))
    if names:
        way = "if it asks for the device, it has to launch them on a CPU too, where TRITON_INTERPRET is 1"
        raise BrokenPromise(f"no kernel ran: it names {names}, and launches none; {way}")
    hidden = registered(op) is not None and definition_of(registered(op)) is None
    return f"no kernel ran, and {'torch.library.Library or C++ hides its code' if hidden else 'its code names none'}"
