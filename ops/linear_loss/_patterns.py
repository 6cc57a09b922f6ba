"""Patterns of plain PyTorch that these operators replace: a projection to the vocabulary and a loss of its logits."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from llmk.compiler.patterns import (
    Arg,
    Call,
    Cast,
    GraphBuilder,
    KeywordArg,
    Match,
    Named,
    NoMatch,
    Pattern,
    Result,
    RewritePattern,
    View,
    With,
    all_arguments,
    arguments,
    as_dtype,
    cast_of,
    constant_of,
    find,
    name_of,
    pattern,
    reshape_of,
    same,
    value_of,
)
from llmk.compiler.spellings import (
    AtPlaces,
    EachRow,
    Of,
    Where,
    axis_back,
    chosen,
    first_of_last,
    linear,
    over_last_axis,
)
from llmk.ops.loss.patterns import REDUCTIONS, capped, cross_entropy_of, loss_options, softcap_of

aten = torch.ops.aten


@pattern
def _Rows(value: Any, match: Match, /, logits: Pattern) -> Iterator[Match]:
    """The pattern, or some of its rows in any arrangement, by views and slices that keep the last axis."""
    while (source := _rows_before(value)) is not None:
        rows = (*match.values.get("rows", ()), value)
        match, value = replace(match, values={**match.values, "rows": rows}).with_nodes(value), source
    yield from find(logits, value, match)


AXES = {"slice": ("start", "end", "step"), "select": ("index",), "unsqueeze": (), "squeeze": ()}
"""Views along one axis, and their arguments besides it."""


def _rows_before(node: Any) -> Node | None:
    """Return the tensor whose rows a node chooses or arranges, if it keeps the last axis."""
    name = name_of(node)
    if name in ("contiguous", "alias"):
        return cast_of(node)
    if name == "unflatten":
        return None
    given = arguments(node, "self", "dim", *AXES[name]) if name in AXES else None
    source = reshape_of(node) if given is None else given["self"]
    if source is None or not value_of(source).dim() or not value_of(node).dim():
        return None
    if given is not None and ("dim" not in given or _is_features(given["dim"], name, value_of(source).dim())):
        return None
    width, after = value_of(source).shape[-1], value_of(node).shape[-1]
    return source if same(width, after) else None


def _is_features(dim: int, name: str, rank: int) -> bool:
    """Return True if a view along this axis changes the last one of a tensor, or puts another behind it."""
    return dim in (-1, rank if name == "unsqueeze" else rank - 1)


@pattern
def _Scaled(value: Any, match: Match, /, logits: Pattern) -> Iterator[Match]:
    """The pattern, perhaps times a number or divided by one, also in place: `scale` is the product of these."""
    yield from find(logits, value, match)
    name = name_of(value).removesuffix("_")
    given = arguments(value, "self", "other") if name in ("mul", "div") else None
    number = None if given is None else constant_of(given["other"])
    if given is None or number is None or (number == 0 and name == "div"):
        return
    scale = match.values.get("scale", 1.0) * (number if name == "mul" else 1 / number)
    scaled = replace(match, values={**match.values, "scale": scale}).with_nodes(value)
    yield from find(_Scaled(logits), given["self"], scaled)


def _logits() -> Pattern:
    """Match a product with its bias, then casts, scales, caps and views of rows."""
    layer = Named("product", linear("input", "linear_weight", "linear_bias"))
    inner = Cast(_Scaled(Cast(_Rows(Cast(_Scaled(Cast(layer)))))))
    return Cast(_Rows(capped(inner)))


def _weight(builder: GraphBuilder, values: Mapping[str, Any]) -> Node:
    """Return the weight as [V, H]."""
    weight = values["linear_weight"]
    return builder(aten.t.default, weight) if values.get("of_columns") else weight


def _rows_of(builder: GraphBuilder, x: Node, rows: tuple[Node, ...]) -> Node:
    """Apply to x the views and slices of rows that were applied to the logits."""
    for node in reversed(rows):
        if cast_of(node) is not None:
            continue
        given = all_arguments(node)
        del given["self"]
        sizes = given.get("size", given.get("shape"))
        if sizes is None:  # a view along another axis or flatten, which says nothing of the last
            x = builder(node.target, x, *given.values())
        else:
            width = value_of(x).shape[-1]
            if not isinstance(width, int):
                width = builder(aten.sym_size.int, x, value_of(x).dim() - 1)
            x = builder(aten.reshape.default, x, [*sizes[:-1], width])
    return x


def _bias(builder: GraphBuilder, values: Mapping[str, Any]) -> Node | None:
    """Return the bias as [V], if there is one.

    Raises:
        NoMatch: The bias is not the same for all rows.
    """
    bias = values.get("linear_bias")
    if bias is None or value_of(bias).dim() == 1:
        return bias
    if any(not isinstance(size, int) or size != 1 for size in value_of(bias).shape[:-1]):
        raise NoMatch("what is added to the logits is not the same for all rows")
    return builder(aten.reshape.default, bias, [-1])


def _build(builder: GraphBuilder, values: Mapping[str, Any]) -> Any:
    options, scale = loss_options(values), values.get("scale", 1.0)
    bias, x = _bias(builder, values), values["input"]
    if scale != 1 and bias is not None:
        raise NoMatch("the logits have a bias and are scaled after it")
    x = _rows_of(builder, x, values.get("rows", ()))
    if scale != 1:
        if value_of(x).dtype == torch.float16:
            raise NoMatch("its logits are scaled, and the operator's input is, which may overflow in float16")
        x = builder(aten.mul.Tensor, x, scale)
    loss = builder(
        torch.ops.llmk.fused_linear_ce.default,
        x,
        _weight(builder, values),
        values["target"],
        linear_bias=bias,
        **options,
    )
    return as_dtype(builder, loss, builder.wanted.dtype)


def _no_width(builder: GraphBuilder, values: Mapping[str, Any], logits: Node) -> Node:
    """Return a tensor like the logits, but of no classes."""
    x = values["input"]
    if value_of(x).dim() != value_of(logits).dim():
        raise NoMatch(f"{name_of(logits)} on the way is returned in another shape")
    empty = builder(aten.slice.Tensor, x, value_of(x).dim() - 1, 0, 0)
    return builder(aten.clone.default, as_dtype(builder, empty, value_of(logits).dtype))


def _why_left(node: Node) -> str:
    return "its logits are not those of a linear layer, then scaled, capped, cast, viewed or shifted, and nothing else"


CHUNKED = "torch_nn::_linear_cross_entropy_batch_chunked"
"""The operator of `F.linear_cross_entropy` with `options`, torch 2.13 and later; without them it is ATen's two."""
CHUNKED_EACH = f"{CHUNKED}_no_reduction"
"""The same with reduction "none"."""


