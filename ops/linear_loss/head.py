"""The projection of hidden states to the logits of classes, and the options that every loss of logits takes with it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

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


@dataclass(frozen=True, kw_only=True)
class Head(FromArguments):
    """The projection as the operators and losses take it, each of which has some of the options.

    `llmk.losses` makes it of a function's arguments and hands it on; an operator makes it of its own to check them.
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

    def checked(self) -> Self:
        """Check that tensors and options fit each other, and return the head, cast under autocast.

        Which classes the ranks have is checked with the process group.
        """
        linear = checked_linear(self.input, self.linear_weight, self.linear_bias)
        head = replace(self, **dict(zip(DIFFERENTIABLE, linear, strict=True)))
        if self.logits_dtype not in (None, torch.float32, head.input.dtype):
            expected = f"None, torch.float32 or {head.input.dtype} as input"
            raise TypeError(f"logits_dtype: expected {expected}, got {self.logits_dtype}")
        check_positive("temperature", self.temperature)
        check_finite("logit_scale", self.logit_scale)
        check_switch("softcap", self.softcap)
        check_chunk_size(self.chunk_size)
        return head

    @property
    def float32_logits(self) -> bool:
        """True if logits are to be float32, False if they are to have the input's dtype."""
        return self.logits_dtype in (None, torch.float32)


def scaled(logit_scale: float, input: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return an input and a bias whose logits are `logit_scale` times what those of these are."""
    if logit_scale == 1.0:
        return input, bias
    return input * logit_scale, None if bias is None else bias * logit_scale


def checked_linear(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, names: Sequence[str] = DIFFERENTIABLE
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Check that a linear layer's tensors fit each other and return them, cast under autocast."""
    check_linear(input, linear_weight, linear_bias, names)
    dtype = autocast_dtype(input.device)
    if dtype is not None:
        input, linear_weight = input.to(dtype), linear_weight.to(dtype)
        linear_bias = linear_bias if linear_bias is None else linear_bias.to(dtype)
    return input, linear_weight, linear_bias


def check_linear(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, names: Sequence[str] = DIFFERENTIABLE
) -> None:
    """Check that a linear layer's tensors fit each other, in dtype too unless autocast makes them."""
    x, w, b = names
    if type(linear_weight) not in PLAIN_TENSORS and (kind := foreign_kind(linear_weight)):
        raise TypeError(f"{w}: expected a plain tensor or a DTensor, got a {kind}, which computes in its own way")
    check_dtype(x, input)
    if input.dim() == 0 or input.shape[-1] == 0:
        raise ValueError(f"{x}: expected shape [..., H] with H at least 1, got {tuple(input.shape)}")
    H = input.shape[-1]
    if linear_weight.dim() != 2 or linear_weight.shape[1] != H:
        raise ValueError(f"{w}: expected shape [V, {H}] to fit {x}, got {tuple(linear_weight.shape)}")
    is_cast = autocast_dtype(input.device) is not None
    for name, tensor in ((w, linear_weight), (b, linear_bias)):
        if tensor is not None:
            check_dtype(name, tensor)
            check_same(name, tensor, x, input, dtype=not is_cast)
    if linear_bias is not None:
        check_shape(b, linear_bias, linear_weight.shape[:1], f"one for each class of {w}")


def check_chunk_size(chunk_size: int) -> None:
    check_number("chunk_size", chunk_size, 0, math.inf, "a number of tokens, or 0 to have it chosen")
