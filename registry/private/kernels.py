"""Triton: how kernels are launched, built and interpreted."""

import importlib.metadata
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import triton

from llmk.registry.private.names import Missing, attribute, find, required

_NEWEST_TRITON = (3, 9)
"""The newest Triton whose launch was read: a newer Triton's kernels are launched in its own way."""

_TRUE = ("1", "true", "yes", "on", "y")
TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
_runtime, _compilation = find("triton.knobs.runtime"), find("triton.knobs.compilation")
INTERPRET: bool = attribute(_runtime, "interpret", lambda _: os.environ.get("TRITON_INTERPRET", "").lower() in _TRUE)
"""TRITON_INTERPRET=1: kernels run on the CPU in Triton's interpreter. Triton decides at import, and so do we."""


def check_interpreter(triton_version: tuple[int, ...], numpy_version: str) -> None:
    """Refuse the one pair of releases whose interpreter fails at any loop: numpy 2.4 makes no number of `[1]` there."""
    if triton_version < (3, 7) and tuple(int(part) for part in numpy_version.split(".")[:2]) >= (2, 4):
        found = ".".join(map(str, triton_version))
        raise ImportError(
            f"TRITON_INTERPRET=1: the interpreter of triton {found} expects numpy<2.4, got numpy {numpy_version} "
            "(pip install 'numpy<2.4'; without TRITON_INTERPRET any numpy will do)"
        )


def _exact_bfloat16(convert: Callable[..., Any], nearest: Any, float32: Any, bfloat16: Any) -> Callable[..., Any]:
    """The interpreter's conversion of floats, but float32 becomes the nearest bfloat16, and that the same float32.

    `convert` drops the bits that bfloat16 lacks: it loses up to a unit, always towards zero, where rounding loses half
    of one. Of bfloat16's subnormal numbers it makes others.
    """
    import numpy  # the interpreter needs it; nothing else in llmk does

    def convert_float(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) == (bfloat16, float32):
            return values.astype(numpy.uint32) << 16
        if (source, target) != (float32, bfloat16) or rounding not in (None, nearest):
            return convert(values, source, target, rounding)
        bits = numpy.ascontiguousarray(values).view(numpy.uint32)
        rounded = bits + (numpy.uint32(0x7FFF) + ((bits >> 16) & 1))  # halfway between two, to the even one
        kept = numpy.where(numpy.isnan(values), bits | 0x400000, rounded)
        return (kept >> 16).astype(numpy.uint16).reshape(values.shape)

    return convert_float


def _mend_interpreter() -> None:
    name = "triton.runtime.interpreter"
    convert, modes = find(f"{name}:_convert_float"), find(f"{name}:_ir.ROUNDING_MODE")
    if convert is not None and modes is not None:  # `test_private.py` asks a newer interpreter whether it rounds
        dtypes = (triton.language.float32, triton.language.bfloat16)
        find(name)._convert_float = _exact_bfloat16(convert, modes.RTNE, *dtypes)


def _launchable(triton_kernel: Any, /) -> Any:
    return triton_kernel


def _mend_wrap_triton() -> None:
    """Let an operator's launches be interpreted: `torch.library.wrap_triton` of older releases refuses the kernels.

    Modules hold that function under names of their own, so it is given other code.
    """
    find("torch.library.wrap_triton").__code__ = _launchable.__code__


if INTERPRET:
    check_interpreter(TRITON, importlib.metadata.version("numpy"))
    _mend_interpreter()
    _mend_wrap_triton()

drivers: Any = find("triton.runtime.driver.driver")
"""Its `active` is the driver of the GPU."""


def _knows_launch() -> bool:
    names = ("launch_enter_hook", "launch_exit_hook", "add_stages_inspection_hook", "debug")
    known = all(hasattr(_runtime, name) for name in names) and hasattr(_compilation, "instrumentation_mode")
    return known and drivers is not None and TRITON <= _NEWEST_TRITON


KNOWS_LAUNCH: bool = _knows_launch()
"""True if all that Triton's own launch does besides launching the kernel is known, and can be left out."""


def _watched() -> bool:
    enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    return bool(
        getattr(enter, "calls", enter)  # a chain of hooks, or what somebody put there instead
        or getattr(leave, "calls", leave)
        or _runtime.add_stages_inspection_hook
        or _runtime.debug
        or _compilation.instrumentation_mode
    )


def _watcher() -> Callable[[], bool]:
    """`_watched`, but at a third of its time where nothing was ever set."""
    runtime_set, compilation_set = vars(_runtime), vars(_compilation)  # what a program sets is the object's own
    enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    from_the_start = _watched()

    def launches_watched() -> bool:
        if runtime_set or compilation_set or enter.calls or leave.calls:
            return _watched()
        return from_the_start

    return launches_watched


launches_watched: Callable[[], bool] = _watcher() if KNOWS_LAUNCH else lambda: True
"""Returns True if a hook or a setting has a part in launches, which only Triton's own launch heeds."""


TensorDescriptor = required("triton.tools.tensor_descriptor.TensorDescriptor")
GPUTarget = find("triton.backends.compiler.GPUTarget", namedtuple("GPUTarget", "backend arch warp_size"))
ASTSource = required("triton.compiler.ASTSource")
make_backend = required("triton.compiler.make_backend")
create_function_from_signature = required("triton.runtime.jit.create_function_from_signature")


def pack_arguments(kernel: Any, *args: Any) -> Any:
    """Options, signature, constants and attributes of a launch, as Triton's JIT makes them."""
    return attribute(kernel, "_pack_args", lambda _: Missing("triton.JITFunction._pack_args"))(*args)


def cuobjdump() -> str:
    """The path of the program: Triton's wheel brings one."""
    return find("triton.knobs.nvidia.cuobjdump.path") or shutil.which("cuobjdump") or "cuobjdump"


def copied_to_host(executor: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """A launch's arguments as the interpreter takes them: on a CPU, sharing memory as they did."""
    return executor._init_args_hst(args, kwargs)


def copy_back(executor: Any, args: Any, args_on_host: Any, kwargs: Any, kwargs_on_host: Any) -> None:
    """Give a launch's arguments what was written into their copies."""
    executor._restore_args_dev(args, args_on_host, kwargs, kwargs_on_host)


def interpreter() -> Any:
    """Triton's interpreter; None where it lacks what opcheck replaces there to watch it."""
    names = (
        "GridExecutor.__call__",
        "GridExecutor._init_args_hst",
        "GridExecutor._restore_args_dev",
        "InterpretedFunction.rewrite",
        "InterpreterError",
        "TensorHandle",
        "_implicit_cvt",
        "_patch_lang",
        "_patch_lang_core",
        "interpreter_builder.set_grid_idx",
        "interpreter_builder.create_get_program_id",
        "interpreter_builder.create_masked_load",
        "interpreter_builder.create_masked_store",
        "interpreter_builder.create_atomic_rmw",
        "interpreter_builder.create_atomic_cas",
        "interpreter_builder.create_addptr",
        "interpreter_builder.create_splat",
        "interpreter_builder.create_broadcast",
    )
    if any(find(f"triton.runtime.interpreter:{name}") is None for name in names):
        return None
    return find("triton.runtime.interpreter")
