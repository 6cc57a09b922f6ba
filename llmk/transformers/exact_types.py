"""Classes that a model asks for by their exact type: an object of one keeps it, and is not patched.

What `patch` changes of a module is its class. `isinstance` goes on holding, `type(module) is X` does not.
"""

import ast
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from llmk.transformers.rewrite import CannotRewrite, Source, source_of

NAMES = ("__name__", "__qualname__", "__module__", "__doc__")
"""The attributes that a patched module's class has in common with its own."""


class ExactTypes:
    """The modules whose type somebody asks for in the sources of these."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._classes: dict[type, str] = {}
        self._modules: dict[nn.Module, str] = {}
        asked: dict[type, list[Any]] = {}
        for module in modules:
            cls = type(module)
            if cls not in asked:
                asked[cls] = list(_asked(cls))
            for found in asked[cls]:
                if found is None:
                    self._modules |= dict.fromkeys(module.modules(), cls.__name__)
                else:
                    self._classes[found] = cls.__name__

    def why_not(self, module: nn.Module) -> str | None:
        """The reason for which a module must keep its type, in words."""
        name = self._classes.get(type(module)) or self._modules.get(module)
        return name and f"the forward of {name} asks for its exact type"


def _asked(cls: type) -> Iterator[type | None]:
    """The classes that a forward compares types with; None where it asks for a type and what for is not known."""
    try:
        source = source_of(cls.forward)  # type: ignore[attr-defined]
    except CannotRewrite:
        return
    parents = {child: node for node in ast.walk(source.definition) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(source.definition):
        if not _is_type(node):
            continue
        parent = parents[node]
        if (isinstance(parent, ast.Attribute) and parent.attr in NAMES) or _is_said(node, parents):
            continue
        yield from _compared(parent, node, source) if isinstance(parent, ast.Compare) else [None]


def _is_said(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Return True if it stands in a message."""
    while not isinstance(node, ast.stmt):
        node = parents[node]
        if isinstance(node, ast.JoinedStr | ast.Raise):
            return True
    return False


def _is_type(node: ast.AST) -> bool:
    match node:
        case ast.Call(ast.Name("type"), [_], []) | ast.Attribute(attr="__class__"):
            return True
    return False


def _compared(compare: ast.Compare, node: ast.AST, source: Source) -> Iterator[type | None]:
    for other in (compare.left, *compare.comparators):
        if other is node or _is_type(other):
            continue
        for name in other.elts if isinstance(other, ast.Tuple | ast.List | ast.Set) else [other]:
            found: Any = source.scope.get(ast.unparse(name).partition(".")[0])
            for attribute in ast.unparse(name).split(".")[1:]:
                found = getattr(found, attribute, None)
            yield found if isinstance(found, type) else None
