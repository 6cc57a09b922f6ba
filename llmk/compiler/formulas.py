"""Formulas of tensors that are made from sizes alone, such as masks: an element as a function of its position.

Whole numbers are a `Line`, a sum over the axes; a comparison of lines is a `Region`, one value where some lines are not
negative and another elsewhere. Sizes may be symbolic: nothing is computed, so that a mask costs the same at any length.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from llmk.registry.private.compilers import statically_known_true

MANY = 2**20
"""Tokens. A mask of as many by as many has 2^40 elements, which no device holds."""


class Unknown(Exception):
    """No formula is known of a node."""


@dataclass(frozen=True)
class Line:
    """At index i: start + sum of steps[axis] * i[axis]. `start` and the steps may be symbolic."""

    start: Any
    steps: tuple[Any, ...]

    def __add__(self, other: "Line") -> "Line":
        return Line(self.start + other.start, tuple(map(operator.add, self.steps, other.steps)))

    def times(self, factor: Any) -> "Line":
        return Line(self.start * factor, tuple(step * factor for step in self.steps))

    def __sub__(self, other: "Line") -> "Line":
        return self + other.times(-1)

    @property
    def is_constant(self) -> bool:
        return all(same(step, 0) for step in self.steps)

    def fits(self, dtype: torch.dtype, shape: Sequence[Any]) -> bool:
        """Return True if the dtype has each number, as integers wrap around. A symbolic size is at most MANY."""
        if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
            return False
        limits, known = torch.iinfo(dtype), isinstance(self.start, int)
        low, high = (self.start, self.start) if known else (-MANY, MANY)
        for step, size in zip(self.steps, shape, strict=True):
            most = max(size - 1, 0) if isinstance(size, int) else MANY
            reach = [step * most, 0] if isinstance(step, int) else [-MANY * most, MANY * most]
            low, high = low + min(reach), high + max(reach)
        return limits.min <= low and high <= limits.max

    def at_least_zero(self, shape: Sequence[Any]) -> bool:
        """Return True if it is known not to be negative anywhere."""
        if not all(isinstance(step, int) for step in self.steps):
            return False
        falls = [step * (size - 1) for step, size in zip(self.steps, shape, strict=True) if step < 0]
        return statically_known_true(self.start + sum(falls) >= 0)


@dataclass(frozen=True)
class Region:
    """`inside` where every line is at least 0, and `outside` elsewhere: truth values or numbers."""

    lines: tuple[Line, ...]
    inside: Any
    outside: Any
    rank: int

    def over(self, change: Callable[[Any], Any]) -> "Region":
        return replace(self, inside=change(self.inside), outside=change(self.outside))

    def with_outside(self, value: Any) -> "Region | None":
        """Return the same region with this value outside, or None if it has no such form."""
        if not self.lines:
            return replace(self, outside=value)
        if self.outside == value:
            return self
        if len(self.lines) == 1 and self.inside == value:
            line = self.lines[0].times(-1)
            return Region((replace(line, start=line.start - 1),), self.outside, self.inside, self.rank)
        return None

    def within(self, other: "Region | None", value: Any) -> "Region | None":
        """Return this region where `other` has its inside, and `value` elsewhere."""
        mine = self.with_outside(value)
        return other and mine and Region(mine.lines + other.lines, mine.inside, value, self.rank)


Formula = Line | Region


def same(a: Any, b: Any) -> bool:
    return statically_known_true(a == b)


def constant(value: Any, rank: int) -> Formula:
    return Region((), value, value, rank) if isinstance(value, bool | float) else Line(value, (0,) * rank)


def reindexed(formula: Formula, sources: Sequence[tuple[int | None, Any]], rank: int) -> Formula:
    """Return the formula of a tensor of `rank` axes: the old index of axis i is that of `sources[i][0]` plus [1]."""
    if isinstance(formula, Region):
        lines = tuple(reindexed(line, sources, rank) for line in formula.lines)
        return replace(formula, lines=lines, rank=rank)
    start, steps = formula.start, [0] * rank
    for step, (axis, offset) in zip(formula.steps, sources, strict=True):
        start = start + step * offset
        if axis is not None:
            steps[axis] = steps[axis] + step
    return Line(start, tuple(steps))


def expanded(formula: Formula, shape: Sequence[Any], target: Sequence[Any]) -> Formula:
    more = len(target) - len(shape)
    if more < 0:
        raise Unknown
    sources: list[tuple[int | None, Any]] = []
    for i, size in enumerate(shape):
        if not (same(size, 1) or same(size, target[i + more])):
            raise Unknown
        sources.append((None if same(size, 1) else i + more, 0))
    return reindexed(formula, sources, len(target))
