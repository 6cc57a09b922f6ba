"""Launches kernels and allocates buffers as the compiler, a recorder or plain eager mode needs it."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from llmk.registry.devices import SHARED_MEMORY, kernels_on_cpu, launches_for, use_kernels_on_cpu
from llmk.registry.eager.launch_cache import captures
from llmk.registry.eager.launcher import StandIn, contiguous_layout, launcher_for, with_options
from llmk.registry.private.kernels import INTERPRET, KNOWS_LAUNCH, TensorDescriptor
from llmk.registry.private.modes import dispatch_modes
from llmk.registry.private.tensors import empty_on_gpu
from llmk.registry.settings import changed, settings

GPU = "cuda"
HAS_LAUNCHER = KNOWS_LAUNCH and not INTERPRET and torch.version.hip is None  # AMD's specializes on more than it knows


@dataclass(frozen=True)
class Launch:
    """One kernel launch: what `triton.compile` needs to build the kernel with no GPU present."""

    kernel: Any
    grid: tuple[Any, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(hash=False)


def wrap_triton(kernel: Any) -> Any:
    """Return `torch.library.wrap_triton(kernel)` if something traces, and in plain eager mode the fastest launcher.

    It also knows the recorder, and the interpreter, which torch 2.11 refuses.
    """
    launches = settings.launches
    if launches is not None:
        return StandIn(lambda grid, *args, **kwargs: launches.append(Launch(kernel, grid, args, kwargs)))
    if not INTERPRET and dispatch_modes():
        return with_options(torch.library.wrap_triton(kernel))
    if captures.current is not None:
        return captures.current.launcher(launcher_for(kernel))
    if kernels_on_cpu() or not HAS_LAUNCHER or not settings.fast_path:
        return with_options(kernel)
    return launcher_for(kernel)


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate by `torch.empty` if something traces; in plain eager mode on a GPU in a fifth of its time.

    That allocates on the current device, which inside a kernel op is the tensors'.
    """
    if dispatch_modes() and not shape:  # Inductor fills a buffer that has no dimension, which would cost a launch
        buffer = torch.empty((1,), dtype=dtype, device=device).view(())
    elif device.type != GPU or dispatch_modes() or not settings.fast_path:
        buffer = torch.empty(shape, dtype=dtype, device=device)
    else:
        buffer = empty_on_gpu(*contiguous_layout(tuple(shape)), dtype)
    if captures.current is not None:
        captures.current.note_buffer(buffer)
    return buffer


def empty_in_order(shape: Sequence[int], order: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate a tensor whose axes lie in memory in this order, for an operator to return.

    While something traces it is no view: AOTAutograd repeats on the output of a graph all views by which a view of it
    was made, also those from before it was an output. Inductor makes `torch.empty` of it before it merges what is alike
    in the forward and the backward pass, which it never does with that.
    """
    if order == tuple(range(len(order))):
        return empty(shape, dtype, device)
    if dispatch_modes():
        return torch.empty_permuted(shape, order, dtype=dtype, device=device)
    buffer = empty([shape[axis] for axis in order], dtype, device)
    return buffer.permute([order.index(axis) for axis in range(len(order))])


ALIGNMENT = 16
"""Bytes of which a descriptor's base and row stride must be multiples."""


def describable(x: Tensor) -> bool:
    """Return True if a matrix can be read through a tensor descriptor, else pointers have to do."""
    at = x.storage_offset() * x.element_size() if recording() else x.data_ptr()  # a fake tensor has no address
    aligned = at % ALIGNMENT == 0 and x.stride(0) * x.element_size() % ALIGNMENT == 0
    return aligned and x.stride(1) == 1 and x.numel() > 0


def descriptor(x: Tensor, block: list[int]) -> Any:
    """Describe a matrix for a kernel that loads or stores blocks of it: zeros outside of it, nothing stored there."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block)


@contextlib.contextmanager
def record_launches(warp_size: int = 32, shared_memory: int = SHARED_MEMORY) -> Iterator[list[Launch]]:
    """Collect the kernel launches of the calls inside instead of making them; tensors should be fake.

    They are those of a GPU with so many threads in a warp, and so many bytes of shared memory for a block.
    """
    launches: list[Launch] = []
    with changed(launches=launches), use_kernels_on_cpu(), launches_for(warp_size, shared_memory):
        yield launches


def recording() -> bool:
    return settings.launches is not None
