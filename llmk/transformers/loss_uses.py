"""The uses that a model's `forward` makes of its logits: every one has to be a known one.

Known are the loss, the output that shows them, their dtype and device, and statements that make others of them, where
each name in such a statement, and in the conditions around it, is a number, a function or the logits. A forward that
does anything else with them needs them whole.
"""

import ast
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from torch import nn

from llmk.transformers.guards import Fact, Facts
from llmk.transformers.probe import Differs
from llmk.transformers.rewrite import Source, argument_names, load

METADATA = ("device", "dtype")
SIZES = ("shape", "size")
LATER = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
"""Expressions with code of their own, which may run at another time."""
MISSING = object()


class Uses:
    """The uses of the logits that a call gives.

    Args:
        model: The model.
        source: Its forward.
        call: The call of its projection.
        criteria: The calls of a loss in the source, as it spells them.
    """

    def __init__(self, model: nn.Module, source: Source, call: ast.AST, criteria: Mapping[str, int]) -> None:
        self._model, self._source, self._call, self._criteria = model, source, call, criteria
        self._parents = {child: node for node in ast.walk(source.definition) for child in ast.iter_child_nodes(node)}
        assigned = [n for n in ast.walk(source.definition) if isinstance(n, ast.Assign)]
        self._assigned = [statement for statement in assigned if self._never(statement) is None]
        self._arguments = argument_names(source.definition)
        statement = call
        while not isinstance(statement, ast.stmt):
            statement = self._parents[statement]
        self._last = statement.end_lineno or statement.lineno
        self.logits: set[str] = set()
        """The names that hold them, or what is made of them."""
        self._tuples: set[str] = set()
        """The names of tuples that have them as a member."""
        for _ in self._assigned:  # as many rounds as a chain of names may be long
            for statement in self._assigned:
                self._name(statement)

    def facts(self, added: str | None) -> Facts:
        """Return what the statements that make the logits read.

        Args:
            added: The parameter or buffer that is added to the logits.

        Raises:
            Differs: There is a use that is not known, or a name.
        """
        found: dict[Fact, None] = {}
        for node in ast.walk(self._source.definition):
            never = self._never(node) if self._is_held(node) or self._makes(node) else None
            if never is not None:
                found[never] = None
            elif self._is_held(node) and not self._is_known(node):
                raise Differs(f"uses its logits for more than the loss: {self._words(node)}")
            elif self._makes(node):
                for fact in self._read(node, added):
                    found[fact] = None
        return tuple(found)

    def _never(self, node: ast.AST) -> Fact | None:
        """The condition of the branch that it stands in, where that is one of the model's numbers and does not hold."""
        while node is not self._source.definition:
            inside, node = node, self._parents[node]
            if isinstance(node, ast.If) and _is_of_numbers(node.test):
                holds = bool(eval(ast.unparse(node.test), {}, {"self": self._model}))
                if inside in (node.orelse if holds else node.body):
                    return Fact(f"bool({ast.unparse(node.test)})", holds)
        return None

    # ---- which names hold them

    def _name(self, statement: ast.Assign) -> None:
        match statement.targets:
            case [ast.Name(name)] if not self._is_loss(statement.value):
                held = [n for n in ast.walk(statement.value) if self._is_held(n) and not self._is_aside(n)]
                if any(isinstance(around, LATER) for node in held for around, _ in self._above(node)):
                    return
                if any(self._is_member(node) or self._is_shown(node) for node in held):
                    self._tuples.add(name)
                elif held:
                    self.logits.add(name)

    def _is_loss(self, value: ast.AST) -> bool:
        return any(isinstance(n, ast.Call) and ast.unparse(n.func) in self._criteria for n in ast.walk(value))

    def _is_held(self, node: ast.AST) -> bool:
        """Return True if it stands for the logits, or for a tuple that has them."""
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            return self._is_after(node) and (node.id in self.logits or node.id in self._tuples)
        return node is self._call

    def _is_after(self, node: ast.expr) -> bool:
        """Return True if it stands after the statement of the projection: what has the same name before is another."""
        return node.lineno > self._last

    def _above(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """The nodes around it, each with the one inside, up to its statement."""
        while not isinstance(node, ast.stmt):
            inside, node = node, self._parents[node]
            yield node, inside

    def _is_aside(self, node: ast.AST) -> bool:
        """Return True if only its dtype, device or being None is asked for, or a loss takes it."""
        parent = self._parents[node]
        match parent:
            case ast.Attribute(attr=name) if name in METADATA:
                return True
            case ast.Compare(ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(None)]):
                return True
        return any(isinstance(n, ast.Call) and self._takes(n, i, parent) for n, i in self._above(node))

    def _takes(self, call: ast.Call, inside: ast.AST, parent: ast.AST) -> bool:
        """Return True if a loss takes the logits by what is inside of its call, or their size."""
        if ast.unparse(call.func) not in self._criteria:
            return False
        sized = isinstance(parent, ast.Attribute) and parent.attr in SIZES
        first = call.args[:1] or [k for k in call.keywords if k.arg == "logits"]
        return sized or inside in first or (isinstance(inside, ast.keyword) and inside.arg == "logits")

    def _is_member(self, node: ast.AST) -> bool:
        """Return True if it is a member of a tuple, or such a tuple, which may be part of another one."""
        if isinstance(node, ast.Name) and node.id in self._tuples:
            return True
        return isinstance(self._parents[node], ast.Tuple)

    # ---- known uses

    def _is_known(self, node: ast.AST) -> bool:
        if self._is_aside(node):
            return True
        *_, (statement, top) = self._above(node)
        if self._is_member(node):
            built = (ast.Tuple, ast.BinOp, ast.IfExp, ast.Starred)
            return self._only(node, built) and isinstance(statement, ast.Assign | ast.Return)
        if isinstance(statement, ast.Return) and top is node:
            return True
        return self._is_shown(node) or self._makes(statement)

    def _only(self, node: ast.AST, kinds: tuple[type[ast.AST], ...]) -> bool:
        return all(isinstance(n, (*kinds, ast.stmt)) for n, _ in self._above(node))

    def _is_shown(self, node: ast.AST) -> bool:
        """Return True if it is `logits=` of an output, an object of a class."""
        keyword = self._parents[node]
        if not isinstance(keyword, ast.keyword) or keyword.arg != "logits":
            return False
        call = self._parents[keyword]
        return isinstance(call, ast.Call) and isinstance(self._source.lookup(self._model, ast.unparse(call.func)), type)

    def _makes(self, statement: ast.AST) -> bool:
        """Return True if a statement makes logits of logits, or of what the projection gives."""
        match statement:
            case ast.Assign([ast.Name(name)], value) if name in self.logits:
                return any(self._is_held(n) and not self._is_aside(n) for n in ast.walk(value))
            case ast.AugAssign(ast.Name(name)):
                return name in self.logits
        return False

    # ---- what they read

    def _read(self, statement: Any, added: str | None) -> Iterator[Fact]:
        expressions = [statement.value]
        if not any(n is self._call for n in ast.walk(statement)):
            expressions += self._conditions(statement)
        for expression in expressions:
            yield from self._facts_in(expression, added, frozenset())

    def _conditions(self, statement: ast.AST) -> Iterator[ast.expr]:
        """The conditions of the branches that it stands in.

        Raises:
            Differs: It stands in another block.
        """
        node = statement
        while node is not self._source.definition:
            node = self._parents[node]
            if isinstance(node, ast.If):
                yield node.test
            elif node is not self._source.definition:
                raise Differs(f"makes its logits in a block of its own: {self._words(statement)}")

    def _facts_in(self, node: ast.AST, added: str | None, above: frozenset[str]) -> Iterator[Fact]:
        if node is self._call:
            return
        match node:
            case ast.Attribute(_, attr) if attr in METADATA:
                return
            case ast.Compare(ast.Name("labels"), [ast.Is() | ast.IsNot()], [ast.Constant(None)]):
                return
            case ast.Call(ast.Name("getattr"), [of, *more]) if _root(whole := self._inlined(of)) == "self":
                call = ast.Call(load("getattr"), [whole, *more], [])
                yield self._of_self(ast.unparse(call), _evaluated(call, self._model))
            case ast.Attribute() if _root(whole := self._inlined(node)) == "self":
                name = ast.unparse(whole).removeprefix("self.")
                if name.split(".")[0] != added and name != "training":
                    yield self._of_self(f"self.{name}", _evaluated(whole, self._model))
            case ast.Name():
                yield from self._of_name(node, added, above)
            case _:
                for child in ast.iter_child_nodes(node):
                    yield from self._facts_in(child, added, above)

    def _inlined(self, node: ast.expr) -> ast.expr:
        """An attribute with what a name of its object was assigned, where that is once."""
        match node:
            case ast.Attribute(of, name):
                return ast.Attribute(self._inlined(of), name, ast.Load())
            case ast.Call(function, [], []):
                return ast.Call(self._inlined(function), [], [])
            case ast.Name(name) if len(values := self._values(name)) == 1 and _root(values[0]) == "self":
                return self._inlined(values[0])
        return node

    def _values(self, name: str) -> list[ast.expr]:
        """Return the values that are assigned to a name, on its own."""
        named = [n for n in ast.walk(self._source.definition) if isinstance(n, ast.NamedExpr)]
        values = [s.value for s in self._assigned for t in s.targets if isinstance(t, ast.Name) and t.id == name]
        return values + [n.value for n in named if n.target.id == name]

    def _of_self(self, expression: str, value: Any) -> Fact:
        if value is None or isinstance(value, int | float | str):
            return Fact(expression, value)
        raise Differs(f"makes its logits of {expression}, a {type(value).__name__}")

    def _of_name(self, node: ast.Name, added: str | None, above: frozenset[str]) -> Iterator[Fact]:
        """Yield the facts that a name was made of, in a statement that makes logits."""
        name = node.id
        if name in self.logits and self._is_after(node):
            return
        if name in self._arguments:
            raise Differs(f"makes its logits of {name}, an argument of its forward")
        values = self._values(name)
        code = self._source.function.__code__
        if name in code.co_varnames + code.co_cellvars:
            if not values or name in above:
                raise Differs(f"makes its logits of {name}, which it does not just assign")
            for value in values:
                yield from self._facts_in(value, added, above | {name})
            return
        value = self._source.scope.get(name, MISSING)
        if value is not MISSING and not isinstance(value, ModuleType | type) and not callable(value):
            raise Differs(f"makes its logits of {name}, a {type(value).__name__}")

    def _words(self, node: ast.AST) -> str:
        while not isinstance(node, ast.stmt):
            node = self._parents[node]
        return ast.unparse(node).splitlines()[0][:100]


def _is_of_numbers(test: ast.AST) -> bool:
    """Return True if a condition compares attributes of the model with constants."""
    kinds = (ast.Compare, ast.cmpop, ast.Constant, ast.expr_context, ast.BoolOp, ast.boolop, ast.UnaryOp, ast.unaryop)
    return all(
        isinstance(n, (*kinds, ast.Attribute)) or (isinstance(n, ast.Name) and n.id == "self") for n in ast.walk(test)
    )


def _evaluated(node: ast.expr, model: nn.Module) -> Any:
    try:
        return eval(ast.unparse(node), {}, {"self": model})
    except Exception as error:  # whatever the code raises
        raise Differs(f"makes its logits of {ast.unparse(node)}, which is not to be had") from error


def _root(node: ast.AST) -> str | None:
    """The name in `NAME.attribute.method().attribute`."""
    while isinstance(node, ast.Attribute) or (isinstance(node, ast.Call) and not (node.args or node.keywords)):
        node = node.value if isinstance(node, ast.Attribute) else node.func
    return node.id if isinstance(node, ast.Name) else None
