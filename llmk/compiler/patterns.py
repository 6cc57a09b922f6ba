"""Patterns over the nodes of a graph of ATen's operators: they match a computation that an operator of llmk replaces.

A pattern is written as the computation itself: `x * x.sigmoid()`, where x is a `KeywordArg`. It matches by structure:
names of ATen's operators without their overloads, arguments by the schema, sums and products in either order. Shapes
and dtypes are not part of it: the backend compares them with the operator's own results when it puts the operator in.

`KeywordArg`, `Arg` and `Match` are named after those of `torch._inductor.pattern_matcher`. Both kinds of arguments have
a name here, and a `Match` finds the same value under it everywhere.

This file imports private names alone, so that the files of operators can import it.
"""

import functools
import inspect
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, ParamSpec, Protocol

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from llmk.registry.private.compilers import settled, statically_known_true
from llmk.registry.private.operators import schema_of

COMMUTATIVE = frozenset({"add", "mul"})
CASTS = frozenset({"to", "_to_copy", "type_as", "alias", "contiguous"})
RESHAPES = frozenset({"view", "reshape", "_unsafe_view", "flatten", "unflatten"})
VIEWS = RESHAPES | {
    *("slice", "select", "narrow", "unsqueeze", "squeeze", "transpose", "permute", "t", "expand", "expand_as"),
    *("chunk", "split", "split_with_sizes", "tensor_split", "unbind"),
}
CAST_ARGUMENTS = "self", "other", "dtype", "layout", "device", "pin_memory", "non_blocking", "copy", "memory_format"
ORDERLY_FORMATS = None, 0, torch.preserve_format, torch.contiguous_format
"""Memory formats that keep the order of elements; 0 is how a schema writes the last one as a default."""
CAST_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
OVERLOAD = type(torch.ops.aten.add.Tensor)
SECOND_NAMES = {
    "concat": "cat",
    "concatenate": "cat",
    "divide": "div",
    "multiply": "mul",
    "negative": "neg",
    "subtract": "sub",
    "true_divide": "div",
}
"""Names that ATen has besides another one, with the same arguments."""


def name_of(node: Any) -> str:
    """Return the name of an operator of ATen without namespace and overload, and of others with their namespace.

    The name is empty if the node calls no operator. An operator with two names has the first.
    """
    if not isinstance(node, Node) or node.op != "call_function" or not isinstance(node.target, OVERLOAD):
        return ""
    name = schema_of(node.target).name.removeprefix("aten::")
    return SECOND_NAMES.get(name, name)


