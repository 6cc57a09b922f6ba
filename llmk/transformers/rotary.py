"""Rotary embedding: calls of a function that turns queries and keys by their positions."""

import ast
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from llmk import functional
from llmk.registry.record import FLOAT_DTYPES
from llmk.transformers.calls import CallFinder, Calls, Function, FunctionForm
from llmk.transformers.probe import AGREEMENT, Differs, agree, randoms, run
from llmk.transformers.rewrite import Source


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


@dataclass(frozen=True)
class Turn(FunctionForm):
    """Functions of queries, keys, cosines and sines.

    Attributes:
        form: What the function computes.
        results: Dtypes of q and cos with which it was tried, and of its results.
    """

    form: str = ""
    results: tuple[tuple[torch.dtype, torch.dtype, torch.dtype], ...] = ()

    operator = "rope"
    positional = range(4, 5)

    def takes(self, names: list[str]) -> bool:
        return len(names) >= 4

    def replaces(self, call: ast.Call) -> bool:
        return super().replaces(call) and not call.keywords

    def attempt(self, function: Function) -> FunctionForm | None:
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
                return Turn(form, tuple((a, b, c) for a, b, c in results if c is not None))
        return None

    def call(self, q: Any, k: Any, cos: Any, sin: Any) -> Any:
        dtype = next((result for a, b, result in self.results if (a, b) == (q.dtype, cos.dtype)), None)
        alike = q.dtype == k.dtype and cos.dtype == sin.dtype
        if dtype is None or not alike or not (q.dim() == k.dim() == 4 and cos.dim() == sin.dim() == 3):
            return NotImplemented
        return FORMS[self.form](q.to(dtype), k.to(dtype), cos, sin)


class RopeFinder(CallFinder):
    """Finds what turns queries and keys in the sources of a model's modules."""

    def __init__(self) -> None:
        super().__init__("rope", Turn())

    def __call__(self, module: nn.Module, source: Source) -> Calls | None:
        """
        Raises:
            Differs: What is named like a rotary embedding is none.
        """
        found = super().__call__(module, source)
        names = {name for name, *_ in found.functions} if found else set()
        calls = [node.func for node in ast.walk(source.definition) if isinstance(node, ast.Call)]
        for name in [function.id for function in calls if isinstance(function, ast.Name)]:
            if "rotary" in name and name not in names:
                raise Differs(f"{name} does not compute rope")
        return found


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
