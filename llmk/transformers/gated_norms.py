"""Norms with a gate: modules that compute `rms_norm_gated`, told by what they compute."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from llmk import functional
from llmk.ops.common.activations import GATES
from llmk.registry.private.modules import children_of, parameters_of
from llmk.transformers.classes import Change
from llmk.transformers.guards import Facts, guarded, has_plain_weights, why_no_weight
from llmk.transformers.norms import Trial, signature_of, small_numbers
from llmk.transformers.probe import Differs
from llmk.transformers.rewrite import own_source, set_source


class GatedForm(NamedTuple):
    """The formula of a gated norm, and the name of its weight."""

    eps: float
    activation: str
    norm_before_gate: bool
    group_size: int
    weight: str

    @property
    def parameters(self) -> tuple[str]:
        return (self.weight,)

    def __call__(self, input: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        order, size = self.norm_before_gate, self.group_size
        return functional.rms_norm_gated(
            input, gate, weight, self.eps, activation=self.activation, norm_before_gate=order, group_size=size
        )


@dataclass(frozen=True)
class GatedNorm(Change):
    """A norm's forward by the operator, as `Norm` is."""

    form: GatedForm
    proven: tuple[tuple[torch.dtype, torch.dtype | None], ...]
    facts: Facts

    @property
    def what(self) -> str:
        return "rms_norm_gated" if self.form.norm_before_gate else "rms_norm_gated, the gate first"

    def methods(self, base: type) -> dict[str, Any]:
        form, proven = self.form, self.proven
        _, _, second = signature_of(base.forward)

        def own(self: Any, input: Tensor | None = None, gate: Tensor | None = None, **named: Tensor) -> Any:
            given = () if input is None else (input,)
            return base.forward(self, *given, **({} if gate is None else {second.name: gate}), **named)

        def forward(self: Any, input: Tensor | None = None, gate: Tensor | None = None, **named: Tensor) -> Any:
            if input is None or gate is None or named or gate.shape != input.shape or gate.dtype != input.dtype:
                return own(self, input, gate, **named)
            weight = getattr(self, form.weight)
            if (input.dtype, weight.dtype) not in proven or not has_plain_weights(self, weight):
                return own(self, input, gate)
            return form(input, gate, weight)

        set_source(forward, f"# {form}\n{own_source(forward)}")
        return guarded(base, "forward", forward, self.facts, own)


def find_gated_norm(module: nn.Module) -> GatedNorm | None:
    """RMSNorm over the last axis or groups of it, with a gate before or after; None where it is no candidate.

    Raises:
        Differs: Why it is none.
    """
    parameters = {name: p for name, p in parameters_of(module).items() if p is not None}
    if children_of(module) or len(parameters) != 1:
        return None
    ((name, weight),) = parameters.items()
    if weight.dim() != 1 or len(weight) < 2 or not _takes_input_and_gate(module):
        return None
    if why := why_no_weight(weight):
        raise Differs(why)
    trial = Trial(module, parameters, len(weight), with_gate=True)
    for form in _forms(module, name, len(weight)):
        if trial.is_like(form):
            proven = trial.proven(form)
            return GatedNorm(form, proven, trial.facts(proven))
    raise Differs("computes no RMSNorm over the last axis with a gate")


def _takes_input_and_gate(module: nn.Module) -> bool:
    names = [p.name for p in signature_of(type(module).forward)]
    return len(names) == 3 and "gate" in names[2]  # self too


def _forms(module: nn.Module, weight: str, width: int) -> Iterator[GatedForm]:
    values = [v for v in vars(module).values() if not isinstance(v, bool)]
    own = {value for _, value in small_numbers(module)}
    counts = {v for v in values if isinstance(v, int) and 0 < v < width and width % v == 0}
    sizes = sorted({width, *counts, *(width // v for v in counts)}, reverse=True)
    for eps, order, activation, size in product([*sorted(own), 1e-5, 1e-6], (True, False), GATES, sizes):
        yield GatedForm(eps, activation, order, size, weight)
