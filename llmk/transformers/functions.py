"""What a `forward` computes between its modules: rotary embedding, residual sums before a norm, causal masks.

Each is an edit of the source (`rewrite.py`) of whatever module contains it.
"""

import ast
import functools
from collections.abc import Callable, Collection, Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor

from llmk import functional
from llmk.transformers.probe import agree
from llmk.transformers.rewrite import Edit, argument_names, load

# ---- rotary embedding


class Rope(Edit):
    """Calls `f(q, k, cos, sin)` of a function that turns queries and keys by their positions."""

    def apply(self, definition: ast.FunctionDef, scope: Mapping[str, Any]) -> bool:
        self.scope = scope
        self.visit(definition)
        return bool(self.names)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.func, ast.Name):
            return node
        name = node.func.id
        ours = rope_like(self.scope.get(name)) if len(node.args) == 4 and not node.keywords else None
        if ours is not None:
            self.names[f"llmk_{ours.__name__}"] = ours
            return ast.Call(load(f"llmk_{ours.__name__}"), node.args, [])
        if "rotary" in name:
            self.left.append(f"{name} does not compute rope")
        return node


def rope_half(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return functional.rope(q, k, cos, sin)


def rope_interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return functional.rope(q, k, cos, sin, interleaved=True)


def rope_interleaved_of_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin hold the angles twice, one half after the other, and the features turn in neighbouring pairs."""
    cos, sin = (x[..., : x.shape[-1] // 2].repeat_interleave(2, dim=-1) for x in (cos, sin))
    return functional.rope(q, k, cos, sin, interleaved=True)


def rope_of_one_half(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin hold each angle once."""
    return functional.rope(q, k, torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1))


def rope_of_sorted_pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Neighbouring pairs are sorted into halves first, and stay so."""
    q, k = (x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (q, k))
    return functional.rope(q, k, cos, sin)


ROPES = (rope_half, rope_interleaved, rope_interleaved_of_halves, rope_of_one_half, rope_of_sorted_pairs)


@functools.cache
def rope_like(function: Any) -> Callable[..., Any] | None:
    """The way to call `rope` that computes the same, if `function` turns queries and keys at all."""
    if not callable(function) or isinstance(function, type):
        return None
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        B, S, D = 2, 5, 16
        q, k = torch.randn(B, 4, S, D), torch.randn(B, 2, S, D)
        for ours, R in product(ROPES, (D, D // 2)):
            cos, sin = torch.randn(B, S, R), torch.randn(B, S, R)
            try:
                got: Any = function(q.clone(), k.clone(), cos.clone(), sin.clone())
                same = [a.shape == b.shape and agree(a, b) for a, b in zip(got, ours(q, k, cos, sin), strict=True)]
            except Exception:  # not made for such arguments
                continue
            if all(same):
                return ours
    return None


# ---- residual sums


class Residual(Edit):
    """`h = a + b` followed by `self.NORM(h)`, where NORM is one that can add."""

    def __init__(self, norms: Collection[str]) -> None:
        super().__init__()
        self.norms = norms
        self.found: list[str] = []

    def apply(self, definition: ast.FunctionDef, scope: Mapping[str, Any]) -> bool:
        self.visit(definition)
        return bool(self.found)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for field in ("body", "orelse"):
            statements = getattr(node, field, None)
            if isinstance(statements, list):
                setattr(node, field, self._fused(statements))
        return node

    def _fused(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        done: list[ast.stmt] = []
        while statements:
            fused, taken = self._fused_at_start(statements)
            done += fused or statements[:1]
            statements = statements[taken:]
        return done

    def _fused_at_start(self, statements: list[ast.stmt]) -> tuple[list[ast.stmt] | None, int]:
        """The sum, a copy of its name perhaps, and the norm, as one statement or two; and how many they were."""
        match statements[:3]:
            case [
                ast.Assign([ast.Name(total)], ast.BinOp(left, ast.Add(), right)) as first,
                ast.Assign([ast.Name(copy)], ast.Name(copied)) as kept,
                ast.Assign([ast.Name(normed)], ast.Call(ast.Attribute(ast.Name("self"), norm), [ast.Name(of)], [])),
            ] if copied == of == total and norm in self.norms and copy not in (total, normed):
                taken = 3
            case [
                ast.Assign([ast.Name(total)], ast.BinOp(left, ast.Add(), right)) as first,
                ast.Assign([ast.Name(normed)], ast.Call(ast.Attribute(ast.Name("self"), norm), [ast.Name(of)], [])),
                *_,
            ] if of == total and norm in self.norms and normed != total:
                taken, kept, copy = 2, None, None
            case _:
                return None, 1
        if isinstance(left, ast.Constant) or isinstance(right, ast.Constant):
            return None, 1
        self.found.append(norm)
        kept_name = copy if normed == total else total
        assert kept_name is not None
        targets = ast.Tuple([ast.Name(normed, ast.Store()), ast.Name(kept_name, ast.Store())], ast.Store())
        norm_call = ast.Call(ast.Attribute(load("self"), norm, ast.Load()), [right, left], [])
        fused: list[ast.stmt] = [ast.copy_location(ast.Assign([targets], norm_call), first)]
        return (fused if normed == total or kept is None else [*fused, kept]), taken


# ---- causal masks


MASKS = ("create_causal_mask", "create_sliding_window_causal_mask")


class CausalMask(Edit):
    """transformers' mask functions, which build a mask whenever a compiler traces them."""

    def apply(self, definition: ast.FunctionDef, scope: Mapping[str, Any]) -> bool:
        given = [name for name in ("position_ids", "past_key_values") if name in argument_names(definition)]
        masks = {f"llmk_{name}": without_mask(scope[name]) for name in MASKS if name in scope}
        if "position_ids" not in given or not masks:
            return False
        self.masks = masks
        self.visit(definition)
        if not self.names:
            return False
        # What the caller gave, before the body fills in positions and a cache of its own.
        value = ast.Tuple([load(name) for name in given], ast.Load())
        definition.body.insert(0, ast.Assign([ast.Name("llmk_given", ast.Store())], value))
        return True

    def visit_Name(self, node: ast.Name) -> ast.AST:
        name = f"llmk_{node.id}"
        if name not in self.masks:
            return node
        self.names[name] = self.masks[name]
        return ast.Call(load(name), [load("llmk_given")], [])


@functools.cache
def without_mask(create: Callable[..., Any]) -> Callable[..., Any]:
    """`create` where there is something to mask but the future, None where attention's `is_causal` says it all."""

    def given_to(given: tuple[Any, ...]) -> Callable[..., Any]:
        def create_mask(*args: Any, **kwargs: Any) -> Any:
            if any(value is not None for value in given) or not _only_causal(create.__name__, *args, **kwargs):
                return create(*args, **kwargs)
            return None

        return create_mask

    return given_to


def _only_causal(
    name: str,
    config: Any = None,
    inputs_embeds: Tensor | None = None,
    attention_mask: Any = None,
    past_key_values: Any = None,
    position_ids: Any = None,
    **others: Any,
) -> bool:
    """With scaled_dot_product_attention, and no padding, packing, cache or window that reaches less far than the row.

    `past_key_values` is the model's own empty cache here, if any.
    """
    if attention_mask is not None or inputs_embeds is None or any(value is not None for value in others.values()):
        return False
    if config is None or config._attn_implementation != "sdpa":
        return False
    window = getattr(config, "sliding_window", None) if name == "create_sliding_window_causal_mask" else None
    return window is None or inputs_embeds.shape[1] <= window
