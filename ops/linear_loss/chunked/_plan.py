"""The plan of a chunked linear layer: how many rows of logits, and of their gradient, exist at a time.

The rows are walked in chunks, and the rows of a chunk in blocks. A block has its logits, in float32 unless the input's
dtype was asked for; a chunk has their gradient, in the input's dtype, for the products that make dx and dW. Where the
logits have the input's dtype their gradient overwrites them, and a block is a chunk.

    memory   dW's sums + C V e + L R V 4          C rows of a chunk, R of a block, e bytes of an element, L layers
    time     3 products of 2 N V H FLOPs, and for each block and chunk what they read and write of W and dW

dW is summed in the weight's own dtype up to ROUNDED_CHUNKS chunks: each product adds its float32 result to what is
there and rounds once, and the error of three such roundings stays within the accuracy rule, at half the memory. Beyond
it is summed in float32. Where each chunk's product is rounded before it is added (`_dynamic_rows.py`), the squares of
the roundings of n equal products and their sums add up to 2 for two and 2.7 for three, where one product's is 1 and the
accuracy rule allows 1.5**2: DYNAMIC_ROUNDED_CHUNKS.

Of all plans the one is chosen whose time times memory ** MEMORY_EXPONENT is least, so that none is chosen that another
one beats in both.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from llmk.registry import cdiv

FLOPS = 7e14
"""Of a product of bfloat16 matrices of this size, on an H100 and an H200."""
BYTES = 4e12
"""Read or written in a second, on the same."""
EXPOSED = 0.5
"""The part of a block's and a chunk's traffic that its products do not hide: 0.3 to 0.55 on an H200."""
MEMORY_EXPONENT = 0.15
"""A plan may take 1.5% more time where it takes 10% less memory."""
CPU_LOGITS = 2**20
"""Elements of one chunk's logits on a CPU: they stay in cache."""
ROW_MULTIPLE = 128
"""A chunk and a block are multiples of it, which keeps the products' tiles whole."""
ROUNDED_CHUNKS = 3
"""The most chunks over which dW is summed in the weight's own dtype."""
DYNAMIC_ROUNDED_CHUNKS = 2
"""The same where the products stop at a number of rows that only the device knows."""
GROUP_BUDGET = 8 * 2**30 // 3
"""The most bytes that one group's logits and their gradient may take for the logits to be made once."""
MOST_CHUNKS, MOST_BLOCKS = 64, 64


@dataclass(frozen=True)
class Plan:
    """How a linear layer over N rows is computed.

    Attributes:
        chunk_rows: Rows whose gradient of the logits exists at a time.
        block_rows: Rows whose logits exist at a time.
        rounded_sums: dW is summed in its own dtype, else in float32.
    """

    chunk_rows: int
    block_rows: int
    rounded_sums: bool


