"""The private names of torch that the backend uses, and what it does where a release lacks one."""

from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any

import torch

from llmk.registry.private import _attribute, _find, _required

list_mode_options: Callable[..., dict[str, Any]] = _required("torch._inductor.list_mode_options")
statically_known_true: Callable[[Any], bool] = _required("torch.fx.experimental.symbolic_shapes.statically_known_true")


def compile_fx(*args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Inductor, which takes seconds to import, where it is first asked for."""
    return _required("torch._inductor.compile_fx.compile_fx")(*args, **kwargs)


MODE_CALLS = tuple(
    function
    for path in (
        "torch._C._set_grad_enabled",
        "torch.amp.autocast_mode._enter_autocast",
        "torch.amp.autocast_mode._exit_autocast",
        "torch.autograd.grad_mode._enter_inference_mode",
        "torch.autograd.grad_mode._exit_inference_mode",
    )
    if (function := _find(path)) is not None
)
"""What Dynamo's graphs change the gradient mode and autocast with."""

_HigherOrderOperator = _find("torch._ops.HigherOrderOperator", ())
CHECKPOINT = _find("torch.ops.higher_order.tag_activation_checkpoint")


def is_higher_order(target: Any) -> bool:
    """Whether a node's target takes graphs, such as the body of a checkpointed region or of an `autograd.Function`."""
    return isinstance(target, _HigherOrderOperator)


def of_functorch(target: Any) -> bool:
    return getattr(target, "__module__", "") == "torch._C._functorch"


def offer_backend(name: str, place: str) -> None:
    """Let `torch.compile(backend=name)` load an object such as "package.module:function" when it is first asked for.

    An installed package is found by its entry point, one that is run from its checkout is not.
    """
    backends = _find("torch._dynamo.backends.registry._BACKENDS")
    if isinstance(backends, dict):
        backends.setdefault(name, EntryPoint(name, place, "torch_dynamo_backends"))


def config_of(mode: str | None, options: dict[str, Any] | None, dynamic: bool | None) -> dict[str, Any]:
    """Inductor's settings for a mode and options of `torch.compile`, checked as it checks them."""
    wrapper = _attribute(torch, "_TorchCompileInductorWrapper", lambda _: None)
    if wrapper is not None:
        return wrapper(mode, options, dynamic).config
    named = list_mode_options(mode, dynamic) if mode and mode != "default" else {}
    return {**named, **(options or {})}
