"""Where a kernel runs: the launch device, the number of programs, and the launches that a call would make."""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

INTERPRET: bool = triton.knobs.runtime.interpret
"""TRITON_INTERPRET=1: kernels run on the CPU in Triton's interpreter. Triton decides at import, and so do we."""


@dataclass
class _State:
    kernels_on_cpu: bool = INTERPRET
    recorder: "list[Launch] | None" = None


_state = _State()


@dataclass(frozen=True)
class Launch:
    """One kernel launch: what `triton.compile` needs to build the kernel with no GPU present."""

    kernel: Any
    grid: tuple[Any, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(hash=False)


class _RecordingKernel:
    """Stands in for a kernel while launches are recorded."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[Any, ...]) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.launches.append(Launch(self.kernel, grid, args, kwargs))

        return launch


def wrap_triton(kernel: Any) -> Any:
    """`torch.library.wrap_triton` that also knows the interpreter (torch 2.11 refuses it) and the recorder."""
    if _state.recorder is not None:
        return _RecordingKernel(kernel, _state.recorder)
    if INTERPRET:
        return kernel
    return torch.library.wrap_triton(kernel)


def recording() -> bool:
    return _state.recorder is not None


def kernels_on_cpu() -> bool:
    return _state.kernels_on_cpu


@contextlib.contextmanager
def use_kernels_on_cpu() -> Iterator[None]:
    """Take the kernel path on CPU tensors too, to trace it through a stub driver where there is no GPU."""
    previous, _state.kernels_on_cpu = _state.kernels_on_cpu, True
    try:
        yield
    finally:
        _state.kernels_on_cpu = previous


@contextlib.contextmanager
def record_launches() -> Iterator[list[Launch]]:
    """Collect the kernel launches of the calls inside instead of making them; tensors should be fake."""
    launches: list[Launch] = []
    _state.recorder = launches
    try:
        with use_kernels_on_cpu():
            yield launches
    finally:
        _state.recorder = None


@contextlib.contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Triton launches on the current device: make it the tensors' one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        yield
    else:
        with torch.cuda.device(device):
            yield


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return (
        2 if INTERPRET else 132
    )  # a few in the interpreter, so that each gets rows; an H200's when tracing without a GPU


def num_programs(device: torch.device, per_multiprocessor: int) -> int:
    """The size of a persistent grid: so many programs on each multiprocessor of the device."""
    return _multiprocessors(device) * per_multiprocessor
