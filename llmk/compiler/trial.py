"""Tries every replacement before it is used: runs it beside the matched nodes, on a CPU, with small inputs.

Outputs and gradients of both are compared by the accuracy rule: the matched nodes in float64 are the reference, and in
the graph's dtypes the baseline. So a rule that reads a node wrongly costs a match and never a result. The kernel that a
GPU runs is not part of this, as the operator's own checks are about that.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate

from llmk.accuracy.neighbours import NEIGHBOURS, nudged, with_default_dtype
from llmk.accuracy.rule import accuracy_violation
from llmk.apart import apart_from_caller
from llmk.compiler.patterns import OVERLOAD, name_of, value_of
from llmk.compiler.size_tensors import computed
from llmk.compiler.sizes import NotSmall, Sizes, candidates
from llmk.registry.private.operators import schema_of

ARITHMETIC = frozenset({"add", "sub", "rsub", "mul", "div", "pow", "add_", "sub_", "mul_", "div_"})
"""Operators whose numbers are no sizes, where they are applied to floating-point tensors."""


class Untried(Exception):
    """The reason for which a replacement cannot be tried, in words for the report."""


@dataclass(frozen=True)
class Comparison:
    """Two ways to compute the same.

    Attributes:
        matched: The nodes that were matched, and views between what both ways take.
        made: The nodes that would stand in their place.
        results: The nodes of `matched` whose values are wanted, and then those of `made`.
        inputs: The nodes that both take.
        indices: By an input of indices: the input that they index, and the axis.
        tried_as: By the name of an operator: what is run in its place.
        ignored: The number among the indices that stands for none.
        autocast: The dtype that autocast computes in, if it is on.
        default_dtype: The caller's default dtype.
        same: Gives one node for all that are known to have equal values.
        sizes: Sizes that stay as they are.
    """

    matched: tuple[Node, ...]
    made: tuple[Node, ...]
    results: tuple[tuple[Node, ...], tuple[Node, ...]]
    inputs: tuple[Node, ...]
    indices: Mapping[Node, tuple[Node, int]]
    tried_as: Mapping[str, Callable[..., Any]]
    ignored: Any
    autocast: torch.dtype | None
    default_dtype: torch.dtype
    same: Callable[[Node], Node]
    sizes: tuple[int, ...] = ()


Draw = Callable[[int, list[int], torch.Generator], Tensor]


def _normal(scale: float, offset: float = 0.0, others: float | None = None, first: int = 0) -> Draw:
    """N(offset, scale^2), with another scale for every other input."""

    def draw(i: int, shape: list[int], generator: torch.Generator) -> Tensor:
        x = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        return offset + x * (scale if others is None or i % 2 == first else others)

    return draw


def _ties(i: int, shape: list[int], generator: torch.Generator) -> Tensor:
    return torch.randint(-2, 3, shape, generator=generator, device="cpu").double()


REGIMES: dict[str, Draw] = {
    "N(0, 1)": _normal(1.0),
    "N(1000, 1)": _normal(1.0, 1000.0),
    "N(0, 10^8)": _normal(1e4),
    "N(0, 10^-8)": _normal(1e-4),
    "large beside tiny": _normal(1e5, others=1e-4),
    "tiny beside large": _normal(1e5, others=1e-4, first=1),
    "ties": _ties,
    "zeros": _normal(0.0),
}


Incoming = Callable[[Tensor], Tensor]
"""Makes another incoming gradient of one that was drawn."""


def _every_other(value: float) -> Incoming:
    def change(grad: Tensor) -> Tensor:
        places = torch.arange(grad.numel(), device="cpu").view(grad.shape) % 2 == 0
        return grad.masked_fill(places, value)

    return change


AS_DRAWN = "normal"
INCOMING: dict[str, Incoming] = {
    AS_DRAWN: lambda grad: grad,
    "0": torch.zeros_like,
    "of stride 0": lambda grad: torch.ones((), dtype=grad.dtype, device="cpu").expand(grad.shape),
    "infinite": _every_other(float("inf")),
    "not a number": _every_other(float("nan")),
}
"""Gradients of the outputs. What a loss has saved may be 0 where it is divided by the number of tokens, which is 0."""


def difference(comparison: Comparison) -> str | None:
    """Return how the two ways differ, with the numbers; None where they compute the same by the accuracy rule.

    Raises:
        Untried: They cannot be run with small inputs.
    """
    return apart_from_caller(_difference, comparison)


def _difference(comparison: Comparison) -> str | None:
    trial = _small_trial(comparison)
    tried = [(regime, AS_DRAWN) for regime in REGIMES]
    if any(node.meta.get("needs_grad") for node in comparison.inputs):
        tried += [("N(0, 1)", incoming) for incoming in INCOMING if incoming != AS_DRAWN]
    for regime, incoming in tried:
        try:
            found = replace(trial, incoming=INCOMING[incoming]).difference(REGIMES[regime])
        except REFUSALS as why:
            found = f"the operator raises {type(why).__name__}: {why}".splitlines()[0]
        if found is not None:
            gradients = "" if incoming == AS_DRAWN else f" and gradients that are {incoming}"
            return f"tried with {regime}{gradients}, it is not the same: {found}"
    return None


def _small_trial(comparison: Comparison) -> "_Trial":
    """Return a trial with the first small sizes with which the matched nodes run."""
    problem = "its tensors are large, and no small sizes fit all that it says"
    for sizes in candidates(comparison.matched, comparison.made, comparison.inputs, comparison.sizes):
        trial = _Trial(comparison, sizes)
        try:
            trial.run_matched(REGIMES["N(0, 1)"])
        except (NotSmall, *REFUSALS) as why:
            problem = f"{type(why).__name__}: {why}".splitlines()[0]
        else:
            return trial
    raise Untried(problem)


FACTOR = 4.0
"""The factor by which errors may exceed those of the matched nodes; the accuracy rule has 1.5.

