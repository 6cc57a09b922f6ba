"""Tensors that a graph makes from sizes alone, such as masks and ranges, computed at other sizes on a CPU.

A node of such a tensor has the call that made it in its `meta`, under "made", with the calls that made its arguments in
their place. They end at sizes and at tensors of which only the shape is read, so that no data has a part in the result.
"""

import functools
import hashlib
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from llmk.compiler.patterns import name_of, value_of
from llmk.compiler.sizes import NotSmall, Sizes
from llmk.registry.private.compilers import constants_of, largest, symbols_of
from llmk.registry.private.tensors import storage_of, version_of

OF_SHAPE = frozenset({"new_ones", "new_zeros", "new_full", "ones_like", "zeros_like", "full_like"})
"""Operators that read nothing but the shape and the dtype of their tensor."""
PURE = OF_SHAPE | {
    *("arange", "ones", "zeros", "full", "scalar_tensor"),
    *("add", "sub", "rsub", "mul", "diff", "cumsum", "index", "where", "masked_fill", "tril", "triu"),
    *("le", "ge", "lt", "gt", "eq", "ne", "logical_not", "logical_and", "logical_or"),
    *("bitwise_not", "bitwise_and", "bitwise_or", "__and__", "__or__"),
    *("to", "_to_copy", "alias", "contiguous", "clone", "detach", "lift_fresh_copy"),
    *("slice", "unsqueeze", "squeeze", "view", "reshape", "_unsafe_view", "permute", "t", "transpose", "expand"),
}
"""Operators whose result is the same each time they are called with the same tensors and numbers."""

FEW = range(1, 13)
OTHERS = (2, 3, 5, 13)
"""Numbers for sizes and other symbols."""
LARGE = 2**22
"""Elements. No larger tensor is computed: a mask of 2,048 by 2,048 tokens has as many."""
ELSE = 7
"""The number for symbols that have no part in a tensor."""
WHOLE = torch.int64, torch.int32
NEVER = 2**20
"""A size that no mask has: it would have 2^40 elements."""


@dataclass(frozen=True, eq=False)
class Like:
    """A tensor of which the shape and dtype are read, and nothing else."""

    value: Tensor

    def __repr__(self) -> str:
        return f"{self.value.dtype} {tuple(self.value.shape)}"


@dataclass(frozen=True, eq=False)
class Made:
    """A call of an operator that made a tensor of sizes alone."""

    target: Any
    args: Any
    kwargs: Any

    def __repr__(self) -> str:
        """Return a hash of the call and of those that made its arguments."""
        return self._hash

    @functools.cached_property
    def _hash(self) -> str:
        return hashlib.sha256(f"{self.target} {self.args} {self.kwargs}".encode()).hexdigest()


def note_calls(gm: GraphModule, mutated: Collection[int]) -> None:
    """Put "made" into the `meta` of every node whose tensor is made from sizes alone, given those of the placeholders.

    Tensors in memory that is `mutated` are left out.
    """
    for node in gm.graph.nodes:
        value = value_of(node)
        if not isinstance(value, Tensor) or (mutated and storage_of(value) in mutated):
            node.meta.pop("made", None)
        elif name_of(node) in PURE and all(_is_known(x, name_of(node)) for x in node.all_input_nodes):
            node.meta["made"] = made_at(node)


def copy_call(source: Node, target: Node, value: Any) -> None:
    """Copy "made" from `source` to `target`, if nothing ever writes into `value`, which both give."""
    is_tensor = isinstance(value, Tensor) and not value.is_inference()
    if "made" in source.meta and is_tensor and version_of(value) == 0:
        target.meta["made"] = source.meta["made"]


def _is_known(node: Node, reader: str) -> bool:
    value = value_of(node)
    if isinstance(value, Tensor):
        return "made" in node.meta or reader in OF_SHAPE
    return isinstance(value, int | float | SymInt)


def made_at(node: Node) -> Made:
    """Return the node's call, with the calls that made its arguments in their place."""

    def of(source: Node) -> Any:
        value = value_of(source)
        return source.meta.get("made", Like(value)) if isinstance(value, Tensor) else value

    return Made(node.target, map_arg(node.args, of), map_arg(node.kwargs, of))


def computed(made: Made, sizes: Sizes) -> Tensor:
    """Return the tensor for other sizes than the graph's.

    Raises:
        NotSmall: It has no such sizes.
    """
    return _values(_calls(made), sizes)[-1]


