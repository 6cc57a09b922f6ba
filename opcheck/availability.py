"""A look whether an operator runs at all on the path that a process takes."""

import contextlib
import re

import torch

from llmk.opcheck.calls import call, device_of, float_dtype, words_of
from llmk.registry import Op, Sample
from llmk.registry.backends import INTERPRET

_NAMES_DEVICE = re.compile(r"active drivers|'CPU' backend|cpu tensor|\b(is_)?cuda\b|\bgpus?\b", re.IGNORECASE)
_ON_A_CPU = "no CPU version: `--path interpreter`, or a GPU"
_IN_THE_INTERPRETER = "does not run in Triton's interpreter: a GPU"

BFLOAT16 = (
    "not checked: Triton's interpreter adds the bits of bfloat16; `--dtype bfloat16` if kernels cast it, or a GPU"
)


def what_else_runs_it(op: Op, sample: Sample) -> str | None:
    """Return what to do where an operator has no code for a CPU; None where it has, right or wrong.

    It has none if a plain call on a CPU raises an error that names a device, or a line of code that asks for one does.
    """
    if device_of(op, sample).type != "cpu":
        return None
    try:
        call(op, sample, ())
    except Exception as error:
        if names_device(error):
            advice = _IN_THE_INTERPRETER if INTERPRET else _ON_A_CPU
            first = (str(error).strip() or words_of(error)).partition("\n")[0]
            return f"{advice} ({type(error).__name__}: {first})"
    return None


def names_device(error: BaseException) -> bool:
    """Return True if an error, or the line of code that raised it, asks for another device."""
    return bool(_NAMES_DEVICE.search(words_of(error)))


def interprets_bfloat16(op: Op, sample: Sample) -> bool:
    """Return True if a call launches a kernel in Triton's interpreter on bfloat16, whose sums are those of its bits."""
    if not INTERPRET or float_dtype(op, sample) != torch.bfloat16:
        return False
    from llmk.opcheck.interpreter import watched  # it needs numpy

    with watched() as watch, contextlib.suppress(Exception):
        call(op, sample, ())
    return watch.launches > 0