def constant_of(value: Any) -> int | float | None:
    """Return a number that is known while the graph is compiled: a constant, or a symbol for what does not change."""
    value = value_of(value)
    if isinstance(value, torch.SymFloat):
        value = settled(value)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def value_of(node: Any) -> Any:
    """Return the value that the trace saw at a node: a fake tensor, a number, or a tuple of them."""
    return node.meta.get("val") if isinstance(node, Node) else node


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors that a node gives: one, those of a tuple, or none."""
    return [x for x in (value if isinstance(value, tuple | list) else [value]) if isinstance(x, Tensor)]


def same(a: Any, b: Any) -> bool:
    """Return True if two sizes are known to be equal, whatever their symbols are."""
    return statically_known_true(a == b)


def same_shape(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(map(same, a, b))


def all_arguments(node: Node) -> dict[str, Any]:
    """Return every argument by its name in the schema, defaults filled in; for code that treats all of them alike."""
    arguments = schema_of(node.target).arguments
    given = dict(zip((a.name for a in arguments), node.args, strict=False)) | dict(node.kwargs)
    return {a.name: given.get(a.name, a.default_value) for a in arguments}


def arguments(node: Any, *names: str) -> dict[str, Any] | None:
    """Return the arguments of an operator's call by their names in the schema, for a rule that knows these names.

    A rule reads all arguments of a node or leaves it: the result is None where an argument that is not named has
    another value than its default, and where the node calls no operator. Names that the schema does not have are left
    out, so that one call reads every overload of an operator.
    """
    if not name_of(node):
        return None
    given = all_arguments(node)
    defaults = {a.name: a.default_value for a in schema_of(node.target).arguments}
    if any(not _is_default(given[name], defaults[name]) for name in given if name not in names):
        return None
    return {name: given[name] for name in names if name in given}


def _is_default(given: Any, default: Any) -> bool:
    if isinstance(given, list | tuple) and isinstance(default, list | tuple):
        return list(given) == list(default)
    return given is default or (type(given) is type(default) and not isinstance(given, Node) and given == default)


def item_of(node: Any) -> tuple[Node, Any] | None:
    """Return the tuple that a node takes an item from, and the index of the item."""
    if not isinstance(node, Node) or node.target is not operator.getitem:
        return None
    source, index = node.args
    return (source, index) if isinstance(source, Node) else None


def is_view(node: Node) -> bool:
    return name_of(node) in VIEWS or item_of(node) is not None


def viewed_by(view: Node) -> Node:
    """Return the tensor that a view shows, or the tuple that an item is taken from."""
    item = item_of(view)
    return all_arguments(view)["self"] if item is None else item[0]


def shown_by(view: Node, value: Any) -> Any:
    """Return what a view shows of another tensor or tuple than the one in the graph."""
    source = viewed_by(view)
    args, kwargs = map_arg((view.args, view.kwargs), lambda node: value if node is source else value_of(node))
    return view.target(*args, **kwargs)  # type: ignore[operator]


def cast_of(node: Any) -> Node | None:
    """Return the tensor that a node casts to another floating-point dtype, or to its own one, if it does nothing else.

    A node that leads from float16 to bfloat16 or back is no cast: neither holds the other's numbers.
    """
    if name_of(node) not in CASTS:
        return None
    given = arguments(node, *CAST_ARGUMENTS)
    if given is None or given.get("memory_format", None) not in ORDERLY_FORMATS:
        return None
    source = given["self"]
    before, after = value_of(source), value_of(node)
    if not isinstance(before, Tensor) or before.device != after.device or before.layout != after.layout:
        return None
    same_width = before.dtype.itemsize == after.dtype.itemsize
    is_it = {before.dtype, after.dtype} <= CAST_DTYPES and (before.dtype == after.dtype or not same_width)
    return source if is_it else None


def is_narrowing(node: Node) -> bool:
    """Return True if a cast rounds."""
    source = cast_of(node)
    return source is not None and value_of(source).dtype.itemsize > value_of(node).dtype.itemsize


@dataclass(frozen=True)
class Match:
    """The nodes that a pattern has matched so far.

    Attributes:
        values: The nodes and constants that were captured, by name.
        nodes: The nodes that the pattern takes in.
        inputs: The captured tensors, in the order in which they were read.
        sizes: Sizes that numbers among the nodes depend on, as in a sum over 4096: a trial leaves them as they are.
        same: Gives one node for all that are known to have equal values.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    nodes: tuple[Node, ...] = ()
    inputs: tuple[Node, ...] = ()
    sizes: tuple[int, ...] = ()
    same: Callable[[Node], Node] = lambda node: node

    def bind(self, name: str, value: Any) -> Iterator["Match"]:
        """Yield the match with the value under this name, unless another value has the name."""
        if name not in self.values:
            yield replace(self, values={**self.values, name: value})
        elif self._are_same(self.values[name], value):
            yield self

    def _are_same(self, a: Any, b: Any) -> bool:
        if isinstance(a, Node) and isinstance(b, Node):
            return self.same(a) is self.same(b)
        return a is b or _equal(a, b)

    def with_nodes(self, *nodes: Node) -> "Match":
        """Return the match with these nodes taken in."""
        return replace(self, nodes=(*self.nodes, *nodes))


def _equal(a: Any, b: Any) -> bool:
    """Return True if two numbers are equal in float32."""
    if isinstance(a, bool) or isinstance(b, bool) or not isinstance(a, int | float) or not isinstance(b, int | float):
        return type(a) is type(b) and not isinstance(a, Node) and a == b
    return math.isclose(a, b, rel_tol=1e-6)


