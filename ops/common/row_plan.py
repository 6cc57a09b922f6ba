"""How kernels that hold a row in registers share out the rows, and which rows are too wide for that.

Such rows, which no model has, go through plain PyTorch. A kernel of a backward pass sums a weight's gradient over the
rows of each program, so there are no more programs than find registers: each costs a row of partial sums.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from llmk.registry import cdiv, grid_cap, next_power_of_2, num_programs


class RowKind(NamedTuple):
    """What a kernel takes, as it was measured, and found not to spill on sm_90.

    Attributes:
        tiles: A tile's rows and warps by its columns, a power of two. Shorter rows make up as many elements as the
            first tile has; wider ones than the last are not held.
        row_bytes: The most bytes that a row has in its own dtype.
        resident: The elements in the tiles of all programs that find registers on a multiprocessor.
    """

    tiles: dict[int, tuple[int, int]]
    row_bytes: int = 2**31
    resident: int = 8192

    def holds(self, columns: int, dtype: torch.dtype, is_aligned: Callable[[], bool] = lambda: True) -> bool:
        """Return True if a program holds such a row: one of half the width unless it is aligned, if that is asked.

        Where Triton cannot read 16 bytes at a time, a thread's addresses take registers too.
        """
        widest = min(max(self.tiles), self.row_bytes // dtype.itemsize)
        return columns <= widest // 2 or (columns <= widest and is_aligned())

    def tile(self, columns: int) -> dict[str, int]:
        """Return the rows, columns and warps of a program for rows that are held."""
        block_n, shortest = next_power_of_2(columns), min(self.tiles)
        block_m, warps = self.tiles[max(block_n, shortest)]
        return {"BLOCK_M": block_m * max(1, shortest // block_n), "BLOCK_N": block_n, "num_warps": warps}

    def elements(self, columns: int) -> int:
        """Return the elements of that tile."""
        tile = self.tile(columns)
        return tile["BLOCK_M"] * tile["BLOCK_N"]


class RowPlan(NamedTuple):
    """The tile of a program, with its options, and how many programs walk over the rows in a backward pass."""

    tile: dict[str, int]
    programs: int

    @classmethod
    def of(cls, kind: RowKind, rows: int, columns: int, device: torch.device, **options: int) -> "RowPlan":
        """Return the plan of rows that a kernel of this kind holds, with more options of the kernel."""
        tile = kind.tile(columns)
        programs = num_programs(device, max(1, kind.resident // kind.elements(columns)))
        return cls(tile | options, grid_cap(cdiv(rows, tile["BLOCK_M"]), programs))
