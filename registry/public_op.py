"""Public ops: `torch.ops.llmk.NAME`, what people call."""

import functools
import inspect
import numbers
import types
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd.forward_ad import unpack_dual
from torch.overrides import is_tensor_like

from llmk.registry.checks import check_home
from llmk.registry.eager.bypass import PLAIN_TENSORS, is_plain_eager
from llmk.registry.eager.launch_cache import LaunchCache
from llmk.registry.eager.launcher import INT64
from llmk.registry.kernel_op import KernelOp
from llmk.registry.private.modes import forward_mode_level, functorch_depth
from llmk.registry.private.operators import schema_of
from llmk.registry.record import OPS, Op

P = ParamSpec("P")
R = TypeVar("R")

_EXACT: dict[str, frozenset[type]] = {"Tensor": PLAIN_TENSORS} | {
    t.__name__: frozenset({t}) for t in (int, float, bool, str)
}
_EXACT["ScalarType"] = frozenset({torch.dtype})
_EXACT |= dict.fromkeys(("List[Tensor]", "List[float]"), frozenset())  # the dispatcher looks at what lists hold

_ACCEPTED: dict[str, tuple[str, Any]] = {
    "Tensor": ("a tensor", torch.Tensor),
    "int": ("an integer", (numbers.Integral, torch.SymInt)),
    "float": ("a number", (numbers.Real, torch.SymInt, torch.SymFloat)),
    "bool": ("a bool", (numbers.Real, torch.SymBool)),
    "str": ("a string", str),
    "ScalarType": ("a torch.dtype", torch.dtype),
    "List[Tensor]": ("a list of tensors", (list, tuple)),
    "List[float]": ("a list of numbers", (list, tuple)),
}
"""The words for a type, and what the dispatcher takes for it besides tensor-likes, and for numbers tensors of one."""
_STRIDED = torch.strided

_library = torch.library.Library("llmk", "FRAGMENT")


