"""The formulas of what a graph of ATen's operators makes from sizes alone: one rule for each operator."""

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx import GraphModule, Node

from llmk.compiler.formulas import Formula, Line, Region, Unknown, constant, expanded, reindexed, same
from llmk.registry.patterns import arguments_of, name_of, value_of
from llmk.registry.private.compilers import statically_known_true
from llmk.registry.private.tensors import storage_of, version_of

WHOLE = (torch.int64, torch.int32)


def note_formulas(gm: GraphModule, written: Collection[int]) -> None:
    """Put the formula of every node that has one into its `meta`, given those of the placeholders.

    Of what lies in memory that is `written` nothing is known.
    """
    for node in gm.graph.nodes:
        value = value_of(node)
        if not isinstance(value, Tensor) or (written and storage_of(value) in written):
            node.meta.pop("formula", None)
        elif (rule := RULES.get(name_of(node))) is not None:
            try:
                node.meta["formula"] = rule(node)
            except Unknown:
                continue


def carry_formula(source: Node, target: Node, value: Any) -> None:
    """Let `target` have the formula of `source`, if nothing ever writes into `value`, which they give."""
    if "formula" not in source.meta or not isinstance(value, Tensor) or value.is_inference():
        return
    if version_of(value) == 0:
        target.meta["formula"] = source.meta["formula"]


def formula_of(value: Any, shape: Sequence[Any]) -> Formula:
    """Of a node or number, as one of a tensor of this shape, to which it is broadcast."""
    if not isinstance(value_of(value), Tensor):
        if not isinstance(value_of(value), int | float | SymInt):
            raise Unknown
        return constant(value_of(value), len(shape))
    if "formula" not in value.meta:
        raise Unknown
    return expanded(value.meta["formula"], value_of(value).shape, shape)


def own_formula(node: Any) -> Formula:
    return formula_of(node, value_of(node).shape)


def viewed(node: Node) -> Formula:
    """Axes of size 1 come and go, the others keep their order."""
    old, new = value_of(node.args[0]).shape, value_of(node).shape
    places = [i for i, size in enumerate(new) if not same(size, 1)]
    kept = [size for size in old if not same(size, 1)]
    if len(places) != len(kept) or not all(same(size, new[i]) for size, i in zip(kept, places, strict=True)):
        raise Unknown
    into = iter(places)
    return reindexed(own_formula(node.args[0]), [(None if same(s, 1) else next(into), 0) for s in old], len(new))


def permuted(node: Node) -> Formula:
    given, rank = arguments_of(node), value_of(node).dim()
    order = list(range(rank))
    if "dims" in given:
        order = [dim % rank for dim in given["dims"]]
    elif rank > 1:
        a, b = (given["dim0"] % rank, given["dim1"] % rank) if "dim0" in given else (0, 1)
        order[a], order[b] = order[b], order[a]
    return reindexed(own_formula(node.args[0]), [(order.index(i), 0) for i in range(rank)], rank)


def sliced(node: Node) -> Formula:
    given, whole = arguments_of(node), value_of(node.args[0])
    start = value_of(given["start"]) or 0
    if given["step"] != 1 or not isinstance(start, int):
        raise Unknown
    dim = given["dim"] % whole.dim()
    start = start + whole.shape[dim] if start < 0 else start
    sources = [(i, start if i == dim else 0) for i in range(whole.dim())]
    return reindexed(own_formula(node.args[0]), sources, whole.dim())


def indexed(node: Node) -> Formula:
    """One index for each axis, none of which counts from the end."""
    given, shape = arguments_of(node), value_of(node).shape
    source, indices = own_formula(given["self"]), given["indices"]
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


def arange(node: Node) -> Formula:
    given = {name: value_of(value) for name, value in arguments_of(node).items()}
    start, step = (given.get(name, default) for name, default in (("start", 0), ("step", 1)))
    if value_of(node).dtype not in WHOLE or isinstance(start, float) or isinstance(step, float):
        raise Unknown
    return Line(start, (step,))