class Pattern:
    """A pattern of a node or of an argument, written as plain PyTorch.

    `x + y`, `-x` and their like are the operators of ATen for them, and `x.NAME(...)` is a `Call` of NAME.

    Attributes:
        find: `find(value, match)` yields every way in which the pattern matches `value`, each added to a match of
            other patterns.
    """

    def __init__(self, find: Callable[[Any, Match], Iterator[Match]]) -> None:
        self.find = find

    def __or__(self, other: Any) -> "Pattern":
        return Either(self, other)

    def __add__(self, other: Any) -> "Pattern":
        return Call("add", self, other)

    def __sub__(self, other: Any) -> "Pattern":
        return Call("sub", self, other)

    def __mul__(self, other: Any) -> "Pattern":
        return Call("mul", self, other)

    def __truediv__(self, other: Any) -> "Pattern":
        return Call("div", self, other)

    def __neg__(self) -> "Pattern":
        return Call("neg", self)

    def __getattr__(self, name: str) -> Callable[..., "Pattern"]:
        if name.startswith("_"):
            raise AttributeError(name)
        return functools.partial(Call, name, self)


P = ParamSpec("P")


def pattern(find: Callable[Concatenate[Any, Match, P], Iterator[Match]]) -> Callable[P, Pattern]:
    """Make a kind of pattern of how it is found: `find(value, match, *args)` with the arguments of the kind."""

    @functools.wraps(find)
    def make(*args: P.args, **kwargs: P.kwargs) -> Pattern:
        return Pattern(lambda value, match: find(value, match, *args, **kwargs))

    _, _, *own = inspect.signature(find).parameters.values()
    make.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    return make


def find(wanted: Any, value: Any, match: Match) -> Iterator[Match]:
    """Do what `Pattern.find` does, where a list stands for its entries and any other value for itself."""
    if isinstance(wanted, Pattern):
        yield from wanted.find(value, match)
    elif isinstance(wanted, list | tuple):
        if isinstance(value, list | tuple) and len(value) == len(wanted):
            yield from _find_all(list(zip(wanted, value, strict=True)), match)
    elif wanted is value or _equal(wanted, value):
        yield match


def _find_all(pairs: list[tuple[Any, Any]], match: Match) -> Iterator[Match]:
    if not pairs:
        yield match
        return
    for first in find(*pairs[0], match):
        yield from _find_all(pairs[1:], first)


@pattern
def KeywordArg(
    value: Any, match: Match, /, name: str, where: Callable[[Tensor], bool] = lambda _: True
) -> Iterator[Match]:
    """A tensor under a name, everywhere the same one, for which `where` is true."""
    if isinstance(value, Node) and isinstance(value_of(value), Tensor) and where(value_of(value)):
        for inner in match.bind(name, value):
            yield replace(inner, inputs=(*inner.inputs, value))


@pattern
def Number(value: Any, match: Match, /, name: str) -> Iterator[Match]:
    """A number under a name, which the graph has as a constant."""
    number = constant_of(value)
    if number is not None:
        yield from match.bind(name, number)


@pattern
def Arg(value: Any, match: Match, /, name: str) -> Iterator[Match]:
    """Any argument under a name: a tensor, a number, None, a list or a dtype."""
    yield from match.bind(name, value)


def Call(name: str, *args: Any, **kwargs: Any) -> Pattern:
    """A call of an operator of ATen, or of llmk by `llmk::`. Arguments that are not mentioned have their defaults.

    Its form that writes into its first argument, such as `add_`, is the same call: it is replaced where nobody else has
    that memory.

    Raises:
        ValueError: ATen has no operator of this name, or none that takes these arguments: nothing would ever match.
    """
    overloads = _overloads("name", name)
    takes = (len(args) <= len(names) and kwargs.keys() <= set(names[len(args) :]) for names in overloads or ())
    if overloads is not None and not any(takes):
        given = ", ".join([f"{len(args)} by position", *kwargs])
        raise ValueError(f"{name}: expected arguments that an overload in ATen takes, got {given}")
    return _call(SECOND_NAMES.get(name, name), *args, **kwargs)


@functools.cache
def _overloads(argument: str, name: str) -> list[list[str]] | None:
    """Return the names of the arguments of each overload of an operator of ATen; None for one of another namespace.

    Raises:
        ValueError: ATen has no such operator; the message names the argument by which it was given.
    """
    if "::" in name:
        return None
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        raise ValueError(f"{argument}: expected an operator of ATen, or NAMESPACE::NAME, got {name!r}")
    schemas = [schema_of(getattr(packet, overload)) for overload in packet.overloads()]
    return [[a.name for a in schema.arguments if not a.is_out] for schema in schemas]