A trial has few elements, so that the largest error of each way is the luck of a few roundings; and a rule that is wrong
is wrong by the size of a result.
"""
REFUSALS = RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, AssertionError


@dataclass(frozen=True)
class _Trial:
    comparison: Comparison
    sizes: Sizes
    incoming: Incoming = INCOMING[AS_DRAWN]

    def difference(self, draw: Draw) -> str | None:
        composition, exact = self.run_matched(draw), self.run_matched(draw, exact=True)
        with with_default_dtype(self.comparison.default_dtype):
            got = self._run(self.comparison.made, self.comparison.results[1], self._inputs(draw))
        near: list[tuple[list[Tensor], list[Tensor]]] = []
        for i, (x, y, z) in enumerate(zip(got, composition, exact, strict=True)):
            if (x.dtype, x.shape) != (y.dtype, y.shape):
                return f"{x.dtype} {tuple(x.shape)} where {y.dtype} {tuple(y.shape)} is right"
            if not y.is_floating_point():
                if not torch.equal(x, y):
                    return f"result {i} is another"
            elif _violation(x, y, z, []) is not None:
                near = near or [self._near(draw, seed) for seed in range(NEIGHBOURS)]
                violation = _violation(x, y, z, [(a[i], b[i]) for a, b in near])
                if violation is not None:
                    return str(violation)
        return None

    def run_matched(self, draw: Draw, exact: bool = False, seed: int | None = None) -> list[Tensor]:
        """Run the matched nodes in the graph's dtypes or in float64: results, then gradients, as real tensors."""
        inputs = self._inputs(draw, seed)
        if exact:
            wide = {id(x): _exact(x) for x in inputs}  # one tensor stays one
            inputs = [wide[id(x)] for x in inputs]
        with with_default_dtype(torch.float64 if exact else self.comparison.default_dtype):
            return self._run(self.comparison.matched, self.comparison.results[0], inputs, exact)

    def _near(self, draw: Draw, seed: int) -> tuple[list[Tensor], list[Tensor]]:
        return self.run_matched(draw, seed=seed), self.run_matched(draw, exact=True, seed=seed)

    def _inputs(self, draw: Draw, seed: int | None = None) -> list[Any]:
        generator, numbers = torch.Generator().manual_seed(0), itertools.count()
        change = None if seed is None else nudged(seed)
        drawn: dict[Node, Any] = {}
        for node in self.comparison.inputs:
            if self.comparison.same(node) not in drawn:
                x = self._input(node, draw, generator, numbers)
                moves = change is not None and isinstance(x, Tensor) and x.is_floating_point()
                drawn[self.comparison.same(node)] = change(x) if moves else x  # type: ignore[misc]
        return [drawn[self.comparison.same(node)] for node in self.comparison.inputs]

    def _input(self, node: Node, draw: Draw, generator: torch.Generator, numbers: Iterator[int]) -> Any:
        value = value_of(node)
        if not isinstance(value, Tensor):
            return self.sizes.of(value)
        if "made" in node.meta:
            return computed(node.meta["made"], self.sizes)
        shape = self.sizes.shape(value)
        if value.dtype == torch.bool:
            drawn = torch.randint(0, 2, shape, generator=generator, device="cpu")
        elif value.is_complex():
            drawn = torch.view_as_complex(draw(next(numbers), [*shape, 2], generator))
        elif value.is_floating_point():
            drawn = draw(next(numbers), shape, generator)
        else:
            drawn = self._whole_numbers(node, shape, generator)
        return _as_laid_out(drawn.to(value.dtype), self.sizes.of(value.stride()))

    def _whole_numbers(self, node: Node, shape: list[int], generator: torch.Generator) -> Tensor:
        chosen, axis = self.comparison.indices.get(node, (None, 0))
        count = 2 if chosen is None else self.sizes.shape(value_of(chosen))[axis]
        drawn = torch.randint(0, max(count, 1), shape, generator=generator, device="cpu")
        if chosen is None or self.comparison.ignored is None:
            return drawn
        counts = torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu") < 0.8
        counts.view(-1)[1:2] = False  # one is left out in any case, and of several another one counts
        counts.view(-1)[:1] = True
        return torch.where(counts, drawn, self.sizes.of(self.comparison.ignored))

    def _run(
        self, nodes: Sequence[Node], results: Sequence[Node], inputs: Sequence[Any], exact: bool = False
    ) -> list[Tensor]:
        values: dict[Node, Any] = {}
        leaves: dict[int, Tensor] = {}
        for node, x in zip(self.comparison.inputs, inputs, strict=True):
            if node.meta.get("needs_grad") and isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()):
                leaves.setdefault(id(x), x.detach().requires_grad_())
            values[node] = leaves.get(id(x), x)
        is_made = nodes is self.comparison.made
        with torch.autocast("cpu", self.comparison.autocast, enabled=is_made and self.comparison.autocast is not None):
            for node in nodes:
                values[node] = self._value(node, values, exact, as_noted=not is_made)
            outputs = [values[node] for node in results]
        return [_real(x.detach()) for x in (*outputs, *_gradients(outputs, list(leaves.values()), self.incoming))]

    def _value(self, node: Node, values: Mapping[Node, Any], exact: bool, as_noted: bool) -> Any:
        keep = _has_no_sizes(node)
        noted = value_of(node)

        def of(x: Any) -> Any:
            if isinstance(x, Node):
                return values[x]
            if exact and isinstance(x, torch.dtype) and x.is_floating_point:
                return torch.float64
            return x if keep else self.sizes.of(x)

        args, kwargs = map_aggregate(node.args, of), map_aggregate(node.kwargs, of)
        if "dropout_p" in (argument.name for argument in _arguments(node)):
            args, kwargs = _without_dropout(node, args, kwargs)
        if as_noted and self.comparison.autocast is not None and not exact and isinstance(noted, Tensor):
            args = map_aggregate(args, lambda x: _in_dtype(x, noted.dtype))
        others = {**IN_FLOAT64, **self.comparison.tried_as} if exact else self.comparison.tried_as
        call = others.get(name_of(node), node.target)
        return call(*args, **kwargs)  # type: ignore[operator,misc]


