"""Dynamo, AOTAutograd and Inductor; what takes a second to import is looked up where it is asked for."""

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

import torch

from llmk.registry.private.names import attribute, find, required

_required_once = functools.cache(required)
Function = TypeVar("Function", bound=Callable[..., Any])


def statically_known_true(condition: Any) -> bool:
    """Return True if a condition on symbolic sizes holds whatever they are, without a guard."""
    return _required_once("torch.fx.experimental.symbolic_shapes.statically_known_true")(condition)


def known(condition: Any) -> bool:
    """Return a condition on sizes, with a guard on symbolic ones, and False where only data decides it."""
    if isinstance(condition, torch.SymBool):
        return _required_once("torch.fx.experimental.symbolic_shapes.guard_or_false")(condition)
    return condition


def settled(value: torch.SymFloat) -> float | None:
    """Return the number behind a symbolic one, with a guard, if a module holds it and it has not changed yet.

    Dynamo makes a number symbolic when it has seen another one in its place. With `dynamic=True` it does so from the
    start, also with an eps that a module holds for ever.
    """
    known = attribute(value.node.shape_env, "var_to_sources", lambda _: {})
    is_settled = all(symbol in known and _never_changed(known[symbol][0]) for symbol in value.node.expr.free_symbols)
    return float(value) if is_settled else None


def _never_changed(source: Any) -> bool:
    if not _member(_member(source, "guard_source"), "is_unspecialized_nn_module"):
        return False
    name, frames = _member(source, "name"), find("torch._dynamo.pgo.get_code_state", dict)()
    seen = [frame.automatic_dynamic[name].scalar for frame in frames.values() if name in frame.automatic_dynamic]
    return bool(seen) and all(isinstance(number, float) for number in seen)


def _member(holder: Any, name: str) -> Any:
    """Return what a release has as an attribute, and another one as a method without arguments."""
    value = attribute(holder, name, lambda _: None)
    return value() if callable(value) else value


def hint_of(value: torch.SymFloat) -> float | None:
    """Return the number behind a symbolic one while a graph is compiled, without a guard."""
    return attribute(value.node, "hint", lambda _: None)


def symbols_of(size: torch.SymInt) -> list[str]:
    """The names of the symbols in a size."""
    return sorted(symbol.name for symbol in size.node.expr.free_symbols)


def hints_of(size: torch.SymInt) -> dict[str, int]:
    """The numbers behind the symbols in a size while a graph is compiled; symbols that depend on data have none."""
    hints = attribute(size.node.shape_env, "backed_var_to_val", lambda env: env.var_to_val)  # torch 2.13 and before
    return {symbol.name: int(hints[symbol]) for symbol in size.node.expr.free_symbols if symbol in hints}


def constants_of(size: torch.SymInt) -> list[int]:
    """The numbers in the expression of a size."""
    return [int(x) for x in size.node.expr.atoms() if x.is_Integer]


def largest(size: torch.SymInt, most: int) -> int:
    """The largest number up to `most` that a size can be, by what its graph has asked of it."""
    bound = attribute(size.node.shape_env, "bound_sympy", lambda _: None)
    return most if bound is None else int(min(bound(size.node.expr).upper, most))


def substituted(size: torch.SymInt, values: Mapping[str, int]) -> int:
    """The size where its symbols have these values."""
    expression = size.node.expr
    return int(expression.subs({symbol: values[symbol.name] for symbol in expression.free_symbols}))


def triton_ops_as_nodes() -> contextlib.AbstractContextManager[Any]:
    """AOTAutograd keeps each `torch.library.triton_op` as one node inside, where it would trace the launches in it."""
    return required("torch._functorch.config.patch")(decompose_custom_triton_ops=False)


def cache_folder() -> str | None:
    """The folder of Inductor's cache, if there is one."""
    folder = find("torch._inductor.runtime.cache_dir_utils.cache_dir")
    is_off = any(getattr(find(path), "force_disable_caches", False) for path in CACHE_SETTINGS)
    return None if folder is None or is_off else folder()


CACHE_SETTINGS = "torch.compiler.config", "torch._inductor.config"


