"""Subclasses that nobody is told of."""

from abc import ABCMeta
from collections.abc import Mapping
from typing import Any

from torch import nn


class _Module(nn.Module):
    """The base of a subclass while it is made, where what it becomes is a module."""


class _Plain:
    """The same where it is not."""


def quiet_subclass(base: type, names: Mapping[str, Any]) -> type:
    """A class with one base and these names, made without running code of the base's.

    Where a class is made in the usual way, an `__init_subclass__` or a metaclass runs, and may refuse it or register
    it by its name. This one is made below a class that has neither, and moved to its base then.
    """
    meta: Any = type(base)
    maker: Any = next(m for m in meta.__mro__ if m in (ABCMeta, type))
    above = _Module if issubclass(base, nn.Module) else _Plain
    cls = maker.__new__(meta, base.__name__, (above,), {"__module__": base.__module__, **names})
    type.__setattr__(cls, "__bases__", (base,))
    return cls
