"""Masks that are known as formulas, computed for a few sizes: no formula is taken on trust.

A node that has a formula has the call that made it too, with the calls that made its arguments. They end at sizes and
at tensors of which only the shape is read.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import map_aggregate

from llmk.apart import apart_from_caller
from llmk.compiler.sizes import NotSmall, Sizes
from llmk.registry.private.compilers import symbols_of

FEW = range(1, 13)
"""Numbers of tokens that stand for the graph's own."""
SMALL = 256
"""Masks of up to so many tokens are computed at their own size."""


@dataclass(frozen=True, eq=False)
class Like:
    """A tensor of which the shape and dtype are read, and nothing else."""

    value: Tensor


@dataclass(frozen=True, eq=False)
class Made:
    """A call of an operator that made a tensor of sizes alone."""

    target: Any
    args: Any
    kwargs: Any


def computed(made: Made | Like, sizes: Sizes) -> Tensor:
    """Return the tensor for other sizes than the graph's.

    Raises:
        NotSmall: It has no such sizes.
    """
    known: dict[int, Any] = {}

    def of(x: Any) -> Any:
        if isinstance(x, Like):
            return torch.zeros(sizes.shape(x.value), dtype=x.value.dtype, device="cpu")
        if not isinstance(x, Made):
            return sizes.of(x)
        if id(x) not in known:
            known[id(x)] = x.target(*map_aggregate(x.args, of), **map_aggregate(x.kwargs, of))
        return known[id(x)]

    try:
        with torch.no_grad():
            return of(made)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise NotSmall(f"{type(error).__name__}: {error}".splitlines()[0]) from error


def disagreement(made: Made | Like, shape: tuple[Any, ...], causal: bool, lowest: float) -> str | None:
    """Return how a mask of queries by keys differs from one that hides the future, or nothing; None where it does not.

    Args:
        made: The calls that made it.
        shape: The mask's, whose last two sizes are known to be the same.
        causal: The formula says that it hides the future.
        lowest: Numbers that are not above this one hide.
    """
    return apart_from_caller(_disagreement, made, shape, causal, lowest)


def _disagreement(made: Made | Like, shape: tuple[Any, ...], causal: bool, lowest: float) -> str | None:
    for sizes in _sizes(shape):
        try:
            mask = computed(made, sizes)
        except NotSmall as why:
            return f"its mask cannot be computed for few tokens: {why}"
        seen = mask if mask.dtype == torch.bool else mask == 0
        hidden = ~seen if mask.dtype == torch.bool else mask <= lowest
        n = sizes.of(shape[-1])
        right = torch.ones(n, n, dtype=torch.bool, device="cpu")
        right = right.tril() if causal else right
        if seen.shape[-1] != n or not bool(((seen == right) & (hidden == ~right)).all()):
            return f"its mask of {n} tokens does not hide {'what comes after each' if causal else 'nothing'} alone"
    return None


def _sizes(shape: tuple[Any, ...]) -> Iterator[Sizes]:
    names = sorted({name for size in shape if isinstance(size, torch.SymInt) for name in symbols_of(size)})
    tokens = shape[-1]
    for n in [tokens] if isinstance(tokens, int) and tokens <= SMALL else FEW:
        numbers = {tokens: n} if isinstance(tokens, int) else {}
        symbols = {name: n + i for i, name in enumerate(names)}
        yield Sizes(numbers, defaultdict(lambda n=n: n, symbols))
