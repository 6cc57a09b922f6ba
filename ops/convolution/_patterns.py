"""Patterns of plain PyTorch that the short causal convolution replaces."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from llmk.compiler.patterns import (
    Arg,
    Cast,
    GraphBuilder,
    Input,
    KeywordArg,
    Named,
    NoMatch,
    Pattern,
    RewritePattern,
    Through,
    View,
    With,
    all_arguments,
    arguments,
    name_of,
    same,
    value_of,
    widened,
)
from llmk.compiler.spellings import Where, silu, transposed_from
from llmk.registry.private.compilers import statically_known_true

aten = torch.ops.aten
OPTIONS = "stride", "padding", "dilation", "groups"
OTHERWISE = (
    "it is no convolution over a token and those right before it: one with kernel_size - 1 zeros on the left is found, "
    "as is one with as many on both sides whose result is cut to the length of its input"
)


def _beginning_of(node: Any) -> Node | None:
    """Return the tensor whose first elements along an axis a slice takes."""
    given = arguments(node, "self", "dim", "start", "end") if name_of(node) == "slice" else None
    if given is None or not same(value_of(node).storage_offset(), value_of(given["self"]).storage_offset()):
        return None
    return given["self"]


def _silu(x: Pattern) -> Pattern:
    return With("activation", "silu", silu(Named("convolved", x)))


def _causal_conv1d() -> Pattern:
    x = Input(KeywordArg("input"))
    padded = x.pad(Arg("pad"), value=Arg("fill")) | x.constant_pad_nd(Arg("pad"), Arg("fill"))
    weight = Input(Input(KeywordArg("taps")).unsqueeze(1) | KeywordArg("weight"))
    bias = Input(KeywordArg("bias")) | None
    convolved = Cast(Where(_is_of_each_channel, (padded | x).conv1d(weight, bias, *map(Arg, OPTIONS))))
    beginning = Cast(Through(_beginning_of, convolved))
    transposed = With("transposed", True, View(transposed_from, beginning))
    return Cast(_silu(beginning) | _silu(transposed)) | Through(_beginning_of, _silu(convolved)) | beginning


def _is_of_each_channel(node: Node) -> bool:
    """Return True if a convolution has one filter for each channel, and not one for each pair of them."""
    given = all_arguments(node)
    input, weight = value_of(given["input"]), value_of(given["weight"])
    return (
        same(given["groups"], input.shape[-2])
        and same(weight.shape[0], input.shape[-2])
        and statically_known_true(weight.shape[-1] != 1)
    )


def _require_causal(values: Mapping[str, Any], input: Tensor, taps: Any) -> None:
    """Check that each channel is convolved over a token and the `taps - 1` before it.

    Raises:
        NoMatch: It is not.
    """
    stride, padding, dilation = (_first(values[name]) for name in ("stride", "padding", "dilation"))
    if input.dim() != 3 or not isinstance(taps, int):
        raise NoMatch("it has no batch, or the number of its taps is not known")
    if (stride, dilation) != (1, 1):
        raise NoMatch(f"its stride is {stride} and its dilation {dilation}, and the operator's are 1")
    left = padding
    if "pad" in values:
        left, *others = (value_of(x) for x in values["pad"])
        if padding not in (0, "valid") or any(x != 0 for x in others) or values["fill"] not in (None, 0):
            raise NoMatch("it is padded with something else than zeros on the left")
    if left != taps - 1:
        raise NoMatch(f"there are {left} zeros before the first token, and the operator has {taps - 1}")


def _first(option: Any) -> Any:
    """Return an option of a convolution over one axis, which may be written as a list."""
    return value_of(option[0] if isinstance(option, list | tuple) else option)


def _build(builder: GraphBuilder, values: Mapping[str, Any]) -> Any:
    weight = values.get("taps", values.get("weight"))
    assert isinstance(weight, Node)
    taps, transposed = value_of(weight).shape[-1], "transposed" in values
    wanted = builder.wanted.transpose(1, 2) if transposed else builder.wanted
    _require_causal(values, value_of(values["input"]), taps)
    if not same(wanted.shape[2], value_of(values["input"]).shape[2]):
        raise NoMatch("its result is not as long as its input")
    input = widened(builder, values["input"], builder.wanted.dtype)
    weight = weight if "taps" in values else builder(aten.squeeze.dim, weight, 1)
    out, _ = builder(
        torch.ops.llmk.causal_conv1d.default,
        input,
        weight,
        values.get("bias"),
        activation=values.get("activation"),
    )
    out = _laid_out(builder, out, wanted, taps)
    return builder(aten.transpose.int, out, 1, 2) if transposed else out


def _laid_out(builder: GraphBuilder, out: Node, wanted: Tensor, taps: int) -> Node:
    """Return the result in the layout of PyTorch's, whose rows are as long as before they were cut."""
    if wanted.is_contiguous():
        contiguous = torch.contiguous_format
        return out if value_of(out).is_contiguous() else builder(aten.clone.default, out, memory_format=contiguous)
    if wanted.stride(2) != 1:
        return out
    return builder(aten.slice.Tensor, builder(aten.constant_pad_nd.default, out, [0, taps - 1]), 2, 0, wanted.shape[2])


def _why_left(node: Node) -> str:
    return OTHERWISE if value_of(node).dim() == 3 and _is_of_each_channel(node) else ""


CAUSAL_CONV1D = (RewritePattern(results=(_causal_conv1d(),), anchor_ops=("conv1d",), why_left=_why_left, build=_build),)
