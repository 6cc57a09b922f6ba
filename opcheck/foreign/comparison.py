"""Another operator as the reference: whether it can say what is right, and what the two cost side by side."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from llmk.opcheck.calls import call, device_of, first_line, incoming_gradients, representatives
from llmk.opcheck.foreign.adapters import form_of, tensors_in
from llmk.opcheck.inputs import NothingToCheck, mapped
from llmk.registry import Op, Sample
from llmk.registry.private.operators import overload_of

_ROWS = 1024
"""The rows of the samples that are timed, where the record can make one of so many."""
_TURNS, _LONGEST = 20, 300.0
"""The most calls that are timed, and the milliseconds after which no more are."""


class Comparison:
    """An operator or a function in the place of a record's reference."""

    def __init__(self, operator: Any) -> None:
        if not callable(operator):
            raise TypeError(f"reference: expected an operator or a function, got {operator!r}")
        self.function: Callable[..., Any] = overload_of(operator)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def resolved(op: Op, device: torch.device, asked: Sequence[torch.dtype] | None) -> tuple[Op, list[str]]:
    """Return the record with a reference that says what is right, and a line where it does so in 16 bits alone.

    What is right in float32 takes a reference that computes in float64. One that rounds its numbers to float32, as
    kernels do, says what is right in float16 and bfloat16, where its own error is far below a unit in the last place.

    Raises:
        NothingToCheck: The reference does not take the operator's calls, or cannot say what is right in a dtype that
            is asked for.
    """
    reference = op.reference
    if not isinstance(reference, Comparison):
        return op, []
    sample = next(iter(op.samples(device, torch.float32)))
    try:
        _called(reference, sample, lambda tensor: tensor)
    except Exception as error:
        raise NothingToCheck(f"the reference refuses the call {sample} ({first_line(error)})") from error
    if _computes_in_float64(reference, sample):
        return dataclasses.replace(op, reference=reference.function), []
    if form_of(overload_of(op.overload)).mutated:
        raise NothingToCheck("the reference mutates its arguments and rounds float64 to float32: give plain PyTorch")
    dtypes = tuple(dtype for dtype in op.dtypes if dtype.itemsize < 4)
    op = dataclasses.replace(op, reference=_in_float32(reference), dtypes=dtypes)
    words = "the reference rounds float64 to float32, so it cannot say what is right in float32"
    if any(dtype.itemsize >= 4 for dtype in asked or ()):
        raise NothingToCheck(f"{words}: ask for float16 or bfloat16, or give plain PyTorch")
    return op, [f"{words}: not checked there"]


def _called(function: Callable[..., Any], sample: Sample, change: Callable[[Tensor], Tensor]) -> list[Tensor]:
    def changed(tensor: Tensor) -> Tensor:
        return change(tensor.detach().clone()) if tensor.is_floating_point() else tensor.clone()

    with torch.no_grad():
        args, kwargs = mapped(changed, sample.args), mapped(changed, sample.kwargs)
        outputs = list(tensors_in(function(*args, **kwargs)))
        return outputs or list(tensors_in([*args, *kwargs.values()]))


def _computes_in_float64(reference: Callable[..., Any], sample: Sample) -> bool:
    """Return False if it rounds: its results stay where float64 inputs move by 2^-40, and not where by 2^-20."""

    def moved(by: float) -> list[Tensor]:
        results = _called(reference, sample, lambda tensor: tensor.double() * (1 + by))
        return [result for result in results if result.is_floating_point()]

    try:
        here, near, far = moved(0.0), moved(2.0**-40), moved(2.0**-20)
    except Exception:  # it refuses float64, in whatever words
        return False
    if not any(value.is_floating_point() for value in tensors_in([*sample.args, *sample.kwargs.values()])):
        return True
    if any(result.dtype != torch.float64 for result in here):
        return False
    return all(torch.equal(a, c) or not torch.equal(a, b) for a, b, c in zip(here, near, far, strict=True))


def _in_float32(reference: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, in float32 on float64 tensors."""

    def narrow(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype == torch.float64 else tensor

    def widen(tensor: Tensor) -> Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor

    def in_float32(*args: Any, **kwargs: Any) -> Any:
        is_exact = any(tensor.dtype == torch.float64 for tensor in tensors_in([*args, *kwargs.values()]))
        results = reference(*mapped(narrow, args), **mapped(narrow, kwargs))
        return mapped(widen, results) if is_exact else results

    return in_float32


def costs_beside(op: Op, other: Comparison, dtype: torch.dtype, device: torch.device) -> str:
    """A line with the times of both, forward and backward of a call, and on a GPU with their peak memory."""
    samples = list(op.samples(device, dtype))
    sample = representatives(op, samples)[0] if op.resized is None else op.resized(_ROWS, device, dtype)
    own, others = (_cost(op, sample, fn) for fn in (op.overload, _like(op, other)))
    words = f"{own[0]:.3g} ms, the reference {others[0]:.3g} ms"
    if device_of(op, sample).type == "cuda":
        words += f"; {own[1]:.3g} MB at most, the reference {others[1]:.3g} MB"
    return f"forward and backward of {sample} in {str(dtype).removeprefix('torch.')}: {words}"


def _like(op: Op, other: Comparison) -> Callable[..., Any]:
    """The other operator with the arguments of the record's one form."""
    form = getattr(op.overload, "form", None)
    return other.function if form is None else form.call(other.function, op.argument_names())


def _cost(op: Op, sample: Sample, fn: Callable[..., Any]) -> tuple[float, float]:
    """Milliseconds, the median of some calls, and the most MB that one allocates, copies of its inputs too."""
    on_gpu, times, made = device_of(op, sample).type == "cuda", [], []

    def grads(outputs: Sequence[Tensor]) -> list[Tensor]:
        made[:] = made or incoming_gradients(outputs)
        return made

    def timed() -> float:
        start = time.perf_counter()
        call(op, sample, fn=fn, grads=grads)
        if on_gpu:
            torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - start)

    timed()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    while len(times) < 3 or (len(times) < _TURNS and sum(times) < _LONGEST):
        times.append(timed())
    most = (torch.cuda.max_memory_allocated() - before) / 1e6 if on_gpu else 0.0
    return statistics.median(times), most
