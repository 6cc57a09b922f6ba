"""Spellings: what PyTorch writes in several ways, each as one pattern for the files of operators.

A quotient may be a product with a reciprocal, a mean a sum over a number, a linear layer a product with a matrix in any
of its names, and the choice of a class a `gather`, `take_along_dim` or an index of ranges. A row-by-row loop whose
results are stacked is the computation of all rows.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from llmk.apart import apart_from_caller
from llmk.compiler.patterns import (
    Call,
    Cast,
    Either,
    KeywordArg,
    Match,
    Pattern,
    Then,
    View,
    With,
    all_arguments,
    arguments,
    find,
    is_last,
    is_view,
    item_of,
    name_of,
    pattern,
    reshape_of,
    same,
    same_shape,
    shown_by,
    value_of,
    viewed_by,
)
from llmk.compiler.size_tensors import samples
from llmk.compiler.sizes import NotSmall
from llmk.registry.private.tensors import storage_of

IN_FLOAT32 = Either(None, torch.float32)
"""The dtype of a sum: the tensor's own, or the one that operators compute in."""


def Where(test: Callable[[Node], bool], at: Any) -> Pattern:
    """The pattern at a node for which `test` is true."""
    return Then(at, lambda node, match: [match] if test(node) else [])


def Of(name: str, source: Any, of: Any) -> Pattern:
    """The pattern, and another one for what it has captured under a name, perhaps at several places."""
    return Then(of, lambda _, match: find(source, match.values[name], match))


def over_last_axis(node: Node) -> bool:
    """Return True if an operator works over the last axis of its tensor, or puts several together along their last."""
    given = all_arguments(node)
    return is_last(given["dim"], value_of(given.get("self", node)))


def reciprocal(x: Pattern) -> Pattern:
    """Match 1 / x."""
    inverse = x.reciprocal()
    return inverse | inverse * 1 | Call("div", 1, x) | x.pow(-1)


def over(x: Pattern, y: Pattern) -> Pattern:
    """Match x / y."""
    return x / y | x * Cast(reciprocal(y))


def square(x: Pattern) -> Pattern:
    """Match x^2."""
    return x.pow(2) | x * x | x.square()


def silu(x: Pattern) -> Pattern:
    """Match x * sigmoid(x)."""
    return x.silu() | x * x.sigmoid()


def axis_back(node: Any) -> Node | None:
    """Return the tensor behind whose last axis a node puts one of size 1."""
    source = all_arguments(node)["self"] if name_of(node) == "unsqueeze" else reshape_of(node)
    if source is None or not same_shape(value_of(node).shape, (*value_of(source).shape, 1)):
        return None
    return source


def expanded_from(node: Any) -> Node | None:
    """Return the tensor that a node gives in a shape that multiplication gives it anyway."""
    return all_arguments(node)["self"] if name_of(node) in ("expand", "expand_as") else None


def first_of_last(node: Any) -> Node | None:
    """Return the tensor whose last axis a node leaves out, by a squeeze, or by the choice of the first element."""
    given = arguments(node, "self", "dim", "index") if name_of(node) in ("squeeze", "select") else None
    if given is None or "dim" not in given or given.get("index", 0) != 0:
        return None
    return given["self"] if is_last(given["dim"], value_of(given["self"])) else None


@pattern
def Mean(value: Any, match: Match, /, x: Pattern, dim: Any, keepdim: Any = True) -> Iterator[Match]:
    """The mean of the pattern over some axes, also as a sum over the number of elements or times a part of one."""
    options = {"dim": dim, "keepdim": keepdim, "dtype": IN_FLOAT32}
    yield from find(x.mean(**options), value, match)
    given = arguments(value, "self", "other") if name_of(value) in ("div", "mul") else None
    if given is None:
        return
    total, number = given.values()
    if name_of(value) == "mul" and not isinstance(total, Node):
        total, number = number, total
    count = _summed_elements(total)
    number = value_of(number)
    if count is None or not _divides(name_of(value), number, count):
        return
    if isinstance(count, int):  # a trial with another size would need another number
        match = replace(match, sizes=(*match.sizes, count))
    yield from find(x.sum(**options), total, match.with_nodes(value))


