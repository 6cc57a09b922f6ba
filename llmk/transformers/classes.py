"""Classes whose methods run operators: what `patch` changes of a module is its class.

A patched module's class is made from the module's own, with some methods replaced, and with the same name. So whatever
is done with a module (copied, pickled, replicated over devices, wrapped, hooked) keeps what it computes, and
`isinstance` goes on holding. The class is said by the module's own class and the changes alone: it is made once for
all modules alike, so that what is compiled for one serves the next, and a pickle holds these two.
"""

import copyreg
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from llmk.transformers.guards import METHOD, llmk_fell_back
from llmk.transformers.subclass import quiet_subclass

CHANGES = "_llmk_changes"


class Change:
    """Replacements for methods of a class. Changes that are equal do the same; they can be pickled."""

    adds = projects = False
    method = "forward"
    """The method that it replaces."""

    @property
    def what(self) -> str:
        """The change in words, for the report."""
        raise NotImplementedError

    def methods(self, base: type) -> dict[str, Any]:
        """The methods that are replaced in `base`, by their names."""
        raise NotImplementedError


@dataclass(frozen=True)
class BehindHook(Change):
    """A module whose `forward` is a hook of accelerate's (`dispatch_model`): behind it runs what was replaced."""

    def methods(self, base: type) -> dict[str, Any]:
        def get(self: Any) -> Any:
            return MethodType(type(self).forward, self)

        def set(self: Any, value: Any) -> None:
            vars(self)["_old_forward"] = value

        def delete(self: Any) -> None:
            del vars(self)["_old_forward"]

        return {"_old_forward": property(get, set, delete)}


def is_behind_hook(module: nn.Module) -> bool:
    own = vars(module)
    return "_hf_hook" in own and getattr(own.get("_old_forward"), "__func__", None) is type(module).forward


def changes_of(module: nn.Module) -> tuple[Change, ...]:
    """Return the changes to a module, if it is patched."""
    return getattr(type(module), CHANGES, ())


def class_with(module: nn.Module, changes: tuple[Change, ...]) -> type:
    """Return the class that changes give a module.

    A parametrization's class stays around it, because PyTorch takes the parametrization away from the very class.
    """
    cls = type(module)
    if not is_parametrized(module):
        return patched_class(cls, changes)
    return _parametrized(cls, patched_class(cls.__bases__[0], changes))


def _parametrized(cls: type, base: type) -> type:
    """The class of a parametrized module with another base."""
    own = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return quiet_subclass(base, {**own, "__qualname__": cls.__qualname__})


def patched_class(base: type, changes: tuple[Change, ...]) -> type:
    """`base` with the methods of `changes`, a later one's before an earlier one's."""
    return _patched_class(base, changes, tuple(getattr(base, change.method, None) for change in changes))


@functools.cache
def _patched_class(base: type, changes: tuple[Change, ...], originals: tuple[Any, ...]) -> type:
    """The same for methods of `base` that are those of now."""
    methods = {name: method for change in changes for name, method in change.methods(base).items()}
    methods = {name: in_own_wrapper(getattr(base, name, None), method) for name, method in methods.items()}
    init: Any = base.__init__
    reduce: Any = base.__reduce_ex__
    newobj = vars(copyreg)["__newobj__"]  # makes an object of its class, in pickles and copies

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        """A new object made from the type of a patched one is not patched: its parts would not be."""
        self.__class__ = base
        init(self, *args, **kwargs)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        reduced = reduce(self, protocol)
        if reduced[0] is not newobj or reduced[1][0] is not cls:
            return reduced
        return _restored, (base, changes, *reduced[1][1:]), *reduced[2:]

    named = {"__qualname__": base.__qualname__, "__doc__": base.__doc__, METHOD: llmk_fell_back, CHANGES: changes}
    cls = quiet_subclass(base, {**named, "__init__": __init__, "__reduce_ex__": __reduce_ex__, **methods})
    return cls


def in_own_wrapper(original: Any, method: Any) -> Any:
    """Return `method` inside a new copy of the wrapper of `original`, if that acts for its module's own class alone.

    Such a wrapper compares itself with the method of the class. transformers puts one around the `forward` of each
    subclass of `GradientCheckpointingLayer`, and there activations are checkpointed.
    """
    cells = original.__closure__ or () if isinstance(original, FunctionType) else ()
    is_own = [_holds(cell, original) for cell in cells]
    if not any(is_own):
        return method
    itself = CellType()
    wrapped = getattr(original, "__wrapped__", None)
    inside = [CellType(method) if _holds(cell, wrapped) else cell for cell in cells]
    closure = tuple(itself if own else cell for own, cell in zip(is_own, inside, strict=True))
    again = FunctionType(original.__code__, original.__globals__, original.__name__, original.__defaults__, closure)
    again.__kwdefaults__ = original.__kwdefaults__
    itself.cell_contents = functools.update_wrapper(again, method)
    return again


def _holds(cell: CellType, value: Any) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # empty
        return False


def _restored(base: type, changes: tuple[Change, ...], *args: Any) -> Any:
    cls: Any = patched_class(base, changes)
    return cls.__new__(cls, *args)


def set_classes(classes: Sequence[tuple[nn.Module, type]]) -> None:
    """Give each module its class: all of them, or none."""
    before = [(module, type(module)) for module, _ in classes]
    try:
        for module, cls in classes:
            module.__class__ = cls
    except BaseException:
        for module, cls in before:
            module.__class__ = cls
        raise


def unpatched_class(module: nn.Module) -> type:
    """The class that a patched module had.

    Raises:
        RuntimeError: The module has been given another class since.
    """
    cls = type(module)
    if CHANGES in vars(cls):
        return cls.__bases__[0]
    if is_parametrized(module) and CHANGES in vars(cls.__bases__[0]):
        return _parametrized(cls, cls.__bases__[0].__bases__[0])
    raise RuntimeError(
        f"model: a {type(module).__name__} was made of a patched module after patch(); unpatch() before that"
    )
