"""The launch cache: an operator's call that looks like an earlier one repeats its launches, for any addresses.

An operator checks its arguments and chooses tiles, grids and strides by their shapes, strides, dtypes and alignment,
never by their values. So one key stands for all of that. When a call has the key of a captured one, the `CachedLaunch`
allocates the buffers and makes the launches, as a CUDA graph does, with the kernel op's `autograd.Function` around them
if a gradient is wanted. Public ops use a cache in the forward pass, kernel ops one inside a backward formula.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from llmk.registry.devices import launches_directly
from llmk.registry.eager.bypass import PLAIN_NUMBERS, PLAIN_TENSORS
from llmk.registry.eager.launcher import Launcher, StandIn
from llmk.registry.private.kernels import drivers, launches_watched
from llmk.registry.private.tensors import empty_on_gpu, storage_of, version_of

_MOST_CALLS = 1024  # of one operator: sizes may change at every step
_STRIDED = torch.strided
_NOTHING: dict[str, Any] = {}
_Key = tuple[Any, ...]


class _Captures(threading.local):
    """The capture that is under way in a thread; the autograd engine has its own."""

    current: "Capture | None" = None


captures = _Captures()


class _Pending(threading.local):
    """The launches that the next kernel op's `autograd.Function` of a thread makes instead of running its body."""

    launch: Callable[[], Any] | None = None


pending = _Pending()


class CachedLaunch:
    """Everything that a call allocates, launches and returns, without its arguments' addresses.

    Args:
        capture: The capture of a call that called one kernel op.
        result: The call's result: outputs of the kernel op.
    """

    def __init__(self, capture: "Capture", result: Any) -> None:
        ((op, args, outputs),) = capture.calls
        first_number = len(capture.tensors)
        self.device = capture.tensors[0].get_device()
        self.pre_run_hooks = [kernel.pre_run_hooks for kernel in capture.kernels.values()]
        self.layouts = [(tuple(buffer.shape), buffer.stride(), buffer.dtype) for buffer in capture.buffers]
        self.numbers: list[Any] = []
        self.launches: list[tuple[Any, ...]] = []
        for run, function, metadata, grid, launched in capture.launches:
            places: list[int] = []
            for arg in launched:
                if isinstance(arg, Tensor):
                    places.append(capture.place(arg))
                else:
                    places.append(first_number + len(self.numbers))
                    self.numbers.append(arg)
            self.launches.append((run, function, metadata, (*grid, 1, 1)[:3], _pick(places)))
        if isinstance(outputs, tuple):
            self.outputs = _pick([self._hand_out(capture, output) for output in outputs])
        else:
            self.outputs = itemgetter(self._hand_out(capture, outputs))
        self.result = _found_in(outputs, result)
        wants_gradient = torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
        self.apply = op.apply if wants_gradient else None
        self.constants = [arg for arg in args if not isinstance(arg, Tensor)]
        self.arguments = _pick(_places(args, capture.inputs))

    def _hand_out(self, capture: "Capture", output: Tensor) -> int:
        """Return the index of an output's buffer, which is allocated with the output's strides."""
        place = capture.place(output) - len(capture.inputs)
        size = output.numel()
        extent = 1 + sum((n - 1) * stride for n, stride in zip(output.shape, output.stride(), strict=True))
        if place < 0 or size != capture.buffers[place].numel() or (size and size != extent):
            raise ValueError("a captured call hands out whole buffers")
        self.layouts[place] = (tuple(output.shape), output.stride(), output.dtype)
        return place

    def __call__(self, tensors: list[Tensor], addresses: list[int]) -> Any:
        if self.apply is None:
            outputs = self.launch(addresses)
        else:
            pending.launch = functools.partial(self.launch, addresses)
            try:
                outputs = self.apply(*self.arguments([*tensors, *self.constants]))
            finally:
                pending.launch = None
        return outputs if self.result is None else self.result(outputs)

    def launch(self, addresses: list[int]) -> Any:
        """Launch the kernels and return the kernel op's outputs."""
        buffers = [empty_on_gpu(*layout) for layout in self.layouts]
        values = [*addresses, *[buffer.data_ptr() for buffer in buffers], *self.numbers]
        active: Any = drivers.active
        stream = active.get_current_stream(self.device)
        for run, function, metadata, (x, y, z), pick in self.launches:
            run(x, y, z, stream, function, metadata, None, None, None, *pick(values))
        return self.outputs(buffers)


