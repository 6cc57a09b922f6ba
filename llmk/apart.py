"""Trying something out, in the middle of whatever the caller does."""

import random
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
    """The same for what all threads share.

    That is the default dtype and device, random states, warnings, anomaly detection and hooks on all modules.
    """
    state, dtype, generator = random.getstate(), torch.get_default_dtype(), torch.get_rng_state()
    try:
        torch.set_default_dtype(torch.float32)
        quiet, unchecked = warnings.catch_warnings(action="ignore"), torch.autograd.set_detect_anomaly(False)
        with torch.device("cpu"), quiet, unchecked, without_global_hooks():
            return function(*args)
    finally:
        random.setstate(state)
        torch.set_default_dtype(dtype)
        torch.set_rng_state(generator)
