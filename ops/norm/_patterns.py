"""Patterns of plain PyTorch that normalizations replace."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from llmk.compiler.patterns import (
    Arg,
    Call,
    Cast,
    GraphBuilder,
    Input,
    KeywordArg,
    Named,
    NoMatch,
    Number,
    Pattern,
    RewritePattern,
    name_of,
    require_last_axis,
    value_of,
    widened,
)

ANCHOR_OPS = ("rms_norm", "rsqrt", "linalg_vector_norm")
OTHERWISE = (
    "what is computed around it is no norm: x * rsqrt(mean(x * x, -1) + eps) of one x is found, as is F.rms_norm"
)
LENGTHS = (
    "F.normalize divides by max(length, eps), where a norm has eps inside the root, which is another function near 0: "
    "F.rms_norm(x, x.shape[-1:], weight, eps) is found"
)


def _why_left(node: Node) -> str:
    """Return the reason for which a norm was left. A division by lengths is one only where its result is multiplied."""
    if name_of(node) != "linalg_vector_norm":
        return OTHERWISE
    divided = [
        div
        for clamp in _users(node, "clamp_min")
        for wide in (clamp, *_users(clamp, "expand_as", "expand"))
        for div in _users(wide, "div")
    ]
    return LENGTHS if any(_users(div, "mul") for div in divided) else ""


def _users(node: Node, *names: str) -> list[Node]:
    return [user for user in node.users if name_of(user) in names]


def _square(x: Pattern) -> Pattern:
    return Call("pow", x, 2) | Call("mul", x, x) | Call("square", x)


def _over_root(x: Pattern, y: Pattern) -> Pattern:
    """Match x / sqrt(y)."""
    root = Call("sqrt", y) | Call("pow", y, 0.5)
    inverse = Call("rsqrt", y) | Call("pow", y, -0.5) | Call("reciprocal", root)
    return Call("mul", x, Cast(inverse)) | Call("div", x, Cast(root))


def _rms_norm(input: Pattern) -> Pattern:
    """Match `F.rms_norm` and norms by hand, with a weight, without, or with Gemma's, which is stored minus one."""
    x, weight = Input(input), Input(KeywordArg("weight"))
    scale = Cast(Call("add", weight, Number("offset"))) | weight
    mean_square = Call("mean", _square(x), Arg("dim"), True)
    by_hand = _over_root(x, Call("add", mean_square, Number("eps")))
    given = Named("given", x)
    normed = Cast(by_hand | Call("rms_norm", given, Arg("normalized_shape"), None, Arg("eps")))
    whole = Call("rms_norm", given, Arg("normalized_shape"), scale, Arg("eps"))
    return Cast(Call("mul", normed, scale) | whole) | normed


@functools.cache
def _own_eps(dtype: torch.dtype) -> float:
    """Return the eps of `F.rms_norm` without one, measured: in 16 bits releases differ in the dtype whose eps it is."""
    small = torch.full((1,), 2.0**-16, dtype=dtype, device="cpu")
    grown = float(torch.rms_norm(small, (1,)) / small)  # 1 / sqrt(eps) nearly
    return min((torch.finfo(d).eps for d in (dtype, torch.float32)), key=lambda eps: abs(eps**-0.5 - grown))


def _options(values: Mapping[str, Any], input: Node) -> dict[str, Any]:
    """Return the keyword arguments of rms_norm.

    Raises:
        NoMatch: It is not over the last axis.
    """
    tensor = value_of(input)
    if "normalized_shape" in values:
        if len(values["normalized_shape"]) != 1:
            raise NoMatch(f"it is over {len(values['normalized_shape'])} axes, and the operator's over the last")
    else:
        require_last_axis(values["dim"], tensor)
    eps = values["eps"]
    if eps is None:
        eps = _own_eps(value_of(values["given"]).dtype)
        if torch.is_autocast_enabled(tensor.device.type) and eps != _own_eps(torch.float32):
            raise NoMatch("eps is that of a dtype, and autocast chooses the dtype")
    return {"weight": values.get("weight"), "eps": eps, "offset": values.get("offset", 0.0)}