def _pick(places: Sequence[int]) -> Callable[[Any], tuple[Any, ...]]:
    if len(places) == 1:  # an itemgetter of one place gives no tuple
        (place,) = places
        return lambda values: (values[place],)
    return itemgetter(*places)


def _places(args: Sequence[Any], inputs: Sequence[Tensor]) -> list[int]:
    """Return the index of each argument of a kernel op among a call's inputs and, after these, its constants."""
    places, constants = [], len(inputs)
    for arg in args:
        if isinstance(arg, Tensor):
            places.append(_index(arg, inputs))
        else:
            places.append(constants)
            constants += 1
    return places


def _found_in(outputs: Any, result: Any) -> Callable[[Any], Any] | None:
    """Return a function that picks a call's result from its kernel op's outputs; None if the result is all of them."""
    if isinstance(outputs, Tensor):
        _index(result, [outputs])
        return None
    if isinstance(result, Tensor):
        return itemgetter(_index(result, outputs))
    places = [_index(tensor, outputs) for tensor in result]
    return None if places == list(range(len(outputs))) else _pick(places)


def _index(tensor: Any, tensors: Sequence[Tensor]) -> int:
    """Return the tensor's index; a ValueError if it is none of them, or several."""
    (index,) = [i for i, known in enumerate(tensors) if known is tensor]
    return index


