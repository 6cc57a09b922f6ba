"""Dynamo, AOTAutograd and Inductor; what takes a second to import is looked up where it is asked for."""

import contextlib
import functools
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import torch

from llmk.registry.private.names import attribute, find, required

_required_once = functools.cache(required)


def statically_known_true(condition: Any) -> bool:
    """Return True if a condition on symbolic sizes holds whatever they are, without a guard."""
    return _required_once("torch.fx.experimental.symbolic_shapes.statically_known_true")(condition)


def backed_constant(value: torch.SymFloat) -> float | None:
    """Return the number behind a symbolic one while a graph is compiled; a guard then holds it to that."""
    node = attribute(value, "node", lambda _: None)
    return float(value) if node is not None and node.has_hint() else None


def symbols_of(size: torch.SymInt) -> list[str]:
    """The names of the symbols in a size."""
    return sorted(symbol.name for symbol in size.node.expr.free_symbols)


def hints_of(size: torch.SymInt) -> dict[str, int]:
    """The numbers behind the symbols in a size while a graph is compiled; symbols that depend on data have none."""
    hints = attribute(size.node.shape_env, "backed_var_to_val", lambda env: env.var_to_val)  # torch 2.13 and before
    return {symbol.name: int(hints[symbol]) for symbol in size.node.expr.free_symbols if symbol in hints}


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


def compile_fx(*args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Inductor, which takes seconds to import, where it is first asked for."""
    return required("torch._inductor.compile_fx.compile_fx")(*args, **kwargs)


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


def with_graph_pass(config: dict[str, Any], run: Callable[[Any], None], key: str) -> dict[str, Any]:
    """Inductor's settings, with which it lets `run` change each graph after its own patterns, besides who does so now.

    Args:
        config: The settings without.
        run: Takes a `torch.fx.Graph`. It is left out where the user wants products tuned or the graph put in another
            order, and in a release that has no such passes, or one where the user has one of their own.
        key: Tells its results apart in Inductor's caches, with llmk's own part of their keys.
    """
    passes, settings = find("torch._inductor.custom_graph_pass"), find("torch._inductor.config")
    wanted = {name: config.get(name, getattr(settings, name, None)) for name in (GRAPH_PASS, *REORDERING)}
    theirs, base = wanted.pop(GRAPH_PASS), getattr(passes, "CustomGraphPass", None)
    takes_several = hasattr(passes, "get_custom_graph_passes")
    if base is None or any(wanted.values()) or (theirs and not takes_several):
        return config

    class Pass(base):
        def __call__(self, graph: Any) -> None:
            run(graph)

        def uuid(self) -> str:
            return key

    return {**config, GRAPH_PASS: [*passes.get_custom_graph_passes(theirs), Pass()] if theirs else Pass()}


GRAPH_PASS = "post_grad_custom_post_pass"
REORDERING = (
    "max_autotune",
    "max_autotune_gemm",
    "aten_distributed_optimizations.enable_overlap_scheduling",
)


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
