"""The projection and the loss in the source of a model's `forward`."""

import ast
from collections.abc import Collection
from typing import NamedTuple

from torch import nn

from llmk.registry.private.modules import buffers_of, parameters_of
from llmk.transformers.guards import Fact, Facts
from llmk.transformers.heads import takes_one
from llmk.transformers.loss_uses import Uses
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
    facts: Facts
    """The facts that make the logits, `config.logits_scaling` perhaps, and what computes the loss."""


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
    criteria = _criteria(model, source)
    uses = Uses(model, source, calls[0], criteria)
    logits = uses.logits
    if any(isinstance(node, ast.Subscript) and _called_on(node.value) in logits for node in ast.walk(definition)):
        raise Differs("its forward takes a part of the logits before the loss")
    used = {ast.unparse(n.func) for n in ast.walk(definition) if isinstance(n, ast.Call) and logits_in(n, logits)}
    criteria = {name: ignored for name, ignored in criteria.items() if name in used}
    if not criteria:
        raise Differs("its forward calls neither self.loss_function nor nn.CrossEntropyLoss() with the logits")
    added = {name for n in ast.walk(definition) if (name := added_name(n)) and _is_bias(model, name, V)}
    if len(added) > 1:
        raise Differs(f"it adds {' and '.join(sorted(added))} to its logits")
    bias = next(iter(added), None)
    facts = (*uses.facts(bias), *(fact for name, ignored in criteria.items() for fact in _of_criterion(name, ignored)))
    return Places(head, frozenset(logits), tuple(criteria.items()), bias, facts)


def _of_criterion(name: str, ignored: int) -> Facts:
    """The facts of a child that computes the loss."""
    if not name.startswith("self.") or name == f"self.{LOSS_FUNCTION}":
        return ()
    numbers = (("reduction", "mean"), ("label_smoothing", 0.0), ("ignore_index", ignored), ("weight", None))
    plain = (Fact(f"{name}.{attribute}", value) for attribute, value in numbers)
    return (Fact(f"kind({name})", nn.CrossEntropyLoss), Fact(f"is_hooked({name})", False), *plain)


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
