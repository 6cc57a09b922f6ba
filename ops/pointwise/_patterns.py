"""Patterns of plain PyTorch that pointwise operators replace."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node

from llmk.compiler.patterns import (
    Arg,
    Cast,
    GraphBuilder,
    Input,
    KeywordArg,
    Pattern,
    RewritePattern,
    cast_of,
    name_of,
    order_in_memory,
    permuted,
    value_of,
    widened,
)
from llmk.compiler.spellings import range_of, silu, square

_gate, _up = Input(KeywordArg("gate")), Input(KeywordArg("up"))


def _gated(activated: Pattern) -> Pattern:
    return Cast(Cast(activated) * _up)


def _packed(builder: GraphBuilder, gate: Node, up: Node) -> Node | None:
    """Return the tensor whose first half is the gate and whose second half is up, if there is one."""
    first, second = range_of(gate), range_of(up)
    if first is None or second is None or not builder.are_same(first[0], second[0]):
        return None
    width = value_of(first[0]).shape[-1]
    return first[0] if (first[1:], second[1:]) == ((0, width // 2), (width // 2, width)) else None


def _build(builder: GraphBuilder, values: Mapping[str, Any], op: Callable[..., Any], **options: Any) -> Any:
    packed = _packed(builder, values["gate"], values["up"])
    if packed is not None:
        return builder(op, widened(builder, packed, builder.wanted.dtype), **options)
    order = order_in_memory(builder.wanted) or list(range(builder.wanted.dim()))
    gate, up = (
        permuted(builder, widened(builder, values[name], builder.wanted.dtype), order) for name in ("gate", "up")
    )
    return permuted(builder, builder(op, gate, up, **options), order, back=True)


def _build_swiglu(builder: GraphBuilder, values: Mapping[str, Any]) -> Any:
    return _build(builder, values, torch.ops.llmk.swiglu.default)


def _build_geglu(builder: GraphBuilder, values: Mapping[str, Any]) -> Any:
    return _build(builder, values, torch.ops.llmk.geglu.default, approximate=values.get("approximate", "tanh"))


def _gelu_by_hand() -> Pattern:
    """Match 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
    cube = _gate.pow(3) | _gate * _gate * _gate
    inner = (_gate + cube * 0.044715) * math.sqrt(2 / math.pi)
    return _gate * 0.5 * (inner.tanh() + 1)


def _why_left(node: Node) -> str:
    """Return the reason for which a gated unit was left, if an activation is multiplied by another tensor."""
    users = [user for user in node.users if cast_of(user) is None] + [
        further for user in node.users if cast_of(user) is not None for further in user.users
    ]
    multiplies = any(name_of(user) == "mul" and len(user.all_input_nodes) == 2 for user in users)
    return OTHERWISE if multiplies else ""


OTHERWISE = "what it multiplies is no gate's other half that swiglu or geglu know"

SWIGLU = (
    RewritePattern(
        results=(_gated(silu(_gate)),),
        anchor_ops=("silu",),
        why_left=_why_left,
        build=_build_swiglu,
    ),
)
GEGLU = (
    RewritePattern(
        results=(_gated(_gate.gelu(approximate=Arg("approximate")) | _gelu_by_hand()),),
        anchor_ops=("gelu",),
        why_left=_why_left,
        build=_build_geglu,
    ),
)

RELU_SQUARED = (RewritePattern(results=(square(KeywordArg("input").relu()),)),)
