"""Hyper-connections in the source of a module: what a layer reads of several residual streams, and what they become.

The expressions say all: they are methods of tensors, whose shapes and dtypes are looked at when they run.
"""

import ast
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from llmk import functional
from llmk.ops.streams.tiles import MAX_OUTPUTS, MAX_SIZE, MAX_STREAMS
from llmk.registry.record import FLOAT_DTYPES
from llmk.transformers.classes import changes_of
from llmk.transformers.guards import is_hooked
from llmk.transformers.rewrite import Edit, Source, blocks

SINKHORN = """
MATRIX = torch.softmax(LOGITS, dim=-1) + EPS
MATRIX = MATRIX / (MATRIX.sum(dim=-2, keepdim=True) + EPS)
for _ in range(ITERATIONS - 1):
    MATRIX = MATRIX / (MATRIX.sum(dim=-1, keepdim=True) + EPS)
    MATRIX = MATRIX / (MATRIX.sum(dim=-2, keepdim=True) + EPS)
"""
PROJECTION = """
ROWS = INPUT.float()
ROWS = NORM(ROWS)
ROWS = F.linear(ROWS, WEIGHT.float())
"""
SUMS = "(WEIGHTS.unsqueeze(-1) * STREAMS).sum(dim=2)", "torch.sum(WEIGHTS.unsqueeze(-1) * STREAMS, dim=2)"
READ = f"{SUMS[0]}.to(STREAMS.dtype)"
WRITE = (
    "WEIGHTS.to(DTYPE).unsqueeze(-1) * OUTPUT.unsqueeze(-2) + torch.matmul(MATRIX.to(DTYPE).transpose(-1, -2), STREAMS)"
)
"""Names in capitals stand for any expression, one name for the same one everywhere."""
KNOWN = {"torch": torch, "F": nn.functional}
"""What the other names of these patterns stand for."""


@dataclass(frozen=True)
class Streams(Edit):
    """The operators of these names, in the place of expressions that compute the same."""

    operators: tuple[str, ...]
    kind = "streams"

    @property
    def what(self) -> str:
        return ", ".join(self.operators)

    def apply(self, definition: ast.FunctionDef) -> dict[str, Any]:
        expressions = _Expressions()
        expressions.visit(definition)
        return {f"llmk_{name}": CALLED[name] for name in expressions.found}


def find_streams(module: nn.Module, source: Source) -> Streams | None:
    if any(source.scope.get(name, known) is not known for name, known in KNOWN.items()):
        return None
    expressions = _Expressions()
    expressions.visit(copy.deepcopy(source.definition))
    return Streams(tuple(sorted(expressions.found))) if expressions.found else None


def rms_linear(norm: Any, input: Any, weight: Any) -> Any:
    projects = any(change.projects for change in changes_of(norm)) and not is_hooked(norm)
    if projects and _is_float(input) and _is_float(weight) and 1 <= len(weight) <= MAX_OUTPUTS:
        return norm(input, projection=weight)
    return nn.functional.linear(norm(input.float()), weight.float())


def sinkhorn(logits: Any, iterations: Any, eps: Any) -> Any:
    known = isinstance(logits, Tensor) and logits.dtype == torch.float32 and logits.dim() >= 2
    if known and logits.shape[-1] == logits.shape[-2] <= MAX_SIZE and iterations >= 1:
        return functional.sinkhorn(logits, iterations, eps)
    matrix = torch.softmax(logits, dim=-1) + eps
    matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(dim=-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + eps)
    return matrix


def read_streams(weights: Any, streams: Any) -> Any:
    if _are_streams(streams) and _is_float(weights) and weights.shape == streams.shape[:-1]:
        return functional.read_streams(streams, weights)
    return (weights.unsqueeze(-1) * streams).sum(dim=2).to(streams.dtype)


def write_streams(weights: Any, dtype: Any, output: Any, mix: Any, streams: Any) -> Any:
    fits = _are_streams(streams) and all(map(_is_float, (weights, output, mix)))
    if fits and weights.shape == streams.shape[:-1] and mix.shape == (*weights.shape, weights.shape[-1]):
        of_token = (*streams.shape[:-2], streams.shape[-1])
        if output.shape == of_token and torch.promote_types(output.dtype, dtype) == dtype == streams.dtype:
            return functional.write_streams(streams, output, weights, mix)
    mixed = torch.matmul(mix.to(dtype).transpose(-1, -2), streams)
    return weights.to(dtype).unsqueeze(-1) * output.unsqueeze(-2) + mixed


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in FLOAT_DTYPES


