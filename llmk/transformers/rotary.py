"""Rotary embedding: calls of a function that turns queries and keys by their positions."""

import ast
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from llmk import functional
from llmk.registry.record import FLOAT_DTYPES
from llmk.transformers.guards import called_of, no_longer
from llmk.transformers.probe import AGREEMENT, Differs, agree, randoms, run
from llmk.transformers.rewrite import Edit, Source, load


def halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return functional.rope(q, k, cos, sin)


def interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return functional.rope(q, k, cos, sin, interleaved=True)


def interleaved_of_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin hold the angles twice, one half after the other, and the features turn in neighbouring pairs."""
    cos, sin = (x[..., : x.shape[-1] // 2].repeat_interleave(2, dim=-1) for x in (cos, sin))
    return functional.rope(q, k, cos, sin, interleaved=True)


def of_one_half(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin hold each angle once."""
    return functional.rope(q, k, torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1))


def of_sorted_pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Neighbouring pairs are sorted into halves first, and stay so."""
    q, k = (torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1) for x in (q, k))
    return functional.rope(q, k, cos, sin)


def of_sorted_pairs_by_the_first_half(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The same, by angles that cos and sin hold twice, one half after the other: the first one counts."""
    cos, sin = (x[..., : x.shape[-1] // 2] for x in (cos, sin))
    return of_sorted_pairs(q, k, torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1))


FORMS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    f.__name__: f
    for f in (
        halves,
        interleaved,
        interleaved_of_halves,
        of_one_half,
        of_sorted_pairs,
        of_sorted_pairs_by_the_first_half,
    )
}


class Turn(NamedTuple):
    """A function that turns queries and keys, what the source calls it, and what it computes."""

    name: str
    function: Callable[..., Any]
    form: str
    results: tuple[tuple[torch.dtype, torch.dtype, torch.dtype], ...]
    """Dtypes of q and cos with which it was tried, and of its results."""


@dataclass(frozen=True)
class Rope(Edit):
    """The calls of these functions."""

    turns: tuple[Turn, ...]
    kind = "rope"

    @property
    def what(self) -> str:
        return "rope"

    def apply(self, definition: ast.FunctionDef, scope: Mapping[str, Any]) -> dict[str, Any]:
        names = {turn.name: "llmk_rope" + f"_{i}" * (i > 0) for i, turn in enumerate(self.turns)}
        _Calls(names).visit(definition)
        return {names[turn.name]: rope(turn) for turn in self.turns}


class _Calls(ast.NodeTransformer):
    """Calls others instead of some functions, which are their second argument."""

    def __init__(self, others: Mapping[str, str | None]) -> None:
        self.others = others

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        other = self.others.get(ast.unparse(node.func)) if is_plain(node) else None
        return node if other is None else ast.Call(load(other), [load("self"), node.func, *node.args], [])


def is_plain(node: ast.Call) -> bool:
    """Return True if it is a call of a name with four arguments."""
    return isinstance(node.func, ast.Name) and len(node.args) == 4 and not node.keywords


@functools.cache
def rope(turn: Turn) -> Callable[..., Any]:
    """Return a function that rotates q and k as the given one does, where they fit the operator."""
    ours, called = FORMS[turn.form], called_of(turn.function)
    still = called.check()
    results = {(q, cos): result for q, cos, result in turn.results}

    def rope(self: nn.Module, function: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        alike = (
            q.dtype == k.dtype and cos.dtype == sin.dtype and q.dim() == k.dim() == 4 and cos.dim() == sin.dim() == 3
        )
        if alike and (q.dtype, cos.dtype) in results:
            if still(function):
                dtype = results[q.dtype, cos.dtype]
                return ours(q.to(dtype), k.to(dtype), cos, sin)
            no_longer(self, turn.name, called, function)
        return function(q, k, cos, sin)

    return rope


class RopeFinder:
    """Finds what turns queries and keys in the sources of a model's modules; each function is tried once."""

    def __init__(self) -> None:
        self._tried: dict[Any, Turn | None] = {}

    def __call__(self, module: nn.Module, source: Source) -> Rope | None:
        """
        Raises:
            Differs: What is named like a rotary embedding is none.
        """
        calls = [node for node in ast.walk(source.definition) if isinstance(node, ast.Call)]
        local = set(source.function.__code__.co_varnames)
        named = {node.func.id: is_plain(node) for node in calls if isinstance(node.func, ast.Name)}
        found = []
        for name, plain in named.items():
            function = None if name in local else source.scope.get(name)
            turn = self._turn(name, function) if plain and callable(function) else None
            if turn is not None:
                found.append(turn)
            elif "rotary" in name:
                raise Differs(f"{name} does not compute rope")
        return Rope(tuple(found)) if found else None

    def _turn(self, name: str, function: Any) -> Turn | None:
        if isinstance(function, type):
            return None
        if function not in self._tried:
            self._tried[function] = _tried(name, function)
        turn = self._tried[function]
        return turn and turn._replace(name=name)


def _tried(name: str, function: Callable[..., Any]) -> Turn | None:
    B, S, D = 2, 5, 16
    randn = randoms()
    q, k = randn(B, 4, S, D), randn(B, 2, S, D)
    for (form, ours), R in product(FORMS.items(), (D, D // 2)):
        cos, sin = randn(B, S, R), randn(B, S, R)
        results = [
            (*dtypes, _result(function, ours, q, k, cos, sin, *dtypes))
            for dtypes in product(FLOAT_DTYPES, FLOAT_DTYPES)
        ]
        if results[0][2] is not None:  # of float32
            return Turn(name, function, form, tuple((a, b, c) for a, b, c in results if c is not None))
    return None


def _result(function: Any, ours: Any, q: Any, k: Any, cos: Any, sin: Any, turned: Any, by: Any) -> torch.dtype | None:
    """The dtype of the function's result for these dtypes, if the operator gives the same with it."""
    q, k, cos, sin = q.to(turned), k.to(turned), cos.to(by), sin.to(by)
    try:
        got = run(function, q.clone(), k.clone(), cos.clone(), sin.clone())
        (dtype,) = {x.dtype for x in got}
        want = ours(q.to(dtype), k.to(dtype), cos, sin)
        tolerance = max(4 * torch.finfo(dtype).eps, AGREEMENT)
        same = all(agree(a, b, tolerance) for a, b in zip(got, want, strict=True))
    except Exception:  # not made for such arguments
        return None
    return dtype if same and all(x.dtype == dtype for x in want) else None
