"""Replaying a kernel op's call that looks like an earlier one, as a CUDA graph does, for any addresses.

A launching function chooses tiles, grids and strides from what its arguments look like, not from what they hold. When a
call looks like one that was captured, its `CapturedCall` allocates the buffers and makes the launches: half the time of
the function itself, where that is most of a small call's.
"""

import threading
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from torch import Tensor

from llmk.registry.eager.launcher import Launcher
from llmk.registry.private.kernels import drivers, launches_watched
from llmk.registry.private.tensors import empty_on_gpu, storage_of, version_of

_MOST_CALLS = 1024  # of one kernel op: sizes may change at every step
_Key = tuple[Any, ...]


class _Captures(threading.local):
    """The capture that is under way in a thread; the autograd engine has its own."""

    current: "Capture | None" = None


captures = _Captures()


class CapturedCall:
    """What a call allocates, launches and returns, but for the addresses of its arguments."""

    def __init__(self, capture: "Capture", outputs: Any) -> None:
        first_number = len(capture.tensors)
        self.pre_run_hooks = [kernel.pre_run_hooks for kernel in capture.kernels.values()]
        self.layouts = [(tuple(buffer.shape), buffer.stride(), buffer.dtype) for buffer in capture.buffers]
        self.numbers: list[Any] = []
        self.launches: list[tuple[Any, ...]] = []
        for run, function, metadata, grid, args in capture.launches:
            places: list[int] = []
            for arg in args:
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

    def _hand_out(self, capture: "Capture", output: Tensor) -> int:
        """The place of the buffer that an output is, perhaps with its axes in another order: it is allocated so."""
        place = capture.place(output) - (len(capture.tensors) - len(capture.buffers))
        size = output.numel()
        extent = 1 + sum((n - 1) * stride for n, stride in zip(output.shape, output.stride(), strict=True))
        if place < 0 or size != capture.buffers[place].numel() or (size and size != extent):
            raise ValueError("a captured call hands out whole buffers")
        self.layouts[place] = (tuple(output.shape), output.stride(), output.dtype)
        return place

    def __call__(self, device: int, addresses: list[int]) -> Any:
        buffers = [empty_on_gpu(*layout) for layout in self.layouts]
        values = [*addresses, *[buffer.data_ptr() for buffer in buffers], *self.numbers]
        active: Any = drivers.active
        stream = active.get_current_stream(device)
        for run, function, metadata, (x, y, z), pick in self.launches:
            run(x, y, z, stream, function, metadata, None, None, None, *pick(values))
        return self.outputs(buffers)


def _pick(places: list[int]) -> Callable[[Any], tuple[Any, ...]]:
    if len(places) < 2:  # an itemgetter of one gives no tuple
        raise ValueError("a captured call has launches of two arguments or more, and two outputs or one alone")
    return itemgetter(*places)