def _calls(made: Made) -> list[Made]:
    """Return a call and those that made its arguments, which come first, each once."""
    found: dict[int, Made] = {}

    def look(x: Any) -> Any:
        if isinstance(x, Made) and id(x) not in found:
            map_aggregate((x.args, x.kwargs), look)
            found[id(x)] = x
        return x

    look(made)
    return list(found.values())


def _values(calls: Iterable[Made], sizes: Sizes) -> list[Tensor]:
    known: dict[int, Tensor] = {}

    def of(x: Any) -> Any:
        if isinstance(x, Like):
            return torch.zeros(sizes.shape(x.value), dtype=x.value.dtype, device="cpu")
        return known[id(x)] if isinstance(x, Made) else sizes.of(x)

    try:
        with torch.no_grad():
            for call in calls:
                known[id(call)] = call.target(*map_aggregate(call.args, of), **map_aggregate(call.kwargs, of))
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise NotSmall(f"{type(error).__name__}: {error}".splitlines()[0]) from error
    return list(known.values())


def samples(node: Node) -> Iterator[tuple[Tensor, Sizes]]:
    """Yield the tensor of a node at so many sizes that what holds at each of them holds at any.

    Raises:
        NotSmall: There are no such sizes, or they are too large.
    """
    shape, calls = value_of(node).shape, _calls(node.meta["made"])
    for sizes in _enough_sizes(shape, calls):
        if math.prod(sizes.shape(value_of(node))) > LARGE:
            raise NotSmall("it depends on numbers that only a large tensor shows")
        tensor = _values(calls, sizes)[-1]
        if list(tensor.shape) != sizes.shape(value_of(node)):
            raise NotSmall("its shape does not follow the sizes")
        yield tensor, sizes


def _enough_sizes(shape: Sequence[Any], calls: Sequence[Made]) -> Iterator[Sizes]:
    """Yield the sizes of a tensor that is not large, if they are numbers, or else enough others.

    Then the last size is each of a dozen numbers, and every symbol that is not in it some, independently. At last both
    are larger than any place at which a comparison could change: one of `i + a` with `j + b` is settled where i and j
    differ by more than `|a| + |b|`, and a and b are among the numbers that the calls take or give.
    """
    last = shape[-1] if shape else 1
    own = _symbols([last], ())[:1]
    others = [name for name in _symbols(shape, calls) if name not in own]

    def at(n: int, *numbers: int) -> Sizes:
        table = {last: n} if isinstance(last, int) and last > max(FEW) else {}
        symbols = {name: numbers[i % len(numbers)] for i, name in enumerate(others)}
        return Sizes(table, defaultdict(lambda: ELSE, symbols | dict.fromkeys(own, n)))

    whole = isinstance(last, int) and math.prod(at(last, max(OTHERS)).of(tuple(shape))) <= LARGE
    for n in [last] if whole else FEW:
        for i in range(len(OTHERS) if others else 1):
            yield at(n, *OTHERS[i:], *OTHERS[:i])
    if whole and not others:
        return
    numbers = _numbers(calls, at(max(FEW), *OTHERS))
    if not whole:
        most = last if isinstance(last, int) else largest(last, NEVER)
        yield at(min(_settled(numbers, most), most), *OTHERS)
    if others:
        yield at(min(FEW) + 2, _settled(numbers, NEVER))


def _symbols(shape: Sequence[Any], calls: Iterable[Made]) -> list[str]:
    found: set[str] = set()

    def look(x: Any) -> Any:
        found.update(symbols_of(x) if isinstance(x, SymInt) else ())
        return x

    map_aggregate((tuple(shape), *((call.args, call.kwargs) for call in calls)), look)
    return sorted(found)


def _numbers(calls: Sequence[Made], sizes: Sizes) -> list[float]:
    """Return the numbers that the calls take, and those in the tensors that they give.

    Raises:
        NotSmall: Positions are in a dtype that does not have all of them.
    """
    found: list[float] = []
    for call in calls:
        for x in (*call.args, *call.kwargs.values()):
            if isinstance(x, SymInt):
                found += [*constants_of(x), sizes.of(x)]
            elif isinstance(x, int | float):
                found.append(x)
    for tensor in _values(calls, sizes):
        values = tensor.unique().tolist()
        if tensor.dtype not in WHOLE and len(values) > 2:
            raise NotSmall(f"it is computed from more than two numbers in {tensor.dtype}")
        found += values
    return found


def _settled(numbers: Iterable[float], most: int) -> int:
    """Return a size that is larger than the sum of any two of the numbers below `most`."""
    return 2 * int(max((abs(x) for x in numbers if abs(x) < most), default=0)) + 2
