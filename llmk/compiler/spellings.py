"""Spellings: what PyTorch writes in several ways, each as one pattern for the files of operators.

A quotient may be a product with a reciprocal, a mean a sum over a number, a linear layer a product with a matrix in any
of its names, and the choice of a class a `gather`, `take_along_dim` or an index of ranges. A row-by-row loop whose
results are stacked is the computation of all rows.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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
    View,
    With,
    all_arguments,
    arguments,
    find,
    is_last,
    item_of,
    name_of,
    reshape_of,
    same,
    same_shape,
    transposed_from,
    value_of,
)
from llmk.compiler.size_tensors import samples
from llmk.compiler.sizes import NotSmall

IN_FLOAT32 = Either(None, torch.float32)
"""The dtype of a sum: the tensor's own, or the one that operators compute in."""


@dataclass(frozen=True)
class Where(Pattern):
    """The pattern at a node for which `test` is true."""

    test: Callable[[Node], bool]
    pattern: Any

    def find(self, value: Any, match: Match) -> Iterator[Match]:
        for inner in find(self.pattern, value, match):
            if self.test(value):
                yield inner


@dataclass(frozen=True)
class Of(Pattern):
    """The pattern, and another one for what it has captured under a name, perhaps at several places."""

    name: str
    source: Any
    pattern: Any

    def find(self, value: Any, match: Match) -> Iterator[Match]:
        for inner in find(self.pattern, value, match):
            yield from find(self.source, inner.values[self.name], inner)


def over_last_axis(node: Node) -> bool:
    """Return True if an operator works over the last axis of its tensor, or puts several together along their last."""
    given = all_arguments(node)
    return is_last(given["dim"], value_of(given.get("self", node)))


def reciprocal(x: Any) -> Pattern:
    """Match 1 / x."""
    inverse = Call("reciprocal", x)
    return inverse | Call("mul", inverse, 1) | Call("div", 1, x) | Call("pow", x, -1)


def over(x: Any, y: Any) -> Pattern:
    """Match x / y."""
    return Call("div", x, y) | Call("mul", x, Cast(reciprocal(y)))


def axis_back(node: Any) -> Node | None:
    """Return the tensor behind whose last axis a node puts one of size 1."""
    source = reshape_of(node)
    if name_of(node) == "unsqueeze":
        given = arguments(node, "self", "dim")
        return given["self"] if given is not None and is_last(given["dim"], value_of(node)) else None
    is_it = source is not None and same_shape(value_of(node).shape, (*value_of(source).shape, 1))
    return source if is_it else None


def expanded_from(node: Any) -> Node | None:
    """Return the tensor that a node gives in a shape that multiplication gives it anyway."""
    return all_arguments(node)["self"] if name_of(node) in ("expand", "expand_as") else None


def first_of_last(node: Any) -> Node | None:
    """Return the tensor whose last axis a node leaves out, by a squeeze, or by the choice of the first element."""
    given = arguments(node, "self", "dim", "index") if name_of(node) in ("squeeze", "select") else None
    if given is None or "dim" not in given or given.get("index", 0) != 0:
        return None
    return given["self"] if is_last(given["dim"], value_of(given["self"])) else None


@dataclass(frozen=True)
class Mean(Pattern):
    """The mean of the pattern over some axes, also as a sum over the number of elements or times a part of one."""

    pattern: Any
    dim: Any
    keepdim: bool = True

    def find(self, value: Any, match: Match) -> Iterator[Match]:
        yield from find(self._over_axes("mean"), value, match)
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
        yield from find(self._over_axes("sum"), total, match.with_nodes(value))

    def _over_axes(self, name: str) -> Pattern:
        return Call(name, self.pattern, self.dim, self.keepdim, dtype=IN_FLOAT32)


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