def as_compiled(wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Let Dynamo see through a wrapper of what `torch.compile` has given, as it does through that itself."""
    if hasattr(wrapper, "_torchdynamo_wrapper_id"):
        wrapper._torchdynamo_wrapper_id = id(wrapper)  # type: ignore[attr-defined]
    return wrapper


def restart_exception() -> type[BaseException]:
    """Return the exception that a backend raises to make Dynamo trace anew."""
    return find("torch._dynamo.exc.RestartAnalysis", GeneratorExit)


def forget_specialized_floats() -> None:
    """Have Dynamo forget the symbols of numbers for which it began again, as their graph is compiled now.

    It keeps them for the whole process, and a number that has changed since then could be no symbol any more.
    """
    find("torch._dynamo.symbolic_convert.TensorifyState.clear", lambda: None)()


def constant_in_graphs(function: Function) -> Function:
    """Have Dynamo call a function while it traces, and take its result as a constant.

    `torch.compiler.assume_constant_result` sets the same mark, and imports all of Dynamo for it, which takes a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def compile_fx(*args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Inductor, which takes seconds to import, where it is first asked for."""
    return required("torch._inductor.compile_fx.compile_fx")(*args, **kwargs)


def computes_a_whole_call(gm: Any) -> bool:
    """Return True if the graph that Dynamo gives a backend computes all that was called, and gives what that returns.

    A graph that Dynamo breaks says so. What goes on after it, and a function that is called in between, have graphs of
    their own: those are called by the user's code, and not by what `torch.compile` returned.
    """
    reason = attribute(gm, "compile_subgraph_reason", lambda _: None)
    if attribute(reason, "graph_break", lambda _: True):
        return False
    outside = itertools.dropwhile(lambda call: call != COMPILING, _calls())
    caller = next((call for call in outside if call not in (COMPILING, *CALLS_OF_MODULES)), ("", ""))
    return caller[0] == "torch._dynamo.eval_frame"


COMPILING = "torch._dynamo.convert_frame", "__call__"
CALLS_OF_MODULES = ("torch.nn.modules.module", "_call_impl"), ("torch.nn.modules.module", "_wrapped_call_impl")


def _calls() -> Iterator[tuple[str, str]]:
    """Yield the module and the name of every function that is running, from the innermost on."""
    frame = sys._getframe()
    while frame is not None:
        yield frame.f_globals.get("__name__", ""), frame.f_code.co_name
        frame = frame.f_back


def _mode_calls() -> tuple[Any, ...]:
    paths = (
        "torch._C._set_grad_enabled",
        "torch.amp.autocast_mode._enter_autocast",
        "torch.amp.autocast_mode._exit_autocast",
        "torch.autograd.grad_mode._enter_inference_mode",
        "torch.autograd.grad_mode._exit_inference_mode",
    )
    return tuple(function for path in paths if (function := find(path)) is not None)


MODE_CALLS = _mode_calls()
"""The functions by which Dynamo's graphs change the gradient mode and autocast."""

_HigherOrderOperator = find("torch._ops.HigherOrderOperator", ())
_Operator = tuple(filter(None, map(find, ("torch._ops.OpOverload", "torch._ops.OpOverloadPacket"))))
CHECKPOINT = find("torch.ops.higher_order.tag_activation_checkpoint")
DATA_OF_TENSOR = find("torch._C._autograd._get_data_attr")
"""`Tensor.data`, which no trace follows."""
LOG_API_USAGE = find("torch._C._log_api_usage_once")
"""Is in a graph where a module is made on the way; it reads and gives nothing."""


def is_higher_order(target: Any) -> bool:
    """True if a node's target takes graphs, such as the body of a checkpointed region or of an `autograd.Function`."""
    return isinstance(target, _HigherOrderOperator)


def is_operator(target: Any) -> bool:
    """Return True if a node's target is an operator, such as `torch.ops.aten.add`, which a trace keeps whole."""
    return isinstance(target, _Operator)


def of_functorch(target: Any) -> bool:
    """Return True if a node's target enters, leaves or serves a transform of `torch.func`, such as `vmap`."""
    module = getattr(target, "__module__", None) or ""
    return module.startswith(("torch._C._functorch", "torch._functorch.")) and not is_higher_order(target)


def functorch_nesting(target: Any) -> int:
    """1 where a node enters a transform of `torch.func`, -1 where it leaves one."""
    name = getattr(target, "__name__", "") if of_functorch(target) else ""
    return name.endswith("_increment_nesting") - name.endswith("_decrement_nesting")


def offer_backend(name: str, place: str) -> None:
    """Let `torch.compile(backend=name)` load an object such as "package.module:function" when it is first asked for.

    An installed package is found by its entry point. One that is run from its checkout is not, and Dynamo, which takes
    a second to import, is told of it.
    """
    if entry_points(group=BACKENDS, name=name):
        return
    backends = find("torch._dynamo.backends.registry._BACKENDS")
    if isinstance(backends, dict):
        backends.setdefault(name, EntryPoint(name, place, BACKENDS))


BACKENDS = "torch_dynamo_backends"
"""The entry points that `torch.compile` looks for backends in."""


def config_of(mode: str | None, options: dict[str, Any] | None, dynamic: bool | None) -> dict[str, Any]:
    """Inductor's settings for a mode and options of `torch.compile`, checked as it checks them."""
    wrapper = attribute(torch, "_TorchCompileInductorWrapper", lambda _: None)
    if wrapper is not None:
        return wrapper(mode, options, dynamic).config
    named = required("torch._inductor.list_mode_options")(mode, dynamic) if mode and mode != "default" else {}
    return {**named, **(options or {})}


def inductor_allocators() -> list[tuple[Any, str]]:
    """Return the modules and names from which Inductor's code takes its allocators when it is loaded."""
    names = ("_empty_strided_cpu", "_empty_strided_cuda")
    guards = find("torch._C._dynamo.guards")
    return [(guards, name) for name in names if hasattr(guards, name)]


def reload_inductor_modules() -> None:
    """Have Inductor load its code again, from the disk where it is there."""
    find("torch._inductor.codecache.PyCodeCache.cache_clear", torch.compiler.reset)()


def autograd_config() -> Any:
    return find("torch._functorch.config")


def compile_errors() -> tuple[type[Exception], ...]:
    """The exceptions that `torch.compile` raises when it cannot compile."""
    paths = "torch._dynamo.exc.TorchDynamoException", "torch._inductor.exc.InductorError"
    return tuple(find(path, RuntimeError) for path in paths)


def aot_backend(compiler: Callable[..., Any], *, decomposed: bool = False) -> Any:
    """A backend for `torch.compile` that gives `compiler` AOTAutograd's graphs, as Inductor would get them if asked."""
    table = find("torch._inductor.decomposition.select_decomp_table") if decomposed else None
    options = {"fw_compiler": compiler, "bw_compiler": compiler, "decompositions": table and table()}
    aot_autograd = find("torch._dynamo.backends.common.aot_autograd")
    if aot_autograd is not None:
        return aot_autograd(**options)
    from functorch.compile import aot_module_simplified

    return functools.partial(aot_module_simplified, **options)
