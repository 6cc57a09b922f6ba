"""Small sizes in the place of a graph's: how a computation is run on a CPU in a moment, whatever it is compiled for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import SymFloat, SymInt, Tensor

from llmk.registry.private.compilers import backed_constant, substituted


class NotSmall(Exception):
    """Why something cannot be computed with small sizes, in words for the report."""


@dataclass(frozen=True)
class Sizes:
    """Another number for each size.

    Attributes:
        numbers: For sizes that are known; others stay.
        symbols: For each symbol in those that are not.
    """

    numbers: Mapping[int, int] = field(default_factory=dict)
    symbols: Mapping[str, int] = field(default_factory=dict)

    def of(self, value: Any) -> Any:
        """An argument of an operator: sizes changed, on the CPU, constants as they are.

        Raises:
            NotSmall: A symbol has no value.
        """
        if isinstance(value, SymInt):
            try:
                return substituted(value, self.symbols)
            except (KeyError, TypeError) as error:
                raise NotSmall("a size depends on data") from error
        if isinstance(value, SymFloat):
            return backed_constant(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return self.numbers.get(value, value)
        if isinstance(value, list | tuple):
            return [self.of(x) for x in value]
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def shape(self, tensor: Tensor) -> list[int]:
        return self.of(tuple(tensor.shape))
