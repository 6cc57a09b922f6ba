"""Short causal convolutions: functions that a module's source calls, and that compute `causal_conv1d` or its step."""

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from llmk import functional
from llmk.ops.convolution.causal_conv1d import ACTIVATIONS, MOST_TAPS
from llmk.registry.record import FLOAT_DTYPES
from llmk.transformers.calls import Function, FunctionForm
from llmk.transformers.packing import sequence_ids
from llmk.transformers.probe import SCALES, Differs, agree, gradients, randoms, rows_of_all_scales, run, same


@dataclass(frozen=True)
class CausalConv1d(FunctionForm):
    """Functions of an input `[B, C, T]`, a weight `[C, K]`, a bias and an activation."""

    operator = "causal_conv1d"
    positional = range(1, 5)

    def takes(self, names: list[str]) -> bool:
        return names[1:4] == ["weight", "bias", "activation"]

    def attempt(self, function: Function) -> FunctionForm:
        for taps, tokens, activation, with_bias in product((2, 4), (9, 1), (None, "silu"), (True, False)):
            given = _inputs(tokens, taps, with_bias)
            got = run(lambda *args, activation=activation: function(*args, activation=activation), *given)
            _compare(got, functional.causal_conv1d(*given, activation=activation)[0], *given)
        return self

    def call(
        self,
        hidden_states: Any,
        weight: Any,
        bias: Any = None,
        activation: Any = None,
        **kwargs: Any,
    ) -> Any:
        if not _fits(hidden_states, weight, bias, activation):
            return NotImplemented
        batch, _, tokens = hidden_states.shape
        ids = sequence_ids(kwargs, batch, tokens)
        return functional.causal_conv1d(hidden_states, weight, bias, activation=activation, sequence_ids=ids)[0]


@dataclass(frozen=True)
class CausalConv1dStep(FunctionForm):
    """Functions of an input `[B, C, T]`, a state `[B, C, S]`, a weight `[C, K]`, a bias and an activation.

    A model generates by them. They change the state that they are given, as causal-conv1d's does, and are replaced
    where that is done with one token.
    """

    operator = "causal_conv1d_step"
    positional = range(2, 6)
    packs = False

    def takes(self, names: list[str]) -> bool:
        return names[1:5] == ["conv_state", "weight", "bias", "activation"]

    def attempt(self, function: Function) -> FunctionForm:
        taps = 4
        for longer, activation, with_bias in product((0, 1), (None, "silu"), (True, False)):
            x, weight, bias = given = _inputs(1, taps, with_bias)
            state = rows_of_all_scales(taps - 1 + longer, 2, randn=randoms(5))
            states = state.clone(), state.clone()

            def update(x: Any, weight: Any, bias: Any, state: Any = states[0], activation: Any = activation) -> Any:
                return function(x, state, weight, bias, activation=activation)

            got = run(update, *given, also=frozenset({"copy"}))
            _compare(got, _step(x, states[1], weight, bias, activation), *given)
            if not agree(states[0].detach(), states[1].detach()):
                raise Differs("leaves another state")
        return self

    def call(self, hidden_states: Any, conv_state: Any, weight: Any, bias: Any = None, activation: Any = None) -> Any:
        if not _fits(hidden_states, weight, bias, activation) or not _fits_state(conv_state, hidden_states, weight):
            return NotImplemented
        return _step(hidden_states, conv_state, weight, bias, activation)


def _step(input: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """Return the result of such a function, by the operator, and update the state."""
    before = state.clone() if torch.is_grad_enabled() else state  # autograd keeps it, and it is updated
    out, after = functional.causal_conv1d_step(input.squeeze(2), before, weight, bias, activation=activation)
    state.copy_(after)
    return out.unsqueeze(2)


# ---- both


def _fits(input: Any, weight: Any, bias: Any, activation: Any) -> bool:
    tensors = [t for t in (input, weight, bias) if t is not None]
    if not all(isinstance(t, Tensor) and t.dtype in FLOAT_DTYPES for t in tensors) or activation not in ACTIVATIONS:
        return False
    if (input.dim(), weight.dim()) != (3, 2) or weight.shape[0] != input.shape[1] or 0 in input.shape[1:]:
        return False
    return 2 <= weight.shape[1] <= MOST_TAPS


def _fits_state(state: Any, input: Tensor, weight: Tensor) -> bool:
    """Return True if the state is of the input's dtype, long enough for the weight, and the input is one token."""
    if not isinstance(state, Tensor) or state.dtype != input.dtype or state.dim() != 3 or input.shape[2] != 1:
        return False
    return state.shape[:2] == input.shape[:2] and state.shape[2] >= weight.shape[1] - 1


def _inputs(tokens: int, taps: int, with_bias: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """An input with channels of all scales, a weight and perhaps a bias."""
    randn, channels = randoms(4), len(SCALES)
    x, weight = rows_of_all_scales(tokens, 2, randn=randn), randn(channels, taps)
    bias = randn(channels).requires_grad_() if with_bias else None
    return x.requires_grad_(), weight.requires_grad_(), bias


def _compare(got: Any, want: Tensor, *inputs: Tensor | None) -> None:
    """
    Raises:
        Differs: A function gives another result, or other gradients.
    """
    if not isinstance(got, Tensor) or not got.requires_grad or not agree(got, want):
        raise Differs("is no causal convolution of each channel")
    given = [x for x in inputs if x is not None]
    if not all(map(same, gradients(got, given), gradients(want, given))):
        raise Differs("has other gradients than a causal convolution")
