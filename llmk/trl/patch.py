"""`patch`: put the operators into the fused head of a TRL trainer's models."""

import ast
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn
from transformers import TrainerCallback

from llmk.transformers.rewrite import CannotRewrite, Edit, load, rewritten
from llmk.trl.counts import Counted
from llmk.trl.divergence import Divergence
from llmk.trl.logprobs import LogProbs
from llmk.trl.trainers import asks_for_fused_head, calls, why_not

HEAD = "_ChunkedLogProbFunction"
"""The function that TRL's `add_fused_lm_head` calls for log-probabilities and entropy."""
LOSS = "_chunked_divergence_loss"
"""The function that `DistillationTrainer` calls for its loss."""
ARGUMENT = "llmk_function"
PATCHED = "trainer: it is patched already; the report that patch() returned undoes it"


@dataclass(frozen=True)
class Seam(Edit):
    """The name of a function that another one calls, and an argument in its place."""

    name: str
    kind = "head"

    @property
    def what(self) -> str:
        return self.name

    def apply(self, definition: ast.FunctionDef) -> dict[str, Any]:
        _Names(self.name).visit(definition)
        definition.args.kwonlyargs.append(ast.arg(ARGUMENT))
        definition.args.kw_defaults.append(ast.Constant(None))
        return {}


class _Names(ast.NodeTransformer):
    def __init__(self, name: str) -> None:
        self._name = name

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return load(ARGUMENT) if node.id == self._name else node


@dataclass
class Report:
    """The report on which of a trainer's models compute through llmk's operators. `print(report)` shows it.

    Attributes:
        heads: The models, by their names in the trainer, and of each the function that was changed: its forward with
            the fused head, or the trainer's loss.
    """

    heads: dict[str, FunctionType]
    _made: Mapping[str, Counted]
    _trainer: Any
    _undo: Callable[[], object]

    @property
    def calls(self) -> dict[str, tuple[int, int]]:
        """The number of calls that llmk computed for each patched model, and of those with gradients."""
        return {name: (made.calls, made.calls_with_gradients) for name, made in self._made.items()}

    def unpatch(self) -> None:
        """Undo it: the models run TRL's own code again."""
        if not isinstance(self._trainer, nn.Module):
            self._trainer.remove_callback(WarnIfNeverCalled)
        self._undo()

    def __str__(self) -> str:
        return "\n".join(
            f"{name}: {made.what}, called {made.calls} times, {made.calls_with_gradients} of them with gradients"
            for name, made in self._made.items()
        )


class WarnIfNeverCalled(TrainerCallback):
    """Warns at the end of training where no gradient came from what was patched."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        if not any(with_gradients for _, with_gradients in self._report.calls.values()):
            warnings.warn(f"llmk.trl.patch: no gradient came from llmk: {self._report}", stacklevel=2)


def patch(trainer: Any) -> Report:
    """Let the models of a TRL trainer compute log-probabilities and entropy by `linear_logprobs`.

    SFT, DPO, KTO, GRPO and RLOO compute through one fused head, which TRL's `add_fused_lm_head` puts into a model; what
    that head calls is replaced. Losses and metrics stay TRL's. The loss of `DistillationTrainer`, of hidden states, is
    computed by `fused_linear_jsd`. Only these instances change. Call it before `train()`.

    Args:
        trainer: The trainer, or a model with a fused head; also one that PEFT has wrapped.

    A trainer that was never led through what was patched warns at the end of training.

    Returns:
        The report, which counts calls; `report.unpatch()` undoes it.

    Raises:
        TypeError: `trainer` is neither, not of TRL 1.16, or computes its loss in another way.
        RuntimeError: It is patched already.
    """
    if (loss := _loss_by_divergence(type(trainer))) is not None:
        return _reported(trainer, _patched_loss(trainer, loss))
    if hasattr(type(trainer), "compute_loss") and not asks_for_fused_head(type(trainer)):
        raise TypeError(f"trainer: {why_not(type(trainer))}")
    return _reported(trainer, _patched_heads(trainer))


def _reported(trainer: Any, report: Report) -> Report:
    if not isinstance(trainer, nn.Module):
        trainer.add_callback(WarnIfNeverCalled(report))
    return report


def _loss_by_divergence(trainer: type) -> FunctionType | None:
    """The method in which a trainer calls TRL's divergence of hidden states, if its loss is computed there."""
    method = getattr(trainer, "_compute_loss", None)
    calls_it = isinstance(method, FunctionType) and LOSS in method.__code__.co_names
    return method if calls_it and calls(trainer, "compute_loss", "_compute_loss") else None