class Capture:
    """Notes what a launching function does: the buffers from `empty` and the launches."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self.tensors: list[Tensor] = list(inputs)
        self.buffers: list[Tensor] = []
        self.launches: list[tuple[Any, ...]] = []
        self.kernels: dict[int, Any] = {}  # by identity: a kernel's own hash is slow
        self.spoiled = False
        self.versions = [_version(tensor) for tensor in inputs]

    def note_buffer(self, buffer: Tensor) -> None:
        self.buffers.append(buffer)
        self.tensors.append(buffer)
        self.versions.append(_version(buffer))

    def launcher(self, launcher: Launcher) -> "_NotingLauncher":
        return _NotingLauncher(self, launcher)

    def place(self, tensor: Tensor) -> int:
        """Which input or buffer it is or begins where; a ValueError where that is none, as for a copy, or several.

        A view is known by its storage. Where inputs share one, the next call's might not.
        """
        storage = storage_of(tensor)
        same = [i for i, known in enumerate(self.tensors) if known is tensor]
        (place,) = same or [i for i, known in enumerate(self.tensors) if storage_of(known) == storage]
        if self.tensors[place].data_ptr() != tensor.data_ptr():
            raise ValueError("a captured call knows tensors by where they begin")
        return place

    def finish(self, outputs: Any) -> CapturedCall | None:
        """None where something other than `empty` and launches had a part in the call."""
        if self.spoiled or None in self.versions or self.versions != [_version(tensor) for tensor in self.tensors]:
            return None
        try:
            return CapturedCall(self, outputs)
        except ValueError:
            return None


def _version(tensor: Tensor) -> int | None:
    """Grows when PyTorch writes into a tensor, which a launch does not tell it of."""
    return 0 if tensor.is_inference() else version_of(tensor)


class _NotingLauncher:
    def __init__(self, capture: Capture, launcher: Launcher) -> None:
        self.capture, self.launcher = capture, launcher

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **constants: Any) -> None:
            built = self.launcher[grid](*args, **constants)
            if built is None:
                self.capture.spoiled = True
                return
            run, function, metadata, rest = built
            self.capture.kernels[id(self.launcher.kernel)] = self.launcher.kernel
            self.capture.launches.append((run, function, metadata, grid, (*args, *rest)))

        return launch


class _Recent:
    """A dict of the latest keys. `new` may be read as it is, which costs no more than of any dict.

    What is set, or got from the old half, comes into the new one. A full new half becomes the old one, and what was
    in that is forgotten: nobody asked for it for a while.
    """

    def __init__(self) -> None:
        self.new: dict[_Key, Any] = {}
        self.old: dict[_Key, Any] = {}

    def __setitem__(self, key: _Key, value: Any) -> None:
        if len(self.new) >= _MOST_CALLS // 2:
            self.old, self.new = self.new, {}
        self.new[key] = value

    def __contains__(self, key: _Key) -> bool:
        if key in self.old:
            self[key] = self.old.pop(key)
        return key in self.new

    def get(self, key: _Key) -> Any:
        return self.new[key] if key in self else None

    def values(self) -> list[Any]:
        return [*self.old.values(), *self.new.values()]


class Replayed:
    """A launching function whose calls are replayed, from the third of a kind on.

    What it does may depend only on its arguments' shapes, strides, dtypes and alignment, on the numbers among them and
    on the device: on no setting, and on no value in a tensor. A call that needs a copy or another operator of PyTorch,
    or that allocates with anything but `empty`, is never repeated; nor are views that begin where no argument does. It
    returns whole buffers, whose axes it may have swapped.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.captured = _Recent()  # for each kind of call what to replay, or None where there can be none
        self._seen = _Recent()

    def __call__(self, device: int, args: tuple[Any, ...]) -> Any:
        parts: list[Any] = [device]
        addresses: list[int] = []
        for arg in args:
            if arg is None:
                parts.append(None)
            elif isinstance(arg, Tensor):
                address = arg.data_ptr()
                addresses.append(address)
                parts += (arg.shape, arg.stride(), arg.dtype, address & 15)
            else:
                parts += (type(arg), arg or str(arg))  # -0.0 is 0.0, but is not the same number
        key = tuple(parts)
        call = self.captured.new.get(key) or self.captured.get(key)
        if call is None:
            return self._capture(key, args)
        if launches_watched() or any(call.pre_run_hooks):
            return self.fn(*args)
        return call(device, addresses)

    def _capture(self, key: _Key, args: tuple[Any, ...]) -> Any:
        if key in self.captured or launches_watched():
            return self.fn(*args)
        if key not in self._seen:  # a shape that comes once is not worth a capture
            self._seen[key] = None
            return self.fn(*args)
        captures.current = capture = Capture([arg for arg in args if isinstance(arg, Tensor)])
        try:
            outputs = self.fn(*args)
        finally:
            captures.current = None
        self.captured[key] = capture.finish(outputs)
        return outputs
