"""Compaction of the tokens that count, so that no work is done for the others."""

import math
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from llmk.ops.linear_loss.chunked._call import LinearCall
from llmk.ops.linear_loss.chunked._dynamic_rows import can_group

C = TypeVar("C", bound=LinearCall)


@dataclass(frozen=True)
class CompactedTokens:
    """The tokens that count, in their order, out of N tokens that were `[...]`.

    Where the host knows their number n only they are gathered, and `count` is None. On a GPU, where the host would have
    to wait for it, the others follow them: n is N, and `count`, int32 `[]`, is the number that count.
    """

    index: Tensor  # [n]
    shape: tuple[int, ...]
    count: Tensor | None

    @classmethod
    def of(cls, mask: Tensor, *linears: tuple[Tensor, Tensor], on_host: bool) -> "CompactedTokens | None":
        """Compact tokens `[...]` by the mask of those that count; their inputs `[..., H]` meet weights `[V, H]`.

        Return None where the GPU has no product for a number of rows that only the device knows.
        """
        shape, mask = tuple(mask.shape), mask.reshape(-1)
        if on_host:
            return cls(mask.nonzero().squeeze(-1), shape, None)
        if not all(can_group(input, weight) for input, weight in linears):
            return None
        order = mask.logical_not().to(torch.uint8).argsort(stable=True)
        return cls(order, shape, mask.sum(dtype=torch.int32))

    def gather(self, x: Tensor) -> Tensor:
        """Gather the rows of `[..., *rest]` of these tokens: `[n, *rest]`."""
        return x.reshape(math.prod(self.shape), *x.shape[len(self.shape) :])[self.index]

    def select(self, call: C, *names: str) -> C:
        """Return the call for these tokens; `names` are its tensors with a row for each token, or None."""
        tensors = {name: getattr(call, name) for name in names}
        return replace(call, **{name: None if x is None else self.gather(x) for name, x in tensors.items()})

    def scatter(self, rows: Tensor) -> Tensor:
        """Scatter `[n, *rest]` to the tokens' positions in `[..., *rest]`, zero elsewhere."""
        if self.count is not None:
            past = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device) >= self.count
            rows = rows.masked_fill(past.view(-1, *[1] * (rows.dim() - 1)), 0.0)
        out = torch.zeros((math.prod(self.shape), *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
        out[self.index] = rows
        return out.view(*self.shape, *rows.shape[1:])
