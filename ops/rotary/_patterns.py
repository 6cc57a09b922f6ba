"""Patterns of plain PyTorch that rotary position embeddings replace."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from llmk.compiler.patterns import (
    Call,
    Cast,
    Either,
    GraphBuilder,
    Input,
    KeywordArg,
    NoMatch,
    Pattern,
    RewritePattern,
    Through,
    View,
    With,
    arguments,
    cast_of,
    item_of,
    name_of,
    reshape_of,
    value_of,
    widened,
)
from llmk.compiler.spellings import Half, Where, expanded_from, over_last_axis, range_of

aten = torch.ops.aten
_cos, _sin = (Input(Through(expanded_from, KeywordArg(name))) for name in ("cos", "sin"))


def _side_by_side(*parts: Pattern) -> Pattern:
    return Where(over_last_axis, Call("cat", parts, Either(-1, 2, 3)))


def _in_pairs(first: Pattern, second: Pattern) -> Pattern:
    """Match the two with their elements in turn."""
    return View(reshape_of, Where(over_last_axis, Call("stack", [first, second], Either(-1, 3, 4))))


def _rotated(name: str) -> Pattern:
    """Match x * cos + rotate(x) * sin, where cos and sin have the width of x."""
    x = Input(KeywordArg(name))
    a, b = Half(x, second=False), Half(x, second=True)
    even, odd = Half(x, second=False, interleaved=True), Half(x, second=True, interleaved=True)
    halves = With("backwards", False, _side_by_side(-b, a)) | With("backwards", True, _side_by_side(b, -a))
    pairs = With("backwards", False, _in_pairs(-odd, even)) | With("backwards", True, _in_pairs(odd, -even))
    rotate = With("interleaved", False, halves) | With("interleaved", True, pairs)
    return Cast(_times(x, _cos) + _times(Cast(rotate), _sin))


def _times(x: Pattern, angle: Pattern) -> Pattern:
    """Match the product, also times 1."""
    return x * angle | x * angle * 1


def _by_halves(name: str) -> Pattern:
    """Match the two halves of the result side by side, where cos and sin have the width of a half."""
    x, found = Input(KeywordArg(name)), []
    for of_pairs in (False, True):
        a, b = (Cast(Half(x, second, of_pairs)) for second in (False, True))
        ahead = a * _cos - b * _sin | a * _cos + b * -_sin, b * _cos + a * _sin
        back = a * _cos + b * _sin, b * _cos - a * _sin | b * _cos + a * -_sin
        for backwards, (first, second) in ((False, ahead), (True, back)):
            parts = Cast(first), Cast(second)
            found.append(With("backwards", backwards, With("of_pairs", of_pairs, _side_by_side(*parts))))
            if of_pairs:  # neighbours again; DeepSeek's come out as halves
                pairs = _in_pairs(*parts)
                found.append(With("backwards", backwards, With("interleaved", True, pairs)))
    return With("half_as_wide", True, Cast(Either(*found)))


def _complex(name: str) -> Pattern:
    """Match neighbours as complex numbers, times others of absolute value 1."""
    x = View(reshape_of, Input(KeywordArg(name))).view_as_complex()
    turned = x * KeywordArg("angles", lambda value: value.is_complex())
    return Cast(View(reshape_of, turned.view_as_real()))


def _rotation(name: str) -> Pattern:
    """Match any of these rotations."""
    return _rotated(name) | _by_halves(name) | _complex(name)


def _partly(name: str) -> Pattern:
    """Match a rotation of the first features, with the other features after them."""
    return Cast(_side_by_side(_rotation(name), Input(KeywordArg(f"{name}_rest"))))


def _whole(builder: GraphBuilder, values: Mapping[str, Any], name: str) -> Node:
    """Return the heads that are rotated, with the features that pass.

    Raises:
        NoMatch: The rotated features and those that pass are not one tensor.
    """
    x, rest = values[name], values.get(f"{name}_rest")
    if rest is not None and value_of(rest).shape[-1] != 0:
        rotated, passed = range_of(x), range_of(rest)
        if rotated is None or passed is None or not builder.are_same(rotated[0], passed[0]):
            raise NoMatch("what is rotated and what passes are not parts of one tensor")
        x, first, last = rotated
        if first != 0 or last != passed[1] or passed[2] != value_of(x).shape[-1]:
            raise NoMatch("what is rotated are not the first features, or what passes not all the others")
    if values.get("of_pairs"):
        width = value_of(x).shape[-1]
        x = builder(aten.cat.default, [builder(aten.slice.Tensor, x, -1, i, width, 2) for i in (0, 1)], -1)
    return widened(builder, x, builder.wanted.dtype)


def _cos_and_sin(builder: GraphBuilder, values: Mapping[str, Any]) -> tuple[Node, Node]:
    """Return cos and sin as wide as the features that they rotate."""
    if "angles" in values:
        parts = builder(aten.view_as_real.default, values["angles"])
        cos, sin = (builder(aten.select.int, parts, -1, i) for i in (0, 1))
        return tuple(builder(aten.repeat_interleave.self_int, x, 2, -1) for x in (cos, sin))  # type: ignore[return-value]
    cos, sin = values["cos"], values["sin"]
    if values.get("backwards"):
        sin = builder(aten.neg.default, sin)
    if "half_as_wide" in values and values.get("interleaved"):
        cos, sin = (builder(aten.repeat_interleave.self_int, x, 2, -1) for x in (cos, sin))
    elif "half_as_wide" in values:
        cos, sin = (builder(aten.cat.default, [x, x], -1) for x in (cos, sin))
    return cos, sin


def _of_tokens(builder: GraphBuilder, node: Node, alone: bool) -> tuple[Node, int]:
    """Return cos or sin as [1 or B, S, R], and the axis of heads among the four axes of q and k.

    Args:
        builder: Puts calls into the graph.
        node: The angles as they are multiplied.
        alone: Each sequence has one head, without an axis.

    Raises:
        NoMatch: Heads have angles of their own.
    """
    shape = value_of(node).shape
    if len(shape) == 2:
        return builder(aten.unsqueeze.default, node, 0), 1
    if len(shape) == 3 and (alone or _is_one(shape[0])):
        return node, 1
    for axis in (1, 2):
        if len(shape) == 4 and _is_one(shape[axis]):
            return builder(aten.select.int, node, axis, 0), axis
    if len(shape) == 3 and _is_one(shape[1]):
        return builder(aten.transpose.int, node, 0, 1), 2
    raise NoMatch(f"angles of shape {tuple(shape)} are not the same for all heads")


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _build(builder: GraphBuilder, values: Mapping[str, Any]) -> Any:
    k, q = (_whole(builder, values, name) for name in ("k", "q"))
    axes = value_of(q).dim(), value_of(k).dim()
    if axes not in ((3, 3), (4, 4)):
        raise NoMatch(f"heads have {axes[0]} axes and {axes[1]}, and the operator's 4")
    alone = axes == (3, 3)
    cos, sin = _cos_and_sin(builder, values)
    (cos, heads), (sin, _) = (_of_tokens(builder, x, alone) for x in (cos, sin))
    if alone:
        k, q = (builder(aten.unsqueeze.default, x, 1) for x in (k, q))
    if heads == 2:
        k, q = (builder(aten.transpose.int, x, 1, 2) for x in (k, q))
    interleaved = values.get("interleaved", "angles" in values)
    q, k = builder(torch.ops.llmk.rope.default, q, k, cos, sin, interleaved=interleaved)
    if alone:
        k, q = (builder(aten.squeeze.dim, x, 1) for x in (k, q))
    return (k, q) if heads == 1 else tuple(builder(aten.transpose.int, x, 1, 2) for x in (k, q))


def _why_left(node: Node) -> str:
    """Return the reason for which a rotation was left that ends in a node: a negated half, or two sums of products."""
    name = name_of(node)
    if name == "copy_":
        given = arguments(node, "self", "src") or {}
        into = arguments(given.get("self"), "self", "dim", "start", "end", "step") or {}
        is_first = (into.get("step"), into.get("start") or 0) == (2, 0)
        return IN_PLACE if is_first and _is_sum_of_products(given["src"]) else ""
    given = arguments(node, "tensors", "dim")
    parts = [_uncast(part) for part in given["tensors"]] if given else []
    negated = [name_of(part) == "neg" for part in parts]
    is_one = sorted(negated) == [False, True] and _is_part(parts[negated.index(False)])
    return OTHERWISE if name == "view_as_complex" or is_one or _are_two_sums(parts) else ""


def _uncast(node: Node) -> Node:
    while (source := cast_of(node)) is not None:
        node = source
    return node


def _is_part(node: Node) -> bool:
    return item_of(node) is not None or name_of(node) in ("slice", "select", "narrow")


def _are_two_sums(parts: list[Node]) -> bool:
    return len(parts) == 2 and all(map(_is_sum_of_products, parts))


def _is_sum_of_products(node: Node) -> bool:
    """Return True if the node is the sum of two products, or their difference."""
    given = arguments(_uncast(node), "self", "other") if name_of(_uncast(node)) in ("add", "sub") else None
    return given is not None and all(name_of(_uncast(x)) == "mul" for x in given.values())


OTHERWISE = (
    "features are turned, but in no known way: q and k [B, heads, S, D], [B, S, heads, D] or [B, S, D], one dtype, "
    "both turned by the same cos and sin, with no change of autocast or of the gradient mode between the two, are found"
)
IN_PLACE = (
    "rotated features are written into slices of a tensor, which is not followed: torch.stack((first, second), dim=-1)"
    ".flatten(-2) of the two is found"
)
ROPE = (
    RewritePattern(results=(_partly("k"), _partly("q")), build=_build),
    RewritePattern(
        results=(_rotation("k"), _rotation("q")),
        anchor_ops=("view_as_complex", "cat", "stack", "copy_"),
        why_left=_why_left,
        build=_build,
    ),
)
"""Keys come first: they are rotated last, and the search begins at the end of a graph."""
