"""What plain PyTorch computes the same as an operator, as patterns over the nodes of a graph of ATen's operators.

A pattern is written as the computation itself: `Call("mul", X, Call("sigmoid", X))`. What it finds is by structure:
names of ATen's operators without their overloads, arguments by the schema, sums and products in either order. Shapes
and dtypes are not part of it: they are held against what the operator gives when it is put in (`llmk.compiler`).
"""

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import Node

from llmk.registry.private.operators import schema_of

COMMUTATIVE = frozenset({"add", "mul"})
CASTS = frozenset({"to", "_to_copy", "type_as", "alias", "contiguous"})
CAST_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
OVERLOAD = type(torch.ops.aten.add.Tensor)


def name_of(node: Any) -> str:
    """An operator of ATen without namespace and overload, one of llmk with its namespace, and else nothing."""
    if not isinstance(node, Node) or node.op != "call_function" or not isinstance(node.target, OVERLOAD):
        return ""
    return schema_of(node.target).name.removeprefix("aten::")


def value_of(node: Any) -> Any:
    """What the graph's trace saw there: a fake tensor, a number, or a tuple of them."""
    return node.meta.get("val") if isinstance(node, Node) else node


def arguments_of(node: Node) -> dict[str, Any]:
    """Every argument by its name in the schema, with defaults filled in."""
    arguments = schema_of(node.target).arguments
    given = dict(zip((a.name for a in arguments), node.args, strict=False)) | dict(node.kwargs)
    return {a.name: given.get(a.name, a.default_value) for a in arguments}


def default_of(node: Node, name: str) -> Any:
    return next(a.default_value for a in schema_of(node.target).arguments if a.name == name)


def is_cast(node: Any) -> bool:
    """Whether it gives its input in float32 or 16 bits, which that is in too, and changes nothing else."""
    if name_of(node) not in CASTS:
        return False
    before, after = value_of(node.args[0]), value_of(node)
    if not isinstance(before, Tensor) or before.device != after.device:
        return False
    same_width = before.dtype.itemsize == after.dtype.itemsize
    return {before.dtype, after.dtype} <= CAST_DTYPES and (before.dtype == after.dtype or not same_width)


@dataclass(frozen=True)
class Found:
    """What a pattern has found so far: values by name, and the nodes that compute."""

    values: Mapping[str, Any] = field(default_factory=dict)
    nodes: tuple[Node, ...] = ()

    def bind(self, name: str, value: Any) -> Iterator["Found"]:
        """With the value under this name, unless another one is there."""
        if name not in self.values:
            yield replace(self, values={**self.values, name: value})
        elif self.values[name] is value or _equal(self.values[name], value):
            yield self

    def over(self, node: Node) -> "Found":
        return replace(self, nodes=(*self.nodes, node))


def _equal(a: Any, b: Any) -> bool:
    """Of numbers: within what float32 tells apart."""
    if isinstance(a, bool) or isinstance(b, bool) or not isinstance(a, int | float) or not isinstance(b, int | float):
        return type(a) is type(b) and not isinstance(a, Node) and a == b
    return math.isclose(a, b, rel_tol=1e-6)


class Pattern:
    """Something that may be found at a node, or as an argument."""

    def find(self, value: Any, found: Found) -> Iterator[Found]:
        """Every way in which it is found at `value`, given what has been found elsewhere."""
        raise NotImplementedError

    def __or__(self, other: Any) -> "Pattern":
        return Either(self, other)


def find(pattern: Any, value: Any, found: Found) -> Iterator[Found]:
    """As `Pattern.find`, where a list stands for its entries and anything else for itself."""
    if isinstance(pattern, Pattern):
        yield from pattern.find(value, found)
    elif isinstance(pattern, list | tuple):
        if isinstance(value, list | tuple) and len(value) == len(pattern):
            yield from _find_all(list(zip(pattern, value, strict=True)), found)
    elif pattern is value or _equal(pattern, value):
        yield found


def _find_all(pairs: list[tuple[Any, Any]], found: Found) -> Iterator[Found]:
    if not pairs:
        yield found
        return
    for first in find(*pairs[0], found):
        yield from _find_all(pairs[1:], first)


