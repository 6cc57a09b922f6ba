"""Trying something out, in the middle of whatever the caller does."""

import random
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch

from llmk.registry.private.modules import without_global_hooks

T = TypeVar("T")


def apart_from_caller(function: Callable[..., T], *args: Any) -> T:
    """The result of `function(*args)`, which neither depends on what the caller has set nor changes it.

    It runs in a thread of its own: grad and inference mode, autocast, hooks on saved tensors (of a checkpoint), fake
    tensors, dispatch and function modes, and functorch's transforms are a thread's, and a new one has none of them.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_with_defaults, function, *args).result()


def _with_defaults(function: Callable[..., T], *args: Any) -> T:
    with _defaults, torch.device("cpu"):
        return function(*args)


class _Shared:
    """A context that all threads share: the first to enter it makes it, and the last to leave it ends it.

    If each made its own, one would put back what another has set.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make, self._count, self._lock = make, 0, threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            if self._count == 0:
                self._made = self._make()
                self._made.__enter__()
            self._count += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0:
                self._made.__exit__(None, None, None)


@contextmanager
def _defaults_of_all_threads() -> Iterator[None]:
    """The default dtype, random states, warnings, anomaly detection and hooks on all modules."""
    state, dtype, generator = random.getstate(), torch.get_default_dtype(), torch.get_rng_state()
    try:
        torch.set_default_dtype(torch.float32)
        quiet, unchecked = warnings.catch_warnings(action="ignore"), torch.autograd.set_detect_anomaly(False)
        with quiet, unchecked, without_global_hooks():
            yield
    finally:
        random.setstate(state)
        torch.set_default_dtype(dtype)
        torch.set_rng_state(generator)


_defaults = _Shared(_defaults_of_all_threads)
