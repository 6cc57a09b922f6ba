"""Propagates formulas of tensors that a graph makes from sizes alone, such as masks: one handler for each operator."""

import contextlib
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from llmk.compiler.formulas import Formula, Line, Region, Unknown, constant, expanded, reindexed, same
from llmk.compiler.masks import Like, Made
from llmk.compiler.patterns import arguments, bounded, name_of, value_of
from llmk.registry.private.compilers import statically_known_true
from llmk.registry.private.tensors import storage_of, version_of

WHOLE = (torch.int64, torch.int32)
KEYS = "formula", "made"
"""The keys of a node's `meta`: its formula, and the calls that made it, which compute small masks for comparison."""

Given = Mapping[str, Any]
Handler = Callable[[Node, Given], Formula]


def propagate_formulas(gm: GraphModule, mutated: Collection[int]) -> None:
    """Put the formula of every node that has one into its `meta`, given those of the placeholders.

    Nothing is known of tensors in memory that is `mutated`.
    """
    for node in gm.graph.nodes:
        value = value_of(node)
        if not isinstance(value, Tensor) or (mutated and storage_of(value) in mutated):
            remove_formula(node)
        else:
            with contextlib.suppress(Unknown):
                node.meta["formula"] = formula_at(node)
                node.meta["made"] = made_at(node)


def copy_formula(source: Node, target: Node, value: Any) -> None:
    """Copy the formula of `source` to `target`, if nothing ever writes into `value`, which both give."""
    if "formula" not in source.meta or not isinstance(value, Tensor) or value.is_inference():
        return
    if version_of(value) == 0:
        target.meta |= {name: source.meta[name] for name in KEYS}


def remove_formula(node: Node) -> None:
    for name in KEYS:
        node.meta.pop(name, None)


def formula_at(node: Node) -> Formula:
    """Return the formula of a node.

    Raises:
        Unknown: No handler knows all of the node's arguments, or a number may not fit its dtype.
    """
    handler, names = HANDLERS.get(name_of(node), (None, ()))
    given = arguments(node, *names)
    if handler is None or given is None:
        raise Unknown
    formula = handler(node, given)
    if isinstance(formula, Line) and not formula.fits(value_of(node).dtype, value_of(node).shape):
        raise Unknown
    return formula


def made_at(node: Node) -> Made:
    """Return the node's call, with the calls that made its arguments in their place."""

    def of(source: Node) -> Any:
        value = value_of(source)
        return source.meta.get("made", Like(value)) if isinstance(value, Tensor) else value

    return Made(node.target, map_arg(node.args, of), map_arg(node.kwargs, of))


def formula_of(value: Any, shape: Sequence[Any]) -> Formula:
    """Return the formula of a node or number that is broadcast to this shape."""
    if not isinstance(value_of(value), Tensor):
        if not isinstance(value_of(value), int | float | SymInt):
            raise Unknown
        return constant(value_of(value), len(shape))
    if "formula" not in value.meta:
        raise Unknown
    return expanded(value.meta["formula"], value_of(value).shape, shape)


def own_formula(node: Any) -> Formula:
    return formula_of(node, value_of(node).shape)


def viewed(node: Node, given: Given) -> Formula:
    """Handle a view: axes of size 1 come and go, the others keep their order."""
    old, new = value_of(given["self"]).shape, value_of(node).shape
    places = [i for i, size in enumerate(new) if not same(size, 1)]
    kept = [size for size in old if not same(size, 1)]
    if len(places) != len(kept) or not all(same(size, new[i]) for size, i in zip(kept, places, strict=True)):
        raise Unknown
    into = iter(places)
    return reindexed(own_formula(given["self"]), [(None if same(s, 1) else next(into), 0) for s in old], len(new))


def permuted(node: Node, given: Given) -> Formula:
    rank = value_of(node).dim()
    order = list(range(rank))
    if "dims" in given:
        order = [dim % rank for dim in given["dims"]]
    elif rank > 1:
        a, b = (given["dim0"] % rank, given["dim1"] % rank) if "dim0" in given else (0, 1)
        order[a], order[b] = order[b], order[a]
    return reindexed(own_formula(given["self"]), [(order.index(i), 0) for i in range(rank)], rank)


