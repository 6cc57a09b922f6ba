"""The output projection and its loss, computed together while training.

A model's own `forward` is kept, with a few expressions changed: in training with labels its projection gives logits of
no width, on which scaling and capping cost nothing; its loss is computed by calling the projection with the hidden
states and the labels; and the output shows no logits. The loss is computed inside the projection's own call, so that
whatever gathers sharded parameters for a module's forward (FSDP, ZeRO-3) does so here.
"""

import ast
import functools
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from transformers.loss import loss_utils

from llmk import functional
from llmk.registry.private.modules import buffers_of, parameters_of
from llmk.registry.record import FLOAT_DTYPES
from llmk.transformers.adapters import adding, as_one_layer, is_lora, linear_of, why_apart
from llmk.transformers.capping import Capping, Trial
from llmk.transformers.classes import Change, changes_of
from llmk.transformers.guards import (
    KEPT,
    METHOD,
    Called,
    Fact,
    Facts,
    broken,
    called_of,
    checked,
    guarded,
    is_hooked,
    llmk_only_brings_weights,
    why_no_weight,
)
from llmk.transformers.heads import ASKED, Inner, head_at, inner_edits, leads_inside, projection_of, takes_one
from llmk.transformers.loss_uses import Uses
from llmk.transformers.probe import Differs
from llmk.transformers.rewrite import Edit, Source, argument_names, load, method_called, replace

LOSS_FUNCTION = "loss_function"
"""transformers' own: a property of every model."""


@dataclass(frozen=True)
class LossSite(Edit):
    """Where a model's forward makes its logits, what it does to them, and where it takes their loss.

    Attributes:
        path: The projection, inside the child that is called for the logits.
        inner: The modules on the way to the projection, and their edits.
        logits: The names that hold the logits, or what is made of them.
        added: The parameter or buffer that is added to them.
        capping: What else becomes of them before the loss.
        criteria: The calls of the loss in the source: of `self.loss_function`, or of an `nn.CrossEntropyLoss`, with the
            label that it ignores.
        function: The model's `loss_function`, if that computes it.
        shifts: Whether `loss_function` holds the logits of token i against label i + 1.
        facts: What the logits are made by, `config.logits_scaling` perhaps, and what computes the loss.
        skip_ignored: The option of `patch`.
    """

    path: str
    inner: tuple[tuple[str, Inner], ...]
    logits: frozenset[str]
    added: str | None
    capping: Capping
    criteria: tuple[tuple[str, int], ...]
    function: Called | None
    shifts: bool
    facts: Facts
    skip_ignored: bool
    kind = "loss"

    @property
    def what(self) -> str:
        return f"fused_linear_ce{self.capping}{'' if self.skip_ignored else ', skip_ignored=False'}"

    def apply(self, definition: ast.FunctionDef) -> dict[str, Any]:
        replace(definition, self._replaced)
        definition.body.insert(0, ast.Assign([ast.Name("llmk_state", ast.Store())], load("llmk_nothing")))
        return {
            "llmk_nothing": NOTHING,
            "llmk_project": project_of(self),
            "llmk_add": add,
            "llmk_loss": loss_of(self),
            "llmk_cross_entropy": cross_entropy_of(self),
            "llmk_shown": shown,
        }

    def _replaced(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Load):
            node.elts = [_shown(e) if isinstance(e, ast.Name) and e.id in self.logits else e for e in node.elts]
        if isinstance(node, ast.BinOp) and self.added is not None and added_name(node) == self.added:
            return ast.Call(load("llmk_add"), [node.left, node.right], [])
        if not isinstance(node, ast.Call):
            return node
        if method_called(node) == self.path.partition(".")[0]:
            project = ast.Call(load("llmk_project"), [load("self"), node.func, node.args[0], load("labels")], [])
            return ast.Attribute(ast.NamedExpr(ast.Name("llmk_state", ast.Store()), project), "logits", ast.Load())
        criterion = ast.unparse(node.func)
        if criterion in dict(self.criteria) and logits_in(node, self.logits):
            return self._loss(node, criterion)
        for keyword in node.keywords:
            if keyword.arg == "logits":
                keyword.value = _shown(keyword.value)
        return node

    def _loss(self, node: ast.Call, criterion: str) -> ast.AST:
        """Return the call as it is where there are logits, else that of ours, without them."""
        arguments = [load("self"), load("llmk_state"), *(ast.Constant(None) for _ in node.args[:1]), *node.args[1:]]
        keywords = [ast.keyword(k.arg, ast.Constant(None) if k.arg == "logits" else k.value) for k in node.keywords]
        name = "llmk_loss"
        if criterion != f"self.{LOSS_FUNCTION}":
            name = "llmk_cross_entropy"
            keywords.append(ast.keyword("ignore_index", ast.Constant(dict(self.criteria)[criterion])))
        fused = ast.Attribute(load("llmk_state"), "fused", ast.Load())
        return ast.IfExp(fused, ast.Call(load(name), arguments, keywords), node)


