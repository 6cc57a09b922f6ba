"""The output projection and its loss, computed together while training.

A model's own `forward` is kept, with a few expressions changed: in training with labels its projection gives logits of
no width, on which scaling and capping cost nothing; its loss is computed by calling the projection with the hidden
states and the labels; and the output shows no logits. The loss is computed inside the projection's own call, so that
whatever gathers sharded parameters for a module's forward (FSDP, ZeRO-3) does so here.
"""

import ast
import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from llmk import functional
from llmk.registry.record import FLOAT_DTYPES
from llmk.transformers.adapters import adding, as_one_layer, is_lora, linear_of, why_apart
from llmk.transformers.capping import Capping, Trial
from llmk.transformers.classes import CHANGES, Change, changes_of
from llmk.transformers.heads import ASKED, Inner, head_at, inner_edits, leads_inside, projection_of
from llmk.transformers.loss_calls import LOSS_FUNCTION, LossCalls, Places, find_places, is_plain
from llmk.transformers.probe import Differs
from llmk.transformers.residuals import is_hooked
from llmk.transformers.rewrite import Edit, Source


@dataclass(frozen=True)
class FusedLoss(Edit):
    """The projection at `path`, the loss and what becomes of the logits, in a model's forward."""

    path: str
    places: Places
    capping: Capping
    shifts: bool
    """Return True if `loss_function` holds the logits of token i against label i + 1."""
    loss_type: str | None
    """The model's, by which transformers chooses its `loss_function`."""
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
    def project(self: nn.Module, head: nn.Module, hidden: Tensor, labels: Tensor | None) -> Projected:
        """The logits, or in training with labels a tensor of no width in their place."""
        if not self.training or labels is None or hidden.dtype not in FLOAT_DTYPES or not _has_that_loss(self, edit):
            return Projected(head(hidden), None, False)
        if not fuses_loss(self, edit.path):
            if not torch.compiler.is_compiling():
                words = _words(head_at(self, edit.path))
                warnings.warn(f"the loss comes from logits, as before patch(): the projection {words}", stacklevel=2)
            return Projected(head(hidden), None, False)
        if edit.inner:
            hidden = head(hidden, **{ASKED: True})
        return Projected(hidden.new_empty((*hidden.shape[:-1], 0)), hidden, True)

    return project


def _has_that_loss(model: nn.Module, edit: FusedLoss) -> bool:
    if "_loss_function" in vars(model) or getattr(model, "loss_type", None) != edit.loss_type:
        return False
    if any(head_at(model, name) != value for name, value in edit.places.numbers):
        return False
    for name, ignored in children_of(edit.places):
        criterion = head_at(model, name)
        if not is_plain(criterion) or criterion.ignore_index != ignored:
            return False
    return True


def children_of(places: Places) -> list[tuple[str, int]]:
    """The names of the children that compute the loss, and the labels they ignore."""
    named = [(name.removeprefix("self."), ignored) for name, ignored in places.criteria if name.startswith("self.")]
    return [(name, ignored) for name, ignored in named if name != LOSS_FUNCTION]


def _words(head: Any) -> str:
    if type(head) is nn.Linear or any(isinstance(change, Head) for change in changes_of(head)):
        return "is looked at by a hook" if is_hooked(head) else "is not where it was"
    why = why_apart(head) if is_lora(head) else None
    return why or f"is now of {type(head).__module__}.{type(head).__name__}"


def add(logits: Tensor, bias: Tensor) -> Tensor:
    return logits if logits.shape[-1] == 0 else logits + bias


def shown(logits: Tensor | None) -> Tensor | None:
    return None if logits is None or logits.shape[-1] == 0 else logits


def fuses_loss(model: nn.Module, path: str) -> bool:
    """True if the loss can be had from the projection: not where a hook looks at logits.

    Nor where an adapter adds to them that is no LoRA. Hooks that bring the weights (FSDP, tensor parallelism, ZeRO-3)
    are for the loss as well.
    """
    head = head_at(model, path)
    if not leads_inside(model, path) or (is_lora(head) and why_apart(head)):
        return False
    head = linear_of(head)
    if any(isinstance(change, Head) for change in changes_of(head)):
        split = (
            CHANGES not in vars(type(head)) or type(head.weight) is not nn.Parameter or hasattr(head.weight, "ds_id")
        )
        return split or not is_hooked(head)
    return type(head) is nn.Linear and head.weight.dtype in FLOAT_DTYPES and not is_hooked(head)


# ---- the loss


@functools.cache
def loss_of(edit: FusedLoss) -> Callable[..., Tensor]:
    """transformers' `ForCausalLMLoss` or `ForMaskedLMLoss`, of the hidden states."""

    def loss(
        self: Any,
        state: Projected,
        logits: Tensor,
        labels: Tensor,
        *args: Any,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        target = labels if shift_labels is None else shift_labels
        if shift_labels is None and edit.shifts:
            target = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
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
        def forward(self: nn.Module, input: Tensor, target: Tensor | None = None, *loss: Any) -> Tensor:
            return base.forward(self, input) if target is None else loss_of_linear(self, input, target, *loss)

        return {"forward": forward}


def find_loss(model: nn.Module, source: Source, skip_ignored: bool) -> FusedLoss:
    """
    Raises:
        Differs: Why its loss cannot be fused.
    """
    path = projection_of(model)
    if "_loss_function" in vars(model):
        raise Differs("its loss_function was replaced")
    head, V = path.partition(".")[0], len(model.get_submodule(path).weight)  # type: ignore[arg-type]
    places = find_places(model, source, head, V)
    inner = inner_edits(model, path)
    criterion = next((name for name, _ in children_of(places)), None)
    capping, shifts = Trial(model, head, criterion, places.added, V).found()
    loss_type = getattr(model, "loss_type", None)
    return FusedLoss(path, places, capping, shifts, loss_type, tuple(inner.items()), skip_ignored)
