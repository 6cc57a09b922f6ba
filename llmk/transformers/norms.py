"""Norms: modules that compute `rms_norm`, `layer_norm` or, with a gate, `rms_norm_gated`, told by what they compute."""

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from llmk import functional
from llmk.ops.common.activations import GATES
from llmk.registry.private.modules import buffers_of, children_of, parameters_of
from llmk.registry.record import FLOAT_DTYPES
from llmk.transformers.classes import Change
from llmk.transformers.guards import Fact, Facts, guarded, has_plain_weights, reads_of, why_no_weight
from llmk.transformers.probe import Differs, agree, apart, gradients, randoms, rows_of_all_scales, run, same
from llmk.transformers.projections import made_of
from llmk.transformers.rewrite import own_source, set_source


class NormForm(NamedTuple):
    """The formula of a norm, and the names of its parameters."""

    op: str
    eps: float | None
    offset: float
    weight: str | None
    bias: str | None

    def __call__(self, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if self.op == "rms_norm":
            output = functional.rms_norm(input, weight, self.used_eps, offset=self.offset)
            return made_of(output, input, weight, self.used_eps, self.offset)
        weight = weight + self.offset if weight is not None and self.offset else weight
        return functional.layer_norm(input, weight, bias, self.used_eps)

    def of_sum(self, input: Tensor, residual: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        """RMSNorm of a sum, and the sum."""
        output, total = functional.add_rms_norm(input, residual, weight, self.used_eps, offset=self.offset)
        return made_of(output, total, weight, self.used_eps, self.offset), total

    @property
    def parameters(self) -> tuple[str | None, str | None]:
        return self.weight, self.bias

    @property
    def used_eps(self) -> float:
        """PyTorch's `eps=None` is that of the dtype it computes in: float32, for shorter inputs too."""
        return torch.finfo(torch.float32).eps if self.eps is None else self.eps


@dataclass(frozen=True)
class Norm(Change):
    """A norm's forward by an operator, with the dtypes of input and weight with which it was found to do the same.

    It is the module's own again where the input is given by a name.
    """

    form: NormForm
    proven: tuple[tuple[torch.dtype, torch.dtype | None], ...]
    facts: Facts

    @property
    def what(self) -> str:
        return f"{self.form.op}, 1 + weight" if self.form.offset else self.form.op

    @property
    def projects(self) -> bool:
        """Return True if its forward takes a weight `[P, N]` too, and returns the product with the norm in float32."""
        alone = self.form.op == "rms_norm" and self.form.parameters == (None, None)
        return alone and (torch.float32, None) in self.proven

    @property
    def adds(self) -> bool:
        """Return True if its forward takes a residual too, and returns their sum beside the norm of it."""
        return self.form.op == "rms_norm"

    def methods(self, base: type) -> dict[str, Any]:
        form, proven = self.form, self.proven

        def own(
            self: Any,
            input: Tensor | None = None,
            residual: Tensor | None = None,
            projection: Tensor | None = None,
            **named: Tensor,
        ) -> Any:
            given = () if input is None else (input,)
            if input is not None and projection is not None:
                return nn.functional.linear(base.forward(self, input.float()), projection.float())
            if input is None or residual is None:
                return base.forward(self, *given, **named)
            total = input + residual
            return base.forward(self, total, **named), total

        def forward(
            self: nn.Module,
            input: Tensor | None = None,
            residual: Tensor | None = None,
            projection: Tensor | None = None,
            **named: Tensor,
        ) -> Any:
            if input is None or named:
                return own(self, input, residual, **named)
            if projection is not None:
                return functional.rms_linear(input, projection, form.used_eps)
            weight, bias = (None if name is None else getattr(self, name) for name in form.parameters)
            known = (input.dtype, None if weight is None else weight.dtype) in proven
            if not known or not has_plain_weights(self, weight, bias):
                return own(self, input, residual)
            if residual is None:
                return form(input, weight, bias)
            if input.shape == residual.shape and input.dtype == residual.dtype:  # no broadcast, no promotion
                return form.of_sum(input, residual, weight)
            total = input + residual
            return form(total, weight, bias), total

        set_source(forward, f"# {form}\n{own_source(forward)}")
        return guarded(base, "forward", forward, self.facts, own)


def find_norm(module: nn.Module) -> Norm | None:
    """RMSNorm or LayerNorm over the last axis, with `weight`, `1 + weight` or none; None where it is no candidate.

    Raises:
        Differs: Why it is neither.
    """
    parameters = {name: p for name, p in parameters_of(module).items() if p is not None}
    named_so = "norm" in type(module).__name__.lower()
    if children_of(module) or not (named_so or _one_axis(parameters)):
        return None
    if (parameters and not _one_axis(parameters)) or len(parameters) > 2:
        shapes = [tuple(p.shape) for p in parameters.values()]
        raise Differs(f"its parameters are {shapes}, not a weight and a bias of one axis")
    if not _takes_one_input(module):
        raise Differs("its forward takes more than the input")
    shape = getattr(module, "normalized_shape", 24)  # asked only of a norm without parameters
    width = next((len(p) for p in parameters.values()), shape if isinstance(shape, int) else shape[-1])
    if why := next(filter(None, map(why_no_weight, parameters.values())), None):
        raise Differs(why)
    trial = Trial(module, parameters, width)
    for form in _forms(module, list(parameters)):
        if trial.is_like(form):
            proven = trial.proven(form)
            return Norm(form, proven, trial.facts(proven))
    raise Differs("computes neither RMSNorm nor LayerNorm over the last axis")


def _forms(module: nn.Module, names: list[str]) -> Iterator[NormForm]:
    weight, bias = [*names, None, None][:2]
    for eps in [*sorted({value for _, value in small_numbers(module)}), 1e-5, 1e-6, None]:
        for offset in (0.0, 1.0) if weight else (0.0,):
            if bias is None:
                yield NormForm("rms_norm", eps, offset, weight, None)
            yield NormForm("layer_norm", eps, offset, weight, bias)


# ---- with a gate


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
    for form in _gated_forms(module, name, len(weight)):
        if trial.is_like(form):
            proven = trial.proven(form)
            return GatedNorm(form, proven, trial.facts(proven))
    raise Differs("computes no RMSNorm over the last axis with a gate")


def _takes_input_and_gate(module: nn.Module) -> bool:
    names = [p.name for p in signature_of(type(module).forward)]
    return len(names) == 3 and "gate" in names[2]  # self too


def _gated_forms(module: nn.Module, weight: str, width: int) -> Iterator[GatedForm]:
    values = [v for v in vars(module).values() if not isinstance(v, bool)]
    own = {value for _, value in small_numbers(module)}
    counts = {v for v in values if isinstance(v, int) and 0 < v < width and width % v == 0}
    sizes = sorted({width, *counts, *(width // v for v in counts)}, reverse=True)
    for eps, order, activation, size in product([*sorted(own), 1e-5, 1e-6], (True, False), GATES, sizes):
        yield GatedForm(eps, activation, order, size, weight)


# ---- both


def small_numbers(module: nn.Module) -> tuple[tuple[str, float], ...]:
    """The attributes of a module that may be its eps, by their names."""
    return tuple((name, v) for name, v in sorted(vars(module).items()) if isinstance(v, float) and 0 < v < 0.1)


class NormSpelling(Protocol):
    """A norm as an operator computes it from rows and the parameters that it names."""

    @property
    def parameters(self) -> tuple[str | None, ...]: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor: ...


class Trial:
    """A norm's outcome for rows of all scales, and with a gate of as many, in training and in evaluation."""

    def __init__(self, module: nn.Module, names: Iterable[str], width: int, *, with_gate: bool = False) -> None:
        randn = randoms(2)
        self.module = module
        self.parameters = {name: randn(width).requires_grad_() for name in names}
        self.rows = [rows_of_all_scales(width).requires_grad_()]
        if with_gate:
            self.rows.append((3 * randn(*self.rows[0].shape)).requires_grad_())
        self.inputs = [*self.rows, *self.parameters.values()]
        self.outcomes = [self._outcome(training) for training in (True, False)]

    def _output(self, rows: Sequence[Tensor], parameters: dict[str, Tensor], training: bool) -> Tensor:
        module = self._twin(parameters, training)
        output = run(type(module).forward, module, *rows)
        if not isinstance(output, Tensor):
            raise Differs("its output is not one tensor")
        return output

    def _outcome(self, training: bool) -> tuple[Tensor, list[Tensor | None]]:
        rows = self.rows if training else [each.unsqueeze(0) for each in self.rows]  # of other axes too
        output = self._output(rows, self.parameters, training)
        if output.shape != rows[0].shape or not output.requires_grad:
            raise Differs("its output is not one differentiable tensor of the input's shape")
        output = output.reshape(self.rows[0].shape)
        return output, gradients(output, self.inputs)

    def is_like(self, form: NormSpelling) -> bool:
        output = _of_form(form, self.rows, self.parameters)
        found = gradients(output, self.inputs)
        return all(agree(output, want) and all(map(same, found, grads)) for want, grads in self.outcomes)

    def facts(self, proven: Iterable[tuple[torch.dtype, torch.dtype | None]]) -> Facts:
        """Return what the module reads, in training and in evaluation, for input of any such dtypes.

        Raises:
            Differs: It keeps something for later, or reads what may change unseen.
        """
        of_batch = [each.detach().unsqueeze(0) for each in self.rows]
        plain = [each.detach() for each in self.rows]
        calls = [(rows, training, torch.float32) for rows, training in product((plain, of_batch), (True, False))]
        calls += [([r.to(of_rows) for r in plain], True, of_weight) for of_rows, of_weight in proven]
        facts: dict[Fact, None] = {}
        for rows, training, dtype in calls:
            facts |= dict.fromkeys(
                reads_of(type(self.module).forward, self._twin(self.parameters, training, dtype), rows)
            )
        return tuple(facts)

    def _twin(self, parameters: Mapping[str, Tensor], training: bool, dtype: torch.dtype | None = None) -> Any:
        given = {name: p if dtype is None else p.to(dtype) for name, p in parameters.items()}
        return apart(self.module, {**dict.fromkeys(parameters_of(self.module)), **given}, training)

    def _pairs(self) -> Iterator[tuple[torch.dtype, torch.dtype | None]]:
        if any(b is not None and b.is_floating_point() for b in buffers_of(self.module).values()):
            return iter([(torch.float32, torch.float32 if self.parameters else None)])  # what a buffer's dtype does
        return product(FLOAT_DTYPES, FLOAT_DTYPES if self.parameters else (None,))

    def proven(self, form: NormSpelling) -> tuple[tuple[torch.dtype, torch.dtype | None], ...]:
        """Return the dtypes of rows and parameters with which the operator does what the module does."""
        return tuple(pair for pair in self._pairs() if self._keeps_dtypes(form, *pair))

    def _keeps_dtypes(self, form: NormSpelling, of_rows: torch.dtype, of_weight: torch.dtype | None) -> bool:
        """Return True if the operator gives the module's dtype too, and its values within the dtype's rounding."""
        with torch.no_grad():
            rows = [each.to(of_rows) for each in self.rows]
            parameters = {name: p.to(of_weight) for name, p in self.parameters.items()}
            try:
                want = self._output(rows, parameters, True)
            except Differs:
                return False
            got = _of_form(form, rows, parameters)
        return got.dtype == want.dtype and agree(got, want, max(ROUNDINGS * torch.finfo(got.dtype).eps, 1e-5))


def _of_form(form: NormSpelling, rows: Sequence[Tensor], parameters: dict[str, Tensor]) -> Tensor:
    return form(*rows, *(None if name is None else parameters[name] for name in form.parameters))


ROUNDINGS = 2
"""A norm may round between normalizing and scaling."""


@functools.cache
def signature_of(forward: Any) -> list[Any]:
    return list(inspect.signature(forward).parameters.values())


def _takes_one_input(module: nn.Module) -> bool:
    """Return True if `forward` has one argument: one that has more may use them."""
    parameters = signature_of(type(module).forward)
    return [p.kind for p in parameters] == [inspect.Parameter.POSITIONAL_OR_KEYWORD] * 2  # self too


def _one_axis(parameters: dict[str, Any]) -> bool:
    """Return True if there are parameters, all of one and the same axis."""
    shapes = {tuple(p.shape) for p in parameters.values()}
    return len(shapes) == 1 and all(len(shape) == 1 and shape[0] > 1 for shape in shapes)
