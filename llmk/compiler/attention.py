"""Attention whose tensors do what its options do: hide the future, and share keys and values between heads.

A mask is a tensor of length times length, and keeps the fast kernels away; keys and values that are repeated for the
heads that share them are saved for the backward pass as often. The replacement is the same operator without either.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from llmk.apart import apart_from_caller
from llmk.compiler.patterns import (
    Arg,
    Either,
    GraphBuilder,
    KeywordArg,
    NoMatch,
    Number,
    Pattern,
    RewritePattern,
    Through,
    View,
    With,
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


def _repeated(name: str) -> Pattern:
    """Match heads [B, KV * n, S, D], each repeated n times in a row, before or after they are moved to the second axis.

    The tensor without the repeats is captured under `name`, and the axis of its heads under `name_axis`.
    """
    axis = Either(1, 2, -3, -2)
    return _repeated_along(1, name) | _repeated_along(2, name).transpose(axis, axis)


def _repeated_along(axis: int, name: str) -> Pattern:
    heads = KeywordArg(name, lambda x: x.dim() == 4)
    column = Through(_whole_slice_of, heads).unsqueeze(Either(axis + 1, axis - 4))
    wide = Through(_whole_slice_of, column).expand(Arg(f"{name}_sizes"))
    at_once = heads.repeat_interleave(Number(f"{name}_times"), Either(axis, axis - 4), output_size=Arg(f"{name}_width"))
    return With(f"{name}_axis", axis, View(reshape_of, Through(_whole_slice_of, wide)) | at_once)


def _whole_slice_of(node: Any) -> Node | None:
    """Return the tensor of which a slice takes all."""
    given = arguments(node, "self", "dim", "start", "end") if name_of(node) == "slice" else None
    if given is None or not same_shape(value_of(node).shape, value_of(given["self"]).shape):
        return None
    return given["self"]


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
    given = key, value, mask, Arg("dropout_p"), Arg("is_causal")
    attention = KeywordArg("query").scaled_dot_product_attention(*given, **options)
    return RewritePattern(results=(attention,), build=_build)


ATTENTION = (
    _attention(_repeated("key"), _repeated("value"), KeywordArg("mask")),
    _attention(KeywordArg("key"), KeywordArg("value"), KeywordArg("mask")),
    _attention(_repeated("key"), _repeated("value"), None),
)
