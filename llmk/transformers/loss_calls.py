"""The projection and the loss in the source of a model's `forward`."""

import ast
from collections.abc import Collection
from typing import NamedTuple

from torch import nn

from llmk.registry.private.modules import buffers_of, parameters_of
from llmk.transformers.heads import takes_one
from llmk.transformers.probe import Differs
from llmk.transformers.rewrite import Source, argument_names, load, method_called

LOSS_FUNCTION = "loss_function"
"""transformers' own: a property of every model."""


class Places(NamedTuple):
    """The calls that the edit looks for."""

    head: str
    """The child that is called for the logits."""
    logits: frozenset[str]
    """The names that hold them, or what is made of them."""
    criteria: tuple[tuple[str, int], ...]
    """The call of the loss in the source: of `self.loss_function`, or of an `nn.CrossEntropyLoss`, with the label that
    it ignores."""
    added: str | None
    """The parameter or buffer that is added to the logits."""
    numbers: tuple[tuple[str, float | None], ...]
    """The model's attributes, `config.logits_scaling` perhaps, that the statements which make the logits read."""


def find_places(model: nn.Module, source: Source, head: str, V: int) -> Places:
    """
    Raises:
        Differs: The source has no such places, or does more with the logits.
    """
    definition = source.definition
    if "labels" not in argument_names(definition):
        raise Differs("its forward takes no labels; fused_linear_ce of the hidden states computes a loss outside")
    calls = [node for node in ast.walk(definition) if method_called(node) == head]
    if len(calls) != 1 or not takes_one(calls[0]):
        raise Differs(f"its forward does not call self.{head} once, with the hidden states alone")
    logits = _made_of(definition, calls[0])
    if any(isinstance(node, ast.Subscript) and _called_on(node.value) in logits for node in ast.walk(definition)):
        raise Differs("its forward takes a part of the logits before the loss")
    if any(_puts_elsewhere(node, logits) for node in ast.walk(definition)):
        raise Differs("its forward has its logits in an attribute, or adds what is made of them to something")
    criteria = _criteria(model, source)
    used = {ast.unparse(n.func) for n in ast.walk(definition) if isinstance(n, ast.Call) and logits_in(n, logits)}
    criteria = {name: ignored for name, ignored in criteria.items() if name in used}
    if not criteria:
        raise Differs("its forward calls neither self.loss_function nor nn.CrossEntropyLoss() with the logits")
    added = {name for n in ast.walk(definition) if (name := added_name(n)) and _is_bias(model, name, V)}
    if len(added) > 1:
        raise Differs(f"it adds {' and '.join(sorted(added))} to its logits")
    numbers = _numbers_read(model, source, logits)
    return Places(head, frozenset(logits), tuple(criteria.items()), next(iter(added), None), numbers)


def logits_in(call: ast.Call, logits: Collection[str]) -> str | None:
    """The name of the logits that a loss is called with: as `logits`, or `logits.view(-1, ...)`."""
    named = [keyword.value for keyword in call.keywords if keyword.arg == "logits"]
    names = (_called_on(first, FLATTENS) for first in [*named, *call.args[:1]])
    return next((name for name in names if name in logits), None)


FLATTENS = ("view", "reshape", "contiguous")


