"""Linear layers that read a norm's output: it is not kept for them, but made again in the backward pass.

A norm writes down what it made its output of, for as long as the output lives. A function that gives an argument to
several linear layers gives it to all of them at once: where the argument is a norm's output, that is one operator. It
is so in plain eager training. A compiler decides itself what it keeps, as does a policy of selective checkpointing,
which goes on seeing the products.
"""

import ast
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from llmk.ops.norm.rms_norm_linear import MOST_LAYERS, linear_of_norm
from llmk.registry.private.tensors import version_of
from llmk.transformers.guards import is_plain_linear, recomputes
from llmk.transformers.rewrite import Edit, Source, argument_names, is_in_place, load, method_called, replace


class MadeOf(NamedTuple):
    """The input of a norm and its parameters, and what tells whether all of it is as it was."""

    input: Tensor
    weight: Tensor | None
    eps: float
    offset: float
    state: tuple[int | None, ...]


_ORIGINS = WeakTensorKeyDictionary()
"""The origins of outputs, as long as these live: an attribute of an output would be saved and sent with it."""


def made_of(output: Tensor, input: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    """Return a norm's output, and write down what it was made of where a backward pass may come."""
    if type(output) is Tensor and recomputes():
        _ORIGINS[output] = MadeOf(input, weight, eps, offset, state_of(input, weight, output))
    return output


def state_of(input: Tensor, weight: Tensor | None, output: Tensor) -> tuple[int | None, ...]:
    """Versions of input and output, and where the weight is: FSDP and ZeRO-3 free it after the norm's call."""
    return version_of(input), version_of(output), None if weight is None else weight.data_ptr()


def projections(x: Any, *linears: Any) -> list[Any]:
    """What linear layers give for x."""
    norm = _ORIGINS.get(x) if type(x) is Tensor and recomputes() else None
    if norm is None or not _reads_norm(x, norm, linears):
        return [linear(x) for linear in linears]
    outputs: list[Any] = []
    for start in range(0, len(linears), MOST_LAYERS):
        weights = [linear.weight for linear in linears[start : start + MOST_LAYERS]]
        missing = [None] * (MOST_LAYERS - len(weights))
        outputs += linear_of_norm(x, *norm[:-1], *weights, *missing)[: len(weights)]
    return outputs


def _reads_norm(x: Tensor, norm: MadeOf, linears: tuple[Any, ...]) -> bool:
    same = norm.state == state_of(norm.input, norm.weight, x)
    return same and all(is_plain_linear(linear, x) and linear.bias is None for linear in linears)


@dataclass(frozen=True)
class Projections(Edit):
    """Calls of these linear layers, one after the other, with the same argument of the function."""

    groups: tuple[tuple[str, ...], ...]
    kind = "projection"

    @property
    def what(self) -> str:
        return "rms_norm_linear"

    def apply(self, definition: ast.FunctionDef) -> dict[str, Any]:
        for group in find_groups(definition):
            if group.names in self.groups:
                group.replace()
        return {"llmk_projections": projections}


def find_projections(module: nn.Module, source: Source) -> Projections | None:
    """The calls of linear layers without a bias that an argument goes into."""
    groups = [group.names for group in find_groups(source.definition)]
    found = [names for names in groups if all(_is_candidate(getattr(module, name, None)) for name in names)]
    return Projections(tuple(found)) if found else None


def _is_candidate(module: Any) -> bool:
    return type(module) is nn.Linear and module.bias is None


# ---- in the source


class Group(NamedTuple):
    """The calls, in the order in which they are evaluated, and where their first statement stands."""

    calls: list[ast.Call]
    body: list[ast.stmt]
    first: ast.stmt

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(method_called(call) or "" for call in self.calls)

    def replace(self) -> None:
        """Make the calls one, before the first statement, and each of them a name for its result."""
        results = [f"llmk_{name}" for name in self.names]
        arguments = [self.calls[0].args[0], *(call.func for call in self.calls)]
        targets = ast.Tuple([ast.Name(name, ast.Store()) for name in results], ast.Store())
        call = ast.Call(load("llmk_projections"), arguments, [])
        here = self.body.index(self.first)
        self.body.insert(here, ast.copy_location(ast.Assign([targets], call), self.first))
        given = dict(zip(self.calls, map(load, results), strict=True))
        for statement in self.body[here + 1 :]:
            replace(statement, lambda node: given.get(node, node))


def find_groups(definition: ast.FunctionDef) -> list[Group]:
    """Return the calls `self.NAME(argument)` of neighbouring statements, for each argument that they begin with."""
    arguments, body, groups, start = argument_names(definition), definition.body, [], 0
    while start < len(body):
        calls, end = _calls_in(body[start], arguments)[:1], start
        if calls:
            calls, given = [], {_argument(calls[0])}
            while end < len(body) and (more := _calls_in(body[end], given)):
                calls, end = calls + more, end + 1
                if _changes(body[end - 1], given):
                    break
            group = Group(calls, body, body[start])
            if len(set(group.names)) == len(calls):
                groups.append(group)
        start = max(end, start + 1)
    return groups


def _argument(call: ast.Call) -> str:
    assert isinstance(call.args[0], ast.Name)
    return call.args[0].id


def _calls_in(statement: ast.stmt, arguments: set[str]) -> list[ast.Call]:
    """The calls in a statement with one of these arguments and nothing else."""
    found: list[ast.Call] = []
    for node in _always_evaluated(statement):
        match node:
            case ast.Call(ast.Attribute(ast.Name("self")), [ast.Name(name)], []) if name in arguments:
                found.append(node)
    return found


SOMETIMES = (ast.IfExp, ast.Lambda, ast.BoolOp, ast.Compare, ast.ListComp, ast.GeneratorExp, ast.DictComp, ast.SetComp)
"""Expressions whose parts are not all evaluated, or not once."""


def _always_evaluated(node: ast.AST) -> list[ast.AST]:
    """The expressions in a statement that are evaluated whenever it runs, in their order."""
    if isinstance(node, SOMETIMES) or not isinstance(node, ast.Assign | ast.Return | ast.Expr | ast.expr | ast.keyword):
        return []
    return [*(found for child in ast.iter_child_nodes(node) for found in _always_evaluated(child)), node]


def _changes(statement: ast.stmt, names: set[str]) -> bool:
    """Return True if a statement gives another value to one of these names, or may change a tensor in place."""
    stored = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return bool(stored & names) or any(map(is_in_place, ast.walk(statement)))
