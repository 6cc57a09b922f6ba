"""Short causal convolutions: functions that a module's source calls and that compute `causal_conv1d`."""

from dataclasses import dataclass
from itertools import product
from typing import Any

from torch import Tensor

from llmk import functional
from llmk.ops.convolution.causal_conv1d import ACTIVATIONS, MOST_TAPS
from llmk.registry.record import FLOAT_DTYPES
from llmk.transformers.calls import Calls, Function, FunctionForm
from llmk.transformers.packing import sequence_ids
from llmk.transformers.probe import SCALES, Differs, agree, gradients, randoms, rows_of_all_scales, run, same


class Convolution(Calls):
    kind = "convolution"


@dataclass(frozen=True)
class CausalConv1d(FunctionForm):
    """Functions of an input `[B, C, T]`, a weight `[C, K]`, a bias and an activation."""

    operator = "causal_conv1d"
    positional = range(1, 5)

    def takes(self, names: list[str]) -> bool:
        return names[1:4] == ["weight", "bias", "activation"]

    def attempt(self, function: Function) -> FunctionForm:
        for taps, tokens, activation, with_bias in product((2, 4), (9, 1), (None, "silu"), (True, False)):
            randn, channels = randoms(4), len(SCALES)
            x = rows_of_all_scales(tokens, 2, randn=randn).requires_grad_()
            weight = randn(channels, taps).requires_grad_()
            bias = randn(channels).requires_grad_() if with_bias else None
            given = [t for t in (x, weight, bias) if t is not None]
            got = run(lambda *args, activation=activation: function(*args, activation=activation), x, weight, bias)
            want, _ = functional.causal_conv1d(x, weight, bias, activation=activation)
            if not isinstance(got, Tensor) or not got.requires_grad or not agree(got, want):
                raise Differs("is no causal convolution of each channel")
            if not all(map(same, gradients(got, given), gradients(want, given))):
                raise Differs("has other gradients than a causal convolution")
        return self

    def call(
        self,
        hidden_states: Any,
        weight: Any,
        bias: Any = None,
        activation: Any = None,
        **kwargs: Any,
    ) -> Any:
        if not _fits(hidden_states, weight, bias) or activation not in ACTIVATIONS:
            return NotImplemented
        batch, _, tokens = hidden_states.shape
        ids = sequence_ids(kwargs, batch, tokens)
        return functional.causal_conv1d(hidden_states, weight, bias, activation=activation, sequence_ids=ids)[0]


def _fits(input: Any, weight: Any, bias: Any) -> bool:
    tensors = [t for t in (input, weight, bias) if t is not None]
    if (
        not all(isinstance(t, Tensor) and t.dtype in FLOAT_DTYPES for t in tensors)
        or input.dim() != 3
        or weight.dim() != 2
    ):
        return False
    return 2 <= weight.shape[1] <= MOST_TAPS and weight.shape[0] == input.shape[1] and 0 not in input.shape[1:]
