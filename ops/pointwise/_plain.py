"""How pointwise operators are written in plain PyTorch."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node

from llmk.registry.patterns import Call, Cast, Emit, Pattern, Plain, Value, Var, as_dtype, range_of, value_of

_gate, _up = Cast(Var("gate")), Cast(Var("up"))


def _gated(activated: Pattern) -> Pattern:
    return Cast(Call("mul", Cast(activated), _up))


def _packed(gate: Node, up: Node) -> Node | None:
    """The tensor whose first half is the gate and whose second is up."""
    first, second = range_of(gate), range_of(up)
    if first is None or second is None or first[0] is not second[0]:
        return None
    width = value_of(first[0]).shape[-1]
    return first[0] if (first[1:], second[1:]) == ((0, width // 2), (width // 2, width)) else None


def _build(emit: Emit, values: Mapping[str, Any], op: Callable[..., Any], **options: Any) -> Any:
    packed = _packed(values["gate"], values["up"])
    if packed is not None:
        return emit(op, as_dtype(emit, packed, emit.wanted.dtype), **options)
    gate, up = (as_dtype(emit, values[name], emit.wanted.dtype) for name in ("gate", "up"))
    return emit(op, gate, up, **options)


def _build_swiglu(emit: Emit, values: Mapping[str, Any]) -> Any:
    return _build(emit, values, torch.ops.llmk.swiglu.default)


def _build_geglu(emit: Emit, values: Mapping[str, Any]) -> Any:
    return _build(emit, values, torch.ops.llmk.geglu.default, approximate=values.get("approximate", "tanh"))


def _gelu_by_hand() -> Pattern:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
    cube = Call("pow", _gate, 3) | Call("mul", Call("mul", _gate, _gate), _gate)
    inner = Call("mul", Call("add", _gate, Call("mul", cube, 0.044715)), math.sqrt(2 / math.pi))
    return Call("mul", Call("mul", _gate, 0.5), Call("add", Call("tanh", inner), 1))


SWIGLU = (
    Plain(
        results=(_gated(Call("silu", _gate) | Call("mul", _gate, Call("sigmoid", _gate))),),
        signs=("silu",),
        build=_build_swiglu,
    ),
)
GEGLU = (
    Plain(
        results=(_gated(Call("gelu", _gate, approximate=Value("approximate")) | _gelu_by_hand()),),
        signs=("gelu",),
        build=_build_geglu,
    ),
)

_relu = Call("relu", Var("input"))
RELU_SQUARED = (Plain(results=(Call("pow", _relu, 2) | Call("square", _relu) | Call("mul", _relu, _relu),)),)
