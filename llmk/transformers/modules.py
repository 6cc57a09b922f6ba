"""Modules that compute what an operator computes: norms, gated feed-forward layers, experts' gates.

Each kind tries the forms it knows on the outcome of the module itself (`probe.py`). The new `forward` of a module reads
the module's own parameters and calls its own children, so that hooks, adapters and sharding go on working. One
function is made for each form, not one for each module: what is compiled for one layer serves the next.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from llmk import functional
from llmk.transformers.probe import Outcome, agree, fingerprint, takes_one_input

Forward = Callable[..., Any]


class Match(NamedTuple):
    """What a module was found to be: an operator, in words, and the method that computes it."""

    what: str
    method: str
    function: Forward
    adds_residual: bool = False


class Left(NamedTuple):
    """Why a candidate is left as it is."""

    why: str


Verdict = Match | Left | None
"""None: the module is no candidate."""


class Recognizer:
    """Finds what modules compute; those that are alike are run once."""

    def __init__(self, find: Callable[[nn.Module], Verdict]) -> None:
        self._find = find
        self._known: dict[Any, Verdict] = {}

    def __call__(self, module: nn.Module) -> Verdict:
        key = fingerprint(module)
        if key not in self._known:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                self._known[key] = self._find(module)
        return self._known[key]


# ---- norms


def find_norm(module: nn.Module) -> Verdict:
    """RMSNorm or LayerNorm over the last axis, with `weight`, `1 + weight` or none."""
    parameters = dict(module.named_parameters())
    named_so = "norm" in type(module).__name__.lower()
    if any(module.children()) or not (named_so or _one_axis(parameters)):
        return None
    if (parameters and not _one_axis(parameters)) or len(parameters) > 2:
        shapes = [tuple(p.shape) for p in parameters.values()]
        return Left(f"its parameters are {shapes}, not a weight and a bias of one axis")
    if not takes_one_input(module):
        return Left("its forward takes more than the input")
    # The second row is so small that eps decides it.
    input = torch.randn(5, _width(module, parameters)) * torch.tensor([1.0, 1e-3, 1.0, 30.0, 0.1]).unsqueeze(1)
    try:
        outcome = Outcome(module, input)
    except Exception as error:  # whatever a module raises: it cannot be run this way
        return Left(f"could not be run: {_first_line(error)}")
    for form in _norm_forms(module, parameters):
        if outcome.equals(form.of_parameters):
            return Match(form.what, "forward", norm_forward(form), adds_residual=form.op == "rms_norm")
    return Left("computes neither RMSNorm nor LayerNorm over the last axis")


def _width(module: nn.Module, parameters: dict[str, Any]) -> int:
    shape = getattr(module, "normalized_shape", 24)  # asked only of a norm without parameters
    return next((len(p) for p in parameters.values()), shape if isinstance(shape, int) else shape[-1])


class NormForm(NamedTuple):
    op: str
    eps: float | None
    offset: float
    weight: str | None
    bias: str | None

    @property
    def what(self) -> str:
        return f"{self.op}, 1 + weight" if self.offset else self.op

    def of_parameters(self, input: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        weight, bias = (None if name is None else parameters[name] for name in (self.weight, self.bias))
        return self(input, weight, bias)

    def __call__(self, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        eps = torch.finfo(input.dtype).eps if self.eps is None else self.eps
        if self.op == "rms_norm":
            return functional.rms_norm(input, weight, eps, offset=self.offset)
        return functional.layer_norm(input, weight + self.offset if weight is not None else None, bias, eps)


def _norm_forms(module: nn.Module, parameters: dict[str, Any]) -> Iterator[NormForm]:
    weight, bias = [*parameters, None, None][:2]
    own = {v for v in vars(module).values() if isinstance(v, float) and 0 < v < 0.1}
    for eps in [*sorted(own), 1e-5, 1e-6, None]:
        for offset in (0.0, 1.0) if weight else (0.0,):
            if bias is None:
                yield NormForm("rms_norm", eps, offset, weight, None)
            yield NormForm("layer_norm", eps, offset, weight, bias)


@functools.cache
def norm_forward(form: NormForm) -> Forward:
    def forward(self: nn.Module, input: Tensor, residual: Tensor | None = None) -> Any:
        weight, bias = (None if name is None else getattr(self, name) for name in (form.weight, form.bias))
        if residual is None:
            return form(input, weight, bias)
        if input.shape != residual.shape or input.dtype != residual.dtype:  # broadcast, or promoted under autocast
            total = input + residual
            return form(total, weight, bias), total
        eps = torch.finfo(input.dtype).eps if form.eps is None else form.eps
        return functional.add_rms_norm(input, residual, weight, eps, offset=form.offset)

    return forward


# ---- gated feed-forward layers


GATES: dict[str, Callable[[Tensor, Tensor | None], Tensor]] = {
    "swiglu": functional.swiglu,
    "geglu, tanh": functools.partial(functional.geglu, approximate="tanh"),
    "geglu": functools.partial(functional.geglu, approximate="none"),
}


class MLPForm(NamedTuple):
    gate: str
    down: str
    inputs: tuple[str, ...]
    """The projections that feed the gate: gate and up, or both packed in one."""

    def of_parameters(self, input: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        def linear(name: str, x: Tensor) -> Tensor:
            return nn.functional.linear(x, parameters[f"{name}.weight"], parameters.get(f"{name}.bias"))

        return self(input, linear)

    def __call__(self, input: Tensor, linear: Callable[[str, Tensor], Tensor]) -> Tensor:
        gate, up = [*(linear(name, input) for name in self.inputs), None][:2]
        assert gate is not None
        return linear(self.down, GATES[self.gate](gate, up))


def find_mlp(module: nn.Module) -> Verdict:
    """`down(act(gate(x)) * up(x))`, gate and up being two layers or one."""
    children = dict(module.named_children())
    linears = {name: child for name, child in children.items() if isinstance(getattr(child, "weight", None), Tensor)}
    if len(linears) not in (2, 3) or any(any(child.children()) for child in children.values()):
        return None
    shapes = {name: tuple(child.weight.shape) for name, child in linears.items()}  # type: ignore[union-attr]
    forms = list(_mlp_forms(shapes))
    if not forms or len(list(module.parameters(recurse=False))) or not takes_one_input(module):
        return None
    if any(isinstance(child, nn.Dropout) and child.p for child in children.values()):
        return Left("has dropout")
    divisor = max(1, math.gcd(*itertools.chain(*shapes.values())) // 4)  # 4096 and 14336 become 8 and 28
    hidden_size = shapes[forms[0].inputs[0]][1]
    try:
        outcome = Outcome(module, torch.randn(3, hidden_size // divisor), divisor)
    except Exception as error:
        return Left(f"could not be run: {_first_line(error)}")
    for form in forms:
        if outcome.equals(form.of_parameters):
            return Match(form.gate if len(form.inputs) == 2 else f"{form.gate}, packed", "forward", mlp_forward(form))
    return Left("computes neither SwiGLU nor GeGLU")


def _mlp_forms(shapes: dict[str, tuple[int, ...]]) -> Iterator[MLPForm]:
    if any(len(shape) != 2 for shape in shapes.values()):
        return
    for *inputs, down in itertools.permutations(shapes):
        rows, _ = shapes[inputs[0]]
        packed = 2 if len(inputs) == 1 else 1
        if all(shapes[name] == shapes[inputs[0]] for name in inputs) and shapes[down][1] * packed == rows:
            yield from (MLPForm(gate, down, tuple(inputs)) for gate in GATES)


@functools.cache
def mlp_forward(form: MLPForm) -> Forward:
    def forward(self: nn.Module, input: Tensor) -> Tensor:
        return form(input, lambda name, x: getattr(self, name)(x))

    return forward


# ---- experts


def find_experts(module: nn.Module) -> Verdict:
    """The gate of packed projections that transformers' grouped products of experts call."""
    apply_gate = getattr(module, "_apply_gate", None)
    if apply_gate is None:
        return None
    packed = torch.randn(3, 16)
    try:
        want = apply_gate(packed)
    except Exception as error:
        return Left(f"its gate could not be run: {_first_line(error)}")
    for name in GATES:
        got = GATES[name](packed, None)
        if got.shape == want.shape and agree(got, want):
            return Match(f"{name}, packed", "_apply_gate", gate_method(name))
    return Left("its gate is neither SwiGLU nor GeGLU")


@functools.cache
def gate_method(name: str) -> Forward:
    def apply_gate(self: nn.Module, gate_up: Tensor) -> Tensor:
        return GATES[name](gate_up, None)

    return apply_gate


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _one_axis(parameters: dict[str, Any]) -> bool:
    """Whether there are parameters, all of one and the same axis."""
    shapes = {tuple(p.shape) for p in parameters.values()}
    return len(shapes) == 1 and all(len(shape) == 1 and shape[0] > 1 for shape in shapes)
