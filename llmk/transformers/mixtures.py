"""Experts of mixtures: modules whose forward computes what `experts_forward` does, told by running both."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from llmk.registry.private.compilers import constant_in_graphs
from llmk.registry.private.modules import children_of, parameters_of
from llmk.registry.record import FLOAT_DTYPES
from llmk.transformers.classes import Change
from llmk.transformers.experts import (
    GATE_FORM,
    Adapters,
    GateForm,
    experts_forward,
    gate_form,
    is_packed,
    weight_names,
)
from llmk.transformers.guards import Facts, called_of, guarded, has_plain_weights, reads_of, why_no_weight
from llmk.transformers.probe import (
    SCALES,
    Differs,
    agree,
    apart,
    gradients,
    randoms,
    rows_of_all_scales,
    same,
    tried,
    without_parameters,
)

IMPLEMENTATION = "_experts_implementation"
"""The configuration's name for the function that experts are computed by."""
H, F, K = 16, 8, 2
"""The sizes of what is tried, whose number of experts is the module's."""


@dataclass(frozen=True)
class Experts(Change):
    """A mixture's experts by operators."""

    operators: str
    facts: Facts

    @property
    def what(self) -> str:
        return self.operators

    def methods(self, base: type) -> dict[str, Any]:
        def forward(
            self: Any, hidden_states: Tensor, *routing: Any, adapters: Adapters | None = None, **named: Any
        ) -> Tensor:
            if named or not takes(self, hidden_states):
                return base.forward(self, hidden_states, *routing, **named)
            return experts_forward(self, hidden_states, *routing, adapters=adapters)

        @constant_in_graphs
        def llmk_gate_form(self: Any) -> GateForm | None:
            return gate_form(self)

        return guarded(base, "forward", forward, self.facts) | {GATE_FORM: llmk_gate_form}


def takes(experts: Any, hidden_states: Tensor) -> bool:
    """Return True if operators take the weights of patched experts, and what goes into these."""
    floats = hidden_states.dtype in FLOAT_DTYPES and experts.down_proj.dtype in FLOAT_DTYPES
    return floats and has_plain_weights(experts, *(getattr(experts, name) for name in weight_names(experts)))


def find_experts(module: nn.Module) -> Experts | None:
    """The experts of a mixture of transformers, in packed weights; None where it is no candidate.

    Raises:
        Differs: Its forward computes something else.
    """
    if not is_packed(module):
        return None
    if why := next(filter(None, map(why_no_weight, parameters_of(module).values())), None):
        raise Differs(why)
    for training in (True, False):
        want, got = (_outcome(forward, module, training) for forward in (type(module).forward, experts_forward))
        if not agree(got[0], want[0]) or not all(map(_alike, got[1], want[1])):
            raise Differs("its experts are more than two products, a gate between and the routing weights")
    operators = "moe_experts" if gate_form(module) else "moe_permute, grouped_linear, moe_unpermute"
    return Experts(operators, _facts(module))


def _facts(module: Any) -> Facts:
    """Return what the forward reads, and its activation, which is not called where an operator computes the gate."""
    facts = {fact: None for training in (True, False) for fact in _reads(module, training)}
    if gate_form(module) and isinstance(act := children_of(module).get("act_fn"), nn.Module):
        facts |= dict.fromkeys(called_of(act, [rows_of_all_scales(H)]).as_part("self.act_fn"))
    return tuple(facts)


def _reads(module: Any, training: bool) -> Facts:
    """Return what is read of the module, but for the name by which transformers dispatches it: `patch` decides that."""
    facts = reads_of(type(module).forward, _twin(module, training), _arguments(module))
    return tuple(fact for fact in facts if IMPLEMENTATION not in fact.expression)


def _arguments(module: Any) -> list[Tensor]:
    """Tokens of all scales, the indices of their experts, and routing weights."""
    T, E = len(SCALES), module.down_proj.shape[0]
    indices = torch.arange(T * K, dtype=torch.int64, device="cpu").view(T, K) * 3 % E
    return [rows_of_all_scales(H), indices, randoms(3)(T, K).square() + 0.1]


def _outcome(forward: Callable[..., Any], module: Any, training: bool) -> tuple[Tensor, list[Tensor | None]]:
    """The output for tokens of all scales, and the gradients of all there is; both times of the same numbers."""
    twin, (x, indices, weights) = _twin(module, training), _arguments(module)
    x, weights = x.requires_grad_(), weights.requires_grad_()

    def outcome() -> tuple[Tensor, list[Tensor | None]]:
        output = forward(twin, x, indices, weights)
        return output, gradients(output, [x, weights, *(p for p in parameters_of(twin).values() if p is not None)])

    return tried(outcome)


def _alike(a: Tensor | None, b: Tensor | None) -> bool:
    """Compare a weight's gradient by experts, each as one row: some of its features are next to nothing."""
    return same(*(t if t is None or t.dim() < 3 else t.flatten(1) for t in (a, b)))


def _twin(module: Any, training: bool) -> Any:
    """A module of the same class, attributes and number of experts, with small random weights."""
    shapes, own = _small_shapes(module), parameters_of(module)
    named = {name for name, p in own.items() if p is not None}
    if named != shapes.keys():
        raise Differs(f"its parameters are {', '.join(sorted(named))}, not those of packed experts")
    E, randn = module.down_proj.shape[0], randoms(2)
    small = {name: (randn(E, *shape) / H**0.5).requires_grad_() for name, shape in shapes.items()}
    twin = apart(module, {**dict.fromkeys(own), **small}, training)
    vars(twin)["_modules"] = without_parameters(children_of(twin))
    return twin


def _small_shapes(module: Any) -> dict[str, tuple[int, ...]]:
    """The parameters of such a module by name, each without the axis of the experts."""
    up, width = ("gate_up_proj", 2 * F) if module.has_gate else ("up_proj", F)
    shapes: dict[str, tuple[int, ...]] = {up: (width, H), "down_proj": (H, F)}
    if module.is_transposed:
        shapes = {name: shape[::-1] for name, shape in shapes.items()}
    return shapes | ({f"{up}_bias": (width,), "down_proj_bias": (H,)} if module.has_bias else {})
