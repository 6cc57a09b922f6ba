"""Gated units: `act(gate) * up` in the source of a module, where act is SiLU or GELU.

Only the product is replaced, so that what stands around it (projections and their adapters, clamps, dropout) goes on
doing what it does. What `act` computes is tried, not told from its name.
"""

import ast
import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from llmk import functional
from llmk.registry.record import FLOAT_DTYPES
from llmk.transformers.guards import (
    Called,
    called_of,
    has_own_forward,
    has_parts,
    is_plain_linear,
    no_longer,
    recomputes,
)
from llmk.transformers.probe import Differs, Once, agree, apart, gradients, rows_of_all_scales, run, same
from llmk.transformers.rewrite import Edit, Source, is_in_place, load, method_called

FORMS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor | None], Tensor]]] = {
    "swiglu": (nn.functional.silu, functional.swiglu),
    "geglu": (nn.functional.gelu, functools.partial(functional.geglu, approximate="none")),
    "geglu_tanh": (
        functools.partial(nn.functional.gelu, approximate="tanh"),
        functools.partial(functional.geglu, approximate="tanh"),
    ),
}
"""Activations, and what computes them times another tensor."""
BEFORE_LINEAR = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}
"""What `gated_linear` calls them."""


class Activation(NamedTuple):
    """An activation by the name that the source calls it, and the operator's form of it."""

    name: str
    form: str
    called: Called


@dataclass(frozen=True)
class Gate(Edit):
    """The products with a result of these activations."""

    activations: tuple[Activation, ...]
    kind = "mlp"

    @property
    def what(self) -> str:
        return ", ".join(sorted({act.form.replace("_", ", ") for act in self.activations}))

    def apply(self, definition: ast.FunctionDef) -> dict[str, Any]:
        names = {act.name: f"llmk_{act.form}" + f"_{i}" * (i > 0) for i, act in enumerate(self.activations)}
        _Products(definition, names.get).visit(definition)
        return {names[act.name]: gated_unit(act) for act in self.activations}


@functools.cache
def gated_unit(activation: Activation) -> Callable[..., Any]:
    """Return what computes `act(gate) * up` where an operator fits; they are the halves of `packed`, if it is given.

    The module `then`, if it is given, takes the product; where it is a plain linear layer the two are one operator.
    """
    unit, called = FORMS[activation.form][1], activation.called
    still, name = called.check(), BEFORE_LINEAR[activation.form]

    def gated(
        self: Any, act: Any, gate: Any, up: Any, up_first: bool = False, packed: Any = None, then: Any = None
    ) -> Any:
        alike = (
            isinstance(gate, Tensor) and isinstance(up, Tensor) and gate.shape == up.shape and gate.dtype == up.dtype
        )
        if alike and gate.dtype in FLOAT_DTYPES:
            if still(act):
                halves = (gate, up) if packed is None else (packed, None)
                if recomputes() and is_plain_linear(then, gate):
                    return functional.gated_linear(*halves, then.weight, then.bias, activation=name)
                return unit(*halves) if then is None else then(unit(*halves))
            no_longer(self, activation.name, called, act)
        product = up * act(gate) if up_first else act(gate) * up
        return product if then is None else then(product)

    return gated


class GateFinder:
    """Finds gated units in the sources of a model's modules; activations that are alike are tried once."""

    def __init__(self) -> None:
        self._kind = Once(lambda act: (_form(act), called_of(act, [rows_of_all_scales(64)])))

    def __call__(self, module: nn.Module, source: Source) -> Gate | None:
        """
        Raises:
            Differs: What looks like an activation is none that an operator computes.
        """
        called: dict[str, None] = {}
        _Products(source.definition, called.setdefault).visit(source.definition)
        found = []
        for name in called:
            act = source.lookup(module, name)
            try:
                found.append(self._activation(name, act))
            except Differs as why:
                if "act" in name.lower():
                    raise Differs(f"{name}, {_words(act)}, {why}") from why
        if not found and source.function.__name__ == "_apply_gate":
            raise Differs("its gate is neither SwiGLU nor GeGLU")
        return Gate(tuple(found)) if found else None

    def _activation(self, name: str, act: Any) -> Activation:
        if not callable(act) or isinstance(act, type):
            raise Differs("is no function")
        return Activation(name, *self._kind(act))


