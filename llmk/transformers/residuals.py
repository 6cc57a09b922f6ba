"""A residual sum and the norm after it, in one."""

import ast
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from llmk.transformers.classes import changes_of
from llmk.transformers.guards import is_hooked
from llmk.transformers.rewrite import Edit, blocks, load


@dataclass(frozen=True)
class Residual(Edit):
    """`h = a + b` followed by `self.NORM(h)`, where NORM is one of these."""

    norms: frozenset[str]
    kind = "residual"

    @property
    def what(self) -> str:
        return "add_rms_norm"

    def apply(self, definition: ast.FunctionDef) -> dict[str, Any]:
        found = False
        for statements in blocks(definition):
            for i in range(len(statements)):
                if fused := self._fused(statements[i : i + 3]):
                    statements[i : i + 3] = fused
                    found = True
        return {"llmk_add_norm": add_norm} if found else {}

    def _fused(self, statements: list[ast.stmt]) -> list[ast.stmt] | None:
        """Return a sum, a copy of its name perhaps, and the norm as one statement, and which of the three follow it.

        The result is None where the statements are others.
        """
        match statements:
            case [
                ast.Assign([ast.Name(total)], ast.BinOp(left, ast.Add(), right)) as first,
                ast.Assign([ast.Name(copy)], ast.Name(copied)) as kept,
                ast.Assign([ast.Name(normed)], ast.Call(ast.Attribute(ast.Name("self"), norm), [ast.Name(of)], [])),
            ] if copied == of == total and norm in self.norms and copy not in (total, normed):
                other, after = (total, [kept]) if normed != total else (copy, [])
            case [
                ast.Assign([ast.Name(total)], ast.BinOp(left, ast.Add(), right)) as first,
                ast.Assign([ast.Name(normed)], ast.Call(ast.Attribute(ast.Name("self"), norm), [ast.Name(of)], [])),
                *after,
            ] if of == total and norm in self.norms and normed != total:
                other = total
            case _:
                return None
        if isinstance(left, ast.Constant) or isinstance(right, ast.Constant):
            return None
        targets = ast.Tuple([ast.Name(normed, ast.Store()), ast.Name(other, ast.Store())], ast.Store())
        norm_call = ast.Call(load("llmk_add_norm"), [ast.Attribute(load("self"), norm, ast.Load()), left, right], [])
        return [ast.copy_location(ast.Assign([targets], norm_call), first), *after]


def add_norm(norm: nn.Module, a: Any, b: Any) -> tuple[Any, Any]:
    """The norm of `a + b`, and `a + b`."""
    tensors = isinstance(a, Tensor) and isinstance(b, Tensor)
    if tensors and any(change.adds for change in changes_of(norm)) and not is_hooked(norm):
        return norm(b, a)
    total = a + b
    return norm(total), total
