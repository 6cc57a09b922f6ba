"""Launches that only tell of themselves, of CPU tensors taken for a GPU's: what the fast path does without a GPU."""

from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.runtime import driver

from llmk.registry import OPS, launch
from llmk.registry.eager import launch_cache, launcher
from llmk.registry.eager.launch_cache import LaunchCache

Run = tuple[Any, ...]


class Compiled:
    """A built kernel."""

    packed_metadata = ()

    def __init__(self, function: str, runs: list[Run]) -> None:
        self.function, self.runs = function, runs

    def run(self, *args: Any) -> None:
        self.runs.append(args)


class _Driver:
    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 7


def stub_launches(patch: pytest.MonkeyPatch) -> list[Run]:
    """The launches made from now on. What is built and captured for them is kept from other tests."""
    made: list[Run] = []

    def build(self: Any, *args: Any, **constants: Any) -> Compiled:
        return Compiled(f"{self.__name__} {constants}", made)

    def launches_directly(tensor: Tensor) -> bool:
        return not torch.is_autocast_enabled("cpu")

    patch.setattr(type(driver), "active", property(lambda self: _Driver()))
    patch.setattr(triton.JITFunction, "run", build)
    patch.setattr(launcher, "_launchers", {})
    for module in (launch, launch_cache):
        patch.setattr(module, "empty_on_gpu", torch._C._dynamo.guards._empty_strided_cpu)  # type: ignore[attr-defined]
    patch.setattr(launch, "GPU", "cpu")
    for module in ("eager.launch_cache", "kernel_op"):
        patch.setattr(f"llmk.registry.{module}.launches_directly", launches_directly)
    for kernel_op in (kernel_op for op in OPS.values() for kernel_op in op.kernel_ops):
        if kernel_op.launch_cache is not None:
            patch.setattr(kernel_op, "launch_cache", LaunchCache())
    return made


def note_buffers(patch: pytest.MonkeyPatch) -> list[Tensor]:
    """The buffers that repeated calls allocate from now on."""
    made: list[Tensor] = []
    allocate = launch_cache.empty_on_gpu

    def noting(*layout: Any) -> Tensor:
        made.append(allocate(*layout))
        return made[-1]

    patch.setattr(launch_cache, "empty_on_gpu", noting)
    return made


def copied(value: Any) -> Any:
    """The same at another address: size, strides and what is before it."""
    if not isinstance(value, Tensor):
        return value
    storage = value.untyped_storage().clone()
    copy = torch.empty(0, dtype=value.dtype).set_(storage, value.storage_offset(), value.size(), value.stride())
    return copy.requires_grad_(value.requires_grad)


def named(runs: list[Run], tensors: list[Tensor]) -> list[Run]:
    """The launches, each address replaced by the number of its tensor."""
    names = {tensor.data_ptr(): f"tensor {i}" for i, tensor in enumerate(tensors) if tensor.data_ptr()}
    return [tuple(names.get(value, value) if type(value) is int else value for value in run) for run in runs]