def sliced(node: Node, given: Given) -> Formula:
    whole = value_of(given["self"])
    dim = given["dim"] % whole.dim()
    start, size = value_of(given["start"]), whole.shape[dim]
    start = 0 if start is None or statically_known_true(start == 0) else bounded(start, size)
    if start is None:
        raise Unknown
    sources = [(i, start if i == dim else 0) for i in range(whole.dim())]
    return reindexed(own_formula(given["self"]), sources, whole.dim())


def indexed(node: Node, given: Given) -> Formula:
    """Handle an index for each axis, none of which counts from the end."""
    shape, indices = value_of(node).shape, given["indices"]
    source = own_formula(given["self"])
    if not isinstance(source, Line) or len(indices) != len(source.steps):
        raise Unknown
    total = Line(source.start, (0,) * len(shape))
    for step, index in zip(source.steps, indices, strict=True):
        if not same(step, 0):
            line = formula_of(index, shape)
            if not isinstance(line, Line) or not line.at_least_zero(shape):
                raise Unknown
            total = total + line.times(step)
    return total


def arange(node: Node, given: Given) -> Formula:
    given = {name: value_of(value) for name, value in given.items()}
    start, step = (given.get(name, default) for name, default in (("start", 0), ("step", 1)))
    if value_of(node).dtype not in WHOLE or isinstance(start, float) or isinstance(step, float):
        raise Unknown
    return Line(start, (step,))


def filled(value: Any) -> Handler:
    """Return the handler of a factory that fills a tensor with `value`, or with the number it is given."""

    def formula(node: Node, given: Given) -> Formula:
        result = value_of(node)
        number = next((value_of(given[name]) for name in ("fill_value", "s") if name in given), value)
        if not isinstance(number, bool | int | float):
            raise Unknown
        return constant(in_dtype(number, result.dtype), result.dim())

    return formula


def in_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Return a number as the dtype has it.

    Raises:
        Unknown: The dtype has no such number.
    """
    try:
        return torch.tensor(value, dtype=dtype, device="cpu").item()
    except (RuntimeError, OverflowError, ValueError) as error:
        raise Unknown from error


def cast(node: Node, given: Given) -> Formula:
    formula, dtype = own_formula(given["self"]), value_of(node).dtype
    if isinstance(formula, Region):
        if dtype in WHOLE:
            raise Unknown
        return formula.over(lambda value: in_dtype(value, dtype))
    if dtype in WHOLE:
        return formula
    if formula.is_constant and isinstance(formula.start, int):
        return constant(in_dtype(formula.start, dtype), len(formula.steps))
    raise Unknown


def unchanged(node: Node, given: Given) -> Formula:
    return own_formula(given["self"])


def two(node: Node, given: Given) -> tuple[Formula, Formula]:
    """Return the formulas of an operator's two tensors or numbers, in the shape of its result."""
    a, b = (formula_of(given[name], value_of(node).shape) for name in ("self", "other"))
    return a, b


def by_values(node: Node, a: Formula, b: Formula, change: Callable[[Any, Any], Any]) -> Region:
    """Return the region that comes of combining a region and a number value by value."""
    dtype = value_of(node).dtype
    x, y = (as_region(formula) for formula in (a, b))
    if x is not None and y is not None and not y.lines:
        return x.over(lambda value: in_dtype(change(value, y.inside), dtype))
    if x is not None and y is not None and not x.lines:
        return y.over(lambda value: in_dtype(change(x.inside, value), dtype))
    raise Unknown


def summed(of_first: int, of_second: int) -> Handler:
    def formula(node: Node, given: Given) -> Formula:
        a, b = two(node, given)
        if isinstance(a, Line) and isinstance(b, Line):
            return a.times(of_first) + b.times(of_second)
        return by_values(node, a, b, lambda x, y: of_first * x + of_second * y)

    return formula


def multiplied(node: Node, given: Given) -> Formula:
    a, b = two(node, given)
    for line, factor in ((a, b), (b, a)):
        if isinstance(line, Line) and isinstance(factor, Line) and factor.is_constant:
            return line.times(factor.start)
    return by_values(node, a, b, operator.mul)


