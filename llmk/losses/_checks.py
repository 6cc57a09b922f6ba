"""Checks of the losses' arguments: each names the argument, what it was and what was expected."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from llmk.registry import check_same

NUMBERS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTEGERS = (torch.int64, torch.int32)
MASKS = (torch.bool, torch.int64, torch.int32)
KINDS = {NUMBERS: "numbers", INTEGERS: "integers", MASKS: "truth values (bool, or integers 0 and 1)"}


def check_tensor(name: str, value: Any, dtypes: Sequence[torch.dtype], expected: str) -> None:
    """Check that `value` is a tensor of one of `dtypes`, which `expected` describes."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor of {expected}, got {type(value).__name__}")
    if value.dtype not in dtypes:
        raise TypeError(f"{name}: expected a tensor of {expected}, got dtype {str(value.dtype).removeprefix('torch.')}")


def check_is_tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")


def check_batch(input: Any, linear_weight: Any, target: Any) -> None:
    """Check `input [B, S, H]`, `linear_weight [V, H]` and `target [B, S]`; the operators check the rest."""
    for name, value in (("input", input), ("linear_weight", linear_weight), ("target", target)):
        check_is_tensor(name, value)
    if input.dim() != 3:
        raise ValueError(f"input: expected shape [B, S, H], got {tuple(input.shape)}")
    if target.shape != input.shape[:2]:
        raise ValueError(f"target: expected shape {tuple(input.shape[:2])} (of input), got {tuple(target.shape)}")


def check_per_token(
    name: str, value: Any, target: Tensor, dtypes: tuple[torch.dtype, ...] = NUMBERS, like: str = "target"
) -> None:
    """Check a tensor with one value for each token, in the shape of `target`, an argument that is called `like`."""
    check_tensor(name, value, dtypes, KINDS[dtypes])
    if value.shape != target.shape:
        raise ValueError(f"{name}: expected shape {tuple(target.shape)} (that of {like}), got {tuple(value.shape)}")
    check_same(name, value, like, target)


def check_per_sequence(
    name: str, value: Any, count: int | None, target: Tensor, dtypes: Sequence[torch.dtype] = NUMBERS,
    expected: str = "numbers",
) -> None:  # fmt: skip
    """Check a tensor with one value for each sequence; a `count` of None is not known."""
    check_tensor(name, value, dtypes, expected)
    if value.dim() != 1 or (count is not None and value.shape[0] != count):
        shape = "[sequences]" if count is None else f"({count},)"
        raise ValueError(f"{name}: expected shape {shape} (one for each sequence), got {tuple(value.shape)}")
    check_same(name, value, "target", target)


def check_positive(name: str, value: float) -> None:
    if not 0.0 < value < float("inf"):
        raise ValueError(f"{name}: expected a finite positive number, got {value}")


def check_between(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name}: expected a number from {low:g} to {high:g}, got {value}")
