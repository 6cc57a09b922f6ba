"""How rotary position embeddings are written in plain PyTorch."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from llmk.registry.patterns import (
    Call,
    Cast,
    Emit,
    EveryOther,
    Half,
    Left,
    Pattern,
    Plain,
    Reshaped,
    Var,
    With,
    as_dtype,
    range_of,
    value_of,
)

aten = torch.ops.aten
_cos, _sin = Cast(Var("cos")), Cast(Var("sin"))


def _rotated(name: str) -> Pattern:
    """x * cos + rotate(x) * sin, where cos and sin have the width of x."""
    x = Cast(Var(name))
    halves = Call("cat", [Call("neg", Half(x, second=True)), Half(x, second=False)], -1)
    pairs = Reshaped(Call("stack", [Call("neg", EveryOther(x, odd=True)), EveryOther(x, odd=False)], -1))
    rotate = With("interleaved", False, halves) | With("interleaved", True, pairs)
    return Cast(Call("add", Call("mul", x, _cos), Call("mul", Cast(rotate), _sin)))


def _by_halves(name: str) -> Pattern:
    """The two halves of the result side by side, where cos and sin have the width of a half."""
    x, found = Cast(Var(name)), []
    for of_pairs, part in ((False, Half), (True, EveryOther)):  # DeepSeek's takes neighbours apart
        a, b = (Cast(part(x, second)) for second in (False, True))
        first = Call("sub", Call("mul", a, _cos), Call("mul", b, _sin))
        second = Call("add", Call("mul", b, _cos), Call("mul", a, _sin))
        found.append(With("of_pairs", of_pairs, Call("cat", [Cast(first), Cast(second)], -1)))
    return With("half_as_wide", True, Cast(found[0] | found[1]))


def _complex(name: str) -> Pattern:
    """Neighbours as complex numbers, times others of absolute value 1."""
    x = Call("view_as_complex", Reshaped(Cast(Var(name))))
    return Cast(Reshaped(Call("view_as_real", Call("mul", x, Var("angles", lambda value: value.is_complex())))))


def _turned(name: str) -> Pattern:
    """Any of these."""
    return _rotated(name) | _by_halves(name) | _complex(name)


def _partly(name: str) -> Pattern:
    """Any of these, of the first features, with the others after them."""
    return Cast(Call("cat", [_turned(name), Cast(Var(f"{name}_rest"))], -1))


def _whole(emit: Emit, values: Mapping[str, Any], name: str) -> Node:
    """The heads that are turned, with the features that pass.

    Raises:
        Left: What is turned and what passes are not one tensor.
    """
    x, rest = values[name], values.get(f"{name}_rest")
    if rest is not None and value_of(rest).shape[-1] != 0:
        turned, passed = range_of(x), range_of(rest)
        if turned is None or passed is None or turned[0] is not passed[0]:
            raise Left("what is turned and what passes are not parts of one tensor")
        x, first, last = turned
        if first != 0 or last != passed[1] or passed[2] != value_of(x).shape[-1]:
            raise Left("what is turned are not the first features, or what passes not all the others")
    if values.get("of_pairs"):
        width = value_of(x).shape[-1]
        x = emit(aten.cat.default, [emit(aten.slice.Tensor, x, -1, i, width, 2) for i in (0, 1)], -1)
    if value_of(x).dim() != 4:
        raise Left(f"heads have {value_of(x).dim()} axes, and the operator's 4")
    return as_dtype(emit, x, emit.wanted.dtype)


def _cos_and_sin(emit: Emit, values: Mapping[str, Any]) -> tuple[Node, Node]:
    """As wide as what they turn."""
    if "angles" in values:
        parts = emit(aten.view_as_real.default, values["angles"])
        cos, sin = (emit(aten.select.int, parts, -1, i) for i in (0, 1))
        return tuple(emit(aten.repeat_interleave.self_int, x, 2, -1) for x in (cos, sin))  # type: ignore[return-value]
    cos, sin = values["cos"], values["sin"]
    if "half_as_wide" in values:
        cos, sin = (emit(aten.cat.default, [x, x], -1) for x in (cos, sin))
    return cos, sin


def _of_tokens(emit: Emit, node: Node) -> tuple[Node, int]:
    """cos or sin as [1 or B, S, R], and the axis of heads among the four of what they turn.

    Raises:
        Left: Heads have angles of their own.
    """
    shape = value_of(node).shape
    if len(shape) == 2:
        return emit(aten.unsqueeze.default, node, 0), 1
    if len(shape) == 3 and _is_one(shape[0]):
        return node, 1
    for axis in (1, 2):
        if len(shape) == 4 and _is_one(shape[axis]):
            return emit(aten.select.int, node, axis, 0), axis
    if len(shape) == 3 and _is_one(shape[1]):
        return emit(aten.transpose.int, node, 0, 1), 2
    raise Left(f"angles of shape {tuple(shape)} are not the same for all heads")


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _build(emit: Emit, values: Mapping[str, Any]) -> Any:
    k, q = (_whole(emit, values, name) for name in ("k", "q"))
    cos, sin = _cos_and_sin(emit, values)
    (cos, heads), (sin, _) = _of_tokens(emit, cos), _of_tokens(emit, sin)
    if heads == 2:
        k, q = (emit(aten.transpose.int, x, 1, 2) for x in (k, q))
    interleaved = values.get("interleaved", "angles" in values)
    q, k = emit(torch.ops.llmk.rope.default, q, k, cos, sin, interleaved=interleaved)
    return (k, q) if heads == 1 else tuple(emit(aten.transpose.int, x, 1, 2) for x in (k, q))


ROPE = (
    Plain(results=(_partly("k"), _partly("q")), build=_build),
    Plain(results=(_turned("k"), _turned("q")), signs=("view_as_complex",), build=_build),
)
"""The keys first: they are turned last, and the search begins at the end of a graph."""
