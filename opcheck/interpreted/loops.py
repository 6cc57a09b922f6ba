"""Loops of kernels that may never end: read from their source, and counted in Triton's interpreter.

A `for` over a range has a bound. A `while` has one if its condition compares a counter with something that the loop
does not change, and every turn moves the counter towards it:

    while tries > 0:                              while (turn < MAX) and (count != last):
        tries = tl.where(done, 0, tries - 1)          turn += 1

`tl.where` may also jump to a number that ends the loop. All other conditions are the data's to decide: a sum that is
rounded otherwise each turn can keep such a loop going forever.
"""

import ast
import functools
import inspect
import operator
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import triton

from llmk.opcheck.inputs import BrokenPromise
from llmk.registry.private.operators import definition_of, functions_of

MOST_TURNS = 20_000
"""The turns past which, and past the elements of the kernel's largest argument, a loop is held not to end."""

_COMPARE: dict[type, tuple[int, Callable[[Any, Any], bool]]] = {
    ast.Lt: (1, operator.lt),
    ast.LtE: (1, operator.le),
    ast.Gt: (-1, operator.gt),
    ast.GtE: (-1, operator.ge),
}
"""The direction in which a counter must go, and the comparison itself."""
_MIRRORED: dict[type, type] = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE}


class EndlessLoop(BrokenPromise):
    """A loop made more turns than any size gives it."""


def unbounded_loops(kernel: Any) -> list[str]:
    """The `while` loops of a kernel's own source without a bound, each as a line that says where it is."""
    function = kernel.fn
    try:
        lines, first = inspect.getsourcelines(function)
    except OSError:  # made without a file
        return []
    tree = ast.parse(textwrap.dedent("".join(lines)))
    loops = (node for node in ast.walk(tree) if isinstance(node, ast.While))
    return [
        f"{function.__name__}, line {first + loop.lineno - 1}: `while {ast.unparse(loop.test)}` has no bound: "
        "expected a comparison of a counter, which every turn moves, with something that the loop does not change"
        for loop in loops
        if not loop_is_bounded(loop)
    ]


def loop_is_bounded(loop: ast.While) -> bool:
    return _is_bounded(loop.test, loop)


def _is_bounded(test: ast.expr, loop: ast.While) -> bool:
    if isinstance(test, ast.BoolOp):
        parts = [_is_bounded(value, loop) for value in test.values]
        return any(parts) if isinstance(test.op, ast.And) else all(parts)
    if isinstance(test, ast.BinOp) and isinstance(test.op, ast.BitAnd):
        return _is_bounded(test.left, loop) or _is_bounded(test.right, loop)
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1):
        return False
    kind, left, right = type(test.ops[0]), test.left, test.comparators[0]
    return kind in _COMPARE and (_counts(left, kind, right, loop) or _counts(right, _MIRRORED[kind], left, loop))


def _counts(counter: ast.expr, kind: type, bound: ast.expr, loop: ast.While) -> bool:
    """Return True if `counter` goes to `bound` in every turn, and nothing moves the bound."""
    if not isinstance(counter, ast.Name):
        return False
    changed = _assignments(loop)
    names = {node.id for node in ast.walk(bound) if isinstance(node, ast.Name)}
    if names & changed.keys() or any(isinstance(node, ast.Call) for node in ast.walk(bound)):
        return False
    steps = changed.get(counter.id, [])
    always = any(counter.id in _targets(statement) for statement in loop.body)
    return always and all(_goes(step, counter.id, kind, bound) for step in steps)


def _targets(statement: ast.AST) -> dict[str, ast.expr]:
    """The names that a statement assigns, each with an expression of its new value."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        return {statement.target.id: ast.BinOp(ast.Name(statement.target.id), statement.op, statement.value)}
    if isinstance(statement, ast.AnnAssign | ast.Assign) and statement.value is not None:
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        names: dict[str, ast.expr] = {}
        for target in targets:
            values = statement.value.elts if isinstance(statement.value, ast.Tuple) else None
            if isinstance(target, ast.Tuple):
                each = values or [statement.value] * len(target.elts)
                names |= {t.id: v for t, v in zip(target.elts, each, strict=False) if isinstance(t, ast.Name)}
            elif isinstance(target, ast.Name):
                names[target.id] = statement.value
        return names
    return {}


def _assignments(loop: ast.While) -> dict[str, list[ast.expr]]:
    """Every new value of each name that the loop's body assigns."""
    found: dict[str, list[ast.expr]] = {}
    for statement in loop.body:
        for node in ast.walk(statement):
            for name, value in _targets(node).items():
                found.setdefault(name, []).append(value)
            if isinstance(node, ast.For) and isinstance(node.target, ast.Name):
                found.setdefault(node.target.id, []).append(node.iter)
    return found


