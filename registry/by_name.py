"""Functions that take by their names what they look at of an op's many arguments."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any


def by_name(fn: Callable[..., Any], names: Sequence[str], op: str) -> Callable[..., Any]:
    """What takes a value for each of `names`, in their order, and hands `fn` those that its parameters are named after.

    A function of `*args` is given all of them.

    Raises:
        ValueError: A parameter has none of the names; it says what `op` has.
    """
    parameters = inspect.signature(fn).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return fn
    unknown = [parameter.name for parameter in parameters if parameter.name not in names]
    if unknown:
        raise ValueError(f"{op} has no argument {', '.join(unknown)}, but {', '.join(names)}")
    places = [names.index(parameter.name) for parameter in parameters]
    return lambda *args: fn(*[args[i] for i in places])
