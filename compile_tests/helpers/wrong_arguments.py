"""A call with one argument at a time that is wrong, and the errors that do not say which and what was expected."""

import inspect
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

OUT_OF_RANGE: dict[str, tuple[float, ...]] = {
    "chunk_size": (-1,),
    "clip_ratio_c": (1.0, 0.2, math.inf),
    "eps": (math.inf, -1.0),
    "k": (0, 10**6),
    "label_smoothing": (math.inf, -1.0, 1.5),
    "logit_scale": (math.inf,),
    "max_log_ratio": (0.0, math.inf, -1.0),
    "offset": (math.inf,),
    "scale": (math.inf,),
    "softcap": (math.inf, -1.0, 1e-40),
    "teacher_softcap": (math.inf, -1.0),
    "temperature": (math.inf, 0.0),
    "top_k": (0, 10**6),
    "z_loss": (math.inf, -1.0),
}
"""Numbers that no function takes for an option of this name."""


def complete(fn: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {name: each.default for name, each in inspect.signature(fn).parameters.items()}
    return defaults | dict(given)


def wrong_values(value: Any) -> Iterator[Any]:
    """Values of another kind than this one, which has one value that is right."""
    if isinstance(value, Tensor):
        yield from ("x", 3j, [1.0], value.to(torch.complex64))
        if value.dim():  # a number may be either
            yield value.long() if value.is_floating_point() else value.float()
    elif isinstance(value, list):
        yield from ("x", 3j, [object()] * max(len(value), 1), [math.nan] * max(len(value), 1))
    elif isinstance(value, bool):
        yield from ("x", 3j, torch.ones(2))
    elif isinstance(value, int | float):
        yield from ("x", 3j, math.nan, torch.ones(2), [1.0])
    else:
        yield from ("nonsense", 3j, object(), math.nan)


def wrong_sizes(value: Any) -> Iterator[Any]:
    """A longer list; a tensor of more axes, of one number less along an axis, or with indices that are too large."""
    if isinstance(value, list) and value:
        yield [*value, value[0]]
    if isinstance(value, Tensor):
        yield value.expand(2, 2, *value.shape)
        yield from (value.narrow(axis, 0, size - 1) for axis, size in enumerate(value.shape) if size > 1)
        yield from value[:1].unbind() if value.dim() else ()
        if value.dtype in (torch.int64, torch.int32):
            yield value + 10**6


def not_named(
    fn: Callable[..., Any],
    arguments: Mapping[str, Any],
    *,
    kinds: Callable[[Any], Iterator[Any]] = wrong_values,
    but: Collection[str] = (),
) -> list[str]:
    """The wrong calls that go through, or whose error does not name the argument, what was expected and what it got."""
    found = []
    for name in arguments.keys() - set(but):
        for wrong in (*kinds(arguments[name]), *OUT_OF_RANGE.get(name, ())):
            said = error_of(fn, {**arguments, name: wrong})
            if not (re.search(rf"\b{name}\b", said) and re.search("expected .*(got|found)", said, re.I | re.S)):
                found.append(f"{name}={wrong!r}: {said or 'no error'}"[:200])
    return found


def error_of(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """The error's message, or nothing where there is none."""
    try:
        fn(**arguments)
    except Exception as error:
        return str(error) or type(error).__name__
    return ""
