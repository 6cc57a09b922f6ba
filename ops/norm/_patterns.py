"""Patterns of plain PyTorch that normalizations replace."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node

from llmk.compiler.patterns import (
    Arg,
    Cast,
    Either,
    GraphBuilder,
    Input,
    KeywordArg,
    Named,
    NoMatch,
    Number,
    Pattern,
    Result,
    RewritePattern,
    View,
    all_arguments,
    arguments,
    cast_of,
    constant_of,
    item_of,
    name_of,
    order_in_memory,
    permuted,
    require_last_axis,
    reshape_of,
    value_of,
    widened,
)
from llmk.compiler.spellings import Mean, axis_back, over, reciprocal, silu, square

ANCHOR_OPS = ("rms_norm", "rsqrt", "sqrt", "pow", "linalg_vector_norm")
OTHERWISE = (
    "what is computed around it is no norm: x * rsqrt(mean(x * x, -1) + eps) of one x is found, as is F.rms_norm"
)
LENGTHS = (
    "F.normalize divides by max(length, eps), where a norm has eps inside the root, which is another function near 0: "
    "F.rms_norm(x, x.shape[-1:], weight, eps) is found"
)


BETWEEN = (
    "it has a gate, but what stands between the two is more than casts, a weight and views to groups of features and "
    "back, or something else reads it"
)


def _why_left(node: Node) -> str:
    """Return the reason for which a norm was left. A division by lengths is one only where its result is multiplied."""
    if name_of(node) in ("sqrt", "pow"):
        return OTHERWISE if _is_root_of_mean(node) else ""
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


def _is_root_of_mean(node: Node) -> bool:
    """Return True if a node is the root of a statistic of rows and a small number, or one over it."""
    given = arguments(node, "self", "exponent")
    if given is None or given.get("exponent", 0.5) not in (0.5, -0.5) or name_of(given["self"]) != "add":
        return False
    total, eps = all_arguments(given["self"])["self"], constant_of(all_arguments(given["self"])["other"])
    while name_of(total) in ("unsqueeze", "div", "mul") or cast_of(total) is not None:
        total = all_arguments(total)["self"]
    total = (item_of(total) or (total,))[0]
    return eps is not None and name_of(total) in ("mean", "sum", "var", "var_mean")


KEPT = Either(True, False)
"""Whether a statistic keeps its axis."""


def _per_row(x: Pattern) -> Pattern:
    """Match a number for each row, whose axis may be put back behind it."""
    return x | View(axis_back, x)


def _over_root(x: Pattern, statistic: Pattern) -> Pattern:
    """Match x / sqrt(statistic + eps), where the statistic's axis is kept, or put back somewhere."""
    y = _per_row(_per_row(statistic) + Number("eps"))
    inverse, root = _per_row(y.rsqrt() | y.pow(-0.5)), _per_row(y.sqrt() | y.pow(0.5))
    return x * Cast(inverse) | over(x, Cast(root | reciprocal(inverse)))


def _rms_norm(input: Pattern) -> Pattern:
    """Match `F.rms_norm` and norms by hand, with a weight, without, or with Gemma's, which is stored minus one."""
    normed, scale = _normed(Input(input)), _scale()
    whole = Named("given", Input(input)).rms_norm(Arg("normalized_shape"), scale, Arg("eps"))
    return Cast(normed * scale | whole) | normed


def _rms_norm_of_groups(input: Pattern) -> Pattern:
    """Match a view to groups of features, a norm of each group, a view back and a weight of all features, or none."""
    normed = Cast(View(reshape_of, _normed(Input(Named("groups", View(reshape_of, Input(input)))))))
    return Cast(normed * _scale()) | normed


def _scale() -> Pattern:
    weight = Input(KeywordArg("weight"))
    return Cast(weight + Number("offset")) | weight


def _normed(x: Pattern) -> Pattern:
    """Match a norm without a weight."""
    by_hand = _over_root(x, Mean(square(x), Arg("dim"), KEPT))
    return Cast(by_hand | Named("given", x).rms_norm(Arg("normalized_shape"), None, Arg("eps")))


@functools.cache
def _own_eps(dtype: torch.dtype) -> float:
    """Return the eps of `F.rms_norm` without one, measured: in 16 bits releases differ in the dtype whose eps it is."""
    small = torch.full((1,), 2.0**-16, dtype=dtype, device="cpu")
    grown = float(torch.rms_norm(small, (1,)) / small)  # 1 / sqrt(eps) nearly
    return min((torch.finfo(d).eps for d in (dtype, torch.float32)), key=lambda eps: abs(eps**-0.5 - grown))


