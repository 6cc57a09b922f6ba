"""The attributes and hooks that a module has of its own."""

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from llmk.registry.private.names import attribute, find


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """A module's own parameters, those that are None included."""
    return attribute(module, "_parameters", lambda module: dict(module.named_parameters(recurse=False)))


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """A module's own buffers, those that are None included."""
    return attribute(module, "_buffers", lambda module: dict(module.named_buffers(recurse=False)))


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    return attribute(module, "_modules", lambda module: dict(module.named_children()))


_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_unknown: dict[int, Any] = {0: None}
_global_hooks: tuple[dict[int, Any], ...] = tuple(
    find(f"torch.nn.modules.module._global{kind}", _unknown) for kind in _KINDS
)
_forward_hooks, _forward_pre_hooks, _backward_hooks, _backward_pre_hooks = _global_hooks


def has_hooks(module: nn.Module) -> bool:
    """Return True if a hook is registered on a module or on all modules; where that cannot be told, as if one were."""
    if _forward_hooks or _forward_pre_hooks or _backward_hooks or _backward_pre_hooks:
        return True
    try:
        own = module._forward_hooks or module._forward_pre_hooks
        return bool(own or module._backward_hooks or module._backward_pre_hooks)
    except AttributeError:
        return True


def without_hooks() -> dict[str, Any]:
    """The attributes of a module that no hook is registered on."""
    return {kind: OrderedDict() for kind in _KINDS}


def hooks_of(module: nn.Module) -> list[Any]:
    """The hooks that are registered on a module and on all modules."""
    own = [getattr(module, kind, _unknown) for kind in _KINDS]
    return [hook for hooks in (*own, *_global_hooks) for hook in hooks.values()]


@contextlib.contextmanager
def without_global_hooks() -> Iterator[None]:
    """Hooks on all modules are not called within."""
    known = [(hooks, hooks.copy()) for hooks in _global_hooks if hooks is not _unknown]
    for hooks, _ in known:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in known:
            hooks.update(before)