def _chunked_linear_cross_entropy() -> Pattern:
    """Match PyTorch's own chunks. Their number and the dtype of their sums are for the operator to choose."""
    x, weight, target = (KeywordArg(name) for name in ("input", "linear_weight", "target"))
    tensors = x, weight, target, Arg("linear_bias"), Arg("weight")
    chunks = {name: Arg(name) for name in ("batch_chunk_size", "acc_policy", "acc_dtype")}
    options = {"ignore_index": Arg("ignore_index"), **chunks}
    saved = "input", "linear_weight", "linear_bias"
    more = {"label_smoothing": Arg("label_smoothing"), "allow_retain_graph": Arg("allow_retain_graph")}
    more |= {f"compute_{name}_grad": Arg(f"saves_{name}") for name in saved}
    each = With("reduction", REDUCTIONS.index("none"), Call(CHUNKED_EACH, *tensors, **options))
    mean, total = (
        With("reduction", REDUCTIONS.index(name), Result(0, Call(CHUNKED, *tensors, reduction=name, **options, **more)))
        for name in ("mean", "sum")
    )
    return each | mean | total


def _whole(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *options: Any) -> tuple[Any, ...]:
    """Compute what PyTorch's chunks are documented to equal. On a CPU they round less than on a GPU."""
    class_weight, reduction, ignore_index, *_ = options
    logits = F.linear(x, weight, bias)
    loss = F.cross_entropy(logits, target, class_weight, reduction=reduction, ignore_index=ignore_index)
    return loss, None, None, None  # and the gradients that nobody reads


def _whole_each(*args: Any) -> Tensor:
    return _whole(*args[:5], "none", args[5])[0]


FUSED_LINEAR_CE = (
    RewritePattern(
        results=(_chunked_linear_cross_entropy(),),
        anchor_ops=(CHUNKED, CHUNKED_EACH),
        build=_build,
        indices={"target": ("linear_weight", 0)},
        tried_as={CHUNKED: _whole, CHUNKED_EACH: _whole_each},
    ),
    RewritePattern(
        results=(cross_entropy_of(_logits()),),
        anchor_ops=("llmk::cross_entropy",),
        why_left=_why_left,
        build=_build,
        indices={"target": ("product", -1)},
        stand_in=_no_width,
    ),
)


def _log_probabilities() -> Pattern:
    """Match log-probabilities of chosen classes: of `F.log_softmax`, or of the logits less their `logsumexp`."""
    axis, index = Arg("axis"), Arg("index")
    logarithms = Cast(_logits().log_softmax(Arg("dim"), dtype=Arg("dtype")))
    return _log_softmax(logarithms, axis, index) | _of_logits(axis, index)