def _summed_elements(node: Any) -> Any:
    """Return the number of elements in each sum of a node that sums over some axes."""
    given = arguments(node, "self", "dim", "keepdim", "dtype") if name_of(node) == "sum" else None
    if given is None or not given.get("dim"):
        return None
    shape = value_of(given["self"]).shape
    return math.prod(shape[axis] for axis in given["dim"])


def _divides(name: str, number: Any, count: Any) -> bool:
    """Return True if a division by the number, or a product with it, makes a mean of a sum of `count` elements."""
    if name == "div":
        return isinstance(number, int | float | torch.SymInt) and same(number, count)
    return isinstance(number, float) and isinstance(count, int) and math.isclose(number * count, 1.0, rel_tol=1e-6)


def features_of(node: Any) -> Iterator[tuple[Node, range, tuple[Node, ...]]]:
    """Yield each tensor of whose last axis a node shows some features, which ones, and the views, the nearest first."""
    source: Any = node
    views: tuple[Node, ...] = ()
    while isinstance(source, Node) and is_view(source):
        views, source = (*views, source), viewed_by(source)
        features = _features(views, value_of(source))
        if features is not None:
            yield source, features, views


def _features(views: tuple[Node, ...], whole: Any) -> range | None:
    """Return the features of a tensor that views of it show, row for row.

    Where they lie in memory says it, in a tensor of its shape that is contiguous: in one that is expanded, several
    elements lie in one place.
    """
    part = value_of(views[0])
    if not isinstance(part, Tensor) or not isinstance(whole, Tensor) or not part.dim() == whole.dim() > 0:
        return None
    *rows, count = part.shape
    *all_rows, width = whole.shape
    if not same_shape(rows, all_rows) or not isinstance(count, int) or not isinstance(width, int):
        return None
    whole = part = whole.new_empty(whole.shape)
    for view in reversed(views):
        part = shown_by(view, part)
    layouts = zip(rows, part.stride(), whole.stride(), strict=False)
    if storage_of(part) != storage_of(whole) or not all(same(size, 1) or same(a, b) for size, a, b in layouts):
        return None
    start, step = part.storage_offset(), part.stride(-1) if count > 1 else 1
    if not isinstance(start, int) or not isinstance(step, int) or step < 1:
        return None
    features = range(start, width, step)[:count]
    return features if len(features) == count else None


def range_of(node: Any) -> tuple[Node, int, int] | None:
    """Return the tensor that a node is a slice of along the last axis, its start and its end; None for other nodes."""
    source, features, _ = next(features_of(node), (None, range(0), ()))
    return (source, features.start, features.stop) if source is not None and features.step == 1 else None