class Projected(NamedTuple):
    """The logits, or in their place a tensor of no width and what they are made of."""

    logits: Tensor | None
    hidden: Tensor | None
    fused: bool


NOTHING = Projected(None, None, False)


@functools.cache
def project_of(site: LossSite) -> Callable[..., Projected]:
    why_not = why_not_fused(site)

    def project(self: nn.Module, head: nn.Module, hidden: Tensor, labels: Tensor | None) -> Projected:
        """The logits, or in training with labels a tensor of no width in their place."""
        if not self.training or labels is None or hidden.dtype not in FLOAT_DTYPES:
            return Projected(head(hidden), None, False)
        if why := why_not(self):
            getattr(self, METHOD)("forward", why, "the loss comes from logits")
            return Projected(head(hidden), None, False)
        if site.inner:
            hidden = head(hidden, **{ASKED: True})
        return Projected(hidden.new_empty((*hidden.shape[:-1], 0)), hidden, True)

    return project


def why_not_fused(site: LossSite) -> Callable[[Any], str | None]:
    """Return what gives the reason for which a model's loss comes from logits now, in words."""
    facts, function = site.facts, site.function
    kept = checked(facts, project_of.__wrapped__)
    same = None if function is None else function.check()

    def why_not(model: Any) -> str | None:
        compiling = torch.compiler.is_compiling()
        if not kept(model):
            return CHANGED if compiling else broken(facts, project_of.__wrapped__, model)
        if function is not None and same is not None and not same(loss_function_of(model)):
            return CHANGED if compiling else function.why(LOSS_FUNCTION, loss_function_of(model))
        why = why_not_projected(model, site.path)
        return None if why is None else f"the projection {why}"

    return why_not


CHANGED = "what makes its logits or its loss has changed"


def why_not_projected(model: Any, path: str) -> str | None:
    """The reason for which no loss can be had from the projection: a hook looks at logits, or they are made otherwise.

    Hooks that bring the weights (FSDP, pruning, ZeRO-3) are for the loss as well.
    """
    head: Any = head_at(model, path)
    if not leads_inside(model, path):
        return "is looked at by a hook, or is not where it was"
    if is_lora(head) and (why := why_apart(head)):
        return why
    head = linear_of(head)
    patched = any(isinstance(change, Head) for change in changes_of(head))
    if not patched and type(head) is not nn.Linear:
        return ANOTHER if torch.compiler.is_compiling() else f"is now of {type(head).__module__}.{type(head).__name__}"
    if is_hooked(head) and not (patched and head.llmk_only_brings_weights()):  # type: ignore[operator]
        return "is looked at by a hook"
    if patched and not getattr(head, f"{KEPT}forward")():
        return "has another forward now"
    if is_parametrized(head):  # reading a weight computes it, and may change the parametrization: only the loss does
        return None
    weight = head.weight
    if why := why_no_weight(weight):
        return f"has weights of its own kind: {why}"
    return None if weight.dtype in FLOAT_DTYPES else "is in a dtype that fused_linear_ce does not take"


ANOTHER = "is now of another class"


def add(logits: Tensor, bias: Tensor) -> Tensor:
    return logits if logits.shape[-1] == 0 else logits + bias


def _shown(logits: ast.expr) -> ast.expr:
    return ast.Call(load("llmk_shown"), [logits], [])


def shown(logits: Tensor | None) -> Tensor | None:
    return None if logits is None or logits.shape[-1] == 0 else logits


# ---- the loss


def loss_function_of(model: Any) -> Any:
    """The function behind a model's `loss_function`, which may be a method."""
    function = getattr(model, LOSS_FUNCTION)
    return getattr(function, "__func__", function)


ARGUMENTS = ("logits", "labels", "vocab_size", "num_items_in_batch", "ignore_index", "shift_labels")
"""The arguments of transformers' loss functions, in their order; others that they are given do nothing there."""


def check_arguments(function: Any) -> None:
    """
    Raises:
        Differs: A loss function takes other arguments.
    """
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    named = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
    takes_any = len(named) < len(parameters) and function.__module__ != loss_utils.__name__
    if named != [*ARGUMENTS[: len(named)]] or takes_any:
        raise Differs(f"its loss function {function.__qualname__} takes other arguments than transformers' own")


