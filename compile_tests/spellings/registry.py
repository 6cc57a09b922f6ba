"""Ways to write in plain PyTorch what the backend finds, each a function with the inputs that it takes.

The tests hold each against itself unrewritten, and the fuzzer damages them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compile_tests.helpers.fuzz_program import Input, Program

CLASSES = 13
"""The number of classes that are chosen from."""


@dataclass(frozen=True)
class Spelling:
    """A function, the operator that replaces it, and its inputs, of which those of numbers are float32."""

    operator: str
    fn: Callable[..., Any]
    inputs: tuple[Input, ...]


SPELLINGS: dict[str, Spelling] = {}


def spelling(operator: str, *inputs: Input | tuple[int, ...]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function under its name. A shape among its inputs is that of a tensor that wants a gradient."""

    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        SPELLINGS[fn.__name__] = Spelling(operator, fn, named(inputs))
        return fn

    return add


def named(inputs: Iterable[Input | tuple[int, ...]]) -> tuple[Input, ...]:
    """Return the inputs with names: x0, x1, ..."""
    templates = (Input("", x) if isinstance(x, tuple) else x for x in inputs)
    return tuple(replace(x, name=f"x{i}") for i, x in enumerate(templates))


def tensors(inputs: Iterable[Input | tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return a tensor for each input, those of numbers in this dtype."""
    return Program(tuple(x.in_dtype(dtype) for x in named(inputs)), (), ()).args()


def classes(*shape: int) -> Input:
    return Input("", shape, torch.int64, "classes", high=CLASSES, grad=False)


def targets(*shape: int) -> Input:
    """Classes, one of which is -100 and does not count."""
    return replace(classes(*shape), kind="targets")


def angles(*shape: int) -> Input:
    return Input("", shape, kind="positive", grad=False)


def turns(*shape: int) -> Input:
    """Complex numbers of absolute value 1."""
    return Input("", shape, torch.complex64, "angles", grad=False)
