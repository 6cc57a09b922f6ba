"""Looking up a private name: what it names, what is public behind it, or what says that it is missing."""

import pkgutil
from collections.abc import Callable
from typing import Any

import torch
import triton


def find(path: str, otherwise: Any = None) -> Any:
    """Return the object at a dotted path, or the other if this release has no such name."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return otherwise


def attribute(holder: Any, name: str, otherwise: Callable[[Any], Any]) -> Any:
    """An attribute of one object or, where it has none of that name, what the other makes of the object."""
    try:
        return getattr(holder, name)
    except AttributeError:
        return otherwise(holder)


class Missing:
    """Stands for a name that this release does not have, where that cannot be done without."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # whoever inspects it, as torch does for kernels, asks for more than it has
            raise AttributeError(name)
        return Missing(f"{self.path}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"this needs {self.path}, which torch {torch.__version__} and triton {triton.__version__} lack"
        )


def required(path: str) -> Any:
    return find(path, Missing(path))
