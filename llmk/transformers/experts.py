"""The experts of transformers' mixtures: `experts_implementation="llmk"`.

What the gate of a module computes is tried on random input, once. Where it is one that `moe_experts` knows, that does
all of it; any other keeps its own code, between two `grouped_linear`.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from llmk import functional
from llmk.apart import apart_from_caller
from llmk.nn import expert_parallel_moe
from llmk.registry import is_sharded
from llmk.registry.private.compilers import constant_in_graphs
from llmk.transformers.guards import has_parts
from llmk.transformers.probe import agree, apart, gradients, rows_of_all_scales, same

NAME = "llmk"

ACTIVATIONS = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "relu": nn.functional.relu,
    "relu_squared": lambda x: nn.functional.relu(x).square(),
}

GATE = "_apply_gate"
"""The method of transformers' experts for what stands between their two products; models give their own."""

EXCHANGE = "llmk_exchange"
"""The attribute of experts over ranks that says how tokens get to them."""

GATE_FORM = "llmk_gate_form"
"""A patched module's method for `gate_form`. For torch 2.11 what a method returns may be a constant of a graph, but not
what a function of a module does."""


def is_packed(module: nn.Module) -> bool:
    """Return True if it is a mixture's experts in packed weights."""
    return hasattr(type(module), GATE) and hasattr(module, "is_transposed")


class GateForm(NamedTuple):
    """A gated unit, by the options of `moe_experts`."""

    activation: str
    interleaved: bool
    limit: float
    alpha: float
    up_offset: float

    def __call__(self, rows: Tensor) -> Tensor:
        gate, up = (rows[..., ::2], rows[..., 1::2]) if self.interleaved else rows.chunk(2, dim=-1)
        if self.limit > 0:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return ACTIVATIONS[self.activation](self.alpha * gate) / self.alpha * (up + self.up_offset)


SWIGLU = GateForm("silu", interleaved=False, limit=0.0, alpha=1.0, up_offset=0.0)

Adapters = Mapping[str, Sequence[tuple[Tensor, Tensor, float]]]
"""Low-rank terms by the name of a weight W: with factors A `[E, ., r]` and B `[E, r, .]` and a scale s, s A B is added
to W, which has the shape of A B."""


def weight_names(experts: Any) -> list[str]:
    """The names of a module's weights in its products, and of their biases."""
    names = ["gate_up_proj" if experts.has_gate else "up_proj", "down_proj"]
    return [*names, *(f"{name}_bias" for name in names)] if experts.has_bias else names


def experts_forward(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *, adapters: Adapters | None = None
) -> Tensor:
    """The function that transformers calls for `experts_implementation="llmk"`, with the module of the experts."""
    x, weights = hidden_states.to(experts.down_proj.dtype), top_k_weights
    if weights.dtype not in (torch.float32, x.dtype):
        weights = weights.float()
    method = getattr(experts, GATE_FORM, None)
    form = gate_form(experts) if method is None else method()
    if form is None or adapters:
        return _step_by_step(experts, form, x, top_k_index, weights, adapters or {}).to(hidden_states.dtype)
    run = functional.moe_experts
    if is_sharded(experts.down_proj):
        run = partial(expert_parallel_moe, exchange=getattr(experts, EXCHANGE, "all_gather"))
    y = run(
        x,
        experts.gate_up_proj,
        experts.down_proj,
        top_k_index,
        weights,
        gate_up_bias=experts.gate_up_proj_bias if experts.has_bias else None,
        down_bias=experts.down_proj_bias if experts.has_bias else None,
        transposed=experts.is_transposed,
        activation=form.activation,
        interleaved=form.interleaved,
        limit=form.limit,
        alpha=form.alpha,
        up_offset=form.up_offset,
    )
    return y.to(hidden_states.dtype)


def _step_by_step(
    experts: Any, form: GateForm | None, x: Tensor, indices: Tensor, weights: Tensor, adapters: Adapters
) -> Tensor:
    """Compute the experts with the module's own code between the products and after them."""
    up_name = "gate_up_proj" if experts.has_gate else "up_proj"
    gate = getattr(experts, GATE) if experts.has_gate else experts.act_fn
    rows, positions, offsets = functional.moe_permute(x, indices, experts.down_proj.shape[0])
    rows = _linear(experts, up_name, rows, offsets, adapters)
    rows = functional.swiglu(rows) if form == SWIGLU else gate(rows)
    rows = _linear(experts, "down_proj", rows, offsets, adapters)
    if getattr(experts, "has_post_expert_norm", False):
        rows = experts.post_expert_norm(rows)
    return functional.moe_unpermute(rows, positions, weights)


def _linear(experts: Any, name: str, rows: Tensor, offsets: Tensor, adapters: Adapters) -> Tensor:
    bias = getattr(experts, f"{name}_bias") if experts.has_bias else None
    weight, transposed = getattr(experts, name), experts.is_transposed
    rows = rows.to(weight.dtype)
    y = functional.grouped_linear(rows, weight, offsets, bias, transposed=transposed)
    for a, b, scale in adapters.get(name, ()):
        first, second = (a, b) if transposed else (b, a)
        low = functional.grouped_linear(rows, first, offsets, transposed=transposed)
        y = torch.add(y, functional.grouped_linear(low, second, offsets, transposed=transposed), alpha=scale)
    return y


_known: "WeakKeyDictionary[nn.Module, tuple[Any, GateForm | None]]" = WeakKeyDictionary()


@constant_in_graphs
def gate_form(experts: Any) -> GateForm | None:
    """Return `moe_experts`' options for the module's gate; None where it has none. A graph takes it as it is."""
    act = getattr(experts, "act_fn", None)
    if not experts.has_gate or getattr(experts, "has_post_expert_norm", False):
        return None
    if isinstance(act, nn.Module) and has_parts(act):
        return None
    state = (type(experts), act, *_numbers(experts))
    if experts not in _known or _known[experts][0] != state:
        _known[experts] = state, apart_from_caller(_find_form, experts)
    return _known[experts][1]


def _numbers(experts: nn.Module) -> list[float]:
    """The numbers among the module's attributes, one of which may be a limit or a scale."""
    plain = (value for value in vars(experts).values() if isinstance(value, int | float))
    return sorted({float(v) for v in plain if not isinstance(v, bool) and 0 < v < math.inf} - {1.0})


def _find_form(experts: Any) -> GateForm | None:
    rows = rows_of_all_scales(32).requires_grad_()
    try:
        got = [getattr(apart(experts, {}, training), GATE)(rows) for training in (True, False)]
        slope = gradients(got[0], [rows])[0]
    except Exception:  # whatever its code raises: it is none that can be tried so
        return None
    numbers = _numbers(experts)
    forms = product(ACTIVATIONS, (False, True), (0.0, *numbers), (1.0, *numbers), (0.0, 1.0))
    for form in (GateForm(*options) for options in forms):
        want = form(rows)
        if all(agree(y, want) for y in got) and same(slope, gradients(want, [rows])[0]):
            return form
    return None


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
