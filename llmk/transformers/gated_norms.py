"""Norms with a gate: modules that compute `rms_norm_gated`, told by what they compute."""

import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from llmk import functional
from llmk.ops.common.activations import GATES
from llmk.registry.private.modules import buffers_of, children_of, parameters_of
from llmk.transformers.classes import Change
from llmk.transformers.norms import DTYPES, ROUNDINGS, signature_of
from llmk.transformers.probe import Differs, agree, apart, gradients, randoms, rows_of_all_scales, run, same
from llmk.transformers.rewrite import set_source


class GatedForm(NamedTuple):
    """The formula of a gated norm, and the name of its weight."""

    eps: float
    activation: str
    norm_before_gate: bool
    group_size: int
    weight: str

    def __call__(self, input: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        order, size = self.norm_before_gate, self.group_size
        return functional.rms_norm_gated(
            input, gate, weight, self.eps, activation=self.activation, norm_before_gate=order, group_size=size
        )


@dataclass(frozen=True)
class GatedNorm(Change):
    """A norm's forward by the operator, with the dtypes of input and weight with which it was found to do the same."""

    form: GatedForm
    proven: tuple[tuple[torch.dtype, torch.dtype], ...]

    @property
    def what(self) -> str:
        return "rms_norm_gated" if self.form.norm_before_gate else "rms_norm_gated, the gate first"

    def methods(self, base: type) -> dict[str, Any]:
        form, proven = self.form, self.proven

        def forward(self: nn.Module, input: Tensor, gate: Tensor | None = None) -> Any:
            weight = getattr(self, form.weight)
            if gate is None or gate.shape != input.shape or gate.dtype != input.dtype:
                return base.forward(self, input, gate)
            if (input.dtype, weight.dtype) not in proven:
                return base.forward(self, input, gate)
            return form(input, gate, weight)

        set_source(forward, f"# {form}\n" + textwrap.dedent(inspect.getsource(forward)))
        return {"forward": forward}


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
    trial = _Trial(module, name, len(weight))
    for form in _forms(module, name, len(weight)):
        if trial.is_like(form):
            return GatedNorm(form, tuple(pair for pair in trial.pairs() if trial.keeps_dtypes(form, *pair)))
    raise Differs("computes no RMSNorm over the last axis with a gate")


def _takes_input_and_gate(module: nn.Module) -> bool:
    names = [p.name for p in signature_of(type(module).forward)]
    return len(names) == 3 and "gate" in names[2]  # self too


def _forms(module: nn.Module, weight: str, width: int) -> Iterator[GatedForm]:
    values = [v for v in vars(module).values() if not isinstance(v, bool)]
    own = {v for v in values if isinstance(v, float) and 0 < v < 0.1}
    counts = {v for v in values if isinstance(v, int) and 0 < v < width and width % v == 0}
    sizes = sorted({width, *counts, *(width // v for v in counts)}, reverse=True)
    for eps, order, activation, size in product([*sorted(own), 1e-5, 1e-6], (True, False), GATES, sizes):
        yield GatedForm(eps, activation, order, size, weight)


class _Trial:
    """A gated norm's outcome for rows of all scales, in training and in evaluation."""

    def __init__(self, module: nn.Module, name: str, width: int) -> None:
        randn = randoms(2)
        self.module, self.name = module, name
        self.weight = randn(width).requires_grad_()
        self.input = rows_of_all_scales(width).requires_grad_()
        self.gate = (3 * randn(*self.input.shape)).requires_grad_()
        self.inputs = [self.input, self.gate, self.weight]
        self.outcomes = [self._outcome(training) for training in (True, False)]

    def _output(self, input: Tensor, gate: Tensor, weight: Tensor, training: bool) -> Tensor:
        module = apart(self.module, {**dict.fromkeys(parameters_of(self.module)), self.name: weight}, training)
        output = run(type(module).forward, module, input, gate)
        if not isinstance(output, Tensor) or output.shape != input.shape:
            raise Differs("its output is not one tensor of the input's shape")
        return output

    def _outcome(self, training: bool) -> tuple[Tensor, list[Tensor | None]]:
        input, gate = (t if training else t.unsqueeze(0) for t in (self.input, self.gate))  # of other axes too
        output = self._output(input, gate, self.weight, training).reshape(self.input.shape)
        if not output.requires_grad:
            raise Differs("its output is not differentiable")
        return output, gradients(output, self.inputs)

    def is_like(self, form: GatedForm) -> bool:
        output = form(self.input, self.gate, self.weight)
        found = gradients(output, self.inputs)
        return all(agree(output, want) and all(map(same, found, grads)) for want, grads in self.outcomes)

    def pairs(self) -> Iterator[tuple[torch.dtype, torch.dtype]]:
        if any(b is not None and b.is_floating_point() for b in buffers_of(self.module).values()):
            return iter([(torch.float32, torch.float32)])  # what a buffer's dtype does is not tried
        return product(DTYPES, DTYPES)

    def keeps_dtypes(self, form: GatedForm, of_input: torch.dtype, of_weight: torch.dtype) -> bool:
        """Return True if the operator gives the module's dtype too, and its values within the dtype's rounding."""
        with torch.no_grad():
            input, gate, weight = self.input.to(of_input), self.gate.to(of_input), self.weight.to(of_weight)
            try:
                want = self._output(input, gate, weight, True)
            except Differs:
                return False
            got = form(input, gate, weight)
        return got.dtype == want.dtype and agree(got, want, max(ROUNDINGS * torch.finfo(got.dtype).eps, 1e-5))