@functools.lru_cache(maxsize=1024)
def plan(
    N: int,
    H: int,
    V: int,
    dtype: torch.dtype,
    *,
    float32_logits: bool,
    on_host: bool,
    chunk_size: int = 0,
    group: int = 1,
    layers: int = 1,
    dynamic: bool = False,
    remade: bool = False,
) -> Plan:
    """Choose the plan of a linear layer over N rows of H features and V classes.

    Args:
        N, H, V: The layer's sizes.
        dtype: The input's.
        float32_logits: The logits are float32.
        on_host: The layer runs on a CPU.
        chunk_size: The rows of a chunk as the user gave them, 0 for none.
        group: Rows that are to be in one block, where they fit.
        layers: The layers whose logits exist at the same time: a student's and a teacher's.
        dynamic: Only the device knows how many rows count.
        remade: The backward pass makes the gradients, so that dW exists once.
    """
    separate = float32_logits and dtype != torch.float32
    sizes = _Sizes(N, H, V, dtype.itemsize, separate, max(group, 1), layers, dynamic, remade, dtype == torch.float16)
    if not V * H > 0 or N == 0:
        return Plan(max(N, 1), max(N, 1), True)
    if on_host:
        return sizes.whole_groups(chunk_size or max(64, CPU_LOGITS // (V * layers)), None)
    if chunk_size:
        return min((sizes.whole_groups(chunk_size, rows) for rows in sizes.blocks(chunk_size)), key=sizes.price)
    return min(sizes.candidates(), key=sizes.price)


@dataclass(frozen=True)
class _Sizes:
    """What a plan's time and memory depend on."""

    N: int
    H: int
    V: int
    element: int
    separate: bool  # the logits are not overwritten by their gradient
    group: int
    layers: int
    dynamic: bool
    remade: bool
    is_float16: bool

    @property
    def unit(self) -> int:
        """The rows of the smallest block: a group, where its logits fit the budget."""
        row = self.V * (4 * self.layers + self.element if self.separate else self.element * self.layers)
        fits = 1 < self.group <= max(self.N, 1) and self.group * row <= GROUP_BUDGET
        return self.group if fits else ROW_MULTIPLE

    def candidates(self) -> Iterator[Plan]:
        units = cdiv(self.N, self.unit)
        for chunks in sorted({cdiv(units, cdiv(units, n)) for n in range(1, MOST_CHUNKS + 1)}):
            rows = cdiv(units, chunks) * self.unit
            yield from (self._plan(rows, block) for block in self.blocks(rows))

    def blocks(self, chunk_rows: int) -> Iterator[int]:
        """Yield the rows that a chunk's blocks may have."""
        units = cdiv(chunk_rows, self.unit)
        each = {cdiv(units, n) for n in (2**k for k in range(MOST_BLOCKS.bit_length()))} if self.separate else {units}
        yield from sorted(min(n * self.unit, chunk_rows) for n in each)

    def whole_groups(self, chunk_rows: int, block_rows: int | None) -> Plan:
        """Return the plan with the most rows up to `chunk_rows` that are whole groups, or so many where none fits."""
        chunk_rows = chunk_rows // self.group * self.group or chunk_rows
        return self._plan(chunk_rows, chunk_rows if block_rows is None else min(block_rows, chunk_rows))

    def _plan(self, chunk_rows: int, block_rows: int) -> Plan:
        most = DYNAMIC_ROUNDED_CHUNKS if self.dynamic else ROUNDED_CHUNKS
        # The range of float16 does not hold the sums of scaled gradients.
        return Plan(chunk_rows, block_rows, not self.is_float16 and cdiv(self.N, chunk_rows) <= most)

    def memory(self, plan: Plan) -> int:
        """Return the bytes that a plan holds at its peak, besides the input, the weight and dx."""
        weight, chunk = self.V * self.H * self.element, min(plan.chunk_rows, self.N)
        sums = weight if plan.rounded_sums else 4 * self.V * self.H
        if self.separate:
            logits = self.V * (chunk * self.element + self.layers * min(plan.block_rows, self.N) * 4)
        else:
            logits = self.V * chunk * self.element * self.layers
        rounding = 0 if plan.rounded_sums else weight
        scaling = 0 if self.remade else 2 * weight  # what the backward pass takes, when there are no logits
        return max(sums + logits, sums + rounding, scaling)

    def time(self, plan: Plan) -> float:
        """Return the seconds of the products, and of what they do not hide of their traffic."""
        chunks = cdiv(self.N, plan.chunk_rows)
        blocks = chunks * cdiv(plan.chunk_rows, plan.block_rows)
        weight = self.V * self.H * self.element
        sums = 2 * (weight if plan.rounded_sums else 4 * self.V * self.H)
        traffic = blocks * weight + chunks * (weight + sums)
        return 6 * self.N * self.V * self.H / FLOPS + EXPOSED * traffic / BYTES

    def price(self, plan: Plan) -> float:
        return self.time(plan) * self.memory(plan) ** MEMORY_EXPONENT