def public_op(
    *, differentiable: tuple[str, ...], kernel_ops: tuple[KernelOp, ...], **record: Any
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register a function as `torch.ops.llmk.NAME`, under its own name, and put its record into `OPS`.

    Its annotations and defaults give the schema. The function checks its arguments, decides what is needed and calls
    kernel ops. It is a CompositeImplicitAutograd: Dynamo and export keep one node, AOTAutograd looks inside.

    Args:
        differentiable: The arguments that get gradients. Any other tensor that requires one is refused when called.
        kernel_ops: The kernel ops that the function calls.
        **record: The other fields of `Op`.

    Returns:
        A decorator. What it returns calls the registered operator and keeps the function's signature and docstring.

    Raises:
        RuntimeError: The name is taken, the function is not under `llmk.ops`, or the op could not be differentiated.
        ValueError: A parameter's or the result's annotation is missing, or none that a schema has a type for.
    """

    def register(fn: Callable[P, R]) -> Callable[P, R]:
        name = fn.__name__
        _refuse_bad_registration(name, fn, differentiable, kernel_ops)
        _library.define(name + _signature_schema(fn), tags=torch.Tag.pt2_compliant_tag)
        overload = getattr(torch.ops.llmk, name).default
        schema = schema_of(overload)
        guarded, fits = _guarded(name, fn, schema, differentiable), _fits(schema)
        cache = LaunchCache(fits) if any(op.has_backward and op.launch_cache for op in kernel_ops) else None
        _library.impl(name, _with_launch_cache(cache, guarded), "CompositeImplicitAutograd")
        for kernel_op in kernel_ops:
            kernel_op.owner = name
        OPS[name] = Op(
            name=name,
            overload=overload,
            differentiable=differentiable,
            kernel_ops=kernel_ops,
            doc=inspect.getdoc(fn) or "",
            module=fn.__module__,
            **record,
        )

        refuse_misuse = _refusing_misuse(fn, schema)

        @functools.wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if is_plain_eager() and fits(args, kwargs):
                return guarded(*args, **kwargs)
            if not torch.compiler.is_compiling():
                refuse_misuse(args, kwargs)
            return overload(*args, **kwargs)

        return _with_own_code(name, _with_launch_cache(cache, call))

    return register


def _with_own_code(name: str, fn: Callable[P, R]) -> Callable[P, R]:
    """The function with a code object of its own: Dynamo counts recompilations by code object, not by function."""
    assert isinstance(fn, types.FunctionType)
    fn.__code__ = fn.__code__.replace(co_name=name, co_qualname=name)
    return fn


def _with_launch_cache(cache: LaunchCache | None, fn: Callable[P, R]) -> Callable[P, R]:
    """Return the function, which in plain eager mode repeats the launches of calls that look alike."""
    if cache is None:
        return fn

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return cache(fn, args, kwargs) if is_plain_eager() else fn(*args, **kwargs)

    return call


def _refuse_bad_registration(
    name: str, fn: Callable[..., Any], differentiable: tuple[str, ...], kernel_ops: tuple[KernelOp, ...]
) -> None:
    if name in OPS:
        raise RuntimeError(f"llmk::{name} is already registered by {OPS[name].module}")
    check_home(fn)
    for kernel_op in kernel_ops:
        kernel_op.complete()
        if kernel_op.owner is not None:
            raise RuntimeError(
                f"llmk::{kernel_op.name} is a kernel op of {kernel_op.owner}: llmk::{name} needs its own"
            )
    if differentiable and not any(kernel_op.has_backward for kernel_op in kernel_ops):
        raise RuntimeError(
            f"llmk::{name} takes differentiable inputs ({', '.join(differentiable)}) "
            "but none of its kernel ops has a registered autograd formula"
        )


def _signature_schema(fn: Callable[..., Any]) -> str:
    """Return `(Tensor input, ...) -> Tensor`; sizes are plain integers, as a public op is never traced with its own."""
    return torch.library.infer_schema(fn, mutates_args=()).replace("SymInt", "int")


def _fits(schema: torch.FunctionSchema) -> Callable[[tuple[Any, ...], dict[str, Any]], bool]:
    """A test whether arguments are the schema's very types: those the dispatcher would hand on as they are."""
    accepted: dict[str, frozenset[type]] = {}
    for argument in schema.arguments:
        kind, optional = _kind(argument)
        accepted[argument.name] = _EXACT[kind] | {type(None)} if optional else _EXACT[kind]
    by_position = [accepted[argument.name] for argument in schema.arguments if not argument.kwarg_only]
    most = len(by_position)

    def fits(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if len(args) > most:
            return False
        for value, kinds in zip(args, by_position):  # noqa: B905  some may be left out
            if type(value) not in kinds or (type(value) is int and not -INT64 <= value < INT64):
                return False
        for name, value in kwargs.items():
            if type(value) not in accepted.get(name, ()) or (type(value) is int and not -INT64 <= value < INT64):
                return False
        return True

    return fits


def _refusing_misuse(
    fn: Callable[..., Any], schema: torch.FunctionSchema
) -> Callable[[tuple[Any, ...], dict[str, Any]], None]:
    """Says in a line what the dispatcher says with the schema and the value, which may be an array."""
    signature, takes = inspect.signature(fn), f"{fn.__name__} takes {', '.join(_names(schema))}"
    kinds = {argument.name: _kind(argument) for argument in schema.arguments}

    def refuse_value(name: str, value: Any, kind: str, optional: bool) -> None:
        words, accepted = _ACCEPTED[kind]
        items = kind.removeprefix("List[").removesuffix("]")  # of a list, the kind of what it holds
        if isinstance(value, torch.Tensor) and kind in ("int", "float", "bool"):
            return refuse_no_number(name, value, kind, words)
        is_accepted = isinstance(value, accepted) or (items == kind and _stands_for_a_tensor(value))
        if not (is_accepted or (value is None and optional)):
            raise TypeError(f"{name}: expected {words}, got {_type_name(value)}; {takes}")
        if items != kind and value is not None:
            for i, item in enumerate(value):
                refuse_value(f"{name}[{i}]", item, items, False)

    def refuse_no_number(name: str, tensor: torch.Tensor, kind: str, words: str) -> None:
        """The dispatcher takes the number out of a tensor, rounds it towards 0 for an integer and drops its graph."""
        if tensor.dim() > 0 or (kind != "float" and (tensor.is_floating_point() or tensor.is_complex())):
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise TypeError(f"{name}: expected {words}, got a tensor {tuple(tensor.shape)} of {dtype}; {takes}")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"{name}: {fn.__name__} takes it as a number and has no gradient for it; pass {name}.item()"
            )

    def refuse(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{fn.__name__}: {error}; {takes}") from None
        for name, value in given.items():
            kind, optional = kinds[name]
            refuse_value(name, value, kind, optional)
            if kind == "int" and isinstance(value, int) and not -INT64 <= value < INT64:
                raise OverflowError(f"{name}: expected an integer of 64 bits, got {value}")

    return refuse


def _stands_for_a_tensor(value: Any) -> bool:
    """True for what overrides PyTorch's functions as a tensor does, such as the placeholder of a symbolic trace."""
    return not isinstance(value, torch.Tensor) and is_tensor_like(value)


def _names(schema: torch.FunctionSchema) -> list[str]:
    """The arguments' names, with a star before those that have to be named."""
    keyword_only = [argument.name for argument in schema.arguments if argument.kwarg_only]
    names = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    return [*names, *(["*", *keyword_only] if keyword_only else [])]


def _kind(argument: Any) -> tuple[str, bool]:
    """An argument's type in the schema, and whether it may be None."""
    name = str(argument.real_type)  # `type` calls a dtype an integer
    optional = name.startswith("Optional[")
    return name.removeprefix("Optional[").removesuffix("]") if optional else name, optional


def _type_name(value: Any) -> str:
    if value is None:
        return "None"
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _guarded(
    name: str, fn: Callable[..., Any], schema: torch.FunctionSchema, differentiable: tuple[str, ...]
) -> Callable[..., Any]:
    """The function behind the refusals that hold for every op: what it cannot differentiate it says, never zeros."""
    kinds = [(argument.name, *_kind(argument)) for argument in schema.arguments]
    tensors = [
        (i, a, kind != "Tensor", not optional, a in differentiable)
        for i, (a, kind, optional) in enumerate(kinds)
        if kind in ("Tensor", "List[Tensor]")
    ]

    @functools.wraps(fn)
    def implementation(*args: Any, **kwargs: Any) -> Any:
        if functorch_depth():
            raise NotImplementedError(f"llmk::{name} does not support torch.func transforms (grad, vmap, jvp, ...)")
        forward_mode, backward, given = forward_mode_level() >= 0, torch.is_grad_enabled(), len(args)
        for position, argument, is_list, required, has_gradient in tensors:
            value = args[position] if position < given else kwargs.get(argument)
            if value is None:
                if required and (position < given or argument in kwargs):
                    raise TypeError(f"{argument}: expected a tensor, got None")
                continue
            for tensor in value if is_list else (value,):
                if tensor.layout is not _STRIDED:
                    raise TypeError(f"{argument}: llmk::{name} expected a dense tensor, got layout {tensor.layout}")
                if backward and not has_gradient and tensor.requires_grad:
                    raise NotImplementedError(
                        f"{argument}: llmk::{name} has no gradient for it; pass {argument}.detach()"
                    )
                if forward_mode and unpack_dual(tensor).tangent is not None:
                    raise NotImplementedError(f"{argument}: llmk::{name} does not support forward-mode AD")
        return fn(*args, **kwargs)

    return implementation
