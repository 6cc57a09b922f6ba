"""The projection of hidden states to the logits of classes, and the options that every loss of logits takes with it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from llmk.registry import (
    FromArguments,
    autocast_dtype,
    check_dtype,
    check_finite,
    check_number,
    check_positive,
    check_same,
    check_shape,
    check_switch,
    foreign_kind,
)
from llmk.registry.eager.bypass import PLAIN_TENSORS

DIFFERENTIABLE = ["input", "linear_weight", "linear_bias"]
"""A linear layer's tensors, by their names in a call."""
LINEAR: Callable[[Mapping[str, Any]], tuple[Any, ...]] = itemgetter(*DIFFERENTIABLE)
"""Return them."""


@dataclass(frozen=True, kw_only=True)
class Head(FromArguments):
    """The projection as the operators and losses take it, each of which has some of the options.

    `llmk.losses` makes it of a function's arguments and hands it on.
    """

    input: Tensor  # [..., H]
    linear_weight: Tensor  # [V, H]
    linear_bias: Tensor | None = None  # [V]
    temperature: float = 1.0  # divides the logits, after the cap
    logit_scale: float = 1.0  # their factor, before it
    softcap: float = 0.0  # 0 is off
    ignore_index: int = -100
    skip_ignored: bool = True
    chunk_size: int = 0  # 0: chosen
    logits_dtype: torch.dtype | None = None  # None is float32
    vocab_start: int = 0  # the class of the weight's first row
    num_classes: int = 0  # of all ranks; 0: those of the weight
    group_name: str = ""  # the ranks that have all classes together; "" for this one

    @property
    def all_classes(self) -> int:
        """The classes of all ranks."""
        return self.num_classes or self.linear_weight.shape[0]

    def arguments(self, without: Sequence[str] = ()) -> dict[str, Any]:
        """Return an operator's arguments, all but those that it does not have.

        Without a scale of the logits the input and the bias are multiplied by it.
        """
        given = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in without}
        if "logit_scale" in without:
            given["input"], given["linear_bias"] = scaled(self.logit_scale, self.input, self.linear_bias)
        return given


check_chunk_size: Callable[[str, Any], None] = partial(
    check_number, low=0, high=math.inf, expected="a number of tokens, or 0 to have it chosen"
)
CHECKS: dict[str, Callable[[str, Any], None]] = {
    "temperature": check_positive,
    "logit_scale": check_finite,
    "softcap": check_switch,
    "chunk_size": check_chunk_size,
}
"""The checks of a projection's options by their names, of which an operator has some."""


def scaled(logit_scale: float, input: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return an input and a bias whose logits are `logit_scale` times what those of these are."""
    if logit_scale == 1.0:
        return input, bias
    return input * logit_scale, None if bias is None else bias * logit_scale


def checked_linear(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, names: Sequence[str] = DIFFERENTIABLE
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Check that a linear layer's tensors fit each other and return them, cast under autocast."""
    dtype = check_linear(input, linear_weight, linear_bias, names)
    if dtype is not None:
        input, linear_weight = input.to(dtype), linear_weight.to(dtype)
        linear_bias = linear_bias if linear_bias is None else linear_bias.to(dtype)
    return input, linear_weight, linear_bias


def check_linear(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, names: Sequence[str] = DIFFERENTIABLE
) -> torch.dtype | None:
    """Check that a linear layer's tensors fit each other, in dtype too unless autocast makes them; return its dtype."""
    x, w, b = names
    if type(linear_weight) not in PLAIN_TENSORS and (kind := foreign_kind(linear_weight)):
        raise TypeError(f"{w}: expected a plain tensor or a DTensor, got a {kind}, which computes in its own way")
    check_dtype(x, input)
    if input.dim() == 0 or input.shape[-1] == 0:
        raise ValueError(f"{x}: expected shape [..., H] with H at least 1, got {tuple(input.shape)}")
    H = input.shape[-1]
    if linear_weight.dim() != 2 or linear_weight.shape[1] != H:
        raise ValueError(f"{w}: expected shape [V, {H}] to fit {x}, got {tuple(linear_weight.shape)}")
    cast_to = autocast_dtype(input.device)
    for name, tensor in ((w, linear_weight), (b, linear_bias)):
        if tensor is not None:
            check_dtype(name, tensor)
            check_same(name, tensor, x, input, dtype=cast_to is None)
    if linear_bias is not None:
        check_shape(b, linear_bias, linear_weight.shape[:1], f"one for each class of {w}")
    return cast_to
