"""Patterns of plain PyTorch that losses of predictions replace, and those of cross entropy for any logits."""

from collections.abc import Mapping
from typing import Any

import torch

from llmk.compiler.patterns import (
    Arg,
    Cast,
    Either,
    GraphBuilder,
    Input,
    KeywordArg,
    NoMatch,
    Number,
    Pattern,
    RewritePattern,
    With,
    as_dtype,
    value_of,
)

REDUCTIONS = ("none", "mean", "sum")
"""Reductions by their numbers in ATen."""


def capped(x: Pattern) -> Pattern:
    """Match the pattern, or `softcap * tanh(x / softcap)` of it."""
    cap = Number("softcap")
    return Cast(Cast(Cast(Cast(x) / cap).tanh()) * cap) | Cast(x)


def cross_entropy_of(logits: Pattern) -> Pattern:
    """Match `F.cross_entropy`, or `F.nll_loss` of `F.log_softmax`."""
    options = Arg("target"), Arg("weight"), Arg("reduction"), Arg("ignore_index")
    logprobs = Cast(logits.log_softmax(Arg("dim"), dtype=Arg("dtype")))
    whole = logits.cross_entropy_loss(*options, label_smoothing=Arg("label_smoothing"))
    return whole | logprobs.nll_loss(*options) | logprobs.nll_loss_nd(*options)


def loss_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of the operators.

    Raises:
        NoMatch: The target is no class for each row, or the softmax is not over classes, or in float64, or the cap is
            not positive.
    """
    target = values["target"]
    if value_of(target).is_floating_point():
        raise NoMatch("its target is probabilities, and the operator's is classes")
    if value_of(target).dim() > 1:
        raise NoMatch("classes are on the second axis, and the operator's on the last")
    if values.get("dim", -1) not in (-1, value_of(target).dim()):
        raise NoMatch(f"its softmax is over axis {values['dim']}, and the operator's over the last")
    if values.get("dtype") == torch.float64:
        raise NoMatch("its softmax is float64, and the operator's float32")
    return {
        "softcap": softcap_of(values),
        "weight": values["weight"],
        "ignore_index": values["ignore_index"],
        "reduction": REDUCTIONS[values["reduction"]],
        "label_smoothing": values.get("label_smoothing", 0.0),
    }


def softcap_of(values: Mapping[str, Any]) -> float:
    """Return the cap on logits, 0 for none.

    Raises:
        NoMatch: It is 0 or less, where PyTorch divides by it all the same.
    """
    if "softcap" in values and not values["softcap"] > 0:
        raise NoMatch(f"its logits are capped at {values['softcap']}, and the operator's cap is positive")
    return values.get("softcap", 0.0)


def _build_cross_entropy(builder: GraphBuilder, values: Mapping[str, Any]) -> Any:
    options = loss_options(values)
    loss = builder(torch.ops.llmk.cross_entropy.default, values["input"], values["target"], **options)
    return as_dtype(builder, loss, builder.wanted.dtype)


def _build_kl_div(builder: GraphBuilder, values: Mapping[str, Any]) -> Any:
    options = {"reduction": REDUCTIONS[values["reduction"]], "log_target": values["log_target"]}
    loss = builder(torch.ops.llmk.kl_div.default, values["input"], values["target"], **options)
    return as_dtype(builder, loss, builder.wanted.dtype)


def _divergence_by_hand() -> Pattern:
    """Match sums and means of p (log p - x), where log p is there or made by a softmax."""
    x, target, scores, axis = KeywordArg("input"), KeywordArg("target"), KeywordArg("scores"), Arg("axis")
    each = target.exp() * (target - x) | scores.softmax(axis) * (scores.log_softmax(axis) - x)
    by_row = each.sum([Arg("summed")]).mean()
    reductions = {"batchmean": by_row, "sum": each.sum(), "mean": each.mean()}
    return Either(*(With("reduction", name, total) for name, total in reductions.items()))


def _build_divergence_by_hand(builder: GraphBuilder, values: Mapping[str, Any]) -> Any:
    x, target = values["input"], values.get("target")
    if target is None:
        if value_of(values["scores"]).dtype.itemsize < 4:
            raise NoMatch("its probabilities were rounded by themselves, and the operator takes them of the logarithms")
        target = builder(torch.ops.aten.log_softmax.int, values["scores"], values["axis"])
    shape = value_of(x).shape
    if value_of(target).shape != shape:
        raise NoMatch("its two distributions have different shapes")
    if values["reduction"] == "batchmean":
        if values["summed"] not in (-1, len(shape) - 1):
            raise NoMatch(f"it is summed over axis {values['summed']}, and the operator's rows are the last")
        x, target = (builder(torch.ops.aten.reshape.default, y, [-1, shape[-1]]) for y in (x, target))
    loss = builder(torch.ops.llmk.kl_div.default, x, target, reduction=values["reduction"], log_target=True)
    return as_dtype(builder, loss, builder.wanted.dtype)


OTHERWISE = "its input is no log_softmax of logits: F.cross_entropy(logits, target) is found"

CROSS_ENTROPY = (
    RewritePattern(
        results=(cross_entropy_of(capped(Input(KeywordArg("input")))),),
        anchor_ops=("cross_entropy_loss", "nll_loss", "nll_loss_nd"),
        why_left=lambda node: OTHERWISE,
        build=_build_cross_entropy,
        indices={"target": ("input", -1)},
    ),
)
KL_DIV = (
    RewritePattern(
        results=(KeywordArg("input").kl_div(KeywordArg("target"), Arg("reduction"), log_target=Arg("log_target")),),
        anchor_ops=("kl_div",),
        build=_build_kl_div,
    ),
    RewritePattern(results=(_divergence_by_hand(),), build=_build_divergence_by_hand),
)
