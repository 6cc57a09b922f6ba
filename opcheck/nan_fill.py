"""Fills new memory with NaN, and integers with their largest value, so that what was never written shows."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from llmk.opcheck.calls import incoming_gradients
from llmk.opcheck.inputs import BrokenPromise, Outcome
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
def nan_filled_in_graphs() -> Iterator[None]:
    """Fill what Inductor's code allocates; `RECYCLE_NOTHING` must be among the options of torch.compile."""
    with contextlib.ExitStack() as stack:
        for module, name in inductor_allocators():
            original = getattr(module, name)
            stack.callback(setattr, module, name, original)
            setattr(module, name, _filling(original))
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


def require_all_written(op: Op, sample: Sample, outcome: Outcome) -> None:
    """Refuse results that hold the fill value where PyTorch's composition does not."""
    reference = reference_for(op, sample, outcome, incoming_gradients)
    for i, output in enumerate(outcome.outputs):
        _require_written(f"{sample}: output {i}", output, reference.composition[i])
    for name, gradient in outcome.gradients.items():
        _require_written(f"{sample}: gradient of {name}", gradient, reference.composition[reference.index_of(name)])


def _require_written(where: str, actual: Tensor | None, right: Tensor | None) -> None:
    if actual is None or right is None or actual.shape != right.shape or actual.dtype == torch.bool:
        return
    unwritten = (_is_fill_value(actual) & ~_is_fill_value(right.to(actual.dtype))).flatten().nonzero()
    if unwritten.numel():
        count, first = unwritten.numel(), int(unwritten[0])
        raise BrokenPromise(f"{where}: {count} element(s) never written, or made of such, the first of them {first}")


def _is_fill_value(tensor: Tensor) -> Tensor:
    value = _fill_value(tensor.dtype)
    return tensor.isnan() if value != value else tensor == value