@pattern
def _call(value: Any, match: Match, /, name: str, *args: Any, **kwargs: Any) -> Iterator[Match]:
    if name_of(value) not in (name, f"{name}_"):
        return
    names = [argument.name for argument in schema_of(value.target).arguments]
    wanted = dict(zip(names, args, strict=False)) | kwargs
    given = arguments(value, *wanted)
    if len(args) > len(names) or given is None or len(given) < len(wanted):
        return
    pairs = [(inner, given[argument]) for argument, inner in wanted.items()]
    orders = [pairs]
    if name in COMMUTATIVE:
        (a, x), (b, y), *rest = pairs
        orders.append([(a, y), (b, x), *rest])
    for order in orders:
        yield from _find_all(order, match.with_nodes(value))


@pattern
def Result(value: Any, match: Match, /, index: int, of: Pattern) -> Iterator[Match]:
    """One of the results of the pattern, which gives a tuple; results that nobody reads are taken in with it."""
    item = item_of(value)
    if item is not None and item[1] == index:
        unread = (user for user in item[0].users if item_of(user) is not None and not user.users)
        yield from find(of, item[0], match.with_nodes(value, *unread))


@pattern
def Either(value: Any, match: Match, /, *patterns: Any) -> Iterator[Match]:
    """Any of several patterns, tried in their order."""
    for one in patterns:
        yield from find(one, value, match)


@pattern
def View(value: Any, match: Match, /, source: Callable[[Any], Node | None], shown: Any) -> Iterator[Match]:
    """A node that shows the pattern in another way: `source(node)` is what it shows, or None."""
    before = source(value)
    if before is not None:
        yield from find(shown, before, match.with_nodes(value))


@pattern
def Through(value: Any, match: Match, /, source: Callable[[Any], Node | None], shown: Any) -> Iterator[Match]:
    """The pattern, after any number of nodes that show it in another way, all of which are passed over."""
    while (before := source(value)) is not None:
        match, value = match.with_nodes(value), before
    yield from find(shown, value, match)


def Input(read: Any) -> Pattern:
    """The pattern, read in its own dtype or in one that holds all of its numbers.

    A cast that changes no number is passed over; a cast that rounds is the input itself.
    """
    return Through(lambda node: None if is_narrowing(node) else cast_of(node), read)


@pattern
def Cast(value: Any, match: Match, /, cast: Any) -> Iterator[Match]:
    """The pattern, or a cast of its result to a dtype that one of its inputs is in.

    A result that is computed in float32 from 16 bits and rounded to 16 bits may be rounded once, by an operator that
    takes 16 bits. One that is computed from float32 may not: the operator would read its input in 16 bits. A cast there
    and back is not passed over either, since it rounds on purpose.
    """
    read_before, widened = len(match.inputs), False
    rounded: tuple[torch.dtype, ...] = ()
    stops = []
    while (source := cast_of(value)) is not None:
        if is_narrowing(value):
            stops.append((rounded, match, value))  # the rounded tensor may be the one that is read
            if widened:
                break
            rounded = (*rounded, value_of(value).dtype)
        widened = widened or value_of(source).dtype.itemsize < value_of(value).dtype.itemsize
        match, value = match.with_nodes(value), source
    else:
        stops.append((rounded, match, value))
    for dtypes, before, at in reversed(stops):
        for inner in find(cast, at, before):
            if {value_of(node).dtype for node in inner.inputs[read_before:]}.issuperset(dtypes):
                yield inner


def is_last(dims: Any, tensor: Tensor) -> bool:
    """Return True if an axis, or a list of one, is the tensor's last."""
    dims = list(dims) if isinstance(dims, list | tuple) else [dims]
    return tensor.dim() > 0 and dims in ([-1], [tensor.dim() - 1])


def reshape_of(node: Any) -> Node | None:
    """Return the tensor that a node gives in another shape, with its elements in the same order."""
    if name_of(node) not in RESHAPES:
        return None
    given = arguments(node, "self", "size", "shape", "start_dim", "end_dim", "dim", "sizes")
    return None if given is None else given["self"]


@pattern
def Then(value: Any, match: Match, /, first: Any, then: Callable[[Any, Match], Iterable[Match]]) -> Iterator[Match]:
    """The pattern, and for each of its matches at a node those that `then(node, match)` makes of it."""
    for inner in find(first, value, match):
        yield from then(value, inner)


def With(name: str, constant: Any, first: Any) -> Pattern:
    """The pattern, and a constant under a name, which tells the alternatives of a pattern apart."""
    return Then(first, lambda _, match: match.bind(name, constant))


