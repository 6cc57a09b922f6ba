"""Launching a kernel in plain eager mode without looking up again what the last call found.

`kernel[grid](...)` binds arguments, specializes on them, formats a key and reads settings: 15 us on an H200's host, of
which the launch itself is 5. A `Launcher` keeps each built kernel under what Triton specializes on, and calls it.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from llmk.registry.private.kernels import INTERPRET, TRITON, TensorDescriptor, drivers, launches_watched

OPTIONS: dict[str, Any] = {"enable_fp_fusion": True} if TRITON >= (3, 9) and not INTERPRET else {}
"""Options of every launch: sums take products unrounded, as in PyTorch's kernels and not in later Triton's default."""
_INT32, INT64 = 2**31, 2**63
"""The least positive integers that 32 and 64 bits with a sign do not hold."""
_LONG = ("long", "long, a multiple of 16")


class StandIn:
    """Stands in for a Triton kernel: `stand_in[grid](...)` is `launch(grid, ...)`."""

    def __init__(self, launch: Callable[..., Any]) -> None:
        self.launch = launch

    def __getitem__(self, grid: tuple[Any, ...]) -> Any:
        return functools.partial(self.launch, grid)


class Launcher(StandIn):
    """Stands in for a Triton kernel on an NVIDIA GPU: `launcher[grid](*args, **constants)`.

    What the kernel takes after `args` must be given by keyword, beside options such as num_warps. Where a hook or a
    setting has a part in launches, Triton's own way is taken, and nothing is kept of what it built.
    """

    def __init__(self, kernel: Any) -> None:
        super().__init__(self._launch)
        self.kernel = kernel
        self._built: dict[Any, tuple[Any, ...]] = {}

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> tuple[Any, ...] | None:
        """Launch and return what the next launch needs, or None where that is not to be repeated."""
        if self.kernel.pre_run_hooks or launches_watched():
            self.kernel[grid](*args, **constants, **OPTIONS)
            return None
        active: Any = drivers.active
        device = active.get_current_device()
        parts: list[Any] = [device, *constants, *constants.values()]
        values: list[Any] = []
        described = False
        for arg in args:
            kind = type(arg)
            if arg is None:
                parts.append(None)
            elif kind is int:  # Triton tells apart 1, multiples of 16, and what needs 64 bits
                if -_INT32 <= arg < _INT32:
                    parts.append("1" if arg == 1 else "16" if not arg & 15 else "int")
                elif -INT64 <= arg < INT64:
                    parts.append(_LONG[not arg & 15])
                else:
                    self._refuse(arg, len(values))
            elif kind is Tensor or isinstance(arg, Tensor):
                address = arg.data_ptr()
                parts += (arg.dtype, not address & 15)
                values.append(address)
                continue
            elif kind is float:  # the type, not the value
                parts.append(kind)
            elif kind is TensorDescriptor:
                described = True
                parts += (kind, arg.base.dtype, *arg.block_shape)
            else:
                parts += (kind, arg)
            values.append(arg)
        key = tuple(parts)
        built = self._built.get(key)
        if built is None:
            built = self._built[key] = self._build(grid, args, constants)
            return None if described else built
        run, function, metadata, rest = built
        x, y, z = (*grid, 1, 1)[:3]
        stream = active.get_current_stream(device)
        run(x, y, z, stream, function, metadata, None, None, None, *values, *rest)
        return None if described else built  # the next launch describes other addresses

    def _refuse(self, number: int, position: int) -> None:
        name = list(self.kernel.signature.parameters)[position]
        raise OverflowError(f"{name}: expected a number of 64 bits, got {number}")

    def _build(self, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, ...]:
        """Launch in Triton's own way, which builds the kernel, and return what the next launch needs of it."""
        compiled = self.kernel[grid](*args, **constants, **OPTIONS)
        rest = list(self.kernel.signature.parameters)[len(args) :]
        return compiled.run, compiled.function, compiled.packed_metadata, tuple(constants[name] for name in rest)


def with_options(kernel: Any) -> Any:
    """Return a kernel, or what stands for one, that is given the options at each launch."""
    return StandIn(lambda grid, *args, **given: kernel[grid](*args, **OPTIONS | given)) if OPTIONS else kernel


_launchers: dict[int, Launcher] = {}


def launcher_for(kernel: Any) -> Launcher:
    """The one launcher of a kernel; found by identity, because a kernel's own hash is slow."""
    launcher = _launchers.get(id(kernel))
    return _launchers.setdefault(id(kernel), Launcher(kernel)) if launcher is None else launcher


@functools.lru_cache(maxsize=4096)
def contiguous_layout(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides, as `empty_on_gpu` takes them."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(shape), tuple(reversed(strides[: len(shape)]))