@functools.cache
def loss_of(site: LossSite) -> Callable[..., Tensor]:
    """transformers' `ForCausalLMLoss` or `ForMaskedLMLoss`, of the hidden states."""

    def loss(
        self: Any,
        state: Projected,
        logits: None,
        labels: Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        target = labels
        if site.shifts:
            shifted = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
            target = shifted if shift_labels is None else shift_labels
        if num_items_in_batch is None:
            return _total(self, site, state, target, ignore_index, "mean")
        total = _total(self, site, state, target, ignore_index, "sum")
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(total.device)
        return total / num_items_in_batch

    return loss


@functools.cache
def cross_entropy_of(site: LossSite) -> Callable[..., Tensor]:
    """`nn.CrossEntropyLoss()`, of the hidden states."""

    def cross_entropy(self: Any, state: Projected, input: None, target: Tensor, ignore_index: int) -> Tensor:
        return _total(self, site, state, target, ignore_index, "mean")

    return cross_entropy


def _total(model: Any, site: LossSite, state: Projected, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    head, hidden = head_at(model, site.path), state.hidden
    assert hidden is not None
    if target.numel() != hidden.shape[:-1].numel():
        tokens = tuple(hidden.shape[:-1])
        raise ValueError(f"labels: expected shape {tokens} (one for each token), got {tuple(target.shape)}")
    target = target.to(hidden.device).reshape(hidden.shape[:-1])
    added = None if site.added is None else getattr(model, site.added)
    arguments = (target, ignore_index, reduction, site.capping, added, site.skip_ignored)
    if is_lora(head) and adding(head):
        hidden, layer = as_one_layer(head, hidden)
        return loss_of_linear(layer, hidden, *arguments)
    # Where no adapter adds to it, PEFT's layer hands what it is given to the projection.
    return head(hidden, *arguments) if changes_of(linear_of(head)) else loss_of_linear(head, hidden, *arguments)


def loss_of_linear(
    head: Any,
    input: Tensor,
    target: Tensor,
    ignore_index: int,
    reduction: str,
    capping: Capping,
    added: Tensor | None,
    skip_ignored: bool,
) -> Tensor:
    """The loss of the logits `capping(head(input) + added)`."""
    weight = head.weight
    biases = [b.flatten().to(weight.dtype) for b in (head.bias, added) if b is not None]
    bias = sum(biases[1:], biases[0]) if biases else None
    if capping.scale != 1:
        input = input * capping.scale
        bias = None if bias is None else bias * capping.scale
    return functional.fused_linear_ce(
        input,
        weight,
        target,
        linear_bias=bias,
        ignore_index=ignore_index,
        reduction=reduction,
        softcap=capping.cap,
        skip_ignored=skip_ignored,
    )


@dataclass(frozen=True)
class Head(Change):
    """The output projection, whose forward gives logits, or with a target their loss."""

    def methods(self, base: type) -> dict[str, Any]:
        def forward(self: Any, input: Tensor, target: Tensor | None = None, *loss: Any) -> Tensor:
            return base.forward(self, input) if target is None else loss_of_linear(self, input, target, *loss)

        brings: dict[str, Any] = {"llmk_only_brings_weights": llmk_only_brings_weights}
        return guarded(base, "forward", forward, ()) | brings


# ---- where it is


def find_loss(model: nn.Module, source: Source, skip_ignored: bool) -> LossSite:
    """
    Raises:
        Differs: Why its loss cannot be fused.
    """
    path, definition = projection_of(model), source.definition
    head, V = path.partition(".")[0], linear_of(model.get_submodule(path)).out_features
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
    biases = {name for n in ast.walk(definition) if (name := added_name(n)) and _is_bias(model, name, V)}
    if len(biases) > 1:
        raise Differs(f"it adds {' and '.join(sorted(biases))} to its logits")
    added = next(iter(biases), None)
    made_by = uses.facts(added)
    inner = inner_edits(model, path)
    function = None
    if f"self.{LOSS_FUNCTION}" in criteria:
        function = called_of(loss_function_of(model))
        check_arguments(function.what)
    children = [name for name in criteria if name.startswith("self.") and name != f"self.{LOSS_FUNCTION}"]
    criterion = next((name.removeprefix("self.") for name in children), None)
    kept = [fact.expression.removeprefix("self.config.") for fact in made_by]
    capping, shifts = Trial(model, head, criterion, added, V, kept).found()
    facts = (*made_by, *(fact for name in children for fact in _of_criterion(name, criteria[name])))
    return LossSite(
        path,
        tuple(inner.items()),
        frozenset(logits),
        added,
        capping,
        tuple(criteria.items()),
        function,
        shifts,
        facts,
        skip_ignored,
    )


def _of_criterion(name: str, ignored: int) -> Facts:
    """The facts of a child that computes the loss."""
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
