"""Attention whose tensors do what its options do: hide the future, and share keys and values between heads.

A mask is a tensor of length times length, and keeps the fast kernels away; keys and values that are repeated for the
heads that share them are saved for the backward pass as often. The replacement is the same operator without either.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from llmk.apart import apart_from_caller
from llmk.compiler.patterns import (
    Arg,
    Call,
    GraphBuilder,
    KeywordArg,
    Match,
    NoMatch,
    Pattern,
    RewritePattern,
    arguments,
    name_of,
    reshape_of,
    same,
    same_shape,
    value_of,
)
from llmk.compiler.size_tensors import samples
from llmk.compiler.sizes import NotSmall

aten = torch.ops.aten
OVERLOAD = aten.scaled_dot_product_attention.default


@dataclass(frozen=True)
class Repeated(Pattern):
    """Heads [B, KV * n, S, D], each repeated n times in a row, before or after they are moved to the second axis.

    The tensor without the repeats is captured under `name`, and the axis of its heads under `name_axis`.
    """

    name: str

    def find(self, value: Any, match: Match) -> Iterator[Match]:
        axis = 1
        transposed = arguments(value, "self", "dim0", "dim1") if name_of(value) == "transpose" else None
        if transposed is not None and {transposed["dim0"] % 4, transposed["dim1"] % 4} == {1, 2}:
            match, value, axis = match.with_nodes(value), transposed["self"], 2
        nodes, source = repeated(value, axis)
        if source is not None:
            for inner in match.with_nodes(*nodes).bind(self.name, source):
                yield from inner.bind(f"{self.name}_axis", axis)


def repeated(node: Any, axis: int) -> tuple[list[Node], Node | None]:
    """Return the nodes that repeat the entries of an axis of a tensor with four, and the tensor or None."""
    if name_of(node) == "repeat_interleave":
        given = arguments(node, "self", "repeats", "dim", "output_size")
        if given is None or not isinstance(given.get("repeats"), int) or value_of(given["self"]).dim() != 4:
            return [node], None
        return [node], given["self"] if given["dim"] in (axis, axis - 4) else None
    joined = reshape_of(node)
    nodes, wide = through_whole_slices(joined, [node])
    expanded = arguments(wide, "self", "size", "implicit") if name_of(wide) == "expand" else None
    if joined is None or expanded is None:
        return [], None
    nodes, narrow = through_whole_slices(expanded["self"], [*nodes, wide])
    given = arguments(narrow, "self", "dim") if name_of(narrow) == "unsqueeze" else None
    if given is None or given["dim"] % 5 != axis + 1:
        return [], None
    nodes, source = through_whole_slices(given["self"], [*nodes, narrow])
    shape, new = list(value_of(source).shape), list(value_of(wide).shape)
    if len(shape) != 4 or len(new) != 5:
        return [], None
    times = new.pop(axis + 1)
    merged = [*shape[:axis], shape[axis] * times, *shape[axis + 1 :]]
    is_it = same_shape(new, shape) and same_shape(merged, value_of(node).shape)
    return nodes, source if is_it else None


def through_whole_slices(node: Any, nodes: list[Node]) -> tuple[list[Node], Any]:
    """Return the tensor below slices that take all of it, with these slices added to the nodes."""
    while name_of(node) == "slice":
        given = arguments(node, "self", "dim", "start", "end")
        if given is None or not same_shape(value_of(node).shape, value_of(given["self"]).shape):
            break
        nodes, node = [*nodes, node], given["self"]
    return nodes, node


def hides_the_future(mask: Node, query: Tensor, key: Tensor) -> bool:
    """Return True if a mask hides all tokens after each and nothing else, and False if it hides nothing.

    Raises:
        NoMatch: It may hide other tokens.
    """
    if "made" not in mask.meta:
        raise NoMatch("its mask is not made from sizes alone")
    if not same(query.shape[-2], key.shape[-2]):
        raise NoMatch("queries and keys are not known to be equally many")
    if not same_shape(value_of(mask).shape[-2:], (query.shape[-2], key.shape[-2])):
        raise NoMatch("its mask is not one of queries by keys")
    return apart_from_caller(_hides_the_future, mask, query.dtype)


def _hides_the_future(mask: Node, dtype: torch.dtype) -> bool:
    possible = {True, False}
    try:
        for tensor, _ in samples(mask):
            n, hidden = tensor.shape[-1], hidden_by(tensor, dtype)
            future = torch.ones(n, n, dtype=torch.bool).triu(1)
            possible = {causal for causal in possible if bool((hidden == (future & causal)).all())}
            if not possible:
                raise NoMatch(f"its mask of {n} tokens hides something else than what comes after each")
    except NotSmall as why:
        raise NoMatch(f"its mask cannot be computed for few tokens: {why}") from why
    return False not in possible


def hidden_by(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what a mask hides: False in one of truth values, and no more than the lowest number of a dtype in another.

    Raises:
        NoMatch: It has other numbers than that and 0.
    """
    if mask.dtype == torch.bool:
        return ~mask
    hidden = mask <= torch.finfo(dtype).min
    if not bool((hidden | (mask == 0)).all()):
        raise NoMatch("its mask is not made of true and false, or of 0 and the lowest number")
    return hidden


def _build(builder: GraphBuilder, values: Mapping[str, Any]) -> Any:
    mask, causal, query = values.get("mask"), values["is_causal"], values["query"]
    key, value = (as_heads(builder, values, name) for name in ("key", "value"))
    if mask is not None:
        if causal:
            raise NoMatch("it has a mask, and is_causal too")
        causal = hides_the_future(mask, value_of(query), value_of(key))
    shares = "key_axis" in values
    if shares and not may_share(value_of(query), value_of(value)):
        raise NoMatch("its kernel takes no keys and values that heads share in this dtype or size")
    return builder(
        OVERLOAD,
        query,
        key,
        value,
        None,
        values["dropout_p"],
        causal,
        scale=values["scale"],
        enable_gqa=values["enable_gqa"] or shares,
    )


def as_heads(builder: GraphBuilder, values: Mapping[str, Any], name: str) -> Node:
    return builder(aten.transpose.int, values[name], 1, 2) if values.get(f"{name}_axis") == 2 else values[name]


def may_share(query: Tensor, value: Tensor) -> bool:
    """Return True if the flash kernels take shared heads: the one for float32 on a GPU wants them repeated."""
    narrow = query.dtype in (torch.float16, torch.bfloat16) or query.device.type == "cpu"
    width = query.shape[-1]
    return narrow and isinstance(width, int) and width <= 256 and same(width, value.shape[-1])


def _attention(key: Pattern, value: Pattern, mask: Any) -> RewritePattern:
    options = {"scale": Arg("scale"), "enable_gqa": Arg("enable_gqa")}
    pattern = Call(
        "scaled_dot_product_attention",
        KeywordArg("query"),
        key,
        value,
        mask,
        Arg("dropout_p"),
        Arg("is_causal"),
        **options,
    )
    return RewritePattern(results=(pattern,), build=_build)


ATTENTION = (
    _attention(Repeated("key"), Repeated("value"), KeywordArg("mask")),
    _attention(KeywordArg("key"), KeywordArg("value"), KeywordArg("mask")),
    _attention(Repeated("key"), Repeated("value"), None),
)
