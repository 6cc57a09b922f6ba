"""The output projection and its loss, computed together while training.

A model's own `forward` is kept, with a few expressions changed: in training with labels its projection gives logits of
no width, on which scaling and capping cost nothing; its loss is computed by calling the projection with the hidden
states and the labels; and the output shows no logits. The loss is computed inside the projection's own call, so that
whatever gathers sharded parameters for a module's forward (FSDP, ZeRO-3) does so here.
"""

import ast
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.loss import loss_utils

from llmk import functional
from llmk.registry.private.modules import children_of
from llmk.registry.record import FLOAT_DTYPES
from llmk.transformers.adapters import adding, as_one_layer, is_lora, linear_of, why_apart
from llmk.transformers.capping import Capping, Trial
from llmk.transformers.classes import Change, changes_of
from llmk.transformers.guards import (
    KEPT,
    METHOD,
    Called,
    broken,
    called_of,
    checked,
    guarded,
    is_hooked,
    llmk_only_brings_weights,
    why_no_weight,
)
from llmk.transformers.heads import ASKED, Inner, head_at, inner_edits, leads_inside, projection_of
from llmk.transformers.loss_calls import LOSS_FUNCTION, LossCalls, Places, find_places
from llmk.transformers.probe import Differs
from llmk.transformers.rewrite import Edit, Source


@dataclass(frozen=True)
class FusedLoss(Edit):
    """The projection at `path`, the loss and what becomes of the logits, in a model's forward."""

    path: str
    places: Places
    capping: Capping
    shifts: bool
    """Return True if `loss_function` holds the logits of token i against label i + 1."""
    function: Called | None
    """The model's `loss_function`, if that computes it."""
    inner: tuple[tuple[str, Inner], ...]
    """The modules on the way to the projection, and their edits."""
    skip_ignored: bool
    kind = "loss"

    @property
    def what(self) -> str:
        return f"fused_linear_ce{self.capping}{'' if self.skip_ignored else ', skip_ignored=False'}"

    def apply(self, definition: ast.FunctionDef, scope: Mapping[str, Any]) -> dict[str, Any]:
        LossCalls(self.places).visit(definition)
        return {
            "llmk_nothing": NOTHING,
            "llmk_project": project_of(self),
            "llmk_add": add,
            "llmk_loss": loss_of(self),
            "llmk_cross_entropy": cross_entropy_of(self),
            "llmk_shown": shown,
        }


class Projected(NamedTuple):
    """The logits, or in their place a tensor of no width and what they are made of."""

    logits: Tensor | None
    hidden: Tensor | None
    fused: bool


NOTHING = Projected(None, None, False)


@functools.cache
def project_of(edit: FusedLoss) -> Callable[..., Projected]:
    why_not = why_not_fused(edit)

    def project(self: nn.Module, head: nn.Module, hidden: Tensor, labels: Tensor | None) -> Projected:
        """The logits, or in training with labels a tensor of no width in their place."""
        if not self.training or labels is None or hidden.dtype not in FLOAT_DTYPES:
            return Projected(head(hidden), None, False)
        if why := why_not(self):
            getattr(self, METHOD)("forward", why, "the loss comes from logits")
            return Projected(head(hidden), None, False)
        if edit.inner:
            hidden = head(hidden, **{ASKED: True})
        return Projected(hidden.new_empty((*hidden.shape[:-1], 0)), hidden, True)

    return project


def why_not_fused(edit: FusedLoss) -> Callable[[Any], str | None]:
    """Return what gives the reason for which a model's loss comes from logits now, in words."""
    facts, function = edit.places.facts, edit.function
    kept = checked(facts, project_of.__wrapped__)
    same = None if function is None else function.check()

    def why_not(model: Any) -> str | None:
        compiling = torch.compiler.is_compiling()
        if not kept(model):
            return CHANGED if compiling else broken(facts, project_of.__wrapped__, model)
        if function is not None and same is not None and not same(loss_function_of(model)):
            return CHANGED if compiling else function.why(LOSS_FUNCTION, loss_function_of(model))
        why = why_not_projected(model, edit.path)
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
    weight = head.weight
    if why := why_no_weight(weight):
        return f"has weights of its own kind: {why}"
    if is_hooked(head) and not (patched and head.llmk_only_brings_weights()):  # type: ignore[operator]
        return "is looked at by a hook"
    if patched and not getattr(head, f"{KEPT}forward")():
        return "has another forward now"
    return None if weight.dtype in FLOAT_DTYPES else "is in a dtype that fused_linear_ce does not take"


ANOTHER = "is now of another class"


def add(logits: Tensor, bias: Tensor) -> Tensor:
    return logits if logits.shape[-1] == 0 else logits + bias


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
def loss_of(edit: FusedLoss) -> Callable[..., Tensor]:
    """transformers' `ForCausalLMLoss` or `ForMaskedLMLoss`, of the hidden states."""

    def loss(
        self: Any,
        state: Projected,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        target = labels
        if edit.shifts:
            shifted = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
            target = shifted if shift_labels is None else shift_labels
        if num_items_in_batch is None:
            return _total(self, edit, state, target, ignore_index, "mean")
        total = _total(self, edit, state, target, ignore_index, "sum")
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(total.device)
        return total / num_items_in_batch

    return loss


@functools.cache
def cross_entropy_of(edit: FusedLoss) -> Callable[..., Tensor]:
    """`nn.CrossEntropyLoss()`, of the hidden states."""

    def cross_entropy(self: Any, state: Projected, target: Tensor, ignore_index: int) -> Tensor:
        return _total(self, edit, state, target, ignore_index, "mean")

    return cross_entropy


def _total(model: Any, edit: FusedLoss, state: Projected, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    head, hidden = head_at(model, edit.path), state.hidden
    assert hidden is not None
    if target.numel() != hidden.shape[:-1].numel():
        tokens = tuple(hidden.shape[:-1])
        raise ValueError(f"labels: expected shape {tokens} (one for each token), got {tuple(target.shape)}")
    target = target.to(hidden.device).reshape(hidden.shape[:-1])
    added = None if edit.places.added is None else getattr(model, edit.places.added)
    arguments = (target, ignore_index, reduction, edit.capping, added, edit.skip_ignored)
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
    biases = [b.flatten().to(head.weight.dtype) for b in (head.bias, added) if b is not None]
    bias = sum(biases[1:], biases[0]) if biases else None
    if capping.scale != 1:
        input = input * capping.scale
        bias = None if bias is None else bias * capping.scale
    return functional.fused_linear_ce(
        input,
        head.weight,
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


def find_loss(model: nn.Module, source: Source, skip_ignored: bool) -> FusedLoss:
    """
    Raises:
        Differs: Why its loss cannot be fused.
    """
    path = projection_of(model)
    head, V = path.partition(".")[0], len(model.get_submodule(path).weight)  # type: ignore[arg-type]
    places = find_places(model, source, head, V)
    inner = inner_edits(model, path)
    function = None
    if f"self.{LOSS_FUNCTION}" in dict(places.criteria):
        function = called_of(loss_function_of(model))
        check_arguments(function.what)
    criteria = (name.removeprefix("self.") for name, _ in places.criteria if name != f"self.{LOSS_FUNCTION}")
    criterion = next((name for name in criteria if name in children_of(model)), None)
    kept = [fact.expression.removeprefix("self.config.") for fact in places.facts]
    capping, shifts = Trial(model, head, criterion, places.added, V, kept).found()
    return FusedLoss(path, places, capping, shifts, function, tuple(inner.items()), skip_ignored)
