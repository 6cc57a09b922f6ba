"""Doing no work for tokens that do not count."""

import math
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from llmk.ops.linear_loss._call import LinearCall

C = TypeVar("C", bound=LinearCall)


@dataclass(frozen=True)
class Kept:
    """The tokens that count, in their order: `index [n]` of N tokens that were `[...]`."""

    index: Tensor
    shape: tuple[int, ...]

    @classmethod
    def of(cls, counts: Tensor) -> "Kept":
        """Of tokens `[...]`, of each whether it counts. On a GPU the host would have to wait for their number."""
        return cls(counts.reshape(-1).nonzero().squeeze(-1), tuple(counts.shape))

    def rows(self, x: Tensor) -> Tensor:
        """Those of `[..., *rest]`: `[n, *rest]`."""
        return x.reshape(math.prod(self.shape), *x.shape[len(self.shape) :])[self.index]

    def call(self, call: C, *names: str) -> C:
        """The call of these tokens alone: of those of its tensors that have a row for each, None left None."""
        tensors = {name: getattr(call, name) for name in names}
        return replace(call, **{name: None if x is None else self.rows(x) for name, x in tensors.items()})

    def spread(self, rows: Tensor) -> Tensor:
        """`[n, *rest]` where they belong, `[..., *rest]`, zero elsewhere."""
        out = torch.zeros((math.prod(self.shape), *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
        out[self.index] = rows
        return out.view(*self.shape, *rows.shape[1:])
