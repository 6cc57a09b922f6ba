"""A residual sum and the norm after it, in one."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from llmk.transformers.classes import changes_of
from llmk.transformers.guards import is_hooked
from llmk.transformers.rewrite import Edit, load


@dataclass(frozen=True)
class Residual(Edit):
    """`h = a + b` followed by `self.NORM(h)`, where NORM is one of these."""

    norms: frozenset[str]
    kind = "residual"

    @property
    def what(self) -> str:
        return "add_rms_norm"

    def apply(self, definition: ast.FunctionDef, scope: Mapping[str, Any]) -> dict[str, Any]:
        sums = _Sums(self.norms)
        sums.visit(definition)
        return {"llmk_add_norm": add_norm} if sums.found else {}


def add_norm(norm: nn.Module, a: Any, b: Any) -> tuple[Any, Any]:
    """The norm of `a + b`, and `a + b`."""
    tensors = isinstance(a, Tensor) and isinstance(b, Tensor)
    if tensors and any(change.adds for change in changes_of(norm)) and not is_hooked(norm):
        return norm(b, a)
    total = a + b
    return norm(total), total


class _Sums(ast.NodeTransformer):
    def __init__(self, norms: frozenset[str]) -> None:
        self.norms = norms
        self.found = False

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
        self.found = True
        kept_name = copy if normed == total else total
        assert kept_name is not None
        targets = ast.Tuple([ast.Name(normed, ast.Store()), ast.Name(kept_name, ast.Store())], ast.Store())
        norm_call = ast.Call(load("llmk_add_norm"), [ast.Attribute(load("self"), norm, ast.Load()), left, right], [])
        fused: list[ast.stmt] = [ast.copy_location(ast.Assign([targets], norm_call), first)]
        return (fused if normed == total or kept is None else [*fused, kept]), taken