def _options(values: Mapping[str, Any], input: Node) -> dict[str, Any]:
    """Return the keyword arguments of rms_norm, for a norm of this tensor.

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
    input = widened(builder, values["input"], wanted.dtype)
    # Heads whose memory is ordered by tokens keep that layout: rows are normalized in any order.
    order = order_in_memory(wanted)
    if order is None or order[-1] != wanted.dim() - 1:
        order = list(range(wanted.dim()))
    normed = builder(torch.ops.llmk.rms_norm.default, permuted(builder, input, order), **options)
    return permuted(builder, normed, order, back=True)


def _build_add_rms_norm(builder: GraphBuilder, values: Mapping[str, Any]) -> Any:
    options = _options(values, values["input"])
    return builder(torch.ops.llmk.add_rms_norm.default, values["input"], values["residual"], **options)


RMS_NORM = (
    RewritePattern(
        results=(_rms_norm(KeywordArg("input")),), anchor_ops=ANCHOR_OPS, why_left=_why_left, build=_build_rms_norm
    ),
)

_total = Named("total", KeywordArg("input") + KeywordArg("residual"))
ADD_RMS_NORM = (RewritePattern(results=(_rms_norm(_total), "total"), build=_build_add_rms_norm),)

_gate = Input(KeywordArg("gate"))
_ACTIVATIONS = {"silu": silu(_gate), "sigmoid": _gate.sigmoid()}


def _gated(x: Pattern, activation: str) -> Pattern:
    return x * Cast(_ACTIVATIONS[activation])


def _build_rms_norm_gated(
    builder: GraphBuilder, values: Mapping[str, Any], activation: str, norm_before_gate: bool
) -> Any:
    options = _options(values, values.get("groups", values["input"]))
    if options.pop("offset") != 0.0:
        raise NoMatch("its weight is stored minus one, which rms_norm_gated does not take")
    input, gate = (widened(builder, values[name], builder.wanted.dtype) for name in ("input", "gate"))
    options |= {"activation": activation, "norm_before_gate": norm_before_gate, "group_size": _group_size(values)}
    return builder(torch.ops.llmk.rms_norm_gated.default, input, gate, **options)


def _group_size(values: Mapping[str, Any]) -> int:
    """Return the number of features that are normalized together, 0 for all.

    Raises:
        NoMatch: A group is not a part of one token's features.
    """
    if "groups" not in values:
        return 0
    size, features = value_of(values["groups"]).shape[-1], value_of(values["input"]).shape[-1]
    if not isinstance(size, int) or not isinstance(features, int) or features % size:
        raise NoMatch(f"it is over groups of {size}, which do not part the {features} features of a token")
    return size


def _why_not_gated(node: Node) -> str:
    """Return the reason for which a norm was put in without the gate that is multiplied before it or after it."""
    before = node
    while reshape_of(before) is not None or cast_of(before) is not None or before is node:
        before = before.all_input_nodes[0]
    after = [node]
    for result in after:
        after += [user for user in result.users if reshape_of(user) is not None or cast_of(user) is not None]
    gates = [user for result in after for user in _users(result, UNIT) if all_arguments(user)["up"] is result]
    return BETWEEN if name_of(before) == UNIT or gates else ""


UNIT = "llmk::swiglu"


RMS_NORM_GATED = tuple(
    RewritePattern(
        results=(pattern,),
        anchor_ops=("llmk::rms_norm",),
        why_left=_why_not_gated,
        build=functools.partial(_build_rms_norm_gated, activation=activation, norm_before_gate=norm_first),
    )
    for activation in _ACTIVATIONS
    for of_all in (_rms_norm, _rms_norm_of_groups)
    for norm_first, pattern in (
        (True, Cast(_gated(of_all(KeywordArg("input")), activation))),
        (False, of_all(Named("gated", _gated(Input(KeywordArg("input")), activation)))),
    )
)


def _layer_norm() -> Pattern:
    x, dim = Input(KeywordArg("input")), Arg("dim")
    both = _of_var(x.var_mean, dim)
    centered = x - Cast(_per_row(Mean(x, dim, KEPT) | Result(1, both)))
    variance = Mean(square(centered), dim, KEPT) | _of_var(x.var, dim) | Result(0, both)
    normed = Cast(_over_root(centered, variance))
    scaled = Cast(normed * Input(KeywordArg("weight")))
    shifted = Cast((scaled | normed) + Input(KeywordArg("bias")))
    whole = x.layer_norm(Arg("normalized_shape"), Arg("weight"), Arg("bias"), Arg("eps"), Arg("cudnn_enable"))
    return Cast(whole) | shifted | scaled | normed


def _of_var(call: Callable[..., Pattern], dim: Pattern) -> Pattern:
    """Match a variance that divides by the number of elements, in both of its overloads."""
    return call(dim, keepdim=KEPT, unbiased=False) | call(dim, keepdim=KEPT, correction=0)


def _build_layer_norm(builder: GraphBuilder, values: Mapping[str, Any]) -> Any:
    options = _options(values, values["input"])
    input = widened(builder, values["input"], builder.wanted.dtype)
    return builder(torch.ops.llmk.layer_norm.default, input, options["weight"], values.get("bias"), options["eps"])


LAYER_NORM = (RewritePattern(results=(_layer_norm(),), anchor_ops=("layer_norm",), build=_build_layer_norm),)
