"""Samples that do not come from an operator's record: calls that are given, and calls that a program made."""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeGuard, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from llmk.opcheck.inputs import mapped
from llmk.registry import Op, Sample
from llmk.registry.private.operators import is_overload, overload_of, schema_of

Samples = Callable[[torch.device, torch.dtype], Iterable[Sample]]


class Strategy(Protocol):
    """A `hypothesis.strategies.SearchStrategy`, without which opcheck does."""

    def example(self) -> Any: ...


GivenSamples = Samples | Mapping[str, Sequence[Sample]] | Sequence[Sample | Sequence[Any]] | Strategy
"""A function as a record has it, what `record()` gives, calls, each a `Sample` or the positional arguments, or a
Hypothesis strategy that draws such calls."""

DRAWN = 20
"""The calls that are taken from a strategy, the same in every run."""

OF_PYTORCH = ("aten", "prim", "prims", "profiler")
"""Namespaces whose operators are not recorded."""


def samples_from(given: GivenSamples, op: Op) -> Samples:
    """Return a record's function of samples; given calls are made on every device and in every dtype.

    Raises:
        ValueError: Of recorded calls none is of the operator.
    """
    if callable(given):
        return given
    if _is_strategy(given):
        given = _drawn(given)
    elif isinstance(given, Mapping):
        given = _calls_of(op, given)
    listed: Any = given
    calls = [
        call if isinstance(call, Sample) else Sample(tuple(call), why=f"call {i}") for i, call in enumerate(listed)
    ]

    def samples(device: torch.device, dtype: torch.dtype) -> list[Sample]:
        return [_moved(call, device, dtype) for call in calls]

    return samples


def _is_strategy(given: Any) -> TypeGuard[Strategy]:
    strategies = sys.modules.get("hypothesis.strategies")
    return strategies is not None and isinstance(given, strategies.SearchStrategy)


def _drawn(strategy: Any) -> list[Any]:
    """Calls that a strategy draws."""
    from hypothesis import HealthCheck, Phase, given, settings

    calls: list[Any] = []

    @settings(
        max_examples=DRAWN, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=cast(Any, list(HealthCheck)),
    )  # fmt: skip
    @given(strategy)
    def draw(call: Any) -> None:
        calls.append(call)

    draw()
    return calls


def _calls_of(op: Op, recorded: Mapping[str, Sequence[Sample]]) -> Sequence[Sample]:
    operator = overload_of(op.overload)
    name = schema_of(operator).name if is_overload(operator) else op.name
    if name not in recorded:
        raise ValueError(f"samples: no call of {name} was recorded; there are {', '.join(recorded) or 'none of any'}")
    return recorded[name]


@contextlib.contextmanager
def record() -> Iterator[dict[str, list[Sample]]]:
    """Record the calls of operators inside, by the operator's name such as `mylib::f`, for `check` to make again.

    Calls that look alike, in shapes, strides, dtypes and in all that is no tensor, are recorded once. Their tensors are
    copied. Operators are seen where Python calls them in eager mode: not in a compiled graph, nor by another operator.
    """
    mode = _Recording()
    with mode:
        yield mode.calls


class _Recording(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[Sample]] = {}
        self.seen: set[tuple[Any, ...]] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        operator, kwargs = overload_of(func), kwargs or {}
        if is_overload(operator):
            name = schema_of(operator).name
            if name.partition("::")[0] not in OF_PYTORCH:
                self.note(name, args, kwargs)
        return func(*args, **kwargs)

    def note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        key = name, _look(args), _look(kwargs)
        if key not in self.seen:
            self.seen.add(key)
            calls = self.calls.setdefault(name, [])
            calls.append(Sample(mapped(_copied, args), mapped(_copied, kwargs), why=f"recorded call {len(calls)}"))


def _look(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_look, value))
    return tuple((name, _look(item)) for name, item in value.items()) if isinstance(value, dict) else repr(value)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _moved(sample: Sample, device: torch.device, dtype: torch.dtype) -> Sample:
    """The sample on a device, its floating-point tensors in a dtype."""

    def move(tensor: Tensor) -> Tensor:
        return tensor.detach().to(device, dtype if tensor.is_floating_point() else tensor.dtype)

    return Sample(mapped(move, sample.args), mapped(move, sample.kwargs), why=sample.why)