def differences(node: Node, given: Given) -> Formula:
    """Handle differences of neighbours on the last axis; an element before the first continues their steps."""
    line, rank = own_formula(given["self"]), value_of(node).dim()
    if not isinstance(line, Line) or given["dim"] not in (-1, rank - 1):
        raise Unknown
    step = line.steps[-1]
    if given["prepend"] is not None:
        if not same(value_of(given["prepend"]).shape[-1], 1):
            raise Unknown
        before = own_formula(given["prepend"])
        first = Line(line.start, (*line.steps[:-1], 0))
        if not isinstance(before, Line) or not is_number(first - replace(before, steps=(*before.steps[:-1], 0)), step):
            raise Unknown
    return Line(step, (0,) * rank)


def is_number(line: Line, number: Any) -> bool:
    return line.is_constant and same(line.start, number)


def running_sum(node: Node, given: Given) -> Formula:
    """Handle the running sum of a tensor that holds one number everywhere."""
    formula = own_formula(given["self"])
    rank = value_of(node).dim()
    each = formula.inside if isinstance(formula, Region) else formula.start
    alone = not formula.lines if isinstance(formula, Region) else formula.is_constant
    if value_of(node).dtype not in WHOLE or not alone or isinstance(each, float):
        raise Unknown
    each, dim = int(each) if isinstance(each, bool) else each, given["dim"] % rank
    return Line(each, tuple(each if i == dim else 0 for i in range(rank)))


def compared(
    compare: Callable[[Any, Any], bool], lines: Callable[[Line], tuple[Line, ...]], inside: bool = True
) -> Handler:
    """Return the handler of a comparison that gives `inside` where lines of the operands' difference are at least 0."""

    def formula(node: Node, given: Given) -> Formula:
        shape, (a, b) = value_of(node).shape, two(node, given)
        if not isinstance(a, Line) or not isinstance(b, Line):
            return by_values(node, a, b, compare)
        found = lines(a - b)
        constants = [line.start for line in found if line.is_constant]
        if any(statically_known_true(start < 0) for start in constants):
            return constant(not inside, len(shape))
        open_ = tuple(line for line in found if not line.at_least_zero(shape))
        return Region(open_, inside, not inside, len(shape))

    return formula


def less(line: Line) -> Line:
    return replace(line, start=line.start - 1)


def joined(outside: bool) -> Handler:
    """Return the handler of `and`, where `outside` is False, or of `or`."""

    def formula(node: Node, given: Given) -> Formula:
        if value_of(node).dtype != torch.bool:
            raise Unknown
        lines: tuple[Line, ...] = ()
        for x in two(node, given):
            part = x.with_outside(outside) if isinstance(x, Region) else None
            if part is None or part.inside is not (not outside):
                raise Unknown
            lines += part.lines
        return Region(lines, not outside, outside, value_of(node).dim())

    return formula


def negated(node: Node, given: Given) -> Formula:
    formula = own_formula(given["self"])
    if not isinstance(formula, Region) or not isinstance(formula.inside, bool):
        raise Unknown
    return formula.over(operator.not_)


def chosen(node: Node, given: Given) -> Formula:
    """Handle `where` and `masked_fill`, which keep a tensor in one region and put a number elsewhere."""
    shape, dtype = value_of(node).shape, value_of(node).dtype
    if "mask" in given:
        where, then, otherwise = (given[name] for name in ("mask", "value", "self"))
    else:
        where, then, otherwise = (given[name] for name in ("condition", "self", "other"))
    parts = [cast_region(as_region(formula_of(x, shape)), dtype) for x in (then, otherwise)]
    condition = formula_of(where, shape)
    for tensor, other, holds in ((*parts, True), (*parts[::-1], False)):
        if isinstance(condition, Region) and tensor and other and not other.lines:
            kept = condition.with_outside(not holds)
            if kept is not None and kept.inside is holds and (found := tensor.within(kept, other.inside)) is not None:
                return found
    raise Unknown


def as_region(formula: Formula) -> Region | None:
    """Return the formula as a region, if it is one or one number everywhere."""
    if isinstance(formula, Line):
        number = formula.start if formula.is_constant else None
        return Region((), number, number, len(formula.steps)) if isinstance(number, int) else None
    return formula