def _grouped_mm(rows: Tensor, weights: Tensor, offs: Tensor, bias: None = None, out_dtype: Any = None) -> Tensor:
    """Rows up to each offset times the matrix of their group, and zeros for rows after the last."""
    ends = offs.tolist()
    parts = [rows[start:end] @ w for start, end, w in zip([0, *ends], ends, weights, strict=False)]
    rest = rows.new_zeros(rows.shape[0] - ends[-1], weights.shape[-1])
    return torch.cat([*parts, rest])


def _sigmoid(x: Tensor) -> Tensor:
    """PyTorch's own has the gradient s * (1 - s), which is 0 from 37 on, where s rounds to 1 in float64 too."""
    return F.logsigmoid(x).exp()


IN_FLOAT64 = {"_grouped_mm": _grouped_mm, "sigmoid": _sigmoid}
"""Operators that have no kernel in float64, or cancel there, and what computes the same."""


def _gradients(outputs: Sequence[Tensor], leaves: Sequence[Tensor], incoming: Incoming) -> list[Tensor]:
    """Return the gradients of the leaves, for incoming ones that are the same in each dtype."""
    generator = torch.Generator().manual_seed(1)
    wanting, given = [], []
    for y in outputs:
        if y.requires_grad:
            wanting.append(y)
            grad = torch.randn(y.shape, generator=generator, dtype=torch.float64, device="cpu")
            given.append(incoming(grad.to(torch.bfloat16).to(y.dtype)))
    if not wanting or not leaves:
        return []
    found = torch.autograd.grad(wanting, leaves, given, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


def _violation(got: Tensor, composition: Tensor, exact: Tensor, near: list[tuple[Tensor, Tensor]]) -> Any:
    exact = exact.double()
    lost = ~got.isfinite() & (~composition.isfinite() | ~exact.isfinite())  # one infinite, another no number: 0 / 0
    exact = torch.where(lost, got.double(), exact)
    return accuracy_violation(got, composition, exact, FACTOR, near)


def _exact(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return x.to(torch.complex128) if x.is_complex() else x.double() if x.is_floating_point() else x


def _in_dtype(x: Any, dtype: torch.dtype) -> Any:
    is_number = isinstance(x, Tensor) and x.is_floating_point() and dtype.is_floating_point
    return x.to(dtype) if is_number else x


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def _as_laid_out(x: Tensor, strides: Sequence[int]) -> Tensor:
    """Return the tensor with its axes in the order in memory that these strides have."""
    order = sorted(range(x.dim()), key=lambda axis: -strides[axis])
    back = [order.index(axis) for axis in range(x.dim())]
    return x.permute(order).contiguous().permute(back)


def _arguments(node: Node) -> Sequence[Any]:
    return schema_of(node.target).arguments if isinstance(node.target, OVERLOAD) else ()


def _has_no_sizes(node: Node) -> bool:
    """Return True if the numbers among a node's arguments are no sizes, but axes, indices or factors."""
    if not isinstance(node.target, OVERLOAD):
        return True
    value = value_of(node)
    return name_of(node) in ARITHMETIC and isinstance(value, Tensor) and value.is_floating_point()


def _without_dropout(node: Node, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments without dropout, as results of chance are not compared."""
    names = [argument.name for argument in _arguments(node)]
    given = dict(zip(names, args, strict=False)) | kwargs | {"dropout_p": 0.0}
    return tuple(given[name] for name in names[: len(args)]), {name: given[name] for name in kwargs}
