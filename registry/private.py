"""Every private name of torch and triton that llmk uses, looked up once, with what is public behind it.

A release may rename any of them: llmk is then slower, but imports and gives the same numbers. Where nothing public
does the same, what needs the name raises when it is called and says so; those are named last.
"""

import functools
import importlib.metadata
import os
import pkgutil
import shutil
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor, nn
from torch.autograd import Function, forward_ad
from torch.fx.operator_schemas import get_signature_for_torch_op

_NEWEST_TRITON = (3, 9)
"""Whose launch was read: a newer Triton's kernels are launched in its own way."""


def _find(path: str, otherwise: Any = None) -> Any:
    """What a dotted path names, or the other where this release has no such name."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return otherwise


def _attribute(holder: Any, name: str, otherwise: Callable[[Any], Any]) -> Any:
    """An attribute of one object or, where it has none of that name, what the other makes of the object."""
    try:
        return getattr(holder, name)
    except AttributeError:
        return otherwise(holder)


# Who looks on. Where that cannot be told someone always does, and every call takes the dispatcher's path.


def _one() -> int:
    return 1


class _Probe(Function):
    """Takes no functorch transform, and says so when it is applied inside one."""

    @staticmethod
    def forward(ctx: Any) -> None:
        return None


def _level_of_probe() -> int | None:
    try:
        _Probe.apply()
    except RuntimeError:
        return 1
    return None


dispatch_modes: Callable[[], int] = _find("torch._C._len_torch_dispatch_stack", _one)
_count_function_modes: Callable[[], int] = _find("torch._C._len_torch_function_stack", _one)
_function_mode_stack = _find("torch.overrides._get_current_function_mode_stack")
_DeviceContext = _find("torch.utils._device.DeviceContext")
profiling: Callable[[], bool] = _find("torch._C._autograd._profiler_enabled", _one)
functorch_level: Callable[[], int | None] = _find("torch._C._functorch.maybe_current_level", _level_of_probe)
_mode_of = _find("torch._C._get_dispatch_mode")


def function_modes() -> int:
    """Those that look on: not that of `torch.set_default_device`, which only changes factories without a device."""
    count = _count_function_modes()
    if not count or _function_mode_stack is None or _DeviceContext is None:
        return count
    return sum(type(mode) is not _DeviceContext for mode in _function_mode_stack())


_functional = _find("torch._C._TorchDispatchModeKey.FUNCTIONAL")


def traced_by_compiler() -> bool:
    """Whether AOTAutograd is making a graph; never where that cannot be told: the graph then has the kernels in it."""
    return None not in (_mode_of, _functional) and _mode_of(_functional) is not None


def forward_mode_level() -> int:
    """Negative where forward-mode AD is off; where that cannot be told each tensor is asked."""
    return getattr(forward_ad, "_current_level", 0)


# Operators.


def schema_of(overload: Any) -> torch.FunctionSchema:
    public: Any = get_signature_for_torch_op
    return _attribute(overload, "_schema", lambda overload: public(overload, return_schemas=True)[1][0])


def _schema_of_a_definition(schema: str) -> torch.FunctionSchema:
    namespace, _, signature = schema.partition("::")
    library = torch.library.Library(f"{namespace}_schemas", "FRAGMENT")  # gone, and the name free, when this returns
    library.define(signature)
    name = signature.partition("(")[0]
    return schema_of(getattr(getattr(torch.ops, f"{namespace}_schemas"), name).default)


parse_schema: Callable[[str], torch.FunctionSchema] = _find("torch._C.parse_schema", _schema_of_a_definition)
_FunctionalTensorMode = _find("torch._subclasses.functional_tensor.FunctionalTensorMode")


def define_kernel_op(name: str, body: Callable[..., Any], *, opaque: bool) -> Any:
    """`torch.library.triton_op` or, for one that no graph looks into, what amounts to `torch.library.custom_op`.

    Of a triton_op's body only Inductor sees the launches, and no dispatch mode of the user's.
    """
    if opaque and _FunctionalTensorMode is None:
        return torch.library.custom_op(name, body, mutates_args=())
    definition: Any = torch.library.triton_op(name, body, mutates_args=())
    if opaque:
        definition.register_torch_dispatch(_FunctionalTensorMode, _keep_as_one_node)
    return definition


def _keep_as_one_node(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
    return mode.__torch_dispatch__(op, types, args, kwargs)


_FunctionBase = _find("torch._C._FunctionBase")


def bare_apply(function: type[Function]) -> Callable[..., Any]:
    """`function.apply` without its look for torch.func's transforms, which whoever calls it has done."""
    if _FunctionBase is None:
        return function.apply
    return super(Function, function).apply  # type: ignore[misc]


