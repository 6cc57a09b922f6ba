"""Defining operators, and what their autograd notes."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.fx.operator_schemas import get_signature_for_torch_op

from llmk.registry.private.names import attribute, find, required


def schema_of(overload: Any) -> torch.FunctionSchema:
    public: Any = get_signature_for_torch_op
    return attribute(overload, "_schema", lambda overload: public(overload, return_schemas=True)[1][0])


_Overload: Any = find("torch._ops.OpOverload", ())


def overload_of(operator: Any) -> Any:
    """Return the overload behind a packet of one or what `torch.library.custom_op` returns; others as they are."""
    operator = attribute(operator, "_opoverload", lambda operator: operator)
    if not is_overload(operator) and callable(getattr(operator, "overloads", None)):
        overloads = operator.overloads()
        return getattr(operator, overloads[0]) if len(overloads) == 1 else operator.default
    return operator


def is_overload(operator: Any) -> bool:
    """Return True for an operator that the dispatcher knows, with a schema."""
    return isinstance(operator, _Overload)


_definitions: Any = find("torch._library.custom_ops.OPDEFS", {})
"""What `torch.library.custom_op` and `triton_op` have returned, by the operator's name; empty where that is unknown."""
_Packet: Any = find("torch._ops.OpOverloadPacket", ())


def definition_of(operator: Any) -> Any:
    """Return what `torch.library.custom_op` or `triton_op` has made an operator of; None for all others."""
    if isinstance(operator, (_Overload, _Packet)):
        return _definitions.get(schema_of(overload_of(operator)).name)
    return operator if hasattr(type(operator), "set_kernel_enabled") else None


def functions_of(definition: Any) -> list[Any]:
    """The functions of such an operator: its own one first, those for a kind of device, and its backward formula."""
    own = attribute(definition, "_init_fn", lambda _: None)
    backward = attribute(definition, "_backward_fn", lambda _: None)
    return [own, *attribute(definition, "_backend_fns", lambda _: {}).values(), backward]


def defined_for_a_cpu() -> list[Any]:
    """The definitions of operators that have a function for a CPU besides their own."""
    return [it for it in list(_definitions.values()) if "cpu" in attribute(it, "_backend_fns", lambda _: ())]


_FunctionalTensorMode = find("torch._subclasses.functional_tensor.FunctionalTensorMode")


def define_kernel_op(name: str, body: Callable[..., Any], *, opaque: bool) -> Any:
    """`torch.library.triton_op` or, for one that no graph looks into, what amounts to `torch.library.custom_op`.

    Of a triton_op's body only Inductor sees the launches, and no dispatch mode of the user's.
    """
    if opaque and _FunctionalTensorMode is None:
        return torch.library.custom_op(name, body, mutates_args=())
    with _kernels_found_on_demand():
        definition: Any = torch.library.triton_op(name, body, mutates_args=())
    if opaque:
        definition.register_torch_dispatch(_FunctionalTensorMode, _keep_as_one_node)
    return definition


_triton_ops: Any = find("torch._library.triton")


@contextlib.contextmanager
def _kernels_found_on_demand() -> Iterator[None]:
    """Let `torch.library.triton_op` find a body's kernels only when a cache of compiled graphs asks for its key.

    It parses the source of the body and of all that it calls, which for all operators takes longer than the import of
    torch, and needs the whole of Dynamo.
    """
    find_kernels = getattr(_triton_ops, "get_inner_triton_kernels", None)
    if find_kernels is None:
        yield
        return
    _triton_ops.get_inner_triton_kernels = functools.partial(_KernelsOfBody, find_kernels)
    try:
        yield
    finally:
        _triton_ops.get_inner_triton_kernels = find_kernels


class _KernelsOfBody(Sequence[Any]):
    """The Triton kernels that a function launches, found when they are first asked for."""

    def __init__(self, find_kernels: Callable[[Any], list[Any]], body: Callable[..., Any]) -> None:
        self._find_kernels, self._body = find_kernels, body

    @functools.cached_property
    def _kernels(self) -> list[Any]:
        return self._find_kernels(self._body)

    def __len__(self) -> int:
        return len(self._kernels)

    def __getitem__(self, place: Any) -> Any:
        return self._kernels[place]


def _keep_as_one_node(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
    return mode.__torch_dispatch__(op, types, args, kwargs)


_FunctionBase = find("torch._C._FunctionBase")


@contextlib.contextmanager
def overriding(namespace: str) -> Iterator[torch.library.Library]:
    """Give a library whose implementations stand in for those of a namespace inside."""
    library = torch.library.Library(namespace, "IMPL")
    try:
        yield library
    finally:
        library._destroy()


def bare_apply(function: type[Function]) -> Callable[..., Any]:
    """`function.apply` without its look for torch.func's transforms, which whoever calls it has done."""
    if _FunctionBase is None:
        return function.apply
    return super(Function, function).apply  # type: ignore[misc]


def noted_by(ctx: Any) -> tuple[tuple[Tensor | None, ...], tuple[Tensor, ...]]:
    """Return the tensors that a forward pass saved and those that it marked as not differentiable, if that is known."""
    return getattr(ctx, "to_save", None) or (), getattr(ctx, "non_differentiable", None) or ()


_included: Callable[[], Any] = required("torch._C._dispatch_tls_local_include_set")
_excluded: Callable[[], Any] = required("torch._C._dispatch_tls_local_exclude_set")
_with_keys: Callable[[Any, Any], Any] = required("torch._C._ForceDispatchKeyGuard")
_key: Any = required("torch._C.DispatchKey")


def autograd_keys() -> contextlib.AbstractContextManager[Any]:
    """Let the dispatcher pass autograd, from which it keeps away in the body of an operator."""
    excluded = _excluded()
    for key in (_key.AutogradFunctionality, _key.AutogradOther, _key.AutogradNestedTensor, _key.ADInplaceOrView):
        excluded = excluded.remove(key)
    return _with_keys(_included().add(_key.ADInplaceOrView), excluded)
