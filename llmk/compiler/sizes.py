"""Small sizes in the place of a graph's, so that a computation for any device is run on a CPU in a moment.

Relations between sizes stay. Large sizes are made small one by one, from the smallest on. A size that is a product, a
double or a sum of others stays that. Numbers among the arguments are sizes too, where they are as large.

Symbols are first told apart, each by a number of its own. Where the graph needs some of them to be related, which their
names do not say, they are made small as the sizes that they stand for while the graph is compiled.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import SymFloat, SymInt, Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate

from llmk.compiler.patterns import tensors_of, value_of
from llmk.registry.private.compilers import hint_of, hints_of, substituted, symbols_of

KEPT = 16
"""Sizes up to this one stay."""
FEW, MOST = 2**18, 2**20
"""Elements of all tensors together: 1 MiB of float32, where there are such sizes, and the most."""
FRESH = (8, 12, 20, 28, 44, 52, 68, 76)
"""Twice or four times an odd number each, and none a product of two others."""


class NotSmall(Exception):
    """The reason for which a tensor cannot be computed with small sizes, in words for the report."""


@dataclass(frozen=True)
class Sizes:
    """Another number for each size.

    Attributes:
        numbers: The new numbers of sizes that are known; others stay.
        symbols: The numbers of the symbols in other sizes.
    """

    numbers: Mapping[int, int] = field(default_factory=dict)
    symbols: Mapping[str, int] = field(default_factory=dict)

    def of(self, value: Any) -> Any:
        """Return an argument of an operator with other sizes, on the CPU; constants stay as they are.

        Raises:
            NotSmall: A symbol has no value, or none of a quotient.
        """
        if isinstance(value, SymInt):
            try:
                return substituted(value, self.symbols)
            except (KeyError, TypeError) as error:
                raise NotSmall("a size depends on data") from error
            except ZeroDivisionError as error:
                raise NotSmall("a size is divided by another one, which has become 0") from error
        if isinstance(value, SymFloat):
            return hint_of(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return self.numbers.get(value, value)
        if isinstance(value, list | tuple):
            return [self.of(x) for x in value]
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def shape(self, tensor: Tensor) -> list[int]:
        return self.of(tuple(tensor.shape))


def candidates(
    matched: Sequence[Node], made: Sequence[Node], inputs: Sequence[Node], kept: Sequence[int] = ()
) -> Iterator[Sizes]:
    """Yield sizes with which all tensors together are small, those of the graph first. Sizes in `kept` stay."""
    nodes = [*inputs, *matched, *made]
    tensors = [x for node in nodes for x in tensors_of(value_of(node))]
    found: list[tuple[int, Sizes]] = []
    for sizes in _all_candidates(nodes, tensors, kept):
        try:
            found.append((sum(math.prod(sizes.shape(x)) for x in tensors), sizes))
        except NotSmall:
            continue
    for elements, sizes in sorted(found, key=lambda pair: pair[0] > FEW):
        if elements <= MOST:
            yield sizes


def _all_candidates(nodes: Sequence[Node], tensors: Sequence[Tensor], kept: Sequence[int]) -> Iterator[Sizes]:
    numbers = _numbers(nodes)
    literals = {x for x in numbers if isinstance(x, int)}
    axes = {x for t in tensors for x in t.shape if isinstance(x, int)}
    names = sorted({name for x in numbers if isinstance(x, SymInt) for name in symbols_of(x)})
    few = defaultdict(lambda: 2, {name: i + 3 for i, name in enumerate(names)})
    more = defaultdict(lambda: 4, {name: 4 * FRESH[i % len(FRESH)] for i, name in enumerate(names)})
    for table in _tables(axes, literals, kept):
        for symbols in (few, more) if names else (few,):
            yield Sizes(table, symbols)
    hints = symbol_hints(nodes)
    for table in _tables(axes.union(hints.values()), literals, kept) if hints else ():
        yield Sizes(table, defaultdict(lambda: 2, {name: table.get(hint, hint) for name, hint in hints.items()}))


def _tables(axes: set[int], literals: set[int], kept: Sequence[int]) -> Iterator[dict[int, int]]:
    """Yield tables of small numbers for large ones: none, then each size by itself, then products of small ones too."""
    yield {}
    large = sorted(x for x in axes if x > KEPT and x not in kept)
    small = sorted(x for x in axes if 1 < x <= KEPT or x in kept)
    if large:
        yield _table(large, sorted(x for x in literals if x > KEPT), [])
        yield _table(large, sorted(x for x in literals if x > KEPT), small)


def _table(large: Sequence[int], literals: Sequence[int], small: Sequence[int]) -> dict[int, int]:
    """Return a small number for each large one. Sizes that are products of `small` ones stay products."""
    known = {x: x for x in small}
    fresh = iter(FRESH)
    for size in large:
        derived = _derived(size, known)
        known[size] = derived if derived is not None else next(fresh, size)
    for number in literals:
        if number not in known:
            derived = _derived(number, known)
            if derived is not None:
                known[number] = derived
    return {x: y for x, y in known.items() if x > KEPT}


def _derived(size: int, known: dict[int, int]) -> int | None:
    """Return the number of a size that follows from those of known sizes, or None."""
    for factor in (2, 3, 4):
        if size % factor == 0 and size // factor in known:
            return factor * known[size // factor]
    for x, y in known.items():
        if size % x == 0 and size // x in known:
            return y * known[size // x]
        if size == x - 1 or 2 * size == x:
            return y - 1 if size == x - 1 else y // 2
    for x, y in known.items():
        if size - x in known:
            return y + known[size - x]
    return None


def symbol_hints(nodes: Sequence[Node]) -> dict[str, int]:
    """Return the sizes that symbols stand for while the graph is compiled, by name."""
    found: dict[str, int] = {}
    for x in _numbers(nodes):
        if isinstance(x, SymInt):
            found |= hints_of(x)
    return found


def _numbers(nodes: Sequence[Node]) -> list[Any]:
    """Return sizes and whole numbers among the arguments and results of the nodes."""
    found: list[Any] = []

    def look(x: Any) -> Any:
        value = value_of(x)
        if isinstance(value, Tensor):
            found.extend(value.shape)
        elif isinstance(value, int | SymInt) and not isinstance(value, bool):
            found.append(value)
        return x

    for node in nodes:
        for value in (*tensors_of(value_of(node)), value_of(node)):
            look(value)
        map_aggregate((node.args, node.kwargs), look)
    return found