class Capture:
    """Records the kernel op that a call calls, the buffers that it gets from `empty`, and its launches."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self.inputs = inputs
        self.tensors: list[Tensor] = list(inputs)
        self.calls: list[tuple[Any, tuple[Any, ...], Any]] = []
        self.buffers: list[Tensor] = []
        self.launches: list[tuple[Any, ...]] = []
        self.kernels: dict[int, Any] = {}  # by identity: a kernel's own hash is slow
        self.spoiled = False
        self.versions = [_version(tensor) for tensor in inputs]

    def note_call(self, op: Any, args: tuple[Any, ...], outputs: Any) -> None:
        self.calls.append((op, args, outputs))
        self.spoiled |= op.launch_cache is None

    def note_buffer(self, buffer: Tensor) -> None:
        self.buffers.append(buffer)
        self.tensors.append(buffer)
        self.versions.append(_version(buffer))

    def launcher(self, launcher: Launcher) -> StandIn:
        """Return a launcher whose launches go into the capture too."""

        def launch(grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
            built = launcher[grid](*args, **constants)
            if built is None:
                self.spoiled = True
                return
            run, function, metadata, rest = built
            self.kernels[id(launcher.kernel)] = launcher.kernel
            self.launches.append((run, function, metadata, grid, (*args, *rest)))

        return StandIn(launch)

    def place(self, tensor: Tensor) -> int:
        """Return the index of the input or buffer that begins where the tensor does; a ValueError if not one does.

        A view is found by its storage. If inputs share one, those of the next call might not.
        """
        storage = storage_of(tensor)
        same = [i for i, known in enumerate(self.tensors) if known is tensor]
        (place,) = same or [i for i, known in enumerate(self.tensors) if storage_of(known) == storage]
        if self.tensors[place].data_ptr() != tensor.data_ptr():
            raise ValueError("a captured call knows tensors by where they begin")
        return place

    def finish(self, result: Any) -> CachedLaunch | None:
        """Return the call to repeat; None if it did more than `empty` and launches of one kernel op."""
        if self.spoiled or None in self.versions or self.versions != [_version(tensor) for tensor in self.tensors]:
            return None
        try:
            return CachedLaunch(self, result)
        except ValueError:
            return None


def _version(tensor: Tensor) -> int | None:
    """Return a number that grows when PyTorch writes into a tensor; a launch of ours does not change it."""
    return 0 if tensor.is_inference() else version_of(tensor)


class _RecentKeys:
    """An approximate LRU cache of two dicts, for all threads. `new` may be read without the lock.

    A key that is set, or found in `old`, goes into `new`. When `new` is full it becomes `old`, and the keys of the
    previous `old`, which nobody asked for since, are dropped.
    """

    def __init__(self) -> None:
        self.new: dict[_Key, Any] = {}
        self.old: dict[_Key, Any] = {}
        self._lock = threading.Lock()  # guards both dicts together: a single read of one needs none

    def __setitem__(self, key: _Key, value: Any) -> None:
        with self._lock:
            self._set(key, value)

    def _set(self, key: _Key, value: Any) -> None:
        if len(self.new) >= _MOST_CALLS // 2:
            self.old, self.new = self.new, {}
        self.new[key] = value

    def __contains__(self, key: _Key) -> bool:
        return self.get(key, _ABSENT) is not _ABSENT

    def get(self, key: _Key, default: Any = None) -> Any:
        with self._lock:
            if key in self.old:
                self._set(key, self.old.pop(key))
            return self.new.get(key, default)

    def values(self) -> list[Any]:
        with self._lock:
            return [*self.old.values(), *self.new.values()]


_ABSENT = object()


def _sharing(tensors: Sequence[Tensor]) -> _Key | None:
    """Return which tensors are the same and which share memory, which a key does not say; None if none do."""
    storages = [storage_of(tensor) for tensor in tensors]
    if len(set(storages)) == len(storages):
        return None
    ids = [id(tensor) for tensor in tensors]
    return (*map(ids.index, ids), *map(storages.index, storages))


class LaunchCache:
    """The launches of one operator's calls, repeated from the third call with the same key on.

    A call may depend only on its arguments' shapes, strides, dtypes, alignment and need of gradients, on the numbers
    among them and on the device: on no setting, and on no value in a tensor. A call is never repeated if it needs a
    copy or another operator of PyTorch, allocates with anything but `empty`, calls several kernel ops, or launches on a
    view that begins where no argument does. It returns whole buffers, whose axes may have been swapped.

    Args:
        accepts: Returns True if a call with these arguments may be captured.
    """

    def __init__(self, accepts: Callable[[tuple[Any, ...], dict[str, Any]], bool] | None = None) -> None:
        self.accepts = accepts
        self.captured = _RecentKeys()  # for each key the launches, or None if there can be none
        self._seen = _RecentKeys()

    def __call__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] = _NOTHING) -> Any:
        """Return what `fn` returns, and call it if the call is not repeated. Nothing may trace or transform."""
        first: Any = args[0] if args else None
        if type(first) not in PLAIN_TENSORS or not launches_directly(first):
            return fn(*args, **kwargs)
        with_grad = torch.is_grad_enabled()
        parts: list[Any] = [with_grad, *kwargs]
        tensors: list[Tensor] = []
        addresses: list[int] = []
        for arg in (*args, *kwargs.values()) if kwargs else args:
            kind = type(arg)
            if kind in PLAIN_TENSORS:
                if arg.layout is not _STRIDED or arg.is_neg():
                    return fn(*args, **kwargs)
                address = arg.data_ptr()
                tensors.append(arg)
                addresses.append(address)
                parts += (arg.shape, arg.stride(), arg.dtype, arg.device, with_grad and arg.requires_grad, address & 15)
            elif kind in PLAIN_NUMBERS:
                parts += (kind, arg or str(arg))  # -0.0 is 0.0, but is not the same number
            else:
                return fn(*args, **kwargs)
        key = tuple(parts)
        call = self.captured.new.get(key) or self.captured.get(key)
        if call is None:
            return self._capture(key, tensors, fn, args, kwargs)
        if launches_watched() or any(call.pre_run_hooks) or captures.current is not None:
            return fn(*args, **kwargs)
        return call(tensors, addresses)

    def _capture(
        self, key: _Key, tensors: list[Tensor], fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if key in self.captured or captures.current is not None or launches_watched():
            return fn(*args, **kwargs)
        if self.accepts is not None and not self.accepts(args, kwargs):
            return fn(*args, **kwargs)
        sharing = _sharing(tensors)
        if sharing is not None and (key, sharing) in self.captured:
            return fn(*args, **kwargs)
        if key not in self._seen:  # a shape that comes once is not worth a capture
            self._seen[key] = None
            return fn(*args, **kwargs)
        captures.current = capture = Capture(tensors)
        try:
            result = fn(*args, **kwargs)
        finally:
            captures.current = None
        call = capture.finish(result)
        # Shared memory alone may be why a call cannot be repeated.
        self.captured[key if call is not None or sharing is None else (key, sharing)] = call
        return result