@dataclass(frozen=True)
class Var(Pattern):
    """A tensor; everywhere the same one. `where` says which will do."""

    name: str
    where: Callable[[Tensor], bool] = lambda _: True

    def find(self, value: Any, found: Found) -> Iterator[Found]:
        if isinstance(value, Node) and isinstance(value_of(value), Tensor) and self.where(value_of(value)):
            yield from found.bind(self.name, value)


@dataclass(frozen=True)
class Number(Pattern):
    """A number that the graph has as a constant."""

    name: str

    def find(self, value: Any, found: Found) -> Iterator[Found]:
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield from found.bind(self.name, value)


@dataclass(frozen=True)
class Value(Pattern):
    """Any argument, as it is."""

    name: str

    def find(self, value: Any, found: Found) -> Iterator[Found]:
        yield from found.bind(self.name, value)


class Call(Pattern):
    """A call of an ATen operator (`llmk::` names one of llmk). An argument that is not mentioned has its default."""

    def __init__(self, name: str, *args: Any, **kwargs: Any) -> None:
        self.name, self.args, self.kwargs = name, args, kwargs

    def find(self, value: Any, found: Found) -> Iterator[Found]:
        if name_of(value) != self.name:
            return
        given = arguments_of(value)
        names = list(given)
        wanted = dict(zip(names, self.args, strict=False)) | self.kwargs
        if len(self.args) > len(names) or any(name not in given for name in self.kwargs):
            return
        if any(not _equal(given[name], default_of(value, name)) for name in names if name not in wanted):
            return
        pairs = [(pattern, given[name]) for name, pattern in wanted.items()]
        orders = [pairs]
        if self.name in COMMUTATIVE:
            (a, x), (b, y), *rest = pairs
            orders.append([(a, y), (b, x), *rest])
        for order in orders:
            yield from _find_all(order, found.over(value))


class Either(Pattern):
    """The first that is found, or the next."""

    def __init__(self, *patterns: Any) -> None:
        self.patterns = patterns

    def find(self, value: Any, found: Found) -> Iterator[Found]:
        for pattern in self.patterns:
            yield from find(pattern, value, found)


@dataclass(frozen=True)
class Cast(Pattern):
    """The pattern, or a cast of it, or a cast of that: but not there and back, which rounds on purpose."""

    pattern: Any

    def find(self, value: Any, found: Found) -> Iterator[Found]:
        widened = False
        while is_cast(value):
            before, after = (value_of(x).dtype.itemsize for x in (value.args[0], value))
            if widened and before > after:
                break
            widened = widened or before < after
            found, value = found.over(value), value.args[0]
        yield from find(self.pattern, value, found)


def range_of(node: Any) -> tuple[Node, int, int] | None:
    """What a node is a slice of along the last axis, where it begins and where it ends; None of anything else."""
    if not isinstance(node, Node) or not node.args or not isinstance(value_of(node), Tensor):
        return None
    index, width = 0, value_of(node).shape[-1] if value_of(node).dim() else 0
    if node.target is operator.getitem:
        node, index = node.args[0], node.args[1]  # type: ignore[assignment]
        if name_of(node) not in ("chunk", "split", "split_with_sizes"):
            return None
    elif name_of(node) != "slice" or arguments_of(node)["step"] != 1:
        return None
    source, dim = node.args[0], arguments_of(node)["dim"]
    whole = value_of(source)
    if dim not in (-1, whole.dim() - 1) or not isinstance(width, int) or not isinstance(whole.shape[-1], int):
        return None
    if name_of(node) == "slice":
        start = arguments_of(node)["start"] or 0
        start = start + whole.shape[-1] if start < 0 else start
    else:
        start = sum(part.shape[-1] for part in value_of(node)[:index])
    return source, start, start + width  # type: ignore[return-value]


