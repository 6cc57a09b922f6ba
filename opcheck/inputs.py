"""An operator's call: a sample's arguments made afresh, and what came of it."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmk.accuracy.neighbours import copy_with_layout
from llmk.registry import Op, Sample

MEMORY = "memory"
"""What is wrong where results are for it: see `BrokenPromise`."""
TIME = "time"
"""What is wrong where the limit of the whole run came before a promise was checked."""


class BrokenPromise(AssertionError):
    """A check found that the operator does not keep what it promises.

    Args:
        message: What is broken, with the sample.
        wrong: The result that is wrong, such as `output 0` or `gradient of input`, where it is one; or MEMORY, for
            which results are wrong.
        size: How many times larger than allowed its error is.
    """

    def __init__(self, message: str, wrong: str = "", size: float = math.inf) -> None:
        super().__init__(message)
        self.wrong, self.size = wrong, size


class NothingToCheck(Exception):
    """A promise does not apply to this operator, or cannot be checked here."""


def no_reference(*args: Any, **kwargs: Any) -> Any:
    """Stands for the reference of an operator that has none: what would need one has nothing to check."""
    raise NothingToCheck


@dataclass
class Outcome:
    """Results of a call."""

    inputs: dict[str, Tensor]
    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]

    def names(self) -> list[str]:
        """Those of the results."""
        return [
            *(f"output {i}" for i in range(len(self.outputs))),
            *(f"gradient of {name}" for name in self.gradients),
        ]

    def results(self) -> list[Tensor | None]:
        return [*self.outputs, *self.gradients.values()]


def comparable(numbers: Tensor) -> Tensor:
    """The same numbers in a dtype that has arithmetic: complex ones as their two parts, and those of 8 bits in 32."""
    if numbers.is_complex():
        return torch.view_as_real(numbers.resolve_conj())
    return numbers.float() if numbers.is_floating_point() and numbers.dtype.itemsize == 1 else numbers


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    a, b = comparable(a), comparable(b)
    return torch.equal(a.detach().nan_to_num(), b.detach().nan_to_num()) and torch.equal(a.isnan(), b.isnan())


def same_results(a: Outcome, b: Outcome) -> bool:
    return all(same_bits(x, y) for x, y in zip(a.results(), b.results(), strict=True))


_watchers: list[Callable[[Sample], None]] = []


@contextlib.contextmanager
def watched_by(watcher: Callable[[Sample], None]) -> Iterator[None]:
    """Tell of the sample of every call that is prepared inside, in whatever thread."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def note(sample: Sample) -> None:
    """Tell those who watch that a call of the sample is next."""
    for watcher in _watchers:
        watcher(sample)


@contextlib.contextmanager
def with_default_device(device: str) -> Iterator[None]:
    """Another default device inside, none after."""
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def spread(tensor: Tensor) -> Tensor:
    """Return the same values, two elements apart in memory, at an offset; a module's parameter stays as it lies."""
    if tensor.dim() == 0 or isinstance(tensor, torch.nn.Parameter):
        return tensor.detach().clone()
    wide = torch.zeros((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), dtype=tensor.dtype, device=tensor.device)
    view = wide[..., 1::2]
    view.copy_(tensor.detach())
    return view


def transposed(tensor: Tensor) -> Tensor:
    """Return the same values with the last two axes swapped in memory; a module's parameter stays as it lies."""
    if tensor.dim() < 2 or isinstance(tensor, torch.nn.Parameter):
        return tensor.detach().clone()
    return tensor.detach().transpose(-1, -2).contiguous().transpose(-1, -2)


def tensors_of(op: Op, sample: Sample) -> dict[str, Tensor]:
    """The tensors among a sample's arguments, by name."""
    return {name: value for name, value in op.bind(sample).items() if isinstance(value, Tensor)}


def mapped(change: Callable[[Tensor], Any], value: Any) -> Any:
    """A value with each of its tensors changed, those in lists, tuples and dictionaries too."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        items = [mapped(change, item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return {name: mapped(change, item) for name, item in value.items()} if isinstance(value, dict) else value


def largest(tensor: Tensor | None) -> float:
    """The largest size of a finite number in a tensor of floating point, 0 of none."""
    if tensor is None or not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return 0.0
    return float(comparable(tensor.detach()).double().nan_to_num(0.0, 0.0, 0.0).abs().max())


def first_where(wrong: Tensor, actual: Tensor, right: Tensor) -> str:
    """The first element that is wrong, in words."""
    index = int(wrong.flatten().nonzero()[0])
    return f"element {index} is {actual.flatten()[index].item()} where {right.flatten()[index].item()} is right"


def all_finite(tensors: Iterable[Tensor | None]) -> bool:
    return all(t is None or bool(t.isfinite().all()) for t in tensors)


def differentiable_inputs(op: Op, sample: Sample) -> list[str]:
    """The sample's tensors that can get a gradient."""
    tensors = tensors_of(op, sample)
    return [name for name in op.differentiable if name in tensors]


def rebound(op: Op, sample: Sample, values: dict[str, Any], why: str) -> Sample:
    """A call with other arguments by name: those before the first that is left out are given by position."""
    left, args = dict(values), []
    for argument in op.schema.arguments:
        if argument.kwarg_only or argument.name not in left or len(args) >= len(sample.args):
            break
        args.append(left.pop(argument.name))
    return Sample(tuple(args), left, why=why)


def prepare(
    op: Op, sample: Sample, wanted: Sequence[str], change: Callable[[Tensor], Tensor] = copy_with_layout
) -> tuple[list[Any], dict[str, Any], dict[str, Tensor]]:
    """Positional and keyword arguments with every tensor changed (copied), and the tensors by name.

    Arguments that are the same tensor stay so, unless only one of them wants a gradient.
    """
    note(sample)
    tensors: dict[str, Tensor] = {}
    copies: dict[tuple[int, bool], Tensor] = {}

    def fresh(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        key = id(value), name in wanted
        tensors[name] = copies[key] if key in copies else change(value).requires_grad_(name in wanted)
        copies[key] = tensors[name]
        return tensors[name]

    args = [fresh(name, value) for name, value in zip(op.argument_names(), sample.args, strict=False)]
    kwargs = {name: fresh(name, value) for name, value in sample.kwargs.items()}
    return args, kwargs, tensors


def as_list(outputs: Any) -> list[Tensor]:
    return list(outputs) if isinstance(outputs, tuple | list) else [outputs]