def filled(value: Any) -> Callable[[Node], Formula]:
    """Of a factory that puts `value` everywhere, or what it is given."""

    def formula(node: Node) -> Formula:
        given, result = arguments_of(node), value_of(node)
        number = next((value_of(given[name]) for name in ("fill_value", "s") if name in given), value)
        if not isinstance(number, bool | int | float):
            raise Unknown
        return constant(in_dtype(number, result.dtype), result.dim())

    return formula


def in_dtype(value: Any, dtype: torch.dtype) -> Any:
    """
    Raises:
        Unknown: The dtype has no such number.
    """
    try:
        return torch.tensor(value, dtype=dtype, device="cpu").item()
    except (RuntimeError, OverflowError, ValueError) as error:
        raise Unknown from error


def cast(node: Node) -> Formula:
    formula, dtype = own_formula(node.args[0]), value_of(node).dtype
    if isinstance(formula, Region):
        if dtype in WHOLE:
            raise Unknown
        return formula.over(lambda value: in_dtype(value, dtype))
    if dtype in WHOLE:
        return formula
    if formula.is_constant and isinstance(formula.start, int):
        return constant(in_dtype(formula.start, dtype), len(formula.steps))
    raise Unknown


def unchanged(node: Node) -> Formula:
    return own_formula(node.args[0])


def two(node: Node) -> tuple[Formula, Formula]:
    """What an operator of two tensors or numbers takes, in the shape of its result."""
    a, b = (formula_of(x, value_of(node).shape) for x in node.args[:2])
    return a, b


def by_values(node: Node, a: Formula, b: Formula, change: Callable[[Any, Any], Any]) -> Region:
    """Of a region and a number, value by value."""
    dtype = value_of(node).dtype
    x, y = (as_region(formula) for formula in (a, b))
    if x is not None and y is not None and not y.lines:
        return x.over(lambda value: in_dtype(change(value, y.inside), dtype))
    if x is not None and y is not None and not x.lines:
        return y.over(lambda value: in_dtype(change(x.inside, value), dtype))
    raise Unknown


def summed(of_first: int, of_second: int) -> Callable[[Node], Formula]:
    def formula(node: Node) -> Formula:
        a, b = two(node)
        if arguments_of(node).get("alpha", 1) != 1:
            raise Unknown
        if isinstance(a, Line) and isinstance(b, Line):
            return a.times(of_first) + b.times(of_second)
        return by_values(node, a, b, lambda x, y: of_first * x + of_second * y)

    return formula


def multiplied(node: Node) -> Formula:
    a, b = two(node)
    for line, factor in ((a, b), (b, a)):
        if isinstance(line, Line) and isinstance(factor, Line) and factor.is_constant:
            return line.times(factor.start)
    return by_values(node, a, b, operator.mul)


def differences(node: Node) -> Formula:
    """Of neighbours on the last axis, with something before the first that goes on in the same steps."""
    given, result = arguments_of(node), value_of(node)
    line, rank = own_formula(given["self"]), result.dim()
    if not isinstance(line, Line) or given["n"] != 1 or given["dim"] not in (-1, rank - 1) or given["append"]:
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


def running_sum(node: Node) -> Formula:
    """Of one number everywhere."""
    given, formula = arguments_of(node), own_formula(node.args[0])
    rank = value_of(node).dim()
    each = formula.inside if isinstance(formula, Region) else formula.start
    alone = not formula.lines if isinstance(formula, Region) else formula.is_constant
    if value_of(node).dtype not in WHOLE or not alone or isinstance(each, float):
        raise Unknown
    each, dim = int(each) if isinstance(each, bool) else each, given["dim"] % rank
    return Line(each, tuple(each if i == dim else 0 for i in range(rank)))


def compared(
    compare: Callable[[Any, Any], bool], lines: Callable[[Line], tuple[Line, ...]], inside: bool = True
) -> Callable[[Node], Formula]:
    """Of a comparison that gives `inside` where the lines, made of the difference of the two, are at least 0."""

    def formula(node: Node) -> Formula:
        shape, (a, b) = value_of(node).shape, two(node)
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