def Named(name: str, first: Any) -> Pattern:
    """The pattern, and the node that it matches under a name."""
    return Then(first, lambda node, match: match.bind(name, node))


class NoMatch(Exception):
    """The reason for which a match is not replaced after all, in words for the report."""


class GraphBuilder(Protocol):
    """Puts calls into the graph. `wanted` is the fake tensor of the first result."""

    wanted: Tensor

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Return a node for the call's result, or one for each of several; arguments are nodes and constants."""

    def are_same(self, a: Node, b: Node) -> bool:
        """Return True if two nodes are known to have equal values."""
        ...


@dataclass(frozen=True, kw_only=True)
class RewritePattern:
    """A computation in plain PyTorch that an operator replaces.

    Attributes:
        results: A pattern for each of the operator's results. The first is looked for everywhere; a further one is a
            name that the first has captured, or a pattern that is looked for in the rest of the graph.
        anchor_ops: The operators of ATen by which a reader would expect this computation: where one of them is left,
            the report says so.
        why_left: `why_left(node)` is the reason that the report gives for an anchor around which nothing matched. It is
            empty where the node is no anchor after all: an activation is one of a gated unit if it multiplies a tensor.
        build: `build(builder, values)` puts the replacement in and returns a node for each result. It raises `NoMatch`
            where the two are not equal after all. Without `build` the values are the operator's arguments by name.
        indices: By the name of a tensor of indices: the name and the axis of the tensor that they index. A trial draws
            small inputs by this.
        tried_as: By the name of an operator: a function of its arguments that a trial runs in its place, where a CPU
            computes it in another way than the GPU for which it was chosen.
        stand_in: `stand_in(builder, values, node)` puts in a tensor that may be returned in place of `node`, which is
            computed on the way: where the user asks for it, and gradients are wanted.
    """

    results: tuple[Any, ...]
    anchor_ops: tuple[str, ...] = ()
    why_left: Callable[[Node], str] = lambda node: "what is computed around it is something else"
    build: Callable[[GraphBuilder, Mapping[str, Any]], Any] | None = None
    indices: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    tried_as: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    stand_in: Callable[[GraphBuilder, Mapping[str, Any], Node], Node] | None = None

    def __post_init__(self) -> None:
        for name in self.anchor_ops:
            _overloads("anchor_ops", name)


def as_dtype(builder: GraphBuilder, node: Node, dtype: torch.dtype) -> Node:
    """Return a result in this dtype, with a cast where it has another."""
    return node if value_of(node).dtype == dtype else builder(torch.ops.aten.to.dtype, node, dtype)


def widened(builder: GraphBuilder, node: Node, dtype: torch.dtype) -> Node:
    """Return an input in a dtype that holds all of its numbers.

    Raises:
        NoMatch: The dtype does not hold them.
    """
    if torch.promote_types(value_of(node).dtype, dtype) != dtype:
        raise NoMatch(f"it reads {value_of(node).dtype}, and the operator would {dtype}".replace("torch.", ""))
    return as_dtype(builder, node, dtype)


def order_in_memory(tensor: Tensor) -> list[int] | None:
    """Return the order of axes in which a tensor is contiguous: as they are, two exchanged, or the second one last."""
    axes = list(range(tensor.dim()))
    orders = [axes]
    for i, j in itertools.combinations(axes, 2):
        exchanged = {i: j, j: i}
        orders.append([exchanged.get(axis, axis) for axis in axes])
    orders.append(axes[:1] + axes[2:] + axes[1:2])
    return next((order for order in orders if tensor.permute(order).is_contiguous()), None)


def permuted(builder: GraphBuilder, node: Node, order: list[int], back: bool = False) -> Node:
    """Return a tensor with its axes in an order, or from this order back as they were."""
    if order == sorted(order):
        return node
    dims = [order.index(axis) for axis in range(len(order))] if back else order
    return builder(torch.ops.aten.permute.default, node, dims)


def require_last_axis(dim: Any, tensor: Tensor) -> None:
    """Check that `dim`, an axis or a list of axes, is the tensor's last one alone.

    Raises:
        NoMatch: It is not.
    """
    if not is_last(dim, tensor):
        dims = [dim] if isinstance(dim, int) else list(dim or ())
        raise NoMatch(f"it is over axes {dims} of {tensor.dim()}, and the operator's over the last")