def _called_on(node: ast.AST, methods: Collection[str] | None = None) -> str | None:
    """NAME in `NAME.method(...).method(...)`, where these are any, or some."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if methods is not None and node.func.attr not in methods:
            return None
        node = node.func.value
    return node.id if isinstance(node, ast.Name) else None


def added_name(node: ast.AST) -> str | None:
    """NAME in `... + self.NAME`, also with `.to(...)`."""
    match node:
        case ast.BinOp(_, ast.Add(), ast.Attribute(ast.Name("self"), name)):
            return name
        case ast.BinOp(_, ast.Add(), ast.Call(ast.Attribute(ast.Attribute(ast.Name("self"), name), "to"))):
            return name
    return None


def _is_bias(model: nn.Module, name: str, V: int) -> bool:
    tensor = parameters_of(model).get(name, buffers_of(model).get(name))
    return tensor is not None and tensor.numel() == tensor.shape[-1] == V


def _made_of(definition: ast.FunctionDef, call: ast.AST) -> set[str]:
    """The names that are assigned what the call gives, or something made of it."""
    assigned = [(s.targets[0], s.value) for s in ast.walk(definition) if isinstance(s, ast.Assign)]
    names: set[str] = set()
    for _ in assigned:  # as many rounds as a chain of names may be long
        names |= {t.id for t, value in assigned if isinstance(t, ast.Name) and _holds(value, call, names)}
    return names


def _holds(value: ast.AST, call: ast.AST, names: set[str]) -> bool:
    """Return True if it is made of the logits, and not by comparing them with labels."""
    return (bool(_names(value) & names) or any(n is call for n in ast.walk(value))) and "labels" not in _names(value)


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _puts_elsewhere(node: ast.AST, logits: set[str]) -> bool:
    match node:
        case ast.Assign([ast.Attribute() | ast.Subscript(), *_], value) | ast.AugAssign(value=value):
            return bool(_names(value) & logits) and "labels" not in _names(value)
    return False


def _numbers_read(model: nn.Module, source: Source, logits: set[str]) -> tuple[tuple[str, float | None], ...]:
    """The numbers, and what is None, that stand where the logits are made, or in the condition for that."""
    found: dict[str, float | None] = {}
    for node in ast.walk(source.definition):
        match node:
            case ast.If(test, body) if any(_assigns(statement, logits) for statement in body):
                read: ast.AST = test
            case ast.Assign() if _assigns(node, logits):
                read = node.value
            case _:
                continue
        for name in filter(None, map(_attribute_of_self, ast.walk(read))):
            value = source.lookup(model, f"self.{name}")
            if value is None or type(value) in (int, float):
                found[name] = value
    return tuple(sorted(found.items()))


def _attribute_of_self(node: ast.AST) -> str | None:
    """NAME.NAME in `self.NAME.NAME`."""
    match node:
        case ast.Attribute(ast.Name("self"), name):
            return name
        case ast.Attribute(ast.Attribute() as inner, name) if path := _attribute_of_self(inner):
            return f"{path}.{name}"
    return None


def _assigns(node: ast.AST, names: set[str]) -> bool:
    match node:
        case ast.Assign([ast.Name(target)], _):
            return target in names
    return False


def _criteria(model: nn.Module, source: Source) -> dict[str, int]:
    """`self.loss_function`, and what computes a plain mean cross entropy, as the source calls them."""
    found = {f"self.{LOSS_FUNCTION}": IGNORED}
    for node in ast.walk(source.definition):
        match node:
            case ast.Assign([ast.Name(target)], ast.Call(func, [], keywords)):
                if source.lookup(model, ast.unparse(func)) is nn.CrossEntropyLoss and _only_ignores(keywords):
                    found[target] = next((ast.literal_eval(k.value) for k in keywords), IGNORED)
    children = [(name, child) for name, child in model.named_children() if isinstance(child, nn.CrossEntropyLoss)]
    return found | {f"self.{name}": child.ignore_index for name, child in children if is_plain(child)}


IGNORED = -100
"""The label that PyTorch and transformers ignore unless told otherwise."""


def _only_ignores(keywords: list[ast.keyword]) -> bool:
    match keywords:
        case [] | [ast.keyword("ignore_index", ast.Constant() | ast.UnaryOp(ast.USub(), ast.Constant()))]:
            return True
    return False


def is_plain(criterion: object) -> bool:
    """Return True if it is a mean cross entropy without weights or smoothing."""
    return type(criterion) is nn.CrossEntropyLoss and (
        criterion.weight is None and criterion.reduction == "mean" and criterion.label_smoothing == 0
    )


class LossCalls(ast.NodeTransformer):
    """Puts the calls of `llmk_project`, `llmk_loss` and their like in these places."""

    def __init__(self, places: Places) -> None:
        self.places = places

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.body.insert(0, ast.Assign([ast.Name("llmk_state", ast.Store())], load("llmk_nothing")))
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        added = added_name(node)
        self.generic_visit(node)
        if added is None or added != self.places.added:
            return node
        return ast.Call(load("llmk_add"), [node.left, node.right], [])

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if method_called(node) == self.places.head:
            project = ast.Call(load("llmk_project"), [load("self"), node.func, node.args[0], load("labels")], [])
            return ast.Attribute(ast.NamedExpr(ast.Name("llmk_state", ast.Store()), project), "logits", ast.Load())
        criterion = ast.unparse(node.func)
        ignored = dict(self.places.criteria).get(criterion)
        if ignored is not None and logits_in(node, self.places.logits):
            return self._loss(node, criterion, ignored)
        for keyword in node.keywords:
            if keyword.arg == "logits":
                keyword.value = ast.Call(load("llmk_shown"), [keyword.value], [])
        return node

    def _loss(self, node: ast.Call, criterion: str, ignored: int) -> ast.AST:
        """The call as it is where there are logits, else that of ours."""
        if criterion == f"self.{LOSS_FUNCTION}":
            ours = ast.Call(load("llmk_loss"), [load("self"), load("llmk_state"), *node.args], node.keywords)
        else:
            arguments = [load("self"), load("llmk_state"), *node.args[1:], ast.Constant(ignored)]
            ours = ast.Call(load("llmk_cross_entropy"), arguments, [])
        fused = ast.Attribute(load("llmk_state"), "fused", ast.Load())
        return ast.IfExp(fused, ours, node)
