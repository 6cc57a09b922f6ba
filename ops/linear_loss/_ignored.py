"""Doing no work for tokens that do not count."""

import math
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from llmk.ops.linear_loss._call import LinearCall
from llmk.ops.linear_loss._grouped import can_group

C = TypeVar("C", bound=LinearCall)


@dataclass(frozen=True)
class Kept:
    """The tokens that count, in their order, of N tokens that were `[...]`.

    Where the host knows their number n they alone are kept, and `count` is None. On a GPU, where it would have to wait
    for that, the others follow them: n is N, and `count`, int32 `[]`, says how many count.
    """

    index: Tensor  # [n]
    shape: tuple[int, ...]
    count: Tensor | None

    @classmethod
    def of(cls, counts: Tensor, *linears: tuple[Tensor, Tensor], on_host: bool) -> "Kept | None":
        """Of tokens `[...]`, of each whether it counts, whose inputs `[..., H]` meet weights `[V, H]`.

        None where all tokens must be worked on: on a GPU, where a product cannot be made for a number of rows that it
        alone knows.
        """
        shape, counts = tuple(counts.shape), counts.reshape(-1)
        if on_host:
            return cls(counts.nonzero().squeeze(-1), shape, None)
        if not all(can_group(input, weight) for input, weight in linears):
            return None
        order = counts.logical_not().to(torch.uint8).argsort(stable=True)
        return cls(order, shape, counts.sum(dtype=torch.int32))

    @staticmethod
    def count_of(kept: "Kept | None") -> Tensor | None:
        """How many of the tokens that are worked on count, where the device alone knows it."""
        return None if kept is None else kept.count

    def rows(self, x: Tensor) -> Tensor:
        """Those of `[..., *rest]`: `[n, *rest]`."""
        return x.reshape(math.prod(self.shape), *x.shape[len(self.shape) :])[self.index]

    def call(self, call: C, *names: str) -> C:
        """The call of these tokens alone: of those of its tensors that have a row for each, None left None."""
        tensors = {name: getattr(call, name) for name in names}
        return replace(call, **{name: None if x is None else self.rows(x) for name, x in tensors.items()})

    def spread(self, rows: Tensor) -> Tensor:
        """`[n, *rest]` where they belong, `[..., *rest]`, zero elsewhere."""
        if self.count is not None:
            past = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device) >= self.count
            rows = rows.masked_fill(past.view(-1, *[1] * (rows.dim() - 1)), 0.0)
        out = torch.zeros((math.prod(self.shape), *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
        out[self.index] = rows
        return out.view(*self.shape, *rows.shape[1:])
