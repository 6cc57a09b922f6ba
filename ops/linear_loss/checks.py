"""Checks of what losses over a vocabulary are given: each names the argument, what it was and what was expected."""

from torch import Tensor

from llmk.registry import LARGEST, autocast_dtype, check_dtype, check_number, check_same, check_shape
from llmk.registry.checks import TINY


def checked_linear(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, fewest_classes: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The linear layer's tensors, in autocast's dtype where it is on, once they fit each other."""
    dtype = autocast_dtype(input.device)
    if dtype is not None:
        input, linear_weight = input.to(dtype), linear_weight.to(dtype)
        linear_bias = linear_bias if linear_bias is None else linear_bias.to(dtype)
    check_dtype("input", input)
    if input.dim() == 0 or input.shape[-1] == 0:
        raise ValueError(f"input: expected shape [..., H] with H at least 1, got {tuple(input.shape)}")
    H = input.shape[-1]
    if linear_weight.dim() != 2 or linear_weight.shape[1] != H or linear_weight.shape[0] < fewest_classes:
        raise ValueError(f"linear_weight: expected shape [V, {H}] to fit input, got {tuple(linear_weight.shape)}")
    check_same("linear_weight", linear_weight, "input", input, dtype=True)
    if linear_bias is not None:
        check_shape("linear_bias", linear_bias, linear_weight.shape[:1], "one for each class")
        check_same("linear_bias", linear_bias, "input", input, dtype=True)
    return input, linear_weight, linear_bias


def check_chunk_size(chunk_size: int) -> None:
    if chunk_size < 0:
        raise ValueError(f"chunk_size: expected a number of tokens, or 0 to have it chosen, got {chunk_size}")


def check_temperature(temperature: float) -> None:
    check_number("temperature", temperature, TINY, LARGEST, "a finite positive number")
