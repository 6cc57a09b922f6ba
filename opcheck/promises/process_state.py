"""The state of the process that a call may change for all others: PyTorch's settings, its functions, random numbers."""

import contextlib
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "whether gradients are made": (torch.is_grad_enabled, torch.set_grad_enabled),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "the precision of float32 products": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    "the choice of deterministic algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
} | {
    f"torch.backends.cudnn.{name}": (
        partial(getattr, torch.backends.cudnn, name),
        partial(setattr, torch.backends.cudnn, name),
    )
    for name in ("benchmark", "deterministic")
}
"""A setting's name in words, and the functions that read and write it."""

OWNERS: dict[str, Any] = {"torch": torch, "torch.nn.functional": torch.nn.functional, "torch.Tensor": torch.Tensor}
"""Modules and classes whose functions a call may not replace."""


def settings() -> dict[str, Any]:
    return {name: read() for name, (read, _) in SETTINGS.items()}


def restore(values: dict[str, Any]) -> list[str]:
    """Put back settings, and return the names of those that were others."""
    changed = [name for name, value in values.items() if SETTINGS[name][0]() != value]
    for name in changed:
        SETTINGS[name][1](values[name])
    return changed


def functions(owners: Mapping[str, Any] = OWNERS) -> dict[str, Any]:
    """Return the functions of modules and classes, by name, as they are when PyTorch's compiler is loaded.

    It puts `torch.manual_seed` into a wrapper, which is no operator's doing.
    """
    torch.compiler.list_backends()  # which loads it
    return {
        f"{owner}.{name}": value
        for owner, where in owners.items()
        for name, value in vars(where).items()
        if inspect.isroutine(value)
    }


def restore_functions(values: dict[str, Any]) -> list[str]:
    """Put back functions, and return the names of those that were others."""
    replaced = []
    for name, value in values.items():
        owner, _, attribute = name.rpartition(".")
        if vars(OWNERS[owner]).get(attribute) is not value:
            setattr(OWNERS[owner], attribute, value)
            replaced.append(name)
    return replaced


@contextlib.contextmanager
def seeded(number: int) -> Iterator[None]:
    """Seed the random numbers of PyTorch, Python and NumPy inside, and put their state back after."""
    numpy = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), numpy.random.get_state() if numpy else None
    with torch.random.fork_rng():
        torch.manual_seed(number)
        random.seed(number)
        if numpy:
            numpy.random.seed(number)
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy:
                numpy.random.set_state(numpy_state)


def random_state() -> dict[str, Any]:
    """Return the states that the next random numbers depend on, by whose they are."""
    found: dict[str, Any] = {"PyTorch's": torch.get_rng_state().tolist(), "Python's": random.getstate()}
    if torch.cuda.is_available():
        found["the GPU's"] = torch.cuda.get_rng_state().tolist()
    if "numpy" in sys.modules:
        found["NumPy's"] = sys.modules["numpy"].random.get_state()[1].tolist()
    return found
