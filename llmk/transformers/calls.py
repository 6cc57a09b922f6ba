"""Functions that a module's source calls by a name and that compute what an operator does: the calls are replaced.

The call is replaced, and not the module, so that what stands around it (masks of padding, the states of a cache) goes
on doing what it does. What the function computes is tried, not told from its name. It may be a module: the package
`kernels` makes one of each function that it has a slot for.
"""

import ast
import functools
import inspect
import logging
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from llmk.transformers.guards import called_of, no_longer
from llmk.transformers.probe import Differs, Once
from llmk.transformers.rewrite import Edit, Source, load

Function = Callable[..., Any]


class FunctionForm:
    """A kind of function that an operator computes. Forms that are equal are the same; they can be pickled.

    Attributes:
        operator: The operator's name.
        positional: How many arguments stand by position in a call that can be replaced.
        packs: True if the functions are given keywords that they do not name, those of packed rows among them.
    """

    operator: ClassVar[str]
    positional: ClassVar[range]
    packs: ClassVar[bool] = True

    def takes(self, names: list[str]) -> bool:
        """Return True if a function with parameters of these names is a candidate."""
        raise NotImplementedError

    def replaces(self, call: ast.Call) -> bool:
        """Return True if a call of a function of this form can be replaced."""
        return len(call.args) in self.positional

    def attempt(self, function: Function) -> "FunctionForm | None":
        """Return the form of a function, this one or a kind of it; None if the function is no candidate after all.

        Raises:
            Differs: The function does not compute what the operator does, outputs or gradients.
        """
        raise NotImplementedError

    def call(self, *args: Any, **options: Any) -> Any:
        """Return what the function returns, by the operator, or NotImplemented where that does not take the arguments.

        Its signature has the function's arguments and the options that the operator has too.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Calls(Edit):
    """The calls of functions, by the names that the source has for them."""

    kind: str  # type: ignore[misc]
    functions: tuple[tuple[str, Function, FunctionForm], ...]

    @property
    def what(self) -> str:
        return ", ".join(sorted({form.operator for _, _, form in self.functions}))

    def apply(self, definition: ast.FunctionDef) -> dict[str, Any]:
        new = {name: f"llmk_{form.operator}_{i}" for i, (name, _, form) in enumerate(self.functions)}
        forms = {name: form for name, _, form in self.functions}
        for name, call in _calls(definition):
            if name in forms and forms[name].replaces(call):
                call.args, call.func = [load("self"), call.func, *call.args], load(new[name])
        return {new[name]: replaced(name, function, form) for name, function, form in self.functions}


@functools.cache
def replaced(name: str, tried: Function, form: FunctionForm) -> Function:
    """Return what is called in place of a function, with the module and the function called for put first."""
    called, compute = called_of(tried), form.call
    still, known = called.check(), frozenset(parameters(compute))
    its_own = frozenset(parameters(tried)[form.positional.stop - 1 :]) - known

    def call(self: nn.Module, function: Any, *args: Any, **kwargs: Any) -> Any:
        if not still(function):
            no_longer(self, name, called, function)
            return function(*args, **kwargs)
        if any(kwargs.get(option) is not None for option in its_own):
            return function(*args, **kwargs)
        given = {option: value for option, value in kwargs.items() if form.packs or option in known}
        result = compute(*args, **given)
        return function(*args, **kwargs) if result is NotImplemented else result

    return call


class CallFinder:
    """Finds the calls in the sources of a model's modules; a function is tried once."""

    def __init__(self, kind: str, *forms: FunctionForm) -> None:
        self._kind, self._forms = kind, forms
        self._form = Once(self._attempted)

    def __call__(self, module: nn.Module, source: Source) -> Calls | None:
        """
        Raises:
            Differs: What takes the arguments of an operator does not compute the same.
        """
        found: dict[str, tuple[str, Function, FunctionForm]] = {}
        code = source.function.__code__
        for name, call in _calls(source.definition):
            function = None if name in code.co_varnames + code.co_cellvars else source.lookup(module, name)
            if not callable(function) or isinstance(function, type) or not isinstance(function, Hashable):
                continue
            try:
                form = self._form(function)
            except Differs as why:
                raise Differs(f"{name} {why}") from why
            if form is not None and form.replaces(call):
                found[name] = (name, function, form)
        return Calls(self._kind, tuple(found.values())) if found else None

    def _attempted(self, function: Function) -> FunctionForm | None:
        """The form of the function; None if its parameters are those of none.

        Raises:
            Differs: It computes something else than each form whose parameters it has.
        """
        names, left = parameters(function), None
        for form in self._forms:
            if form.takes(names):
                try:
                    return _without_advice(form.attempt, function)
                except Differs as why:
                    left = why
        if left is not None:
            raise left
        return None


def _without_advice(attempt: Callable[[Function], FunctionForm | None], function: Function) -> FunctionForm | None:
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # transformers' advice, once, about a function that is to be replaced
    try:
        return attempt(function)
    finally:
        logging.disable(level)


def parameters(function: Function) -> list[str]:
    """The names of a function's parameters, without `*args` and `**kwargs`."""
    try:
        found = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):
        return []
    return [p.name for p in found.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _calls(definition: ast.FunctionDef) -> Iterator[tuple[str, ast.Call]]:
    """The calls of functions by a name, without arguments in a `*list`."""
    for node in ast.walk(definition):
        match node:
            case ast.Call(ast.Name(name), args) if not any(isinstance(a, ast.Starred) for a in args):
                yield name, node
