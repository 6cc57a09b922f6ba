"""Where a kernel runs: the launch device, the number of programs, and the launches that a call would make."""

import contextlib
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.compiler.config
import torch.fx.traceback as fx_traceback
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from llmk.registry.launcher import launcher_for, with_options
from llmk.registry.plan import rehearsals
from llmk.registry.private import (
    INTERPRET,
    KNOWS_LAUNCH,
    current_device,
    dispatch_modes,
    empty_on_gpu,
    function_modes,
    functorch_level,
    profiling,
    traced_by_compiler,
)

HAS_LAUNCHER = KNOWS_LAUNCH and not INTERPRET and torch.version.hip is None  # AMD's specializes on more than it knows
PLAIN_TENSORS = frozenset({Tensor, torch.nn.Parameter})
_OTHERS = frozenset({int, float, bool, str, type(None), torch.dtype})


@dataclass
class _State:
    kernels_on_cpu: bool = INTERPRET
    recorder: "list[Launch] | None" = None
    short_path: bool = True
    warp_size: int = 32 if torch.version.hip is None else 64
    in_graph: Mapping[str, str] = field(default_factory=dict)


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


def inside_functorch() -> bool:
    """Whether a torch.func transform is running."""
    return functorch_level() is not None


def forced_form(name: str) -> str | None:
    """What `ops_in_graph_as` says of a kernel op."""
    return _state.in_graph.get(name)


@contextlib.contextmanager
def ops_in_graph_as(forms: Mapping[str, str]) -> Iterator[None]:
    """Trace kernel ops, such as `_rms_norm_fwd`, as "kernel" or "aten" whatever they were registered as: to measure."""
    for name, form in forms.items():
        if not (name.startswith("_") and hasattr(torch.ops.llmk, name)):
            raise ValueError(f"forms: expected names of kernel ops, got {name!r}")
        if form not in ("kernel", "aten"):
            raise ValueError(f"forms[{name!r}]: expected 'kernel' or 'aten', got {form!r}")
    # AOTAutograd's cache sees the public op only, which is the same in both forms.
    tag = torch.compiler.config.cache_key_tag + "".join(f"|{name}={forms[name]}" for name in sorted(forms))
    previous, _state.in_graph = _state.in_graph, forms
    try:
        with torch.compiler.config.patch(cache_key_tag=tag):  # type: ignore[attr-defined]
            yield
    finally:
        _state.in_graph = previous


