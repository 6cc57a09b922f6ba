"""The device of a call: which code runs there, and what a launch needs to know.

An operator has kernels for a GPU, the same in Triton's interpreter, and plain PyTorch for a CPU. `runs_kernels` is the
one place where that is decided; `KernelOp.implementation` asks it. INTERPRET is TRITON_INTERPRET=1.
"""

import contextlib
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from llmk.registry.private.kernels import INTERPRET
from llmk.registry.private.tensors import current_device
from llmk.registry.settings import changed, settings


def kernels_on_cpu() -> bool:
    return settings.kernels_on_cpu


def use_kernels_on_cpu(used: bool = True) -> AbstractContextManager[None]:
    """Take the kernel path on CPU tensors too, to trace it through a stub driver where there is no GPU.

    If not `used`, take plain PyTorch, in Triton's interpreter too.
    """
    return changed(kernels_on_cpu=used)


def runs_kernels(name: str, tensor: Tensor) -> bool:
    """Return True if kernels compute what is asked for the device of this tensor, else plain PyTorch."""
    if not tensor.is_cuda and not tensor.is_cpu:
        raise NotImplementedError(f"llmk::{name} runs on cpu and cuda devices, got {tensor.device}")
    return tensor.is_cuda or settings.kernels_on_cpu


def launches_for(warp_size: int, shared_memory: int) -> AbstractContextManager[None]:
    """Choose launches as on a GPU with so many threads in a warp, and so many bytes of shared memory for a block."""
    return changed(warp_size=warp_size, shared_memory=shared_memory)


AUTOCAST_DEVICES = frozenset(
    kind for kind in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla") if torch.amp.is_autocast_available(kind)
)
"""The types of devices that know autocast, found once: Dynamo of torch 2.11 does not trace the question."""


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype that autocast casts a linear layer's tensors to on this device; None if it is off."""
    if device.type in AUTOCAST_DEVICES and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return None


def kernel_context(tensor: Tensor) -> AbstractContextManager[Any]:
    """Make the tensor's device current, where Triton launches, and keep autocast away from the products inside."""
    # Entering one costs microseconds.
    return _kernel_context(tensor.device) if _needs_context(tensor) else contextlib.nullcontext()


@contextlib.contextmanager
def _kernel_context(device: torch.device) -> Iterator[None]:
    with torch.autocast(device.type, enabled=False):
        if device.type == "cuda":
            with torch.cuda.device(device):
                yield
        else:
            yield


def launches_directly(tensor: Tensor) -> bool:
    """Return True if kernels are launched for it as things are: on the current GPU, without autocast."""
    return tensor.is_cuda and tensor.get_device() == current_device() and not torch.is_autocast_enabled("cuda")


def _needs_context(tensor: Tensor) -> bool:
    return not launches_directly(tensor) if tensor.is_cuda else torch.is_autocast_enabled(tensor.device.type)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    # A few in the interpreter, so that each program gets several rows; an H200's when tracing without a GPU.
    return 2 if INTERPRET else 132


@functools.cache
def has_device_offsets(device: torch.device) -> bool:
    """Return True if `torch.nn.functional.grouped_mm` takes the numbers of rows from this GPU's memory, in bfloat16.

    PyTorch has a kernel for compute capabilities 9 and 10; for others it waits until it can read the numbers.
    """
    return (
        device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] in (9, 10)
    )


def max_warps() -> int:
    """The largest number of warps in one thread block, which has room for 1024 threads."""
    return 1024 // settings.warp_size


SHARED_MEMORY = 227 * 1024
"""An H100's, and that of every call where there is no GPU."""


@functools.cache
def _shared_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return SHARED_MEMORY
    properties = torch.cuda.get_device_properties(device)
    # What a block has if it asks for it; AMD's have all of it without.
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a thread block may have: 227 KiB of an H100, 99 of an RTX 4090."""
    return _shared_memory(device) if settings.shared_memory is None else settings.shared_memory


def num_programs(device: torch.device, per_multiprocessor: int) -> int:
    """The size of a persistent grid: so many programs on each multiprocessor of the device."""
    return _multiprocessors(device) * per_multiprocessor


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return (a + b - 1) // b


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, for n from 1 to 2**32; a symbolic n becomes a fixed number."""
    n = int(n) - 1
    for shift in (1, 2, 4, 8, 16):
        n |= n >> shift
    return n + 1


def grid_cap(work: int, most: int) -> int:
    """The number of programs for `work` pieces: one for each up to `most`, and `most` if the number is symbolic.

    So a graph for any amount of work has one grid, and buffers of one size. Programs without work must do no harm.
    """
    return min(work, most) if isinstance(work, int) else most


def size_hint(n: int) -> int:
    """Return n, or the number that a symbolic n was traced with, without a guard: for choices that are never wrong.

    A symbolic number without such a hint counts as large.
    """
    if isinstance(n, torch.SymInt):
        hint = n.node.hint
        return 2**31 if hint is None else int(hint)
    return n