def _build_rms_norm(builder: GraphBuilder, values: Mapping[str, Any]) -> Any:
    options, wanted = _options(values, values["input"]), builder.wanted
    input, transpose = widened(builder, values["input"], wanted.dtype), torch.ops.aten.transpose.int
    # Heads whose memory is ordered by tokens keep that layout: rows are normalized in any order.
    transposed = wanted.dim() > 2 and not wanted.is_contiguous() and wanted.transpose(-3, -2).is_contiguous()
    if transposed:
        input = builder(transpose, input, -3, -2)
    normed = builder(torch.ops.llmk.rms_norm.default, input, **options)
    return builder(transpose, normed, -3, -2) if transposed else normed


def _build_add_rms_norm(builder: GraphBuilder, values: Mapping[str, Any]) -> Any:
    options = _options(values, values["input"])
    return builder(torch.ops.llmk.add_rms_norm.default, values["input"], values["residual"], **options)


RMS_NORM = (
    RewritePattern(
        results=(_rms_norm(KeywordArg("input")),), anchor_ops=ANCHOR_OPS, why_left=_why_left, build=_build_rms_norm
    ),
)

_total = Named("total", Call("add", KeywordArg("input"), KeywordArg("residual")))
ADD_RMS_NORM = (RewritePattern(results=(_rms_norm(_total), "total"), build=_build_add_rms_norm),)

_gate = Input(KeywordArg("gate"))
_ACTIVATIONS = {
    "silu": Call("silu", _gate) | Call("mul", _gate, Call("sigmoid", _gate)),
    "sigmoid": Call("sigmoid", _gate),
}


def _gated(x: Pattern, activation: str) -> Pattern:
    return Call("mul", x, Cast(_ACTIVATIONS[activation]))


def _build_rms_norm_gated(
    builder: GraphBuilder, values: Mapping[str, Any], activation: str, norm_before_gate: bool
) -> Any:
    options = _options(values, values["input"])
    if options.pop("offset") != 0.0:
        raise NoMatch("its weight is stored minus one, which rms_norm_gated does not take")
    input, gate = (widened(builder, values[name], builder.wanted.dtype) for name in ("input", "gate"))
    options |= {"activation": activation, "norm_before_gate": norm_before_gate}
    return builder(torch.ops.llmk.rms_norm_gated.default, input, gate, **options)


RMS_NORM_GATED = tuple(
    RewritePattern(
        results=(pattern,),
        build=functools.partial(_build_rms_norm_gated, activation=activation, norm_before_gate=norm_first),
    )
    for activation in _ACTIVATIONS
    for norm_first, pattern in (
        (True, Cast(_gated(_rms_norm(KeywordArg("input")), activation))),
        (False, _rms_norm(Named("gated", _gated(Input(KeywordArg("input")), activation)))),
    )
)


def _layer_norm() -> Pattern:
    x = Input(KeywordArg("input"))
    centered = Call("sub", x, Call("mean", x, Arg("dim"), True))
    variance = Call("mean", _square(centered), Arg("dim"), True)
    for options in ({"unbiased": False}, {"correction": 0}):
        variance = variance | Call("var", x, Arg("dim"), keepdim=True, **options)
    normed = Cast(_over_root(centered, Call("add", variance, Number("eps"))))
    scaled = Cast(Call("mul", normed, Input(KeywordArg("weight"))))
    shifted = Cast(Call("add", scaled | normed, Input(KeywordArg("bias"))))
    whole = Call("layer_norm", x, Arg("normalized_shape"), Arg("weight"), Arg("bias"), Arg("eps"), Arg("cudnn_enable"))
    return Cast(whole) | shifted | scaled | normed


def _build_layer_norm(builder: GraphBuilder, values: Mapping[str, Any]) -> Any:
    options = _options(values, values["input"])
    input = widened(builder, values["input"], builder.wanted.dtype)
    return builder(torch.ops.llmk.layer_norm.default, input, options["weight"], values.get("bias"), options["eps"])


LAYER_NORM = (RewritePattern(results=(_layer_norm(),), anchor_ops=("layer_norm",), build=_build_layer_norm),)
