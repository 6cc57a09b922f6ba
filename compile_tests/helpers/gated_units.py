"""A gated unit that the patch must find by what it computes."""

from typing import Any

import torch
from torch import nn


class Unit(nn.Module):
    """A gated layer, named and ordered against every habit, and square, so that shapes do not tell."""

    def __init__(self, act: Any = nn.functional.silu) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(8, 8) for _ in range(3))
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(nn.functional.silu(self.down(x)) * self.up(x))