@pattern
def Half(value: Any, match: Match, /, x: Any, second: bool, interleaved: bool = False) -> Iterator[Match]:
    """The first half of the last axis of the pattern, or the second.

    The features 0, 2, ... are the first interleaved half, and 1, 3, ... the second.
    """
    for source, features, views in features_of(value):
        width = value_of(source).shape[-1]
        halves = range(0, width, 2), range(1, width, 2)
        if not interleaved:
            halves = range(width // 2), range(width // 2, width)
        if width % 2 == 0 and features == halves[second]:
            yield from find(x, source, match.with_nodes(*views))


def transposed_from(node: Any) -> Node | None:
    """Return the tensor whose last two axes a node exchanges."""
    if name_of(node) not in ("t", "numpy_T", "mT", "transpose", "permute") or value_of(node).dim() < 2:
        return None
    source = all_arguments(node)["self"]
    (*rows, a, b), (*steps, i, j) = value_of(source).shape, value_of(source).stride()
    is_it = same_shape(value_of(node).shape, (*rows, b, a)) and same_shape(value_of(node).stride(), (*steps, j, i))
    return source if is_it else None


@pattern
def Einsum(value: Any, match: Match, /, x: Any, rows: Any, columns: Any) -> Iterator[Match]:
    """The product of a tensor's last axis and a matrix, by `einsum`: `rows` is read as [V, H], `columns` as [H, V]."""
    given = arguments(value, "equation", "tensors") if name_of(value) == "einsum" else None
    if given is None or len(given["tensors"]) != 2:
        return
    inputs, arrow, result = given["equation"].replace(" ", "").partition("->")
    a, _, b = inputs.partition(",")
    first, second = given["tensors"]
    for of_input, tensor, of_matrix, matrix in ((a, first, b, second), (b, second, a, first)):
        batch, summed, new = of_input[:-1], of_input[-1:], result[-1:]
        axes = batch.replace("...", "")
        is_linear = arrow and result[:-1] == batch and new not in of_input and len({*axes, summed}) == len(axes) + 1
        wanted = {new + summed: rows, summed + new: columns}.get(of_matrix) if is_linear else None
        if wanted is not None:
            for inner in find(x, tensor, match.with_nodes(value)):
                yield from find(wanted, matrix, inner)


def _is_matrix(x: Tensor) -> bool:
    return x.dim() == 2


def linear(input: str, weight: str, bias: str) -> Pattern:
    """Match a linear layer, its bias inside, added or none, by all names of a product with a matrix.

    The weight is [V, H]; where it is [H, V], `of_columns` is captured.
    """
    x, w, b = KeywordArg(input), KeywordArg(weight, _is_matrix), KeywordArg(bias)
    columns = View(transposed_from, w) | With("of_columns", True, w)
    bare = x.linear(w, None) | x.matmul(columns) | x.mm(columns) | Einsum(x, w, columns)
    return bare | x.linear(w, b) | b.addmm(x, columns) | bare + b


def chosen(x: Pattern, axis: Any, index: Any) -> Pattern:
    """Match the elements of the pattern at some indices along an axis."""
    return x.gather(axis, index) | x.take_along_dim(index, axis)


@pattern
def AtPlaces(value: Any, match: Match, /, x: Any, index: Any) -> Iterator[Match]:
    """One element of each row of the pattern: it is indexed by a range for every axis but the last."""
    given = arguments(value, "self", "indices") if name_of(value) == "index" else None
    if given is None or len(given["indices"]) != value_of(given["self"]).dim():
        return
    *ranges, last = given["indices"]
    rows = value_of(given["self"]).shape[:-1]
    are_places = all(isinstance(place, Node) and _is_whole(place) for place in given["indices"])
    if (
        are_places
        and same_shape(value_of(value).shape, rows)
        and all(_counts(place, axis, rows) for axis, place in enumerate(ranges))
    ):
        for inner in find(x, given["self"], match.with_nodes(value)):
            yield from find(index, last, inner)


def _is_whole(node: Node) -> bool:
    return value_of(node).dtype in (torch.int64, torch.int32)


def _counts(node: Node, axis: int, shape: Any) -> bool:
    """Return True if a tensor, broadcast to this shape, holds the position along an axis."""
    return "made" in node.meta and apart_from_caller(_are_positions, node, axis, tuple(shape))


def _are_positions(node: Node, axis: int, shape: tuple[Any, ...]) -> bool:
    try:
        for tensor, sizes in samples(node):
            rows = sizes.of(shape)
            places = torch.arange(rows[axis], dtype=torch.int64, device="cpu").view(-1, *[1] * (len(rows) - axis - 1))
            if not bool((tensor.expand(rows) == places).all()):
                return False
    except (NotSmall, RuntimeError):  # its shape is another one
        return False
    return True


@pattern
def _RowOf(value: Any, match: Match, /, name: str, row: int, rows: int) -> Iterator[Match]:
    """Row `row` of the first axis of a tensor of `rows` rows, under its name."""
    item, index = item_of(value) or (value, None)
    given = arguments(item, "self", "dim", "index") if name_of(item) in ("select", "unbind") else None
    if given is None or given["dim"] != 0 or given.get("index", index) != row:
        return
    if same(value_of(given["self"]).shape[0], rows):
        yield from match.with_nodes(*{value, item}).bind(name, given["self"])


@pattern
def EachRow(value: Any, match: Match, /, of_row: Callable[[Callable[[str], Pattern]], Pattern]) -> Iterator[Match]:
    """A stack of the results of one computation, made of each row of the first axis of some tensors by itself.

    `of_row(row)` is the pattern of one; `row(name)` in it is the row of the tensor that is captured under the name.
    """
    given = arguments(value, "tensors", "dim") if name_of(value) == "stack" else None
    if given is not None and given["dim"] == 0:
        count = len(given["tensors"])
        each = [of_row(lambda name, i=i: _RowOf(name, i, count)) for i in range(count)]
        yield from find(each, given["tensors"], match.with_nodes(value))
