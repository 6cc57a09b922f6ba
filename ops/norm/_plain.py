"""How normalizations are written in plain PyTorch."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from llmk.registry.patterns import (
    Call,
    Cast,
    Emit,
    Input,
    Left,
    Named,
    Number,
    Pattern,
    Plain,
    Value,
    Var,
    name_of,
    require_last_axis,
    value_of,
    widened,
)

SIGNS = ("rms_norm", "rsqrt", "linalg_vector_norm")
OTHERWISE = (
    "what is computed around it is no norm: x * rsqrt(mean(x * x, -1) + eps) of one x is found, as is F.rms_norm"
)
LENGTHS = (
    "F.normalize divides by max(length, eps), where a norm has eps inside the root, which is another function near 0: "
    "F.rms_norm(x, x.shape[-1:], weight, eps) is found"
)


def _why_left(node: Node) -> str:
    """Why a norm was left: vectors that are divided by their lengths are meant where something multiplies them then."""
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
    """x / sqrt(y)."""
    root = Call("sqrt", y) | Call("pow", y, 0.5)
    inverse = Call("rsqrt", y) | Call("pow", y, -0.5) | Call("reciprocal", root)
    return Call("mul", x, Cast(inverse)) | Call("div", x, Cast(root))


def _rms_norm(input: Pattern) -> Pattern:
    """By hand, with Gemma's weight that is stored minus one too, and `F.rms_norm`; with a weight or without."""
    x, weight = Input(input), Input(Var("weight"))
    scale = Cast(Call("add", weight, Number("offset"))) | weight
    mean_square = Call("mean", _square(x), Value("dim"), True)
    by_hand = _over_root(x, Call("add", mean_square, Number("eps")))
    given = Named("given", x)
    normed = Cast(by_hand | Call("rms_norm", given, Value("normalized_shape"), None, Value("eps")))
    whole = Call("rms_norm", given, Value("normalized_shape"), scale, Value("eps"))
    return Cast(Call("mul", normed, scale) | whole) | normed


@functools.cache
def _own_eps(dtype: torch.dtype) -> float:
    """Ask `F.rms_norm` which eps it adds where it is given none, as releases differ in whose eps it is in 16 bits."""
    small = torch.full((1,), 2.0**-16, dtype=dtype, device="cpu")
    grown = float(torch.rms_norm(small, (1,)) / small)  # 1 / sqrt(eps) nearly
    return min((torch.finfo(d).eps for d in (dtype, torch.float32)), key=lambda eps: abs(eps**-0.5 - grown))


def _options(values: Mapping[str, Any], input: Node) -> dict[str, Any]:
    """The keyword arguments of rms_norm.

    Raises:
        Left: It is not over the last axis.
    """
    tensor = value_of(input)
    if "normalized_shape" in values:
        if len(values["normalized_shape"]) != 1:
            raise Left(f"it is over {len(values['normalized_shape'])} axes, and the operator's over the last")
    else:
        require_last_axis(values["dim"], tensor)
    eps = values["eps"]
    if eps is None:
        eps = _own_eps(value_of(values["given"]).dtype)
        if torch.is_autocast_enabled(tensor.device.type) and eps != _own_eps(torch.float32):
            raise Left("eps is that of a dtype, and autocast chooses the dtype")
    return {"weight": values.get("weight"), "eps": eps, "offset": values.get("offset", 0.0)}


def _build_rms_norm(emit: Emit, values: Mapping[str, Any]) -> Any:
    options, wanted = _options(values, values["input"]), emit.wanted
    input, transpose = widened(emit, values["input"], wanted.dtype), torch.ops.aten.transpose.int
    # Heads that lie in memory after the tokens they are of stay so: rows are normalized in any order.
    turned = wanted.dim() > 2 and not wanted.is_contiguous() and wanted.transpose(-3, -2).is_contiguous()
    if turned:
        input = emit(transpose, input, -3, -2)
    normed = emit(torch.ops.llmk.rms_norm.default, input, **options)
    return emit(transpose, normed, -3, -2) if turned else normed


def _build_add_rms_norm(emit: Emit, values: Mapping[str, Any]) -> Any:
    options = _options(values, values["input"])
    return emit(torch.ops.llmk.add_rms_norm.default, values["input"], values["residual"], **options)


RMS_NORM = (Plain(results=(_rms_norm(Var("input")),), signs=SIGNS, why_left=_why_left, build=_build_rms_norm),)

_total = Named("total", Call("add", Var("input"), Var("residual")))
ADD_RMS_NORM = (Plain(results=(_rms_norm(_total), "total"), build=_build_add_rms_norm),)


def _layer_norm() -> Pattern:
    x = Input(Var("input"))
    centered = Call("sub", x, Call("mean", x, Value("dim"), True))
    variance = Call("mean", _square(centered), Value("dim"), True)
    for options in ({"unbiased": False}, {"correction": 0}):
        variance = variance | Call("var", x, Value("dim"), keepdim=True, **options)
    normed = Cast(_over_root(centered, Call("add", variance, Number("eps"))))
    scaled = Cast(Call("mul", normed, Input(Var("weight"))))
    shifted = Cast(Call("add", scaled | normed, Input(Var("bias"))))
    whole = Call(
        "layer_norm", x, Value("normalized_shape"), Value("weight"), Value("bias"), Value("eps"), Value("cudnn_enable")
    )
    return Cast(whole) | shifted | scaled | normed


def _build_layer_norm(emit: Emit, values: Mapping[str, Any]) -> Any:
    options = _options(values, values["input"])
    input = widened(emit, values["input"], emit.wanted.dtype)
    return emit(torch.ops.llmk.layer_norm.default, input, options["weight"], values.get("bias"), options["eps"])


LAYER_NORM = (Plain(results=(_layer_norm(),), signs=("layer_norm",), build=_build_layer_norm),)
