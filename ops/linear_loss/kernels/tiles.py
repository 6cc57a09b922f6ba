"""The tiles of the three products of a loss over a vocabulary, and what they cost.

A multiprocessor computes one tile at a time, so that a product takes as many waves as there are tiles for each of them:
64 tiles of 128 x 256 take as long as 132. A smaller tile multiplies at a lower rate, but fills the last wave better.
"""

import functools
from dataclasses import dataclass

import torch

from llmk.registry import cdiv, next_power_of_2, num_programs
from llmk.registry.devices import INTERPRET, shared_memory

COLUMNS = 256
"""The classes of a tile of logits, over which one partial sum of a row is."""
SMALL_SHARED_MEMORY = 200 * 1024


@dataclass(frozen=True)
class Tile:
    """A tile of a product and its launch. Programs that run at the same time make tiles of `group` rows of them."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    group: int = 8

    def arguments(self) -> dict[str, int]:
        return {
            "BLOCK_M": self.rows,
            "BLOCK_N": self.columns,
            "BLOCK_K": self.depth,
            "GROUP_M": self.group,
            "NUM_STAGES": self.stages,
            "num_warps": self.warps,
        }


FEW_BLOCKS = 8
INTERPRETED_ROWS = 16


def interpreted_block(least: int, size: int) -> int:
    """Return a block of `least`, or one that cuts a size into few: each takes the interpreter 10 ms, however wide."""
    return max(least, next_power_of_2(cdiv(size, FEW_BLOCKS)))


def logits_tile(V: int, device: torch.device) -> Tile:
    """Return the tile of logits of V classes, whose width is the same for any number of rows: so are a row's sums.

    H100, 4096 rows, of cuBLAS's time for the bare product: 128 x 256 x 64 1.02 to 1.06, 256 x 128 1.16, 128 x 128 1.21.
    H200, 4096 to 6016 rows, 2048 to 4096 features: in groups of 16 rows of tiles 1.00 to 1.09, of 8 1.04 to 1.09, of
    all 1.04 to 1.09.
    """
    if INTERPRET:
        return Tile(INTERPRETED_ROWS, interpreted_block(64, V), 16, 4, 1)
    if shared_memory(device) >= SMALL_SHARED_MEMORY:
        return Tile(128, COLUMNS, 64, 8, 3, group=16)
    return Tile(64, COLUMNS, 32, 8, 2)


def listed_tile(V: int) -> Tile:
    """Return the tile of logits of listed rows, of which there are mostly none: one that is built soon."""
    return Tile(16, interpreted_block(64, V), 16, 4, 1) if INTERPRET else Tile(16, COLUMNS, 32, 4, 2)


GRADIENT_TILES = {
    Tile(128, 256, 64, 8, 3): 1.0,
    Tile(128, 128, 64, 4, 4): 1.07,
    Tile(64, 128, 64, 4, 4): 1.6,
    Tile(64, 64, 128, 4, 3): 2.1,
}
"""The time of an element of each tile, of that of the first one: H200, contractions of 32000 to 262144."""


def gradient_tile(rows: int, columns: int, depth: int | None, device: torch.device) -> Tile:
    """Return the tile of a gradient with so many rows and columns, a product over `depth`; None where that is of rows.

    A block of rows reaches no further than the tile of logits in which the last one is that counts: beyond P is not
    written.
    """
    if INTERPRET:
        block = INTERPRETED_ROWS if depth is None else interpreted_block(16, depth)
        return Tile(interpreted_block(16, rows), 32, block, 4, 1)
    if shared_memory(device) < SMALL_SHARED_MEMORY:
        return Tile(64, 128, 32, 8, 2)
    return _cheapest(rows, columns, num_programs(device, 1))[0]


PAIR_TILE = Tile(128, 256, 64, 8, 3)


def pair_tiles(rows: int, columns: int, classes: int) -> tuple[Tile, Tile]:
    """Return the tiles of both gradients of a chunk that are made in one launch."""
    if not INTERPRET:
        return PAIR_TILE, PAIR_TILE
    of_input = Tile(interpreted_block(16, rows), 32, interpreted_block(16, classes), 4, 1)
    return of_input, Tile(interpreted_block(16, classes), 32, INTERPRETED_ROWS, 4, 1)


def are_paired(rows: int, columns: int, classes: int, device: torch.device) -> bool:
    """Return True if one launch takes less time for both gradients of a chunk than one for each of them."""
    if INTERPRET:
        return True
    return shared_memory(device) >= SMALL_SHARED_MEMORY and saves_time(rows, columns, classes, num_programs(device, 1))


@functools.lru_cache(maxsize=1024)
def saves_time(rows: int, columns: int, classes: int, multiprocessors: int) -> bool:
    """Compare two launches' times with that of one: of all tiles' together, or of those of the input's alone.

    Where the input's do not fill a wave, smaller ones do. H200, of two launches' time: 0.97 to 0.995 of 192 to 564
    tiles, 1.02 of 64.
    """
    of_rows, of_classes = (_cheapest(each, columns, multiprocessors)[1] for each in (rows, classes))
    of_columns, area = cdiv(columns, PAIR_TILE.columns), PAIR_TILE.rows * PAIR_TILE.columns
    of_input, of_weight = cdiv(rows, PAIR_TILE.rows) * of_columns, cdiv(classes, PAIR_TILE.rows) * of_columns
    waves = cdiv(of_input, multiprocessors) * multiprocessors
    together = area * max(classes * waves, classes * of_input + rows * of_weight)
    return of_input >= multiprocessors and together < classes * of_rows + rows * of_classes


def gradient_cost(rows: int, columns: int, multiprocessors: int) -> float:
    """Return the time of a gradient, of that of as many elements in tiles that fill all multiprocessors."""
    return _cheapest(rows, columns, multiprocessors)[1] / (rows * columns)


@functools.lru_cache(maxsize=1024)
def _cheapest(rows: int, columns: int, multiprocessors: int) -> tuple[Tile, float]:
    """Return the tile that takes least time, and that, in elements of the first one."""

    def time(tile: Tile) -> float:
        waves = cdiv(cdiv(rows, tile.rows) * cdiv(columns, tile.columns), multiprocessors)
        return waves * multiprocessors * tile.rows * tile.columns * GRADIENT_TILES[tile]

    tile = min(GRADIENT_TILES, key=time)
    return tile, time(tile)
