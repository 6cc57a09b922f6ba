"""`patch`: put the operators into a model that exists."""

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from llmk.transformers.functions import CausalMask, Residual, Rope
from llmk.transformers.loss import FusedLoss, Projection, find_projection, projection_forward
from llmk.transformers.modules import Left, Match, Recognizer, find_experts, find_mlp, find_norm
from llmk.transformers.report import Entry, Report
from llmk.transformers.rewrite import CannotRewrite, Edit, rewritten

MARK = "patched_by_llmk"


def patch(
    model: nn.Module,
    *,
    norms: bool = True,
    mlps: bool = True,
    rope: bool = True,
    residuals: bool = True,
    loss: bool = True,
    masks: bool = True,
) -> Report:
    """Replace what llmk's operators compute in a Hugging Face model, or in any model of modules like those.

    What a module computes is found by running it on random input, in float32 on the CPU, so that no class needs to be
    known: a candidate that does not agree, outputs and gradients, is left as it is and named in the report. Only this
    instance changes. Its parameters, state dict and `save_pretrained` stay as they are.

    In training with labels, `output.loss` comes from `fused_linear_ce` and `output.logits` is None; in evaluation and
    generation the logits are there.

    Args:
        model: The model. Patch it before it is wrapped (DDP, FSDP, PEFT) or compiled. Its parameters may be on any
            device, "meta" too.
        norms: RMSNorm, with `weight`, `1 + weight` or none, and LayerNorm.
        mlps: SwiGLU and GeGLU layers, gate and up projected apart or packed, and the gates of packed experts.
        rope: The rotary embedding of queries and keys.
        residuals: A residual sum and the RMSNorm that follows it, in one.
        loss: The output projection and the causal language model's loss, in one.
        masks: With `scaled_dot_product_attention`, no causal mask where neither padding nor packing needs one, also
            when a compiler traces the model.

    Returns:
        The report: `print(report)` shows what was replaced and what was left and why, `report.unpatch()` undoes it.

    Raises:
        TypeError: `model` is not a `torch.nn.Module`.
        ValueError: `model` is patched already.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if any(hasattr(vars(module).get("forward"), MARK) for module in model.modules()):
        raise ValueError("model: is patched already; call unpatch() of its report first")
    report = Report(model)
    which = {"norm": norms, "mlp": mlps, "rope": rope, "residual": residuals, "loss": loss, "mask": masks}
    with torch.enable_grad(), torch.device("cpu"):  # for what is run and compared, whatever is set where this is called
        _patch(report, {kind for kind, wanted in which.items() if wanted})
    return report


def _patch(report: Report, kinds: set[str]) -> None:
    model = report.model
    adding: set[nn.Module] = set()
    if "norm" in kinds:
        adding = _replace(report, "norm", find_norm)
    if "mlp" in kinds:
        _replace(report, "mlp", find_mlp)
        _replace(report, "experts", find_experts)
    projection = find_projection(model) if "loss" in kinds else None
    if isinstance(projection, Left):
        report.entries.append(Entry("", "loss", type(model).__name__, False, projection.why))
    for name, module in model.named_modules():
        edits: dict[str, Callable[[], Edit]] = {"rope": Rope, "mask": CausalMask}
        fused = frozenset(name for name, child in module.named_children() if child in adding)
        if fused:
            edits["residual"] = _residual(fused)
        if module is model and isinstance(projection, Projection):
            edits["loss"] = _loss(projection.name)
        changed = _rewrite(report, name, module, {kind: edit for kind, edit in edits.items() if kind in kinds})
        if "loss" in changed and isinstance(projection, Projection):
            _set_method(report, projection.head, "forward", projection_forward(projection.capping))


@functools.cache
def _residual(norms: frozenset[str]) -> Callable[[], Edit]:
    return lambda: Residual(norms)


@functools.cache
def _loss(head: str) -> Callable[[], Edit]:
    return lambda: FusedLoss(head)


def _replace(report: Report, kind: str, find: Callable[[nn.Module], Any]) -> set[nn.Module]:
    """Give each module that `find` matches its method; those that can add a residual are returned."""
    recognize = Recognizer(find)
    adding = set()
    for name, module in report.model.named_modules():
        verdict = recognize(module)
        if isinstance(verdict, Match) and verdict.method in vars(module):
            verdict = Left(f"its {verdict.method} was replaced already")
        if isinstance(verdict, Match):
            _set_method(report, module, verdict.method, verdict.function)
            if verdict.adds_residual:
                adding.add(module)
            report.entries.append(Entry(name, kind, type(module).__name__, True, verdict.what))
        elif isinstance(verdict, Left):
            report.entries.append(Entry(name, kind, type(module).__name__, False, verdict.why))
    return adding


WHAT = {
    "rope": "rope",
    "residual": "add_rms_norm",
    "mask": "none where is_causal says it all",
    "loss": "fused_linear_ce",
}


def _rewrite(report: Report, name: str, module: nn.Module, edits: dict[str, Callable[[], Edit]]) -> set[str]:
    """Give the module its own forward with those of the edits that change it, and say which they were."""
    if not edits or "forward" in vars(module):
        return set()
    forward = type(module).forward
    try:
        done = rewritten(forward, tuple(edits.values()))
    except CannotRewrite as error:
        report.entries.append(Entry(name, "forward", type(module).__name__, False, str(error)))
        return set()
    for kind, changed, left in zip(edits, done.changed, done.left, strict=True):
        if changed or left:
            report.entries.append(Entry(name, kind, type(module).__name__, changed, WHAT[kind] if changed else left))
    if done.function is not None:
        _set_method(report, module, "forward", done.function)
    return {kind for kind, changed in zip(edits, done.changed, strict=True) if changed}


def _set_method(report: Report, module: nn.Module, name: str, function: Callable[..., Any]) -> None:
    setattr(function, MARK, True)
    report._set(module, name, MethodType(function, module))