def _patched_loss(trainer: Any, loss: FunctionType) -> Report:
    if "_compute_loss" in vars(trainer):
        raise RuntimeError(PATCHED)
    try:
        changed = rewritten(loss, (Seam(LOSS),))
    except CannotRewrite as why:
        raise TypeError(f"trainer: its loss cannot be changed: {why}") from why
    made = Divergence()
    changed.__kwdefaults__ = {**(changed.__kwdefaults__ or {}), ARGUMENT: made}
    trainer._compute_loss = MethodType(changed, trainer)
    return Report({"model": changed}, {"model": made}, trainer, lambda: vars(trainer).pop("_compute_loss", None))


def _patched_heads(trainer: Any) -> Report:
    heads, before = {}, {}
    for name, model in _models(trainer):
        forward = _fused_forward(model)
        if forward is not None:
            heads[name], before[name] = forward, (forward.__code__, forward.__kwdefaults__)
    if not heads:
        raise TypeError(
            f"trainer: expected a trainer of TRL 1.16 with a fused head (SFT, DPO, KTO, GRPO, RLOO), or "
            f"DistillationTrainer, or a model after trl.trainer.utils.add_fused_lm_head, got {type(trainer).__name__}"
        )
    if any(ARGUMENT in (forward.__kwdefaults__ or {}) for forward in heads.values()):
        raise RuntimeError(PATCHED)
    made: dict[str, LogProbs] = {}
    codes = {name: _edited(forward) for name, forward in heads.items()}
    for name, forward in heads.items():
        original = forward.__globals__[HEAD].apply
        forward.__code__ = codes[name]
        made[name] = LogProbs(original)
        forward.__kwdefaults__ = {**(before[name][1] or {}), ARGUMENT: made[name]}

    def undo() -> None:
        for name, forward in heads.items():
            forward.__code__, forward.__kwdefaults__ = before[name]

    return Report(heads, made, trainer, undo)


def _models(trainer: Any) -> Iterator[tuple[str, nn.Module]]:
    """The policy and its reference, without what wraps them."""
    if isinstance(trainer, nn.Module):
        yield "model", trainer
        return
    for name in ("model", "ref_model"):
        model = getattr(trainer, name, None)
        if isinstance(model, nn.Module):
            yield name, model


def _fused_forward(model: nn.Module) -> FunctionType | None:
    """The function that TRL made for a model or one inside it, under what accelerate wrapped around it."""
    for module in model.modules():
        forward = vars(module).get("forward")
        while forward is not None:
            function = getattr(forward, "__func__", forward)
            if isinstance(function, FunctionType) and "fused_lm_head" in function.__code__.co_varnames:
                return function
            forward = getattr(function, "__wrapped__", None)
    return None


def _edited(forward: FunctionType) -> CodeType:
    """The code of TRL's function with the edit.

    Raises:
        TypeError: It is another function than TRL 1.16's.
    """
    bare = FunctionType(
        forward.__code__, forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__
    )
    try:
        code = rewritten(bare, (Seam(HEAD),)).__code__
    except CannotRewrite as why:
        raise TypeError(f"trainer: the fused head of its model cannot be changed: {why}") from why
    if forward.__code__.co_names.count(HEAD) != 1 or HEAD in code.co_names:
        raise TypeError(f"trainer: the fused head of its model does not call {HEAD}, as TRL 1.16's does")
    return code
