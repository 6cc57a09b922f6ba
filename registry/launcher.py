"""Launching a kernel in plain eager mode without looking up again what the last call found.

`kernel[grid](...)` binds arguments, specializes on them, formats a key and reads settings: 15 us on an H200's host, of
which the launch itself is 5. A `Launcher` keeps each built kernel under what Triton specializes on, and calls it.
"""

import functools
from typing import Any

from torch import Tensor

from llmk.registry.private import drivers, launches_watched

_LARGEST_INT32 = 2**31 - 1
_LONG = ("long", "long, a multiple of 16")


class Launcher:
    """Stands in for a Triton kernel on an NVIDIA GPU: `launcher[grid](*args, **constants)`.

    What the kernel takes after `args` must be given by keyword, beside options such as num_warps.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._built: dict[Any, tuple[Any, ...]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> tuple[Any, ...]:
        active: Any = drivers.active
        device = active.get_current_device()
        parts: list[Any] = [device, *constants, *constants.values()]
        values: list[Any] = []
        for arg in args:
            if isinstance(arg, Tensor):
                address = arg.data_ptr()
                values.append(address)
                parts += (arg.dtype, not address & 15)
                continue
            values.append(arg)
            kind = type(arg)
            if kind is int:  # Triton tells apart 1, multiples of 16, and what needs 64 bits
                parts.append("1" if arg == 1 else not arg & 15 if arg <= _LARGEST_INT32 else _LONG[not arg & 15])
            else:  # of a float the type, not the value
                parts.append(kind if kind is float else arg)
        key = tuple(parts)
        built = self._built.get(key)
        # A profiler's hooks expect what Triton's own launch tells them.
        if built is None or launches_watched():
            built = self._built[key] = self._build(grid, args, constants)
            return built
        run, function, metadata, rest = built
        x, y, z = (*grid, 1, 1)[:3]
        stream = active.get_current_stream(device)
        run(x, y, z, stream, function, metadata, None, None, None, *values, *rest)
        return built

    def _build(self, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, ...]:
        """Launch in Triton's own way, which builds the kernel, and return what the next launch needs of it."""
        compiled = self.kernel[grid](*args, **constants)
        rest = list(self.kernel.signature.parameters)[len(args) :]
        return compiled.run, compiled.function, compiled.packed_metadata, tuple(constants[name] for name in rest)


_launchers: dict[int, Launcher] = {}


def launcher_for(kernel: Any) -> Launcher:
    """The one launcher of a kernel; found by identity, because a kernel's own hash is slow."""
    launcher = _launchers.get(id(kernel))
    if launcher is None:
        launcher = _launchers[id(kernel)] = Launcher(kernel)
    return launcher