@contextlib.contextmanager
def recomputed_in_backward(input: Tensor) -> Iterator[None]:
    """What a graph computes of `input` in here, it computes again in the backward pass instead of keeping it till then.

    For elementwise results that cost less to compute again, next to what the backward pass reads anyway, than to keep
    in a GPU's memory; on a CPU they are kept. It is the mark that selective activation checkpointing puts on nodes;
    where a user's own policy put one, that stays.
    """
    meta = fx_traceback.current_meta
    on_gpu = input.is_cuda or kernels_on_cpu()
    if not on_gpu or not traced_by_compiler() or "recompute" in meta:
        yield
        return
    meta |= {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": 0}
    try:
        yield
    finally:
        for key in ("recompute", "ac_graph_id"):
            meta.pop(key, None)


def wrap_triton(kernel: Any) -> Any:
    """`torch.library.wrap_triton` where something traces; in plain eager mode what launches in the least time.

    It also knows the recorder, and the interpreter, which torch 2.11 refuses.
    """
    if _state.recorder is not None:
        return _RecordingKernel(kernel, _state.recorder)
    if not INTERPRET and dispatch_modes():
        return with_options(torch.library.wrap_triton(kernel))
    if rehearsals.current is not None:
        return rehearsals.current.launcher(launcher_for(kernel))
    if _state.kernels_on_cpu or not HAS_LAUNCHER or not _state.short_path:
        return with_options(kernel)
    return launcher_for(kernel)


@functools.lru_cache(maxsize=4096)
def _contiguous_layout(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(shape), tuple(reversed(strides[: len(shape)]))


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.empty` where something traces; in plain eager mode on a GPU what takes a fifth of its time.

    That allocates on the current device, which inside a kernel op is the tensors'.
    """
    if dispatch_modes() and not shape:  # Inductor fills a buffer that has no dimension, which would cost a launch
        buffer = torch.empty((1,), dtype=dtype, device=device).view(())
    elif device.type != "cuda" or dispatch_modes() or not _state.short_path:
        buffer = torch.empty(shape, dtype=dtype, device=device)
    else:
        buffer = empty_on_gpu(*_contiguous_layout(shape), dtype)
    if rehearsals.current is not None:
        rehearsals.current.note_buffer(buffer)
    return buffer


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


class set_short_path_enabled:
    """Whether plain eager mode may leave out PyTorch's dispatcher and Triton's launcher, in all threads.

    Like `torch.set_grad_enabled` it is a function and a context manager. Without the short path every call goes through
    the dispatcher, every buffer comes from `torch.empty` and every launch is Triton's own: the same bits, more slowly.
    """

    def __init__(self, mode: bool) -> None:
        if not isinstance(mode, bool):
            raise TypeError(f"mode: expected a bool, got {mode!r}")
        self.previous, _state.short_path = _state.short_path, mode

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        _state.short_path = self.previous


def takes_short_path(args: Collection[Any]) -> bool:
    """Whether a call is plain eager mode: nothing traces, transforms or wraps tensors that hold numbers."""
    if not _state.short_path or dispatch_modes() or functorch_level() is not None:
        return False
    for arg in args:
        kind = type(arg)
        if kind in PLAIN_TENSORS:
            if arg.is_meta or arg.is_neg():  # a negative bit is the dispatcher's to resolve
                return False
        elif kind not in _OTHERS:
            return False
    return True


def nothing_looks_on() -> bool:
    """Whether a call from Python need not pass the dispatcher: no compiler, mode, transform or profiler is on."""
    return not (
        torch.compiler.is_compiling()
        or not _state.short_path
        or dispatch_modes()
        or function_modes()
        or functorch_level() is not None
        or profiling()
    )


@contextlib.contextmanager
def record_launches(warp_size: int = 32) -> Iterator[list[Launch]]:
    """Collect the kernel launches of the calls inside instead of making them; tensors should be fake.

    They are those of a GPU whose warps have `warp_size` threads.
    """
    launches: list[Launch] = []
    previous, _state.warp_size = _state.warp_size, warp_size
    _state.recorder = launches
    try:
        with use_kernels_on_cpu():
            yield launches
    finally:
        _state.recorder, _state.warp_size = None, previous


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast would cast a linear layer's tensors to on this device; None where it is off."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return None


@contextlib.contextmanager
def kernel_context(device: torch.device) -> Iterator[None]:
    """Make the tensors' device current, where Triton launches, and keep autocast away from the products inside."""
    with torch.autocast(device.type, enabled=False):
        if device.type == "cuda":
            with torch.cuda.device(device):
                yield
        else:
            yield


def needs_context(tensor: torch.Tensor) -> bool:
    """Whether `kernel_context` would change anything; entering it costs microseconds."""
    if tensor.is_cuda:
        return torch.is_autocast_enabled("cuda") or tensor.get_device() != current_device()
    return torch.is_autocast_enabled(tensor.device.type)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    # A few in the interpreter, so that each program gets several rows; an H200's when tracing without a GPU.
    return 2 if INTERPRET else 132


def most_warps() -> int:
    """Of one thread block, which has room for 1024 threads."""
    return 1024 // _state.warp_size


def num_programs(device: torch.device, per_multiprocessor: int) -> int:
    """The size of a persistent grid: so many programs on each multiprocessor of the device."""
    return _multiprocessors(device) * per_multiprocessor
