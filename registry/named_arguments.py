"""Calls functions that name, as their parameters, only those arguments of an op that they need."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any


def by_argument_names(fn: Callable[..., Any], names: Sequence[str], op: str) -> Callable[..., Any]:
    """Return a function that takes a value for each of `names` and passes `fn` those that it has as parameters.

    A function of `*args` gets all of them.

    Raises:
        ValueError: A parameter has none of the names; the message lists those of `op`.
    """
    parameters = inspect.signature(fn).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return fn
    unknown = [parameter.name for parameter in parameters if parameter.name not in names]
    if unknown:
        raise ValueError(f"{op} has no argument {', '.join(unknown)}, but {', '.join(names)}")
    places = [names.index(parameter.name) for parameter in parameters]
    return lambda *args: fn(*[args[i] for i in places])