def noted_by(ctx: Any) -> tuple[tuple[Tensor | None, ...], tuple[Tensor, ...]]:
    """What a forward pass saved for backward and what it marked as not differentiable, where that is told."""
    return getattr(ctx, "to_save", None) or (), getattr(ctx, "non_differentiable", None) or ()


# Modules.


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """A module's own parameters, those that are None included."""
    return _attribute(module, "_parameters", lambda module: dict(module.named_parameters(recurse=False)))


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """A module's own buffers, those that are None included."""
    return _attribute(module, "_buffers", lambda module: dict(module.named_buffers(recurse=False)))


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    return _attribute(module, "_modules", lambda module: dict(module.named_children()))


def has_hooks(module: nn.Module) -> bool:
    """Whether a hook is registered on a module; where that cannot be told, as if one were."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind, True) for kind in kinds)


class _NoMode:
    """Stands for a dispatch mode, where there is none: it cannot be entered."""

    def __enter__(self) -> None:
        raise RuntimeError(f"this needs a TorchDispatchMode, which llmk does not find in torch {torch.__version__}")

    def __exit__(self, *exception: object) -> None:
        pass


DispatchMode: Any = _find("torch.utils._python_dispatch.TorchDispatchMode", _NoMode)


# Tensors.


def version_of(tensor: Tensor) -> int | None:
    """Grows when PyTorch writes into a tensor; None where that cannot be told."""
    return _attribute(tensor, "_version", lambda tensor: None)


def storage_of(tensor: Tensor) -> int:
    """The same for tensors that share their memory."""
    return _attribute(tensor.untyped_storage(), "_cdata", lambda storage: storage.data_ptr())


def _torch_empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


empty_on_gpu: Callable[..., Tensor] = _find("torch._C._dynamo.guards._empty_strided_cuda", _torch_empty)
"""What Inductor's code allocates with, on the current device, in a fifth of the time of `torch.empty`."""
current_device: Callable[[], int] = _find("torch._C._cuda_getDevice", torch.cuda.current_device)
_addmm_activation = _find("torch.ops.aten._addmm_activation")


def addmm_activation(bias: Tensor, x: Tensor, weight: Tensor, out: Tensor, *, gelu: bool) -> None:
    """out = f(x @ weight + bias) by cuBLASLt, where f is relu or gelu's tanh approximation."""
    if _addmm_activation is not None:
        _addmm_activation.out(bias, x, weight, use_gelu=gelu, out=out)
        return
    torch.addmm(bias, x, weight, out=out)
    out.copy_(F.gelu(out, approximate="tanh") if gelu else F.relu(out))


# Triton.

_TRUE = ("1", "true", "yes", "on", "y")
TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
_runtime, _compilation = _find("triton.knobs.runtime"), _find("triton.knobs.compilation")
INTERPRET: bool = _attribute(_runtime, "interpret", lambda _: os.environ.get("TRITON_INTERPRET", "").lower() in _TRUE)
"""TRITON_INTERPRET=1: kernels run on the CPU in Triton's interpreter. Triton decides at import, and so do we."""


def check_interpreter(triton_version: tuple[int, ...], numpy_version: str) -> None:
    """Refuse the one pair of releases whose interpreter fails at any loop: numpy 2.4 makes no number of `[1]` there."""
    if triton_version < (3, 7) and tuple(int(part) for part in numpy_version.split(".")[:2]) >= (2, 4):
        found = ".".join(map(str, triton_version))
        raise ImportError(
            f"TRITON_INTERPRET=1: the interpreter of triton {found} expects numpy<2.4, got numpy {numpy_version} "
            "(pip install 'numpy<2.4'; without TRITON_INTERPRET any numpy will do)"
        )


if INTERPRET:
    check_interpreter(TRITON, importlib.metadata.version("numpy"))

drivers: Any = _find("triton.runtime.driver.driver")
"""Its `active` is the driver of the GPU."""


def _knows_launch() -> bool:
    names = ("launch_enter_hook", "launch_exit_hook", "add_stages_inspection_hook", "debug")
    known = all(hasattr(_runtime, name) for name in names) and hasattr(_compilation, "instrumentation_mode")
    return known and drivers is not None and TRITON <= _NEWEST_TRITON


KNOWS_LAUNCH: bool = _knows_launch()
"""Whether what Triton's own launch of a kernel does besides launching it is known, and can be left out."""


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
"""Whether a hook or a setting has a part in launches, which only Triton's own launch heeds."""


# DTensor and processes.


