"""A function with a few of its expressions changed, made from its own source.

What a model computes between its modules (turning queries by their positions, adding a residual, projecting to logits)
stands in the source of a `forward` and in no module that could be exchanged. So that source is parsed, edited as a
syntax tree and compiled again. The result runs in the globals of the original, keeps its decorators, and its lines are
those of the original file, so that tracebacks still point there.
"""

import ast
import copy
import functools
import inspect
import textwrap
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType
from typing import Any, ClassVar, NamedTuple

from torch import nn

from llmk.transformers.classes import Change
from llmk.transformers.guards import guarded


class CannotRewrite(Exception):
    """Why a function could not be made again."""


class Edit:
    """One kind of change of a function's source. Edits that are equal change the same; they can be pickled.

    Attributes:
        kind: Its kind in the report.
    """

    kind: ClassVar[str]

    @property
    def what(self) -> str:
        """The edit in words, for the report."""
        raise NotImplementedError

    def apply(self, definition: ast.FunctionDef) -> dict[str, Any]:
        """Change the definition in place.

        Returns:
            The functions that the changed code calls, by the names it calls them; empty where it changed nothing.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Rewrite(Change):
    """A method made again from its edited source."""

    edits: tuple[Edit, ...]
    method: str = "forward"

    def methods(self, base: type) -> dict[str, Any]:
        return guarded(base, self.method, rewritten(getattr(base, self.method), self.edits), ())


class Source(NamedTuple):
    """A function under its decorators, as syntax, and the names that it sees."""

    function: FunctionType
    definition: ast.FunctionDef
    scope: Mapping[str, Any]

    def lookup(self, module: nn.Module, name: str) -> Any:
        """Return what a dotted name stands for in a method of `module`; None if that is not known."""
        root, *attributes = name.split(".")
        found = module if root == "self" else self.scope.get(root)
        for attribute in attributes:
            found = getattr(found, attribute, None)
        return found


def source_of(function: Any) -> Source:
    """The source of `function`; whoever changes the definition changes a copy of it.

    Raises:
        CannotRewrite: It is not there.
    """
    inner = inspect.unwrap(function)
    if not isinstance(inner, FunctionType):
        raise CannotRewrite("it is not a function")
    definition = _definition(inner)
    closed_over = {n: _content(c) for n, c in zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True)}
    return Source(inner, definition, ChainMap(closed_over, inner.__globals__))


@functools.cache
def rewritten(function: Any, edits: tuple[Edit, ...]) -> FunctionType:
    """`function` after the edits, with its decorators.

    Raises:
        CannotRewrite: The source is not there, or a decorator hides the function it wraps.
    """
    inner, definition, _ = source_of(function)
    definition = copy.deepcopy(definition)
    names: dict[str, Any] = {}
    for edit in edits:
        names |= edit.apply(definition)
    return _rewrap(function, inner, _compiled(inner, definition, names))


class _Replaced(ast.NodeTransformer):
    def __init__(self, new: Callable[[Any], Any]) -> None:
        self._new = new

    def visit(self, node: ast.AST) -> Any:
        return self._new(self.generic_visit(node))


def replace(node: ast.AST, new: Callable[[Any], Any]) -> None:
    """Put `new(n)` in the place of every node n inside of a node, the innermost first."""
    _Replaced(new).generic_visit(node)


def blocks(definition: ast.FunctionDef) -> Iterator[list[ast.stmt]]:
    """Yield the statements of a function and of each branch and loop in it; whoever changes a list changes them."""
    for node in ast.walk(definition):
        for statements in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if isinstance(statements, list):
                yield statements


def load(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def method_called(node: ast.AST) -> str | None:
    """NAME where the node is the call `self.NAME(...)`."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name("self"), attr=name)):
            return name
    return None


def is_in_place(node: ast.AST) -> bool:
    """Return True if it is a call that changes what it is given, by PyTorch's names for that."""
    if not isinstance(node, ast.Call):
        return False
    function = ast.unparse(node.func)
    return function.endswith("_") or any(keyword.arg in ("inplace", "out") for keyword in node.keywords)


def argument_names(definition: ast.FunctionDef) -> set[str]:
    args = definition.args
    return {arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)}