def _log_softmax(x: Pattern, axis: Pattern, index: Pattern) -> Pattern:
    return chosen(x, axis, index) | With("at_places", True, AtPlaces(x, index))


def _of_logits(axis: Pattern, index: Pattern) -> Pattern:
    """Match forms that read the logits more than once."""
    logits, dim = Arg("logits"), Arg("dim")
    one_by_one = EachRow(lambda row: Where(over_last_axis, row("logits").logsumexp(Arg("row_dim"))))
    sums = logits.logsumexp([dim]) | one_by_one
    kept = logits.logsumexp([dim], True) | View(axis_back, sums)
    several = chosen(logits, axis, index)
    first = With("squeezed", True, View(first_of_last, several)) | With("at_places", True, AtPlaces(logits, index))
    less, negative = several - kept | first - sums, kept - several | sums - first
    return Of("logits", _logits(), less | With("negative", True, negative) | EachRow(_of_row))


def _of_row(row: Callable[[str], Pattern]) -> Pattern:
    """Match the log-probabilities of chosen classes of one row of logits of three axes."""
    logarithms = Where(over_last_axis, row("logits").log_softmax(Arg("row_dim"), dtype=Arg("dtype")))
    return Where(over_last_axis, chosen(Cast(logarithms), Arg("row_axis"), row("index")))


def _why_logprobs_left(node: Node) -> str:
    """Return the reason for which log-probabilities were left, if entries of a row are chosen and are such."""
    advice = "F.cross_entropy(logits, target, reduction='none') is found where the logits are no linear layer's"
    if name_of(node) == "logsumexp":
        others = (x for user in _behind_views(node) if name_of(user) == "sub" for x in user.all_input_nodes)
        are = any(name_of(_before_views(x)) in CHOICES for x in others)
    else:
        are = name_of(_before_views(all_arguments(node)["self"])) == "log_softmax"
    return f"{_why_left(node)}: {advice}" if are else ""


CHOICES = "gather", "take_along_dim", "index"
"""Operators that choose classes of rows."""
VIEWS = "squeeze", "unsqueeze", "select", "view", "reshape", "stack"


def _before_views(node: Node) -> Node:
    while (source := cast_of(node)) is not None or name_of(node) in VIEWS:
        node = source or node.all_input_nodes[0]
    return node


def _behind_views(node: Node) -> Iterator[Node]:
    for user in node.users:
        yield user
        if cast_of(user) is not None or name_of(user) in VIEWS:
            yield from _behind_views(user)


NO_CLASS = -(2**31)
"""An index that no class has: `gather` has no target to ignore."""


def _build_logprobs(builder: GraphBuilder, values: Mapping[str, Any]) -> Any:
    index, squeezed, at_places = values["index"], values.get("squeezed"), values.get("at_places")
    last = value_of(index).dim() - (not at_places)
    if any(values.get(name, -1) not in (-1, last) for name in ("dim", "axis")):
        raise NoMatch("its softmax, or the choice of classes, is not over the last axis")
    if values.get("dtype") == torch.float64:
        raise NoMatch("its softmax is float64, and the operator's float32")
    if squeezed and not same(value_of(index).shape[-1], 1):
        raise NoMatch("the axis of chosen classes is squeezed, and is not known to have one")
    weight = _weight(builder, values)
    logprobs, _ = builder(
        torch.ops.llmk.linear_logprobs.default,
        _rows_of(builder, values["input"], values.get("rows", ())),
        weight,
        _from_the_end(builder, index, weight) if at_places else index,
        linear_bias=_bias(builder, values),
        logit_scale=values.get("scale", 1.0),
        softcap=softcap_of(values),
        ignore_index=NO_CLASS,
    )
    if squeezed:
        logprobs = builder(aten.squeeze.dim, logprobs, -1)
    if values.get("negative"):
        logprobs = builder(aten.neg.default, logprobs)
    return as_dtype(builder, logprobs, builder.wanted.dtype)


def _from_the_end(builder: GraphBuilder, index: Node, weight: Node) -> Node:
    """Return indices of classes that may be negative, as those of an index may, counted from the first class."""
    classes = value_of(weight).shape[0]
    if not isinstance(classes, int):
        classes = builder(aten.sym_size.int, weight, 0)
    is_negative = builder(aten.lt.Scalar, index, 0)
    return builder(aten.where.self, is_negative, builder(aten.add.Tensor, index, classes), index)


LINEAR_LOGPROBS = (
    RewritePattern(
        results=(_log_probabilities(),),
        anchor_ops=(*CHOICES, "logsumexp"),
        why_left=_why_logprobs_left,
        build=_build_logprobs,
        indices={"index": ("product", -1)},
        stand_in=_no_width,
    ),
)