@dataclass(frozen=True)
class Einsum(Pattern):
    """The product of a tensor's last axis and a matrix, by `einsum`: `rows` is read as [V, H], `columns` as [H, V]."""

    input: Any
    rows: Any
    columns: Any

    def find(self, value: Any, match: Match) -> Iterator[Match]:
        given = arguments(value, "equation", "tensors") if name_of(value) == "einsum" else None
        if given is None or len(given["tensors"]) != 2:
            return
        inputs, arrow, result = given["equation"].replace(" ", "").partition("->")
        a, _, b = inputs.partition(",")
        x, y = given["tensors"]
        for of_input, tensor, of_matrix, matrix in ((a, x, b, y), (b, y, a, x)):
            pattern = self._matrix(of_input, of_matrix, result) if arrow else None
            if pattern is not None:
                for inner in find(self.input, tensor, match.with_nodes(value)):
                    yield from find(pattern, matrix, inner)

    def _matrix(self, of_input: str, of_matrix: str, result: str) -> Any:
        """Return the pattern of the matrix, if the equation is that of a linear layer."""
        batch, summed, new = of_input[:-1], of_input[-1:], result[-1:]
        axes = batch.replace("...", "")
        if result[:-1] != batch or new in of_input or len({*axes, summed}) != len(axes) + 1:
            return None
        return {new + summed: self.rows, summed + new: self.columns}.get(of_matrix)


def _is_matrix(x: Tensor) -> bool:
    return x.dim() == 2


def linear(input: str, weight: str, bias: str) -> Pattern:
    """Match a linear layer, its bias inside, added or none, by all names of a product with a matrix.

    The weight is [V, H]; where it is [H, V], `of_columns` is captured.
    """
    x, w, b = KeywordArg(input), KeywordArg(weight, _is_matrix), KeywordArg(bias)
    columns = View(transposed_from, w) | With("of_columns", True, w)
    bare = Call("linear", x, w, None) | Call("matmul", x, columns) | Call("mm", x, columns) | Einsum(x, w, columns)
    return bare | Call("linear", x, w, b) | Call("addmm", b, x, columns) | Call("add", bare, b)


def chosen(x: Any, axis: Any, index: Any) -> Pattern:
    """Match the elements of the pattern at some indices along an axis."""
    return Call("gather", x, axis, index) | Call("take_along_dim", x, index, axis)


@dataclass(frozen=True)
class AtPlaces(Pattern):
    """One element of each row of the pattern: it is indexed by a range for every axis but the last."""

    pattern: Any
    index: Any

    def find(self, value: Any, match: Match) -> Iterator[Match]:
        given = arguments(value, "self", "indices") if name_of(value) == "index" else None
        if given is None or len(given["indices"]) != value_of(given["self"]).dim():
            return
        *ranges, last = given["indices"]
        rows = value_of(given["self"]).shape[:-1]
        if all(isinstance(x, Node) and _is_whole(x) for x in given["indices"]) and self._are_ranges(
            value, ranges, rows
        ):
            for inner in find(self.pattern, given["self"], match.with_nodes(value)):
                yield from find(self.index, last, inner)

    @staticmethod
    def _are_ranges(node: Node, ranges: list[Node], rows: Sequence[Any]) -> bool:
        """Return True if the node has one element for each row, and each index is the position along its axis."""
        is_whole = same_shape(value_of(node).shape, rows)
        return is_whole and all(_counts(x, i, rows) for i, x in enumerate(ranges))


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


@dataclass(frozen=True)
class _RowOf(Pattern):
    """Row `row` of the first axis of a tensor of `rows` rows, under its name."""

    name: str
    row: int
    rows: int

    def find(self, value: Any, match: Match) -> Iterator[Match]:
        item, index = item_of(value) or (value, None)
        given = arguments(item, "self", "dim", "index") if name_of(item) in ("select", "unbind") else None
        if given is None or given["dim"] != 0 or given.get("index", index) != self.row:
            return
        if same(value_of(given["self"]).shape[0], self.rows):
            yield from match.with_nodes(*{value, item}).bind(self.name, given["self"])


@dataclass(frozen=True)
class EachRow(Pattern):
    """A stack of the results of one computation, made of each row of the first axis of some tensors by itself.

    `of_row(row)` is the pattern of one; `row(name)` in it is the row of the tensor that is captured under the name.
    """

    of_row: Callable[[Callable[[str], Pattern]], Pattern]

    def find(self, value: Any, match: Match) -> Iterator[Match]:
        given = arguments(value, "tensors", "dim") if name_of(value) == "stack" else None
        if given is not None and given["dim"] == 0:
            yield from self._find_rows(given["tensors"], 0, match.with_nodes(value))

    def _find_rows(self, rows: Any, first: int, match: Match) -> Iterator[Match]:
        if first == len(rows):
            yield match
            return
        pattern = self.of_row(lambda name: _RowOf(name, first, len(rows)))
        for inner in find(pattern, rows[first], match):
            yield from self._find_rows(rows, first + 1, inner)
