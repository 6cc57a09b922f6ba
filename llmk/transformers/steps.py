"""Functions of one token, by which a model generates: they compute the operators' steps.

A function that goes token by token is tried with a few, and replaced where it is called with one after a state. An
update of a convolution changes the state that it is given, as causal-conv1d's does.
"""

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from llmk import functional
from llmk.ops.convolution.causal_conv1d import ACTIVATIONS, MOST_TAPS
from llmk.registry.record import FLOAT_DTYPES
from llmk.transformers.calls import Function, FunctionForm
from llmk.transformers.probe import SCALES, Differs, agree, gradients, randoms, rows_of_all_scales, run, same
from llmk.transformers.recurrences import DeltaRule

# ---- the gated delta rule


@dataclass(frozen=True)
class DeltaRuleStep(DeltaRule):
    """Functions of queries, keys, values, log decays and beta that go token by token: no size of chunks."""

    operator = "gated_delta_rule_step"

    def takes(self, names: list[str]) -> bool:
        return super().takes(names) and "chunk_size" not in names

    @property
    def cases(self) -> list[tuple[int, bool, dict[str, Any]]]:
        """Compare several tokens: what one alone gives is a row of one number, which may cancel."""
        final = {"output_final_state": True}
        return [(9, True, final), (9, True, final | {"use_qk_l2norm_in_kernel": True})]

    def call(  # type: ignore[override]
        self,
        query: Any,
        key: Any,
        value: Any,
        g: Any,
        beta: Any,
        initial_state: Any = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> Any:
        if initial_state is None or not self.fits(query, key, value, g, beta, initial_state) or query.shape[1] != 1:
            return NotImplemented
        q, k, v, g, beta = (x.squeeze(1) for x in (query, key, value, g, beta))
        out, final = functional.gated_delta_rule_step(
            q, k, v, g, beta, initial_state.float(), l2_norm_qk=use_qk_l2norm_in_kernel
        )
        return out.unsqueeze(1), final if output_final_state else None


# ---- the convolution


@dataclass(frozen=True)
class CausalConv1dStep(FunctionForm):
    """Functions of an input `[B, C, T]`, a state `[B, C, S]`, a weight `[C, K]`, a bias and an activation."""

    operator = "causal_conv1d_step"
    positional = range(2, 6)
    packs = False

    def takes(self, names: list[str]) -> bool:
        return names[1:5] == ["conv_state", "weight", "bias", "activation"]

    def attempt(self, function: Function) -> FunctionForm:
        for longer, activation, with_bias in product((0, 1), (None, "silu"), (True, False)):
            randn, channels, taps = randoms(4), len(SCALES), 4
            x = rows_of_all_scales(1, 2, randn=randn).requires_grad_()
            state, weight = rows_of_all_scales(taps - 1 + longer, 2, randn=randn), randn(channels, taps)
            given = [x, weight.requires_grad_(), *([randn(channels).requires_grad_()] if with_bias else [])]
            states = state.clone(), state.clone()
            bias = given[2] if with_bias else None

            def update(x: Tensor, weight: Tensor, bias: Any = bias, activation: Any = activation) -> Any:
                return function(x, states[0], weight, bias, activation=activation)  # noqa: B023  called at once

            got = run(update, x, weight, also=frozenset({"copy"}))
            want = _convolution_step(x, states[1], weight, bias, activation)
            if not isinstance(got, Tensor) or not got.requires_grad or not agree(got, want):
                raise Differs("is no causal convolution of each channel")
            if not agree(states[0].detach(), states[1].detach()):
                raise Differs("leaves another state")
            if not all(map(same, gradients(got, given), gradients(want, given))):
                raise Differs("has other gradients than a causal convolution")
        return self

    def call(self, hidden_states: Any, conv_state: Any, weight: Any, bias: Any = None, activation: Any = None) -> Any:
        if not _fits(hidden_states, conv_state, weight, bias, activation):
            return NotImplemented
        return _convolution_step(hidden_states, conv_state, weight, bias, activation)


def _fits(input: Any, state: Any, weight: Any, bias: Any, activation: Any) -> bool:
    tensors = [t for t in (input, state, weight, bias) if t is not None]
    if not all(isinstance(t, Tensor) and t.dtype in FLOAT_DTYPES for t in tensors) or activation not in ACTIVATIONS:
        return False
    if (input.dim(), state.dim(), weight.dim()) != (3, 3, 2) or input.shape[2] != 1 or input.dtype != state.dtype:
        return False
    channels, taps = weight.shape
    alike = input.shape[:2] == state.shape[:2] and input.shape[1] == channels > 0
    return alike and 2 <= taps <= MOST_TAPS and state.shape[2] >= taps - 1


def _convolution_step(
    input: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """Return the result of such a function, by the operator, and update the state."""
    before = state.clone() if torch.is_grad_enabled() else state  # autograd keeps it, and it is updated
    out, after = functional.causal_conv1d_step(input.squeeze(2), before, weight, bias, activation=activation)
    state.copy_(after)
    return out.unsqueeze(2)