def joined(outside: bool) -> Callable[[Node], Formula]:
    """Of `and`, where `outside` is False, or of `or`."""

    def formula(node: Node) -> Formula:
        lines: tuple[Line, ...] = ()
        for x in two(node):
            part = x.with_outside(outside) if isinstance(x, Region) else None
            if part is None or part.inside is not (not outside):
                raise Unknown
            lines += part.lines
        return Region(lines, not outside, outside, value_of(node).dim())

    return formula


def negated(node: Node) -> Formula:
    formula = own_formula(node.args[0])
    if not isinstance(formula, Region) or not isinstance(formula.inside, bool):
        raise Unknown
    return formula.over(operator.not_)


def chosen(node: Node) -> Formula:
    """Of `where` and `masked_fill`, which leave a tensor as it is in one region and put a number elsewhere."""
    shape, dtype, given = value_of(node).shape, value_of(node).dtype, arguments_of(node)
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
    """The formula, if it is a region, or one number everywhere."""
    if isinstance(formula, Line):
        number = formula.start if formula.is_constant else None
        return Region((), number, number, len(formula.steps)) if isinstance(number, int) else None
    return formula


def cast_region(region: Region | None, dtype: torch.dtype) -> Region | None:
    return region and region.over(lambda value: in_dtype(value, dtype))


def triangle(sign: int) -> Callable[[Node], Formula]:
    """Of `tril`, where `sign` is 1, or of `triu`."""

    def formula(node: Node) -> Formula:
        rank, diagonal = value_of(node).dim(), value_of(arguments_of(node)["diagonal"])
        source, line = as_region(own_formula(node.args[0])), Line(sign * diagonal, (*(0,) * (rank - 2), sign, -sign))
        found = source and source.within(Region((line,), True, False, rank), in_dtype(0, value_of(node).dtype))
        if found is None:
            raise Unknown
        return found

    return formula


RULES: dict[str, Callable[[Node], Formula]] = {
    "arange": arange, "add": summed(1, 1), "sub": summed(1, -1), "rsub": summed(-1, 1), "mul": multiplied,
    "diff": differences, "cumsum": running_sum, "index": indexed,
    "le": compared(operator.le, lambda d: (d.times(-1),)), "ge": compared(operator.ge, lambda d: (d,)),
    "lt": compared(operator.lt, lambda d: (less(d.times(-1)),)), "gt": compared(operator.gt, lambda d: (less(d),)),
    "eq": compared(operator.eq, lambda d: (d, d.times(-1))),
    "ne": compared(operator.ne, lambda d: (d, d.times(-1)), inside=False),
    "where": chosen, "masked_fill": chosen, "tril": triangle(1), "triu": triangle(-1),
    "ones": filled(1), "new_ones": filled(1), "ones_like": filled(1),
    "zeros": filled(0), "new_zeros": filled(0), "zeros_like": filled(0),
    "full": filled(None), "new_full": filled(None), "full_like": filled(None),
    "scalar_tensor": filled(None),
    "to": cast, "_to_copy": cast, "slice": sliced,
    **dict.fromkeys(("logical_not", "bitwise_not"), negated),
    **dict.fromkeys(("__and__", "bitwise_and", "logical_and"), joined(False)),
    **dict.fromkeys(("__or__", "bitwise_or", "logical_or"), joined(True)),
    **dict.fromkeys(("unsqueeze", "squeeze", "view", "reshape", "_unsafe_view"), viewed),
    **dict.fromkeys(("permute", "transpose", "t"), permuted),
    **dict.fromkeys(("alias", "contiguous", "clone", "detach", "lift_fresh_copy"), unchanged),
    "expand": lambda node: formula_of(node.args[0], value_of(node).shape),
}  # fmt: skip
"""By an operator's name in ATen: what it gives."""
