"""A matrix of all rows that a forward pass keeps for a second pass over them, if it fits."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmk.ops.linear_loss.chunked.plan import kept_rows
from llmk.ops.linear_loss.rows.projection import ALIGNED
from llmk.registry import cdiv

PADDING_ELEMENTS = 2
"""Elements of a buffer past the matrix."""


@dataclass(frozen=True)
class KeptRows:
    """The sizes of the matrix, which may be symbolic.

    Attributes:
        rows: Its rows: all or none are kept.
        columns: Its columns, on this rank.
        mean_columns: The columns of a rank on average, so that all ranks decide alike.
        dtype, device: Those of its elements.
    """

    rows: Any
    columns: Any
    mean_columns: Any
    dtype: torch.dtype
    device: torch.device

    @property
    def stride(self) -> Any:
        columns: Any = torch.sym_max(self.columns, 1)
        return cdiv(columns, ALIGNED) * ALIGNED

    def buffer(self, keep: bool) -> Tensor:
        """Return a buffer for all rows, or for none: see `matrix`.

        Its size is a function of sizes alone, so that fakes have the same. It is never empty, because PyTorch traces
        tensors without elements apart.
        """
        rows = kept_rows(self.rows, self.mean_columns, self.dtype.itemsize) if keep else 0
        return torch.empty((rows * self.stride + PADDING_ELEMENTS,), dtype=self.dtype, device=self.device)

    def matrix(self, buffer: Tensor) -> Tensor | None:
        """Return the matrix of a buffer, None where it has none."""
        if buffer.numel() < self.stride:
            return None
        return buffer[: buffer.numel() // self.stride * self.stride].view(-1, self.stride)[:, : self.columns]
