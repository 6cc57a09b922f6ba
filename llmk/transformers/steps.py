"""Functions of one token, by which a model generates: they compute the operators' steps.

A function that goes token by token is tried with a few, and replaced where it is called with one after a state. An
update of a convolution changes the state that it is given, as causal-conv1d's does.
"""

import functools
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from llmk import functional
from llmk.ops.convolution.causal_conv1d import ACTIVATIONS, MOST_TAPS
from llmk.registry.record import FLOAT_DTYPES
from llmk.transformers.calls import Function, FunctionForm, its_own
from llmk.transformers.probe import SCALES, Differs, agree, gradients, randoms, rows_of_all_scales, run, same
from llmk.transformers.recurrences import DeltaRule, delta_rule_form, fits_delta_rule

# ---- the gated delta rule

STEP_OPTIONS = ("initial_state", "output_final_state", "use_qk_l2norm_in_kernel")


@dataclass(frozen=True)
class DeltaRuleStep(DeltaRule):
    """Functions of queries, keys, values, log decays and beta that go token by token: no size of chunks."""

    operator = "gated_delta_rule_step"

    def takes(self, names: list[str]) -> bool:
        return names[3:5] == ["g", "beta"] and set(STEP_OPTIONS) <= set(names) and "chunk_size" not in names

    @property
    def cases(self) -> list[tuple[int, bool, dict[str, Any]]]:
        """Compare several tokens: what one alone gives is a row of one number, which may cancel."""
        final = {"output_final_state": True}
        return [(9, True, final), (9, True, final | {"use_qk_l2norm_in_kernel": True})]

    def replacement(self, tried: Function) -> Function:
        return delta_rule_form(tried, STEP_OPTIONS, fits_delta_rule_step, delta_rule_step, self.grouped, self.channels)


def fits_delta_rule_step(q: Any, k: Any, v: Any, g: Any, beta: Any, options: Any, channels: bool = False) -> bool:
    fits = options.get("initial_state") is not None and fits_delta_rule(q, k, v, g, beta, options, channels)
    return fits and q.shape[1] == 1


def delta_rule_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, options: Any) -> Any:
    """Return the results of such a function, by the operator."""
    q, k, v, g, beta = (x.squeeze(1) for x in (q, k, v, g, beta))
    state, normalize = options["initial_state"].float(), options.get("use_qk_l2norm_in_kernel", False)
    out, final = functional.gated_delta_rule_step(q, k, v, g, beta, state, l2_norm_qk=normalize)
    return out.unsqueeze(1), final if options.get("output_final_state", False) else None


# ---- the convolution

ARGUMENTS = ["conv_state", "weight", "bias", "activation"]
"""The arguments of an update after its input."""


@dataclass(frozen=True)
class CausalConv1dStep(FunctionForm):
    """Functions of an input `[B, C, T]`, a state `[B, C, S]`, a weight `[C, K]`, a bias and an activation."""

    operator = "causal_conv1d_step"
    positional = range(2, 2 + len(ARGUMENTS))

    def takes(self, names: list[str]) -> bool:
        return names[1:5] == ARGUMENTS

    def attempt(self, function: Function) -> None:
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
            want = convolution_step(x, states[1], weight, bias, activation)
            if not isinstance(got, Tensor) or not got.requires_grad or not agree(got, want):
                raise Differs("is no causal convolution of each channel")
            if not agree(states[0].detach(), states[1].detach()):
                raise Differs("leaves another state")
            if not all(map(same, gradients(got, given), gradients(want, given))):
                raise Differs("has other gradients than a causal convolution")

    def replacement(self, tried: Function) -> Function:
        return _convolution_step(tried)


@functools.cache
def _convolution_step(tried: Function) -> Function:
    others = its_own(tried, ARGUMENTS)

    def update(
        function: Any, input: Any, conv_state: Any, weight: Any, bias: Any = None, activation: Any = None, **kwargs: Any
    ) -> Any:
        asks_for_more = any(kwargs.get(name) is not None for name in others)
        if asks_for_more or not fits_convolution_step(input, conv_state, weight, bias, activation):
            return function(input, conv_state, weight, bias, activation=activation, **kwargs)
        return convolution_step(input, conv_state, weight, bias, activation)

    return update


def fits_convolution_step(input: Any, state: Any, weight: Any, bias: Any, activation: Any) -> bool:
    tensors = [t for t in (input, state, weight, bias) if t is not None]
    if not all(isinstance(t, Tensor) and t.dtype in FLOAT_DTYPES for t in tensors) or activation not in ACTIVATIONS:
        return False
    if (input.dim(), state.dim(), weight.dim()) != (3, 3, 2) or input.shape[2] != 1 or input.dtype != state.dtype:
        return False
    channels, taps = weight.shape
    alike = input.shape[:2] == state.shape[:2] and input.shape[1] == channels > 0
    return alike and 2 <= taps <= MOST_TAPS and state.shape[2] >= taps - 1


def convolution_step(
    input: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """Return the result of such a function, by the operator, and update the state."""
    before = state.clone() if torch.is_grad_enabled() else state  # autograd keeps it, and it is updated
    out, after = functional.causal_conv1d_step(input.squeeze(2), before, weight, bias, activation=activation)
    state.copy_(after)
    return out.unsqueeze(2)
