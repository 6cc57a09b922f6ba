"""A function with a few of its expressions changed, made from its own source.

What a model computes between its modules (turning queries by their positions, adding a residual, projecting to logits)
stands in the source of a `forward` and in no module that could be exchanged. So that source is parsed, edited as a
syntax tree and compiled again. The result runs in the globals of the original, keeps its decorators, and its lines are
those of the original file, so that tracebacks still point there.
"""

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Mapping
from types import CellType, FunctionType
from typing import Any, NamedTuple


class CannotRewrite(Exception):
    """Why a function could not be made again."""


class Edit(ast.NodeTransformer):
    """One kind of change.

    Attributes:
        names: The functions that the changed code calls.
        left: What was found and not changed, and why.
    """

    def __init__(self) -> None:
        self.names: dict[str, Callable[..., Any]] = {}
        self.left: list[str] = []

    def apply(self, definition: ast.FunctionDef, scope: Mapping[str, Any]) -> bool:
        """Change the definition, whose globals are `scope`, in place; whether there was anything to change."""
        raise NotImplementedError


class Rewritten(NamedTuple):
    """The function, or None where no edit found anything, and which edits did."""

    function: FunctionType | None
    changed: tuple[bool, ...]
    left: tuple[str, ...]


@functools.cache
def rewritten(function: FunctionType, edits: tuple[Callable[[], Edit], ...]) -> Rewritten:
    """`function` after those of `edits` that find something to change, made once.

    Raises:
        CannotRewrite: The source is not there, or a decorator hides the function it wraps.
    """
    inner = inspect.unwrap(function)
    definition = _definition(inner)
    applied = [make() for make in edits]
    changed = tuple(edit.apply(definition, inner.__globals__) for edit in applied)
    left = tuple(", ".join(edit.left) for edit in applied)
    if not any(changed):
        return Rewritten(None, changed, left)
    names = {name: value for edit in applied for name, value in edit.names.items()}
    return Rewritten(_rewrap(function, inner, _compiled(inner, definition, names)), changed, left)


def load(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def method_called(node: ast.AST) -> str | None:
    """NAME where the node is the call `self.NAME(...)`."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name("self"), attr=name)):
            return name
    return None


def argument_names(definition: ast.FunctionDef) -> set[str]:
    args = definition.args
    return {arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)}


def _definition(function: FunctionType) -> ast.FunctionDef:
    try:
        source = textwrap.dedent(inspect.getsource(function))
        (definition,) = ast.parse(source).body
    except (OSError, TypeError, SyntaxError, ValueError) as error:
        raise CannotRewrite("its source is not to be had") from error
    if not isinstance(definition, ast.FunctionDef):
        raise CannotRewrite("its source is not a function's")
    ast.increment_lineno(definition, function.__code__.co_firstlineno - 1)
    return definition


def _compiled(function: FunctionType, definition: ast.FunctionDef, names: dict[str, Any]) -> FunctionType:
    """The definition as a function. What it closes over, new and old, are the arguments of a function around it."""
    closed_over = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    values = {name: cell.cell_contents for name, cell in closed_over.items()} | names
    factory = ast.FunctionDef(
        "factory",
        ast.arguments([], [ast.arg(name) for name in values], None, [], [], None, []),
        [_bare(definition), ast.Return(load(definition.name))],
        [],
    )
    if hasattr(factory, "type_params"):  # Python 3.12
        factory.type_params = []  # type: ignore[attr-defined]
    module = ast.fix_missing_locations(ast.Module([factory], []))
    scope: dict[str, Any] = {}
    exec(compile(module, function.__code__.co_filename, "exec"), function.__globals__, scope)
    made = scope["factory"](**values)
    functools.update_wrapper(made, function)
    del made.__wrapped__  # it is not the original that runs
    made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return made


def _bare(definition: ast.FunctionDef) -> ast.FunctionDef:
    """Without what is evaluated where a function is defined: that is taken from the original."""
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
    copy = FunctionType(outer.__code__, outer.__globals__, outer.__name__, outer.__defaults__, closure)
    copy.__kwdefaults__ = outer.__kwdefaults__
    return functools.update_wrapper(copy, again)  # type: ignore[return-value]


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None
