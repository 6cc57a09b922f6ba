"""Functions that a module's source calls by a name and that compute what an operator does: the calls are replaced.

The call is replaced, and not the module, so that what stands around it (masks of padding, the states of a cache) goes
on doing what it does. What the function computes is tried, not told from its name.
"""

import ast
import inspect
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

from torch import nn

from llmk.transformers.probe import Differs
from llmk.transformers.rewrite import Edit, Source, load

PACKING = frozenset({"seq_idx", "cu_seqlens"})
"""The keywords that say where packed sequences begin, for a model's own function."""


class Form(NamedTuple):
    """A kind of function that an operator computes."""

    operator: str
    positional: range
    """How many arguments stand by position in a call that can be replaced."""
    takes: Callable[[list[str]], bool]
    """Whether a function with parameters of these names is a candidate."""
    attempt: Callable[[FunctionType], None]
    """Raises Differs where the function does not compute what the operator does, outputs or gradients."""
    replacement: Callable[[FunctionType], Callable[..., Any]]
    """Returns what is called in place of a function that was tried, with the function called for as first argument."""


@dataclass(frozen=True)
class Calls(Edit):
    """The calls of functions, by the names that the source has for them."""

    functions: tuple[tuple[str, FunctionType, Form], ...]

    @property
    def what(self) -> str:
        return ", ".join(sorted({form.operator for _, _, form in self.functions}))

    def apply(self, definition: ast.FunctionDef, scope: Mapping[str, Any]) -> dict[str, Any]:
        new = {name: f"llmk_{form.operator}_{i}" for i, (name, _, form) in enumerate(self.functions)}
        forms = {name: form for name, _, form in self.functions}
        for name, call in _calls(definition):
            if name in forms and len(call.args) in forms[name].positional:
                call.args, call.func = [call.func, *call.args], load(new[name])
        return {new[name]: form.replacement(function) for name, function, form in self.functions}


class CallFinder:
    """Finds the calls in the sources of a model's modules; a function is tried once."""

    def __init__(self, edit: type[Calls], *forms: Form) -> None:
        self._edit, self._forms = edit, forms
        self._tried: dict[tuple[FunctionType, Form], Differs | None] = {}

    def __call__(self, module: nn.Module, source: Source) -> Calls | None:
        """
        Raises:
            Differs: What takes the arguments of an operator does not compute the same.
        """
        found: dict[str, tuple[str, FunctionType, Form]] = {}
        stored = {n.id for n in ast.walk(source.definition) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        for name, call in _calls(source.definition):
            function = source.lookup(module, name)
            if name in stored or not isinstance(function, FunctionType):
                continue
            for form in self._forms:
                if len(call.args) in form.positional and form.takes(_parameters(function)):
                    self._require(name, function, form)
                    found[name] = (name, function, form)
        return self._edit(tuple(found.values())) if found else None

    def _require(self, name: str, function: FunctionType, form: Form) -> None:
        key = function, form
        if key not in self._tried:
            level = logging.root.manager.disable
            logging.disable(logging.WARNING)  # transformers' advice, once, about a function that is to be replaced
            try:
                self._tried[key] = None
                form.attempt(function)
            except Differs as why:
                self._tried[key] = why
            finally:
                logging.disable(level)
        why = self._tried[key]
        if why is not None:
            raise Differs(f"{name} {why}") from why


def its_own(function: FunctionType, arguments: Collection[str]) -> frozenset[str]:
    """The keywords that are for the function itself: those it has a name for, but for these, and of packed sequences.

    A model's layers hand on all keyword arguments of the model, and a function takes what it does not know as `kwargs`,
    where it may look for packed sequences.
    """
    return frozenset(_parameters(function)) - frozenset(arguments) | PACKING


def _calls(definition: ast.FunctionDef) -> Iterator[tuple[str, ast.Call]]:
    """The calls of functions by a name, without arguments in a `*list`."""
    for node in ast.walk(definition):
        match node:
            case ast.Call(ast.Name(name), args) if not any(isinstance(a, ast.Starred) for a in args):
                yield name, node


def _parameters(function: FunctionType) -> list[str]:
    """The names of a function's parameters, without `*args` and `**kwargs`."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