def _form(act: Any) -> str:
    """Return the one of FORMS that a function or a module without parameters computes."""
    if isinstance(act, nn.Module):
        if has_parts(act) or has_own_forward(act):
            raise Differs("has parts of its own")
        calls = [functools.partial(type(act).forward, apart(act, {}, training)) for training in (True, False)]
    else:
        calls = [act]
    x = rows_of_all_scales(64).requires_grad_()
    found = {form for form, (known, _) in FORMS.items() if all(_computes(call, known, x) for call in calls)}
    if len(found) != 1:
        raise Differs("is neither SiLU nor GELU")
    return found.pop()


def _computes(call: Callable[[Tensor], Tensor], known: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    got, want = run(call, x), known(x)
    if not isinstance(got, Tensor) or not agree(got, want) or not got.requires_grad:
        return False
    if not same(gradients(got, [x])[0], gradients(want, [x])[0]):
        return False
    return all(run(call, x.detach().to(dtype)).dtype == dtype for dtype in FLOAT_DTYPES)


def _words(act: Any) -> str:
    return type(act).__name__ if isinstance(act, nn.Module) else getattr(act, "__name__", repr(act))


# ---- in the source


class _Products(ast.NodeTransformer):
    """Puts calls in the place of products with an activation's result.

    Args:
        definition: The function.
        replacement: For the name of what may be an activation, that of the function to call instead, if any.
    """

    def __init__(self, definition: ast.FunctionDef, replacement: Callable[[str], str | None]) -> None:
        self._replacement = replacement
        self._uses = Counter((n.id, type(n.ctx)) for n in ast.walk(definition) if isinstance(n, ast.Name))
        self._later: dict[str, ast.expr] = {}
        """Activations that are called where their result is used, by the name that has their argument until then."""
        self._before: ast.stmt | None = None
        """The statement before the one that is visited."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for name, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                self._statements(value)
            elif isinstance(value, list):
                value[:] = [self.visit(item) if isinstance(item, ast.AST) else item for item in value]
            elif isinstance(value, ast.AST):
                setattr(node, name, self.visit(value))
        return node

    def _statements(self, statements: list[ast.stmt]) -> None:
        for i, statement in enumerate(statements):
            self._put_off(statement, statements[i + 1 :])
            self._before = statements[i - 1] if i else None
            statements[i] = self.visit(statement)

    def _put_off(self, statement: ast.stmt, after: list[ast.stmt]) -> None:
        """Make `x = y` of `x = act(y)`, where x is used once, in a product of the same block."""
        match statement:
            case ast.Assign([ast.Name(name)], ast.Call(act, [argument], [])):
                once = self._uses[name, ast.Store] == self._uses[name, ast.Load] == 1
                if once and _can_wait(argument, name, after) and self._named(act):
                    self._later[name], statement.value = act, argument

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.Mult):
            for factor, other in ((node.left, node.right), (node.right, node.left)):
                act, gate = self._applied(factor)
                if act is None or _is_given(gate) or _is_given(other):
                    continue
                if function := self._named(act):
                    operands: list[tuple[str, ast.expr]] = [("gate", gate), ("up", other)]
                    if factor is node.right:  # evaluated in the order in which they stood
                        operands = [*reversed(operands), ("up_first", ast.Constant(True))]
                    operands += self._packed(gate, other)
                    return ast.Call(
                        load(function), [load("self"), act], [ast.keyword(*operand) for operand in operands]
                    )
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Give the product to the module that takes it and nothing else: `self.NAME(act(gate) * up)`."""
        is_product = [isinstance(argument, ast.BinOp) for argument in node.args] == [True]
        self.generic_visit(node)
        if is_product and not node.keywords and method_called(node):
            match node.args[0]:
                case ast.Call(args=[ast.Name("self"), _], keywords=[*_, _] as keywords) as product:
                    keywords.append(ast.keyword("then", node.func))
                    return product
        return node

    def _named(self, act: ast.expr) -> str | None:
        """The function that replaces products with results of `act`."""
        root = act
        while isinstance(root, ast.Attribute):
            root = root.value
        if not isinstance(root, ast.Name) or self._uses[root.id, ast.Store]:
            return None
        return self._replacement(ast.unparse(act))

    def _applied(self, factor: ast.expr) -> tuple[ast.expr | None, ast.expr]:
        """The activation whose result `factor` is, and its argument."""
        match factor:
            case ast.Call(act, [argument], []) if not isinstance(argument, ast.Starred):
                return act, argument
            case ast.Name(name) if name in self._later:
                return self._later[name], factor
        return None, factor

    def _packed(self, gate: ast.expr, up: ast.expr) -> list[tuple[str, ast.expr]]:
        """Return the argument that the statement before has split into gate and up."""
        match self._before:
            case ast.Assign([ast.Tuple([ast.Name() as first, ast.Name() as second])], ast.Call() as split):
                function, *arguments = map(ast.unparse, [split.func, *split.args, *(k.value for k in split.keywords)])
                names = [k.arg for k in split.keywords]
                if _name(gate) != first.id or _name(up) != second.id or names not in ([], ["dim"]):
                    return []
                if function == "torch.chunk" and arguments[1:] == ["2", "-1"]:
                    split.args[0] = _kept(split.args[0])
                elif isinstance(split.func, ast.Attribute) and split.func.attr == "chunk" and arguments == ["2", "-1"]:
                    split.func.value = _kept(split.func.value)
                else:
                    return []
                return [("packed", load(PACKED))]
        return []


PACKED = "llmk_packed"


def _kept(value: ast.expr) -> ast.expr:
    """`value`, and a name for it."""
    return value if isinstance(value, ast.NamedExpr) else ast.NamedExpr(ast.Name(PACKED, ast.Store()), value)


def _name(node: ast.AST) -> str | None:
    return node.id if isinstance(node, ast.Name) else None


def _is_given(node: ast.expr) -> bool:
    """Return True if it is a constant or an attribute, such as a learned factor, and no result."""
    return isinstance(node, ast.Constant | ast.Attribute)


def _can_wait(argument: ast.expr, name: str, after: list[ast.stmt]) -> bool:
    """Return True if `act(argument)` is the same in the product that has it, by `name`, in a later statement.

    That is so where the argument is a new tensor, or nothing is called in between, and nothing is changed in place.
    """
    uses = (i for i, s in enumerate(after) if any(_name(node) == name for node in ast.walk(s)))
    first = next(uses, None)
    if first is None:
        return False
    statement, between = after[first], after[:first]
    if not isinstance(statement, ast.Assign | ast.Return | ast.Expr) or not _has_factor(name, statement):
        return False
    is_new = isinstance(argument, ast.Call) and ast.unparse(argument.func).startswith("self.")
    names = {_name(node) for node in ast.walk(argument)} - {None}
    if not is_new and any(_name(node) in names for node in ast.walk(statement)):
        return False
    if not all(isinstance(s, ast.Assign) and _targets_names(s) and (is_new or not _calls(s)) for s in between):
        return False
    return not any(is_in_place(node) for s in (*between, statement) for node in ast.walk(s))


def _has_factor(name: str, statement: ast.stmt) -> bool:
    products = (n for n in ast.walk(statement) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult))
    return any(name in (_name(n.left), _name(n.right)) for n in products)


def _targets_names(statement: ast.Assign) -> bool:
    parts = [part for target in statement.targets for part in getattr(target, "elts", [target])]
    return all(isinstance(part, ast.Name) for part in parts)


def _calls(statement: ast.stmt) -> bool:
    return any(isinstance(node, ast.Call) for node in ast.walk(statement))
