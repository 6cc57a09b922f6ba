"""Small sizes in the place of a graph's, so that a computation for any device is run on a CPU in a moment."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import SymFloat, SymInt, Tensor

from llmk.registry.private.compilers import hint_of, substituted


class NotSmall(Exception):
    """The reason for which a tensor cannot be computed with small sizes, in words for the report."""


@dataclass(frozen=True)
class Sizes:
    """Another number for each size.

    Attributes:
        numbers: The new numbers of sizes that are known; others stay.
        symbols: The numbers of the symbols in other sizes.
    """

    numbers: Mapping[int, int] = field(default_factory=dict)
    symbols: Mapping[str, int] = field(default_factory=dict)

    def of(self, value: Any) -> Any:
        """Return an argument of an operator with other sizes, on the CPU; constants stay as they are.

        Raises:
            NotSmall: A symbol has no value, or none of a quotient.
        """
        if isinstance(value, SymInt):
            try:
                return substituted(value, self.symbols)
            except (KeyError, TypeError) as error:
                raise NotSmall("a size depends on data") from error
            except ZeroDivisionError as error:
                raise NotSmall("a size is divided by another one, which has become 0") from error
        if isinstance(value, SymFloat):
            return hint_of(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return self.numbers.get(value, value)
        if isinstance(value, list | tuple):
            return [self.of(x) for x in value]
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def shape(self, tensor: Tensor) -> list[int]:
        return self.of(tuple(tensor.shape))