@dataclass(frozen=True)
class Half(Pattern):
    """The first half of the last axis of the pattern, or the second."""

    pattern: Any
    second: bool

    def find(self, value: Any, found: Found) -> Iterator[Found]:
        part = range_of(value)
        if part is not None:
            source, start, stop = part
            width = value_of(source).shape[-1]
            if (2 * start, 2 * stop) == ((width, 2 * width) if self.second else (0, width)):
                inner = found.over(value) if value.args[0] is source else found.over(value).over(value.args[0])
                yield from find(self.pattern, source, inner)


@dataclass(frozen=True)
class EveryOther(Pattern):
    """The features 0, 2, ... of the last axis of the pattern, or 1, 3, ..."""

    pattern: Any
    odd: bool

    def find(self, value: Any, found: Found) -> Iterator[Found]:
        if name_of(value) != "slice":
            return
        given = arguments_of(value)
        whole = value_of(given["self"])
        width = whole.shape[-1]
        to_the_end = isinstance(width, int) and isinstance(given["end"], int) and given["end"] >= width
        last = given["dim"] in (-1, whole.dim() - 1)
        if last and to_the_end and (given["start"], given["step"]) == (int(self.odd), 2):
            yield from find(self.pattern, given["self"], found.over(value))


@dataclass(frozen=True)
class Reshaped(Pattern):
    """A view of the pattern in another shape. Its elements keep their order, so that the result's shape tells which."""

    pattern: Any

    def find(self, value: Any, found: Found) -> Iterator[Found]:
        if name_of(value) in ("view", "reshape", "_unsafe_view", "flatten"):
            yield from find(self.pattern, value.args[0], found.over(value))


@dataclass(frozen=True)
class With(Pattern):
    """The pattern, and a constant under a name: which of several it was."""

    name: str
    constant: Any
    pattern: Any

    def find(self, value: Any, found: Found) -> Iterator[Found]:
        for inner in find(self.pattern, value, found):
            yield from inner.bind(self.name, self.constant)


@dataclass(frozen=True)
class Named(Pattern):
    """The pattern, and the node where it was found under a name."""

    name: str
    pattern: Any

    def find(self, value: Any, found: Found) -> Iterator[Found]:
        for inner in find(self.pattern, value, found):
            yield from inner.bind(self.name, value)


class Left(Exception):
    """Why something that looks like an operator is left as it is, in words for the report."""


class Emit(Protocol):
    """Puts calls into the graph. `wanted` is what the first result gives, a fake tensor."""

    wanted: Tensor

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """A node for the call's result, or one for each of several; arguments are nodes and constants."""


@dataclass(frozen=True, kw_only=True)
class Plain:
    """A computation in plain PyTorch that an operator replaces.

    Attributes:
        results: A pattern for each of the operator's results. The first is looked for everywhere; a further one is a
            name that the first has bound, or a pattern that is looked for in the rest of the graph.
        signs: The operators of ATen by which a reader would expect it: where one of them is left, the report says so.
        build: `build(emit, values)` puts in what replaces it and returns a node for each result; without it the values
            are the operator's arguments by name. It raises `Left` where the two are not equal after all.
        stand_in: `stand_in(emit, values, node)` puts in what may be returned in place of `node`, which is computed on
            the way: where the user asks for it, and gradients are wanted.
    """

    results: tuple[Any, ...]
    signs: tuple[str, ...] = ()
    build: Callable[[Emit, Mapping[str, Any]], Any] | None = None
    stand_in: Callable[[Emit, Mapping[str, Any], Node], Node] | None = None


def as_dtype(emit: Emit, node: Node, dtype: torch.dtype) -> Node:
    """The node, cast where it is of another dtype."""
    return node if value_of(node).dtype == dtype else emit(torch.ops.aten.to.dtype, node, dtype)


def require_last_axis(dim: Any, tensor: Tensor) -> None:
    """
    Raises:
        Left: `dim`, an axis or a list of them, is not the tensor's last one alone.
    """
    dims = [dim] if isinstance(dim, int) else list(dim or ())
    if dims not in ([-1], [tensor.dim() - 1]):
        raise Left(f"it is over axes {dims} of {tensor.dim()}, and the operator's over the last")
