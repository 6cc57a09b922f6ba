"""Sums over a long row in which threads wait for each other once, at its end, and not once a block."""

import triton
import triton.language as tl

LANE = tl.constexpr(8)
"""Columns next to each other that one thread reads and adds up by itself."""


@triton.jit
def lanes_of(BLOCK_V: tl.constexpr):
    """The columns of a block, `[BLOCK_V / LANE, LANE]`."""
    return tl.arange(0, BLOCK_V // LANE)[:, None] * LANE + tl.arange(0, LANE)[None, :]
