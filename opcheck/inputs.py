"""An operator's call: a sample's arguments made afresh, and what came of it."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from llmk.registry import Op, Sample


class BrokenPromise(AssertionError):
    """A check found that the operator does not keep what it promises."""


@dataclass
class Outcome:
    """What a call gave."""

    inputs: dict[str, Tensor]
    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]


_watchers: list[Callable[[Sample], None]] = []


@contextlib.contextmanager
def watched_by(watcher: Callable[[Sample], None]) -> Iterator[None]:
    """Tell of the sample of every call that is prepared inside, in whatever thread."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def copy_with_layout(tensor: Tensor) -> Tensor:
    """A copy with its own memory and the same strides and offset, gaps and overlaps included."""
    storage = tensor.untyped_storage().clone()
    return tensor.detach().new_empty(0).set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def differentiable_inputs(op: Op, sample: Sample) -> list[str]:
    """The sample's tensors that can get a gradient."""
    bound = op.bind(sample)
    return [name for name in op.differentiable if isinstance(bound.get(name), Tensor)]


def prepare(
    op: Op, sample: Sample, wanted: Sequence[str], change: Callable[[Tensor], Tensor] = copy_with_layout
) -> tuple[list[Any], dict[str, Any], dict[str, Tensor]]:
    """Positional and keyword arguments with every tensor changed (copied), and the tensors by name."""
    for watcher in _watchers:
        watcher(sample)
    tensors: dict[str, Tensor] = {}

    def fresh(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        tensors[name] = change(value).requires_grad_(name in wanted)
        return tensors[name]

    args = [fresh(name, value) for name, value in zip(op.argument_names(), sample.args, strict=False)]
    kwargs = {name: fresh(name, value) for name, value in sample.kwargs.items()}
    return args, kwargs, tensors


def as_list(outputs: Any) -> list[Tensor]:
    return list(outputs) if isinstance(outputs, tuple | list) else [outputs]