def _goes(value: ast.expr, counter: str, kind: type, bound: ast.expr) -> bool:
    """Return True if a counter's new value is a step nearer to the bound, or a number that ends the loop."""
    direction, holds = _COMPARE[kind]
    if isinstance(value, ast.Call) and ast.unparse(value.func) in ("tl.where", "where") and len(value.args) == 3:
        return all(_goes(part, counter, kind, bound) for part in value.args[1:])
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add | ast.Sub):
        step = _number(value.right)
        if not (isinstance(value.left, ast.Name) and value.left.id == counter and step is not None):
            return False
        return direction * (step if isinstance(value.op, ast.Add) else -step) > 0
    ends, limit = _number(value), _number(bound)
    return ends is not None and limit is not None and not holds(ends, limit)


def _number(node: ast.expr) -> float | None:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def kernels_of(functions: Iterable[Callable[..., Any]]) -> list[Any]:
    """The kernels that functions name, and those that these call, whether they will be compiled or interpreted."""
    found: dict[int, Any] = {}
    seen: set[int] = set()
    waiting: list[Any] = list(functions)
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if is_kernel(value):
            found[id(value)] = value
        waiting += _named_in(value)
    return list(found.values())


def is_kernel(value: Any) -> bool:
    """Return True if a value is what `triton.jit` makes: a class of Triton's own around a function."""
    return isinstance(value, triton.KernelInterface) and inspect.isfunction(getattr(value, "fn", None))


def _named_in(value: Any) -> Iterator[Any]:
    """Yield what a function, a kernel, an operator's body, a class or a table of these refers to."""
    if isinstance(value, dict | list | tuple):
        yield from value.values() if isinstance(value, dict) else value
        return
    definition = definition_of(value)
    if definition is not None:
        yield from functions_of(definition)
        return
    if inspect.isclass(value):
        yield from filter(inspect.isfunction, map(_function_of, vars(value).values()))
        return
    function = inspect.unwrap(value) if callable(value) else value
    if isinstance(function, functools.partial):
        yield from (function.func, *function.args, *function.keywords.values())
        return
    inner = getattr(function, "fn", None)  # of kernels, of those wrapped in configurations, of kernel operators
    if not inspect.isfunction(function):
        if inspect.isfunction(inner) or is_kernel(inner):
            yield inner
        return
    for cell in function.__closure__ or ():
        yield from _contents(cell)
    names = set(_names(function.__code__))
    for name in names:
        named = function.__globals__.get(name)
        if inspect.ismodule(named):
            yield from (vars(named)[other] for other in names if _belongs(vars(named).get(other)))
        elif _belongs(named):
            yield named


def _function_of(member: Any) -> Any:
    """Return the function of a class's property or class method; anything else as it is."""
    return member.fget if isinstance(member, property) else getattr(member, "__func__", member)


def _contents(cell: Any) -> Iterator[Any]:
    try:
        yield cell.cell_contents
    except ValueError:  # empty yet
        return


def _belongs(value: Any) -> bool:
    """Return True if it may call an operator's kernel, which PyTorch, Triton and Python themselves do not."""
    if isinstance(value, dict | list | tuple) or is_kernel(value) or definition_of(value) is not None:
        return True
    home = getattr(value, "__module__", None) or ""
    return callable(value) and home.partition(".")[0] not in ("torch", "triton", "builtins", "typing", "functools")


def _names(code: Any) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from _names(constant)


def counting_turns(transformer: type, counter: str) -> type:
    """Triton's rewriting of a kernel's tree, which also makes `for _ in counter(lambda: test):` of `while test:`."""

    class CountingTurns(transformer):
        def visit_While(self, node: ast.While) -> ast.For:
            self.generic_visit(node)
            test = ast.Lambda(ast.arguments([], [], None, [], [], None, []), node.test)
            call = ast.Call(ast.parse(counter, mode="eval").body, [test], [])
            return ast.copy_location(ast.For(ast.Name("_", ast.Store()), call, node.body, node.orelse), node)

    return CountingTurns


def turns(test: Callable[[], Any], name: str, most: int) -> Iterator[None]:
    """The turns of `while test():`, refused past `most` of them."""
    count = 0
    while test():
        count += 1
        if count > most:
            raise EndlessLoop(f"{name}: a loop has made {most} turns and goes on")
        yield
