"""Patterns of hyper-connections in plain PyTorch, as transformers has them."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from llmk.compiler.patterns import (
    Arg,
    Call,
    Cast,
    Either,
    GraphBuilder,
    Input,
    KeywordArg,
    Match,
    NoMatch,
    Number,
    Pattern,
    RewritePattern,
    View,
    arguments,
    find,
    name_of,
    pattern,
    same_shape,
    value_of,
    widened,
)
from llmk.compiler.spellings import IN_FLOAT32, Mean, Where, axis_back, over_last_axis, square, transposed_from
from llmk.ops.streams.tiles import MAX_OUTPUTS, MAX_SIZE, MAX_STREAMS


@pattern
def _Sinkhorn(value: Any, match: Match, /) -> Iterator[Match]:
    """A softmax and divisions by sums of columns, of rows and of columns, in turn."""
    divisions = 0
    while (found := _divided_by_sums(value, -1 if divisions % 2 else -2, match)) is not None:
        value, match = found
        divisions += 1
    if divisions % 2:
        softmax = Input(KeywordArg("input")).softmax(Arg("axis"), dtype=IN_FLOAT32)
        for inner in find(Where(over_last_axis, softmax) + Number("eps"), value, match):
            yield from inner.bind("iterations", (divisions + 1) // 2)


def _divided_by_sums(node: Any, axis: int, match: Match) -> tuple[Node, Match] | None:
    """Return what a node divides by its own sums along an axis and eps, and the match with the nodes of it."""
    given = arguments(node, "self", "other") if name_of(node) == "div" else None
    if given is None:
        return None
    axes = Either([axis], [value_of(node).dim() + axis])
    sums = Call("sum", given["self"], axes, True, dtype=IN_FLOAT32) + Number("eps")
    return next(((given["self"], inner) for inner in find(sums, given["other"], match.with_nodes(node))), None)


def _build_sinkhorn(builder: GraphBuilder, values: Mapping[str, Any]) -> Any:
    logits = value_of(values["input"])
    if logits.shape[-2] != logits.shape[-1] or not _is_from_1_to(MAX_SIZE, logits.shape[-1]):
        raise NoMatch(f"its matrices are not square with sizes up to {MAX_SIZE}")
    input = widened(builder, values["input"], builder.wanted.dtype)
    return builder(torch.ops.llmk.sinkhorn.default, input, values["iterations"], values["eps"])


def _is_from_1_to(most: int, size: Any) -> bool:
    return isinstance(size, int) and 1 <= size <= most


def _rms_linear() -> Pattern:
    """Match a product with rows that were read in 16 bits, and divided in float32 before it or after it."""
    x = Input(KeywordArg("input", lambda x: x.dtype.itemsize == 2))
    inverse = Cast((Mean(square(x), Arg("axis")) + Number("eps")).rsqrt())
    weight = Input(KeywordArg("weight", _has_few_rows))
    return (x * inverse).linear(weight, None) | x.linear(weight, None) * inverse


def _has_few_rows(weight: Tensor) -> bool:
    return weight.dim() == 2 and _is_from_1_to(MAX_OUTPUTS, weight.shape[0])


def _build_rms_linear(builder: GraphBuilder, values: Mapping[str, Any]) -> Any:
    if list(values["axis"]) not in ([-1], [value_of(values["input"]).dim() - 1]):
        raise NoMatch("its mean is not over the last axis")
    return builder(torch.ops.llmk.rms_linear.default, *(values[name] for name in ("input", "weight", "eps")))


def _write_streams() -> Pattern:
    by_stream = View(axis_back, KeywordArg("weights")) * View(_row_put_in, Input(KeywordArg("output")))
    mixed = View(transposed_from, Input(KeywordArg("mix"))).matmul(Input(KeywordArg("streams")))
    return Cast(by_stream + mixed)


def _row_put_in(node: Any) -> Node | None:
    """Return the tensor before whose last axis a node puts one of size 1."""
    given = arguments(node, "self", "dim") if name_of(node) == "unsqueeze" else None
    return given["self"] if given is not None and given["dim"] in (-2, value_of(node).dim() - 2) else None


def _build_write_streams(builder: GraphBuilder, values: Mapping[str, Any]) -> Any:
    names = "streams", "output", "weights", "mix"
    streams, *others = (value_of(values[name]) for name in names)
    if streams.dim() < 2 or not _is_from_1_to(MAX_STREAMS, streams.shape[-2]):
        raise NoMatch(f"it has more than {MAX_STREAMS} streams, or their number is symbolic")
    *tokens, N, H = streams.shape
    shapes = (*tokens, H), (*tokens, N), (*tokens, N, N)
    if not all(same_shape(x.shape, shape) for x, shape in zip(others, shapes, strict=True)):
        raise NoMatch("its weights and its layer's output are not those of each token")
    return builder(torch.ops.llmk.write_streams.default, *(values[name] for name in names))


SINKHORN = (RewritePattern(results=(Cast(_Sinkhorn()),), build=_build_sinkhorn),)
RMS_LINEAR = (RewritePattern(results=(_rms_linear(),), build=_build_rms_linear),)
WRITE_STREAMS = (RewritePattern(results=(_write_streams(),), build=_build_write_streams),)
