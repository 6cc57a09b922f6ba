"""The way from a model to its output projection, which may be the last layer of a head: `cls.predictions.decoder`.

The modules on the way get a `forward` that, asked for it, returns what goes into the projection and not what comes out.
"""

import ast
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from llmk.transformers.adapters import is_lora, linear_of, why_apart
from llmk.transformers.classes import changes_of
from llmk.transformers.guards import KEPT, has_own_forward, is_hooked, why_no_weight
from llmk.transformers.probe import Differs, first_line
from llmk.transformers.rewrite import (
    CannotRewrite,
    Edit,
    Rewrite,
    Source,
    load,
    method_called,
    replace,
    rewritten,
    source_of,
)

ASKED = "llmk_inner"
"""The argument that asks for what goes into the projection."""


@dataclass(frozen=True)
class Inner(Edit):
    """The call of `self.NEXT` in the forward of a head; `is_last` where that is the projection."""

    next: str
    is_last: bool
    kind = "loss"

    @property
    def what(self) -> str:
        return "gives what goes into the projection"

    def apply(self, definition: ast.FunctionDef) -> dict[str, Any]:
        definition.args.kwonlyargs.append(ast.arg(ASKED))
        definition.args.kw_defaults.append(ast.Constant(False))
        replace(definition, self._called)
        return {}

    def _called(self, node: Any) -> ast.AST:
        if method_called(node) != self.next:
            return node
        if self.is_last:
            return ast.IfExp(load(ASKED), node.args[0], node)
        node.keywords.append(ast.keyword(ASKED, load(ASKED)))
        return node


def projection_of(model: nn.Module) -> str:
    """The name of its output projection.

    Raises:
        Differs: There is none, or it is no linear layer.
    """
    try:
        head = model.get_output_embeddings()  # type: ignore[operator]
    except Exception as error:
        raise Differs(f"its output projection is not to be had: {first_line(error)}") from error
    if head is None:
        raise Differs("has no output projection: get_output_embeddings() returns None")
    path = next((name for name, module in model.named_modules() if module is head), None)
    if path is None:
        raise Differs("its output projection is not one of its modules")
    linear = linear_of(head)
    if type(linear).forward is not nn.Linear.forward or has_own_forward(linear):
        raise Differs(f"its output projection {type(linear).__name__} is not a plain linear layer")
    if not is_parametrized(linear) and (why := why_no_weight(linear.weight)):
        raise Differs(f"of its output projection {why}")
    if is_lora(head) and (why := why_apart(head)):
        raise Differs(f"its output projection {why}")
    return path


def inner_edits(model: nn.Module, path: str) -> dict[str, Inner]:
    """The edits of the modules between a model and its projection, by their names.

    Raises:
        Differs: One of them does more than to return what the projection gives.
    """
    first, *names = path.split(".")
    found, name = {}, first
    for i, next in enumerate(names):
        module, inner = model.get_submodule(name), Inner(next, i == len(names) - 1)
        try:
            source = source_of(type(module).forward)
            rewritten(type(module).forward, (inner,))
        except CannotRewrite as why:
            raise Differs(f"{name}, which projects, cannot be changed: {why}") from why
        if "forward" in vars(module) or not _returns_call(source, next):
            raise Differs(f"{name} does not just return what its {next} gives")
        found[name] = inner
        name = f"{name}.{next}"
    return found


def _returns_call(source: Source, next: str) -> bool:
    """Return True if `self.NEXT(x)` is called once, and its result returned as it is."""
    calls = [node for node in ast.walk(source.definition) if method_called(node) == next]
    if len(calls) != 1 or not takes_one(calls[0]):
        return False
    names: set[str] = set()
    for statement in source.definition.body:
        match statement:
            case ast.Assign([ast.Name(target)], value) if value is calls[0]:
                names = {target}
            case ast.Assign([ast.Name(target)], ast.Name(of)) if of in names:
                names.add(target)
            case ast.Return(value):
                return value is calls[0] or (isinstance(value, ast.Name) and value.id in names)
            case _ if names:
                return False
    return False


def takes_one(call: ast.AST) -> bool:
    """Return True if it is a call with one argument."""
    match call:
        case ast.Call(args=[argument], keywords=[]):
            return not isinstance(argument, ast.Starred)
    return False


def head_at(model: nn.Module, path: str) -> Any:
    """The module at the end of a way that may lead nowhere by now."""
    module: Any = model
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def leads_inside(model: nn.Module, path: str) -> bool:
    """Return True if the modules on the way are those that were changed, with nobody looking at what they return."""
    module: Any = model
    for name in path.split(".")[:-1]:
        module = getattr(module, name, None)
        changed = any(isinstance(c, Rewrite) and any(isinstance(e, Inner) for e in c.edits) for c in changes_of(module))
        if not changed or is_hooked(module) or not getattr(module, f"{KEPT}forward")():
            return False
    return True