def tell_calls_apart(overload: Any) -> bool:
    """Have DTensor tell apart calls that differ in a flag, a string or in which tensor is None; whether it will."""
    from torch.distributed.tensor import DTensor

    dispatcher = _attribute(DTensor, "_op_dispatcher", lambda _: None)
    static_arguments = _find("torch.distributed.tensor._op_schema.RuntimeSchemaInfo")
    if None in (dispatcher, static_arguments):
        return False
    dispatcher.sharding_propagator.op_to_schema_info[overload] = static_arguments(static_argnum=1)
    return True


# What nothing public does.


class _Missing:
    """Stands for a name that this release does not have, where that cannot be done without."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # whoever inspects it, as torch does for kernels, asks for more than it has
            raise AttributeError(name)
        return _Missing(f"{self.path}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"this needs {self.path}, which torch {torch.__version__} and triton {triton.__version__} lack"
        )


def _required(path: str) -> Any:
    return _find(path, _Missing(path))


collectives = _required("torch.ops._c10d_functional")
"""What a graph may hold: they return what they communicate. `torch.distributed`'s own write into a tensor."""
group_named = _required("torch.distributed.distributed_c10d._resolve_process_group")
FakeTensorMode = _required("torch._subclasses.fake_tensor.FakeTensorMode")
GPUTarget = _find("triton.backends.compiler.GPUTarget", namedtuple("GPUTarget", "backend arch warp_size"))
ASTSource = _required("triton.compiler.ASTSource")
make_backend = _required("triton.compiler.make_backend")
create_function_from_signature = _required("triton.runtime.jit.create_function_from_signature")


def pack_arguments(kernel: Any, *args: Any) -> Any:
    """Options, signature, constants and attributes of a launch, as Triton's JIT makes them."""
    return _attribute(kernel, "_pack_args", lambda _: _Missing("triton.JITFunction._pack_args"))(*args)


def cuobjdump() -> str:
    """Where the program is: Triton's wheel brings one."""
    return _find("triton.knobs.nvidia.cuobjdump.path") or shutil.which("cuobjdump") or "cuobjdump"


# What opcheck watches, and asks the compiler; it is looked up there, because importing it takes a second.


def interpreter() -> Any:
    """Triton's interpreter; None where it lacks what opcheck replaces there to watch it."""
    names = (
        "GridExecutor.__call__", "InterpretedFunction.rewrite", "InterpreterError", "TensorHandle", "_implicit_cvt",
        "_patch_lang_core", "interpreter_builder.set_grid_idx", "interpreter_builder.create_get_program_id",
        "interpreter_builder.create_masked_load", "interpreter_builder.create_masked_store",
        "interpreter_builder.create_atomic_rmw", "interpreter_builder.create_atomic_cas",
        "interpreter_builder.create_addptr", "interpreter_builder.create_splat",
        "interpreter_builder.create_broadcast",
    )  # fmt: skip
    if any(_find(f"triton.runtime.interpreter:{name}") is None for name in names):
        return None
    return _find("triton.runtime.interpreter")


def _multiply_for(cycles: int) -> None:
    x = torch.ones(4096, 4096, dtype=torch.float32, device="cuda")
    for _ in range(cycles // 5_000_000 + 1):  # some milliseconds each
        torch.mm(x, x)


delay_stream: Callable[[int], None] = _find("torch.cuda._sleep", _multiply_for)
"""Keeps the current stream busy for so many of the GPU's cycles."""


def inductor_allocators() -> list[tuple[Any, str]]:
    """Where Inductor's code finds what it allocates with, as modules and names, when it is loaded."""
    names = ("_empty_strided_cpu", "_empty_strided_cuda")
    guards = _find("torch._C._dynamo.guards")
    return [(guards, name) for name in names if hasattr(guards, name)]


def reload_inductor_modules() -> None:
    """Have Inductor load its code again, from the disk where it is there."""
    _find("torch._inductor.codecache.PyCodeCache.cache_clear", torch.compiler.reset)()


def autograd_config() -> Any:
    return _find("torch._functorch.config")


def compile_errors() -> tuple[type[Exception], ...]:
    """What `torch.compile` raises when it cannot compile."""
    paths = "torch._dynamo.exc.TorchDynamoException", "torch._inductor.exc.InductorError"
    return tuple(_find(path, RuntimeError) for path in paths)


def aot_backend(compiler: Callable[..., Any], *, decomposed: bool = False) -> Any:
    """A backend for `torch.compile` that gives `compiler` AOTAutograd's graphs, as Inductor would get them if asked."""
    table = _find("torch._inductor.decomposition.select_decomp_table") if decomposed else None
    options = {"fw_compiler": compiler, "bw_compiler": compiler, "decompositions": table and table()}
    aot_autograd = _find("torch._dynamo.backends.common.aot_autograd")
    if aot_autograd is not None:
        return aot_autograd(**options)
    from functorch.compile import aot_module_simplified

    return functools.partial(aot_module_simplified, **options)