def cast_region(region: Region | None, dtype: torch.dtype) -> Region | None:
    return region and region.over(lambda value: in_dtype(value, dtype))


def triangle(sign: int) -> Handler:
    """Return the handler of `tril`, where `sign` is 1, or of `triu`."""

    def formula(node: Node, given: Given) -> Formula:
        rank, diagonal = value_of(node).dim(), value_of(given["diagonal"])
        source, line = as_region(own_formula(given["self"])), Line(sign * diagonal, (*(0,) * (rank - 2), sign, -sign))
        found = source and source.within(Region((line,), True, False, rank), in_dtype(0, value_of(node).dtype))
        if found is None:
            raise Unknown
        return found

    return formula


def broadcast(node: Node, given: Given) -> Formula:
    return formula_of(given["self"], value_of(node).shape)


MEMORY = "dtype", "layout", "device", "pin_memory", "memory_format"
"""Arguments for a tensor's place and dtype, which the node's fake tensor tells too."""
COPY = "self", *MEMORY, "non_blocking", "copy"
BOTH = "self", "other"

HANDLERS: dict[str, tuple[Handler, tuple[str, ...]]] = {
    "arange": (arange, ("start", "end", "step", *MEMORY)),
    "add": (summed(1, 1), BOTH),
    "sub": (summed(1, -1), BOTH),
    "rsub": (summed(-1, 1), BOTH),
    "mul": (multiplied, BOTH),
    "diff": (differences, ("self", "dim", "prepend")),
    "cumsum": (running_sum, ("self", "dim", "dtype")),
    "index": (indexed, ("self", "indices")),
    "le": (compared(operator.le, lambda d: (d.times(-1),)), BOTH),
    "ge": (compared(operator.ge, lambda d: (d,)), BOTH),
    "lt": (compared(operator.lt, lambda d: (less(d.times(-1)),)), BOTH),
    "gt": (compared(operator.gt, lambda d: (less(d),)), BOTH),
    "eq": (compared(operator.eq, lambda d: (d, d.times(-1))), BOTH),
    "ne": (compared(operator.ne, lambda d: (d, d.times(-1)), inside=False), BOTH),
    "where": (chosen, ("condition", *BOTH)),
    "masked_fill": (chosen, ("self", "mask", "value")),
    "tril": (triangle(1), ("self", "diagonal")),
    "triu": (triangle(-1), ("self", "diagonal")),
    "ones": (filled(1), ("size", *MEMORY)),
    "new_ones": (filled(1), ("self", "size", *MEMORY)),
    "zeros": (filled(0), ("size", *MEMORY)),
    "new_zeros": (filled(0), ("self", "size", *MEMORY)),
    "ones_like": (filled(1), ("self", *MEMORY)),
    "zeros_like": (filled(0), ("self", *MEMORY)),
    "full": (filled(None), ("size", "fill_value", *MEMORY)),
    "scalar_tensor": (filled(None), ("s", *MEMORY)),
    "full_like": (filled(None), ("self", "fill_value", *MEMORY)),
    "new_full": (filled(None), ("self", "size", "fill_value", *MEMORY)),
    "to": (cast, COPY),
    "_to_copy": (cast, COPY),
    "slice": (sliced, ("self", "dim", "start", "end")),
    **dict.fromkeys(("logical_not", "bitwise_not"), (negated, ("self",))),
    **dict.fromkeys(("__and__", "bitwise_and", "logical_and"), (joined(False), BOTH)),
    **dict.fromkeys(("__or__", "bitwise_or", "logical_or"), (joined(True), BOTH)),
    **dict.fromkeys(("unsqueeze", "squeeze"), (viewed, ("self", "dim"))),
    **dict.fromkeys(("view", "reshape", "_unsafe_view"), (viewed, ("self", "size", "shape"))),
    "permute": (permuted, ("self", "dims")),
    "t": (permuted, ("self",)),
    "transpose": (permuted, ("self", "dim0", "dim1")),
    **dict.fromkeys(("alias", "contiguous", "clone", "detach", "lift_fresh_copy"), (unchanged, ("self", *MEMORY))),
    "expand": (broadcast, ("self", "size", "implicit")),
}
"""By an operator's name in ATen: its handler, and the names of the arguments that the handler reads."""
