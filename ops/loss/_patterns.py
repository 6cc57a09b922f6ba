"""Patterns of plain PyTorch that losses of predictions replace."""

from collections.abc import Mapping
from typing import Any

import torch

from llmk.compiler.patterns import (
    Arg,
    Call,
    GraphBuilder,
    Input,
    KeywordArg,
    NoMatch,
    Pattern,
    RewritePattern,
    With,
    as_dtype,
    value_of,
)
from llmk.ops.loss.cross_entropy_patterns import REDUCTIONS, capped, cross_entropy_of, loss_options


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
    x, scores, axis = KeywordArg("input"), KeywordArg("scores"), Arg("axis")
    of_logarithms = Call("mul", Call("exp", KeywordArg("target")), Call("sub", KeywordArg("target"), x))
    of_scores = Call("mul", Call("softmax", scores, axis), Call("sub", Call("log_softmax", scores, axis), x))
    each = of_logarithms | of_scores
    by_row = Call("mean", Call("sum", each, [Arg("summed")]))
    return With("reduction", "batchmean", by_row) | With("reduction", "sum", Call("sum", each)) | With(
        "reduction", "mean", Call("mean", each)
    )  # fmt: skip


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
        results=(
            Call("kl_div", KeywordArg("input"), KeywordArg("target"), Arg("reduction"), log_target=Arg("log_target")),
        ),
        anchor_ops=("kl_div",),
        build=_build_kl_div,
    ),
    RewritePattern(results=(_divergence_by_hand(),), build=_build_divergence_by_hand),
)
