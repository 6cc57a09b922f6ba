"""The attributes and hooks that a module has of its own."""

from torch import Tensor, nn

from llmk.registry.private.names import attribute


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """A module's own parameters, those that are None included."""
    return attribute(module, "_parameters", lambda module: dict(module.named_parameters(recurse=False)))


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """A module's own buffers, those that are None included."""
    return attribute(module, "_buffers", lambda module: dict(module.named_buffers(recurse=False)))


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    return attribute(module, "_modules", lambda module: dict(module.named_children()))


def has_hooks(module: nn.Module) -> bool:
    """Return True if a hook is registered on a module; where that cannot be told, as if one were."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind, True) for kind in kinds)
