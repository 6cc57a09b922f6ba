"""Counting the calls of what stands in the place of a function of TRL's."""

from typing import ClassVar

import torch
from torch import Tensor

from llmk.registry.private.compilers import constant_in_graphs


class Counted:
    """The number of calls that llmk computed, and of those with gradients."""

    what: ClassVar[str]
    """A quantity that is computed, and by which operator, for the report."""

    def __init__(self) -> None:
        self.calls = 0
        self.calls_with_gradients = 0

    def count(self, hidden: Tensor, weight: Tensor, *others: Tensor | None) -> None:
        """Count a call with these hidden states and projection.

        Raises:
            RuntimeError: The projection is partitioned by ZeRO-3, which does not gather it for a backward pass.
        """
        if hasattr(weight, "ds_id"):
            raise RuntimeError(
                "llmk.trl.patch: the output projection is partitioned by ZeRO-3; train without the patch"
            )
        self._count(torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad))

    @constant_in_graphs
    def _count(self, with_gradients: bool) -> None:
        """Once for each call; once for each graph of a compiled model, which cannot count."""
        self.calls += 1
        self.calls_with_gradients += with_gradients
