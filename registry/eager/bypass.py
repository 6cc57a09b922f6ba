"""Tells whether a call is plain eager mode, in which PyTorch's dispatcher may be left out."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from llmk.registry.private.modes import (
    batching_gradients,
    count_function_modes,
    dispatch_modes,
    forward_mode_level,
    functorch_depth,
    jit_tracing,
    looking_on,
    profiling,
)
from llmk.registry.settings import settings

PLAIN_TENSORS = frozenset({Tensor, torch.nn.Parameter})
PLAIN_NUMBERS = frozenset({int, float, bool, str, type(None), torch.dtype})


class set_short_path_enabled:
    """Sets if plain eager mode may take the fast path, without dispatcher and Triton's launcher, in all threads.

    Like `torch.set_grad_enabled` it is a function and a context manager. Without the fast path every call goes through
    the dispatcher, every buffer comes from `torch.empty` and every launch is Triton's own: the same bits, more slowly.
    """

    def __init__(self, mode: bool) -> None:
        if not isinstance(mode, bool):
            raise TypeError(f"mode: expected a bool, got {mode!r}")
        self.previous, settings.fast_path = settings.fast_path, mode

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        settings.fast_path = self.previous


def takes_fast_path(args: Collection[Any]) -> bool:
    """Return True if a call is plain eager mode: nothing traces, transforms or wraps tensors that hold numbers."""
    return is_eager() and are_plain(args)


def is_eager() -> bool:
    """Return True if kernel ops need not pass the dispatcher: nothing traces or transforms."""
    return settings.fast_path and not (dispatch_modes() or functorch_depth() or jit_tracing() or batching_gradients())


def are_plain(args: Collection[Any]) -> bool:
    """Return True if no argument wraps tensors, or stands for one."""
    for arg in args:
        kind = type(arg)
        if kind in PLAIN_TENSORS:
            if arg.is_meta or arg.is_neg():  # a negative bit is the dispatcher's to resolve
                return False
        elif kind not in PLAIN_NUMBERS:
            return False
    return True


def is_plain_eager() -> bool:
    """Return True if a call from Python need not pass the dispatcher: nothing traces, transforms or looks on."""
    return not (
        torch.compiler.is_dynamo_compiling()
        or not settings.fast_path
        or dispatch_modes()
        or (count_function_modes() and looking_on())
        or functorch_depth()
        or jit_tracing()
        or forward_mode_level() >= 0
        or profiling()
    )
