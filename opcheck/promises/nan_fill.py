"""Fills new memory with NaN, and integers with their largest value, so that what was never written shows."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from llmk.opcheck.calls import incoming_gradients
from llmk.opcheck.inputs import MEMORY, BrokenPromise, Outcome
from llmk.opcheck.reference import reference_for
from llmk.registry import Op, Sample, set_short_path_enabled
from llmk.registry.private.compilers import inductor_allocators, reload_inductor_modules

RECYCLE_NOTHING: dict[str, Any] = {"allow_buffer_reuse": False, "inplace_buffers": False}


@contextlib.contextmanager
def nan_filled() -> Iterator[None]:
    """Fill what PyTorch allocates in eager mode; the fast path, with an allocator of its own, is off meanwhile."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    deterministic: Any = torch.utils.deterministic
    fill = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    try:
        with set_short_path_enabled(False):
            yield
    finally:
        deterministic.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


@contextlib.contextmanager
def zero_filled() -> Iterator[None]:
    """Fill what Python allocates with 0, inside of operators as well, where a mode of PyTorch's does not reach."""
    with contextlib.ExitStack() as stack:
        for owner, name in _ALLOCATIONS:
            stack.enter_context(mock.patch.object(owner, name, _zeroing(getattr(owner, name))))
        yield


_ALLOCATIONS = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (Tensor, "new_empty"),
    (Tensor, "new_empty_strided"),
)


def _zeroing(allocate: Any) -> Any:
    @functools.wraps(allocate)
    def zeroed(*args: Any, **kwargs: Any) -> Tensor:
        result = allocate(*args, **kwargs)
        with torch.no_grad():
            return result.zero_()

    return zeroed


@contextlib.contextmanager
def nan_filled_in_graphs() -> Iterator[None]:
    """Fill what Inductor's code allocates; `RECYCLE_NOTHING` must be among the options of torch.compile."""
    with contextlib.ExitStack() as stack:
        for module, name in inductor_allocators():
            stack.enter_context(mock.patch.object(module, name, _filling(getattr(module, name))))
        reload_inductor_modules()
        stack.callback(reload_inductor_modules)
        yield


def _filling(allocate: Any) -> Any:
    def filled(*layout: Any) -> Tensor:
        return fill(allocate(*layout))

    return filled


def fill(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.fill_(_fill_value(tensor.dtype))


def _fill_value(dtype: torch.dtype) -> float:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def require_all_written(op: Op, sample: Sample, outcome: Outcome, again: Callable[[], Outcome] | None = None) -> None:
    """Refuse results that hold the fill value where PyTorch's composition does not.

    `again` makes the call where new memory holds 0: what is NaN there too was computed, from no memory that is new.
    """
    reference = reference_for(op, sample, outcome, incoming_gradients)
    for i, name in enumerate(outcome.names()):
        actual, right = outcome.results()[i], reference.composition[i]
        unwritten = _unwritten(actual, right)
        if unwritten is not None and again is not None and bool(unwritten.any()):
            filled_otherwise = again().results()[i]
            assert filled_otherwise is not None
            unwritten &= ~_is_fill_value(filled_otherwise)
        if unwritten is not None and bool(unwritten.any()):
            places = unwritten.flatten().nonzero()
            count, first = places.numel(), int(places[0])
            raise BrokenPromise(
                f"{sample}: {name}: {count} element(s) never written, or made of such, the first of them {first}",
                MEMORY,
            )


def _unwritten(actual: Tensor | None, right: Tensor | None) -> Tensor | None:
    if actual is None or right is None or actual.shape != right.shape or actual.dtype == torch.bool:
        return None
    return _is_fill_value(actual) & ~_is_fill_value(right.to(actual.dtype))


def _is_fill_value(tensor: Tensor) -> Tensor:
    value = _fill_value(tensor.dtype)
    return tensor.isnan() if value != value else tensor == value