@functools.cache
def _definition(function: FunctionType) -> ast.FunctionDef:
    try:
        (definition,) = ast.parse(own_source(function)).body
        runs = function.__code__ in _codes(function)
    except (OSError, TypeError, SyntaxError, ValueError) as error:
        raise CannotRewrite("its source is not to be had") from error
    if not isinstance(definition, ast.FunctionDef):
        raise CannotRewrite("its source is not a function's")
    ast.increment_lineno(definition, function.__code__.co_firstlineno - 1)
    names = _compiled(function, copy.deepcopy(definition), {}).__code__.co_names
    if not runs or names != function.__code__.co_names:  # a file changed, or code made from it in another way
        raise CannotRewrite("its source is not what runs")
    return definition


def _codes(function: FunctionType) -> frozenset[CodeType]:
    lines, _ = inspect.findsource(function)
    return _codes_in("".join(lines), function.__code__.co_filename)


@functools.lru_cache(64)
def _codes_in(source: str, file: str) -> frozenset[CodeType]:
    """The functions in a file, compiled again."""
    found, todo = set(), [compile(source, file, "exec", dont_inherit=True)]
    while todo:
        inner = [constant for constant in todo.pop().co_consts if isinstance(constant, CodeType)]
        found.update(inner)
        todo += inner
    return frozenset(found)


def _compiled(function: FunctionType, definition: ast.FunctionDef, names: dict[str, Any]) -> FunctionType:
    """The definition as a function. The new names are the arguments of a function around it, the old ones its own."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    added = _new_defaults(function, definition)
    module: Any = ast.parse(f"def factory({', '.join([*cells, *names])}): pass")
    module.body[0].body = [_bare(definition), ast.Return(load(definition.name))]
    ast.fix_missing_locations(module)
    scope: dict[str, Any] = {}
    exec(compile(module, function.__code__.co_filename, "exec"), function.__globals__, scope)
    code = scope["factory"](**dict.fromkeys(cells), **names).__code__
    cells |= {name: CellType(value) for name, value in names.items()}
    closure = tuple(cells[name] for name in code.co_freevars)
    made = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = {**(function.__kwdefaults__ or {}), **added} or None
    functools.update_wrapper(made, function)
    vars(made).pop("__wrapped__")  # it is not the original that runs
    places = [f"# {n}: {getattr(f, '__module__', '')}.{getattr(f, '__qualname__', f)}" for n, f in names.items()]
    set_source(made, "\n".join([*places, ast.unparse(definition)]))
    return made


def _new_defaults(function: FunctionType, definition: ast.FunctionDef) -> dict[str, Any]:
    """The defaults of the keyword arguments that an edit added."""
    arguments = zip(definition.args.kwonlyargs, definition.args.kw_defaults, strict=True)
    own = function.__code__.co_varnames
    return {a.arg: ast.literal_eval(d) for a, d in arguments if a.arg not in own and d is not None}


def set_source(function: FunctionType, source: str) -> None:
    """The source that `source_of_method` gives for a function that was made here."""
    vars(function)["llmk_source"] = source


def own_source(function: FunctionType) -> str:
    """The source of a function as it stands in its file, from the first column on."""
    return textwrap.dedent(inspect.getsource(function))


def source_of_method(module: nn.Module, name: str) -> str:
    """The source of a module's method, as it was or as it was made here."""
    function = inspect.unwrap(getattr(type(module), name))
    made = getattr(function, "llmk_source", None)
    return made or own_source(function)


def _bare(definition: ast.FunctionDef) -> ast.FunctionDef:
    """Remove what is evaluated where a function is defined: that is taken from the original."""
    args = definition.args
    definition.decorator_list, definition.returns = [], None
    for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg):
        if arg is not None:
            arg.annotation = None
    args.defaults = [ast.Constant(None) for _ in args.defaults]
    args.kw_defaults = [default and ast.Constant(None) for default in args.kw_defaults]
    return definition


def _rewrap(outer: FunctionType, inner: FunctionType, made: FunctionType) -> FunctionType:
    """The decorators' wrappers, from `outer` down to `inner`, again around `made`."""
    if outer is inner:
        return made
    wrapped: FunctionType = outer.__wrapped__  # type: ignore[attr-defined]
    again = _rewrap(wrapped, inner, made)
    cells = outer.__closure__ or ()
    held = [_content(cell) is wrapped for cell in cells]
    if not any(held):
        raise CannotRewrite(f"its decorator {outer.__code__.co_qualname} hides it")
    closure = tuple(CellType(again) if mine else cell for mine, cell in zip(held, cells, strict=True))
    made_again = FunctionType(outer.__code__, outer.__globals__, outer.__name__, outer.__defaults__, closure)
    made_again.__kwdefaults__ = outer.__kwdefaults__
    return functools.update_wrapper(made_again, again)  # type: ignore[return-value]


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None
