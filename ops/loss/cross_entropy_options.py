"""Arguments and results of the cross entropy of rows of logits; `cross_entropy.py` has the formulas."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from llmk.registry import (
    check_dtype,
    check_not_negative,
    check_number,
    check_option,
    check_parameter,
    check_same,
    check_shape,
)


class CrossEntropyOptions(NamedTuple):
    """The options of a cross entropy."""

    weight: Tensor | None
    ignore_index: int
    smoothing: float
    softcap: float
    z_loss: float

    def contiguous_weight(self) -> Tensor | None:
        return self.weight.contiguous() if self.weight is not None else None

    def numbers(self) -> tuple[int, float, float, float | None]:
        """Return the options as kernels take them; a softcap of None is off."""
        return self.ignore_index, self.smoothing, self.z_loss, self.softcap or None

    def class_weights(self, num_classes: int, device: torch.device) -> Tensor:
        """Return the weights of all classes in float32, for plain PyTorch."""
        if self.weight is None:
            return torch.ones(num_classes, dtype=torch.float32, device=device)
        return self.weight.float()

    def weight_sum(self) -> Tensor | None:
        return self.weight.sum(dtype=torch.float32) if self.weight is not None and self.smoothing else None


def check_classes(name: str, classes: Tensor, input: Tensor) -> None:
    """Class indices, one for each row of `input`."""
    check_dtype(name, classes, (torch.int64, torch.int32))
    check_shape(name, classes, input.shape[:-1], "the shape of input without its last axis")
    check_same(name, classes, "input", input)


def check_loss_options(
    classes: int,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
) -> None:
    """The checks that the losses over a vocabulary share; `input` is what the target's shape follows."""
    check_classes("target", target, input)
    check_parameter("weight", weight, (classes,), "one for each class", "input", input)
    check_loss_numbers(reduction, label_smoothing, z_loss)


def check_loss_numbers(reduction: str, label_smoothing: float, z_loss: float) -> None:
    check_option("reduction", reduction, ("none", "mean", "sum"))
    check_number("label_smoothing", label_smoothing, 0.0, 1.0, "a number from 0 to 1")
    check_not_negative("z_loss", z_loss)


class RowResults(NamedTuple):
    """The results of the forward pass for each row, in float32."""

    loss: Tensor  # [...], the shape of the target
    counts: Tensor  # [...], what the row adds to the denominator of a mean: w_t
    stats: Tensor  # [2, ...], maximum and sum


class RowLoss(NamedTuple):
    """The two directions of the loss of rows, and what makes one number of it."""

    losses: Callable[[Tensor, Tensor, CrossEntropyOptions], RowResults]
    gradients: Callable[[Tensor, Tensor | None, Tensor, Tensor, Tensor, CrossEntropyOptions], Tensor]
    sum: Callable[[Tensor], Tensor]
    mean: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def counted(target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return a mask of the rows that count, and the targets as indices, 0 for the other rows."""
    target = target.long()  # int32 would wrap an ignore_index that it does not hold
    counts = target != ignore_index
    return counts, torch.where(counts, target, 0)
