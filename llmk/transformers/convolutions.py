"""Short causal convolutions: functions that a module's source calls and that compute `causal_conv1d`.

The call is replaced, not the module's convolution, so that what stands around it (masks of padding, the states of a
cache) goes on doing what it does. What the function computes is tried, not told from its name.
"""

import ast
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from llmk import functional
from llmk.ops.convolution.causal_conv1d import ACTIVATIONS, MOST_TAPS
from llmk.transformers.probe import SCALES, Differs, agree, gradients, randoms, rows_of_all_scales, run, same
from llmk.transformers.rewrite import Edit, Source, load

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PACKING = frozenset({"seq_idx", "cu_seqlens"})
"""The keywords that say where packed sequences begin, for a model's own function."""
ARGUMENTS = ["weight", "bias", "activation"]
"""What such a function takes after its input."""


@dataclass(frozen=True)
class Convolution(Edit):
    """The calls of functions, by the names that the source has for them."""

    functions: tuple[tuple[str, FunctionType], ...]
    kind = "convolution"

    @property
    def what(self) -> str:
        return "causal_conv1d"

    def apply(self, definition: ast.FunctionDef, scope: Mapping[str, Any]) -> dict[str, Any]:
        names = {name: f"llmk_causal_conv1d_{i}" for i, (name, _) in enumerate(self.functions)}
        for call in _calls(definition):
            name = call.func.id  # type: ignore[attr-defined]
            if name in names:
                call.args, call.func = [call.func, *call.args], load(names[name])
        return {names[name]: convolution(function) for name, function in self.functions}


@functools.cache
def convolution(tried: FunctionType) -> Callable[..., Any]:
    """Return what calls the operator in place of the function that was tried, where the arguments are as they were.

    A model's layers hand on all keyword arguments of the model. Those that the function has a name for, and those of
    packed sequences, which it may look for among the others, are for the function itself.
    """
    parameters = list(inspect.signature(tried).parameters.values())[1 + len(ARGUMENTS) :]
    named = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
    its_own = named | PACKING

    def convolve(
        function: Any, input: Any, weight: Any, bias: Any = None, activation: Any = None, **kwargs: Any
    ) -> Any:
        asks_for_more = any(kwargs.get(name) is not None for name in its_own)
        if function is tried and not asks_for_more and _fits(input, weight, bias) and activation in ACTIVATIONS:
            return functional.causal_conv1d(input, weight, bias, activation=activation)[0]
        return function(input, weight, bias, activation=activation, **kwargs)

    return convolve


def _fits(input: Any, weight: Any, bias: Any) -> bool:
    tensors = [t for t in (input, weight, bias) if t is not None]
    if not all(isinstance(t, Tensor) and t.dtype in DTYPES for t in tensors) or input.dim() != 3 or weight.dim() != 2:
        return False
    return 2 <= weight.shape[1] <= MOST_TAPS and weight.shape[0] == input.shape[1] and 0 not in input.shape[1:]


class ConvolutionFinder:
    """Finds the calls in the sources of a model's modules; a function is tried once."""

    def __init__(self) -> None:
        self._tried: dict[FunctionType, Differs | None] = {}

    def __call__(self, module: nn.Module, source: Source) -> Convolution | None:
        """
        Raises:
            Differs: What looks like a convolution is none that the operator computes.
        """
        found: dict[str, FunctionType] = {}
        stored = {n.id for n in ast.walk(source.definition) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        for call in _calls(source.definition):
            name = call.func.id  # type: ignore[attr-defined]
            function = source.lookup(module, name)
            if name not in stored and isinstance(function, FunctionType) and _takes_convolution(function):
                self._require(name, function)
                found[name] = function
        return Convolution(tuple(found.items())) if found else None

    def _require(self, name: str, function: FunctionType) -> None:
        if function not in self._tried:
            try:
                self._tried[function] = None
                _try(function)
            except Differs as why:
                self._tried[function] = why
        why = self._tried[function]
        if why is not None:
            raise Differs(f"{name} {why}") from why


def _calls(definition: ast.FunctionDef) -> Iterator[ast.Call]:
    """The calls of functions by a name, with the arguments where the replacement looks for them."""
    for node in ast.walk(definition):
        match node:
            case ast.Call(ast.Name(), [first, *_]) if not any(isinstance(a, ast.Starred) for a in node.args):
                if len(node.args) <= 1 + len(ARGUMENTS) and not isinstance(first, ast.Starred):
                    yield node


def _takes_convolution(function: FunctionType) -> bool:
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return False
    return names[1:4] == ARGUMENTS


def _try(function: FunctionType) -> None:
    """
    Raises:
        Differs: The function does not compute what the operator does, outputs or gradients.
    """
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # transformers' advice, once, about a function that is to be replaced
    try:
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
    finally:
        logging.disable(level)