def _are_streams(value: Any) -> bool:
    """Return True for `[B, S, N, H]` that the operators take."""
    return _is_float(value) and value.dim() == 4 and 1 <= value.shape[2] <= MAX_STREAMS and value.shape[3] > 0


CALLED: dict[str, Callable[..., Any]] = {
    "rms_linear": rms_linear,
    "sinkhorn": sinkhorn,
    "read_streams": read_streams,
    "write_streams": write_streams,
}


class _Expressions(ast.NodeTransformer):
    """Puts calls in the place of what is written as above, and keeps the names of their operators."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self.cast: dict[str, str] = {}

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.cast = _cast_later(node)
        self.generic_visit(node)
        for statements in blocks(node):
            for block in _BLOCKS:
                statements[:] = self._replaced(statements, *block)
        return node

    def _replaced(
        self, statements: list[ast.stmt], operator: str, pattern: list[ast.stmt], target: str, *names: str
    ) -> Iterator[ast.stmt]:
        i = 0
        while i < len(statements):
            given = _fits(pattern, statements[i : i + len(pattern)])
            name = None if given is None else given[target]
            if given is None or not isinstance(name, ast.Name):
                yield statements[i]
                i += 1
                continue
            call = self._call(operator, *(given[argument] for argument in names))
            yield ast.copy_location(ast.Assign([ast.Name(name.id, ast.Store())], call), statements[i])
            i += len(pattern)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        """A sum that has a name, and is cast to the dtype of the streams where it is used."""
        match node.targets:
            case [ast.Name(name)] if name in self.cast:
                for pattern in _SUMS:
                    given = _fits(pattern, node.value)
                    if given is not None and ast.unparse(given["STREAMS"]) == self.cast[name]:
                        node.value = self._call("read_streams", given["WEIGHTS"], given["STREAMS"])
                        return node
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        given = _fits(_READ, node)
        if given is None:
            return self.generic_visit(node)
        return self._call("read_streams", given["WEIGHTS"], given["STREAMS"])

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        given = _fits(_WRITE, node)
        if given is None:
            return self.generic_visit(node)
        return self._call("write_streams", *(given[n] for n in ("WEIGHTS", "DTYPE", "OUTPUT", "MATRIX", "STREAMS")))

    def _call(self, operator: str, *arguments: ast.expr) -> ast.Call:
        self.found.add(operator)
        return ast.Call(ast.Name(f"llmk_{operator}", ast.Load()), [*arguments], [])


_BLOCKS = (
    ("sinkhorn", ast.parse(SINKHORN).body, "MATRIX", "LOGITS", "ITERATIONS", "EPS"),
    ("rms_linear", ast.parse(PROJECTION).body, "ROWS", "NORM", "INPUT", "WEIGHT"),
)
"""Statements, the name that they give a value to, and what their operator takes."""
_READ, _WRITE, *_SUMS = (ast.parse(text, mode="eval").body for text in (READ, WRITE, *SUMS))


def _cast_later(definition: ast.FunctionDef) -> dict[str, str]:
    """The names that are given a value once and used once, in `NAME.to(ARGUMENT.dtype)`, and those arguments."""
    names = [node for node in ast.walk(definition) if isinstance(node, ast.Name)]
    uses = Counter((node.id, type(node.ctx)) for node in names)
    found: dict[str, str] = {}
    for node in ast.walk(definition):
        match node:
            case ast.Call(ast.Attribute(ast.Name(name), "to"), [ast.Attribute(ast.Name(of), "dtype")], []) if (
                uses[name, ast.Load] == uses[name, ast.Store] == 1 and not uses[of, ast.Store]
            ):
                found[name] = of
    return found


def _fits(pattern: Any, node: Any) -> dict[str, ast.expr] | None:
    """What the names in capitals stand for, where the node is written as the pattern."""
    given: dict[str, ast.expr] = {}
    return given if _is_like(pattern, node, given) else None


def _is_like(pattern: Any, node: Any, given: dict[str, ast.expr]) -> bool:
    if isinstance(pattern, ast.Name) and pattern.id.isupper() and pattern.id not in KNOWN:
        known = given.setdefault(pattern.id, node)
        return isinstance(node, ast.expr) and ast.unparse(known) == ast.unparse(node)
    if isinstance(pattern, list):
        alike = isinstance(node, list) and len(pattern) == len(node)
        return alike and all(_is_like(a, b, given) for a, b in zip(pattern, node, strict=True))
    if not isinstance(pattern, ast.AST):
        return pattern == node
    return type(pattern) is type(node) and all(
        _is_like(value, getattr(node, field, None), given) for field, value in ast.iter_fields(pattern)
    )
