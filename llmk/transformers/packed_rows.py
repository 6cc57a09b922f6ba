"""Packed rows that a model is told of by `position_ids` alone: its layers get `seq_idx`, derived on the device.

Every collator that packs sends `position_ids`, and transformers' models use them for attention alone: the states of
convolutions and recurrences run on from one sequence into the next. So the `forward` that goes through the layers is
given the number of each token's sequence, among the keyword arguments that the layers hand on. Where these do not
reach every convolution and recurrence, or one of them is not llmk's and would take no notice, the model says so once.
"""

import ast
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from llmk.transformers.guards import METHOD
from llmk.transformers.packing import ids_from_positions, packing_of
from llmk.transformers.rewrite import CannotRewrite, Edit, argument_names, load, source_of

UPDATES = {"update_conv_state": "convolution", "update_recurrent_state": "recurrence"}
"""The methods of a cache by which a layer says that it has a state, and the kind of replacement that computes it."""
ROWS = ("input_ids", "inputs_embeds")
RAN = "states run on from one sequence of a packed row into the next"


@dataclass(frozen=True)
class PackedRows(Edit):
    """Gives the layers `seq_idx`, or says why they do not get it."""

    why_not: str | None = None
    kind = "packing"

    @property
    def what(self) -> str:
        return self.why_not or "sequences apart by position_ids"

    def apply(self, definition: ast.FunctionDef) -> dict[str, Any]:
        names = argument_names(definition)
        keywords = load(definition.args.kwarg.arg) if definition.args.kwarg else ast.Dict([], [])
        rows = [load(name) for name in ROWS if name in names]
        positions = load("position_ids") if "position_ids" in names else ast.Constant(None)
        call = ast.Call(load("llmk_packing"), [load("self"), keywords, positions, *rows], [])
        if self.why_not:
            definition.body.insert(0, ast.Expr(call))
            return {"llmk_packing": _saying(self.why_not)}
        definition.body.insert(0, ast.Assign([ast.Name(keywords.id, ast.Store())], call))  # type: ignore[union-attr]
        return {"llmk_packing": with_sequences}


def with_sequences(
    self: nn.Module, keywords: dict[str, Any], position_ids: Tensor | None, *rows: Tensor | None
) -> dict[str, Any]:
    """Return a model's keyword arguments with `seq_idx`, if positions are all that says how its rows are packed."""
    tokens = next((x for x in rows if x is not None), None)
    if tokens is None or position_ids is None or not _may_be_packed(keywords, position_ids):
        return keywords
    return keywords | {"seq_idx": ids_from_positions(position_ids, tokens.shape[0])}


def _saying(why: str) -> Any:
    def say(self: nn.Module, keywords: dict[str, Any], position_ids: Tensor | None, *rows: Tensor | None) -> None:
        """Warn in training; generation has positions of its own, of rows that are not packed."""
        position_ids = keywords.get("position_ids") if position_ids is None else position_ids
        if torch.is_grad_enabled() and position_ids is not None and _may_be_packed(keywords, position_ids):
            getattr(self, METHOD)("forward", why, RAN)

    return say


def _may_be_packed(keywords: Mapping[str, Any], position_ids: Tensor) -> bool:
    return not packing_of(keywords) and position_ids.shape[-1] > 1


# ---- where


def find_packed_rows(
    modules: Mapping[str, nn.Module], replaced: Mapping[str, Collection[str]], causal: Collection[nn.Module]
) -> Iterator[tuple[str, PackedRows]]:
    """The models, by name, that go through layers with replaced convolutions or recurrences, and their edits.

    Args:
        modules: All modules by name.
        replaced: The kinds of what was replaced in a layer, by its name.
        causal: The outermost models.
    """
    layers: dict[str, list[str]] = defaultdict(list)
    for name in replaced:
        stack = next((above for above in _upwards(name) if isinstance(modules.get(above), nn.ModuleList)), None)
        if stack:
            layers[stack.rpartition(".")[0]].append(name)
    for model, inside in layers.items():
        top = next((above for above in _upwards(model) if modules.get(above) in causal), model)
        try:
            _check_positions(modules, top, model)
            for name in inside:
                _check_keywords(modules, model, name)
                _check_states(modules[name], replaced[name])
        except CannotRewrite as why:
            yield top, PackedRows(str(why))
        else:
            yield model, PackedRows()


def _upwards(name: str, top: str = "") -> Iterator[str]:
    """The names of a module and those around it up to `top`, from the inside."""
    yield name
    while name != top:
        name = name.rpartition(".")[0]
        yield name


def _check_positions(modules: Mapping[str, nn.Module], top: str, model: str) -> None:
    """
    Raises:
        CannotRewrite: The positions do not come from the outermost model to the one that goes through the layers.
    """
    for name in _upwards(model, top):
        source = source_of(type(modules[name]).forward)
        if name == model and "position_ids" not in argument_names(source.definition):
            raise CannotRewrite(f"{type(modules[name]).__name__} takes no position_ids")
        if name != model and not _hands_on(source.definition, "position_ids"):
            raise CannotRewrite(f"{type(modules[name]).__name__} does not hand on position_ids")


def _check_keywords(modules: Mapping[str, nn.Module], model: str, layer: str) -> None:
    """
    Raises:
        CannotRewrite: A model's keyword arguments do not reach the functions that a layer calls.
    """
    for name in _upwards(layer, model):
        module = modules[name]
        if isinstance(module, nn.ModuleList):
            continue
        if not _hands_on(source_of(type(module).forward).definition, "seq_idx"):
            raise CannotRewrite(f"{type(module).__name__} does not hand on seq_idx")


def _hands_on(definition: ast.FunctionDef, name: str) -> bool:
    """Return True if a call gets an argument of this name, or all keyword arguments."""
    rest = definition.args.kwarg.arg if definition.args.kwarg else None
    for call in ast.walk(definition):
        for given in call.keywords if isinstance(call, ast.Call) else ():
            match given:
                case ast.keyword(arg=None, value=ast.Name(value)) if value == rest:
                    return True
                case ast.keyword(arg=value) if value == name:
                    return True
    return False


def _check_states(layer: nn.Module, replaced: Collection[str]) -> None:
    """
    Raises:
        CannotRewrite: The layer has a state whose computation was not replaced: it takes no notice of boundaries.
    """
    definition = source_of(type(layer).forward).definition
    updates = {node.attr for node in ast.walk(definition) if isinstance(node, ast.Attribute)} & UPDATES.keys()
    for kind in sorted(UPDATES[name] for name in updates):
        if kind not in replaced:
            raise CannotRewrite(f"the {kind} of {type(layer).__name__} is not llmk's")
