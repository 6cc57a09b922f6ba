"""The plan of a chunked linear layer: how many rows of logits, and of their gradient, exist at a time.

The rows are walked in chunks, and the rows of a chunk in blocks. A block has its logits, in float32 unless the input's
dtype was asked for; a chunk has their gradient, in the input's dtype, for the products that make dx and dW. Where the
logits have the input's dtype their gradient overwrites them, and a block is a chunk.

    memory   dW's sums + C V e + L R V 4          C rows of a chunk, R of a block, e bytes of an element, L layers
    time     3 products of 2 N V H FLOPs, the passes over N V logits, and for each block and chunk what they read and
             write of W and dW; or the host's, for each block and chunk, where that is longer

dW is summed in the weight's own dtype up to ROUNDED_CHUNKS chunks: each product adds its float32 result to what is
there and rounds once, and the error of three such roundings stays within the accuracy rule, at half the memory. Beyond
it is summed in float32. Where each chunk's product is rounded before it is added (`_dynamic_rows.py`), the squares of
the roundings of n equal products and their sums add up to 2 for two and 2.7 for three, where one product's is 1 and the
accuracy rule allows 1.5**2: DYNAMIC_ROUNDED_CHUNKS. There a product exists beside the sums, and is added by a kernel.

Of all plans the one is chosen whose time times memory ** MEMORY_EXPONENT is least, so that none is chosen that another
one beats in both.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from llmk.registry import cdiv

FLOPS = 7.8e14
"""A second, of products of bfloat16 matrices. This and what follows is fitted to 52 sizes of up to 7 plans each on an
H100 (`python -m benchmarks.plans`), of which it is off by 5% in the mean."""
BYTES = 3e12
"""Read or written a second."""
LOGIT_BYTES = 12
"""Read and written of each logit and its gradient, besides what the products hide."""
EXPOSED = 0.46
"""The part of a block's and a chunk's traffic of weights that its products do not hide."""
BLOCK_SECONDS, CHUNK_SECONDS = 1.9e-4, 2e-4
"""Seconds of the host to launch what a block and a chunk take."""
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
MOST_CHUNKS, MOST_BLOCKS = 64, 64


@dataclass(frozen=True)
class Plan:
    """The chunks in which a linear layer over N rows is computed.

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
        layers: The layers whose logits exist at the same time: a student's and a teacher's.
        dynamic: Only the device knows how many rows count.
        remade: The backward pass makes the gradients, so that dW exists once.
    """
    sizes = Sizes.of(N, H, V, dtype, float32_logits, layers=layers, dynamic=dynamic, remade=remade)
    return sizes.chosen(on_host=on_host, chunk_size=chunk_size)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes that a plan's time and memory depend on."""

    N: int
    H: int
    V: int
    element: int
    logit: int  # bytes, as of an element
    separate: bool  # the logits are not overwritten by their gradient
    layers: int
    dynamic: bool
    remade: bool
    is_float16: bool

    @classmethod
    def of(
        cls,
        N: int,
        H: int,
        V: int,
        dtype: torch.dtype,
        float32_logits: bool,
        *,
        layers: int = 1,
        dynamic: bool = False,
        remade: bool = False,
    ) -> "Sizes":
        """Return the sizes from the arguments of `plan`."""
        return cls(
            N=N,
            H=H,
            V=V,
            element=dtype.itemsize,
            logit=4 if float32_logits else dtype.itemsize,
            separate=float32_logits and dtype != torch.float32,
            layers=layers,
            dynamic=dynamic,
            remade=remade,
            is_float16=dtype == torch.float16,
        )

    def chosen(self, *, on_host: bool, chunk_size: int) -> Plan:
        """Return the plan of the least price."""
        if not self.V * self.H > 0 or self.N == 0:
            return Plan(max(self.N, 1), max(self.N, 1), True)
        if on_host:
            rows = chunk_size or max(64, CPU_LOGITS // (self.V * self.layers))
            return self._plan(rows, rows)
        if chunk_size:
            return min((self._plan(chunk_size, rows) for rows in self.blocks(chunk_size)), key=self.price)
        return min(self.candidates(), key=self.price)

    def described(self, *, on_host: bool, chunk_size: int, stored: bool = True) -> str:
        """Say what the chosen plan is; without `stored` logits are made where they are read, never in memory."""
        plan = self.chosen(on_host=on_host, chunk_size=chunk_size)
        chunk, block = min(plan.chunk_rows, self.N), min(plan.block_rows, self.N)
        logits = f"{8 * self.logit}-bit logits of {block} at a time" if stored else "no logits in memory"
        parts = [f"{chunk} tokens a chunk, {logits}"]
        parts.append(f"the gradient of the weight summed in {8 * self.element if plan.rounded_sums else 32} bits")
        return ", ".join(parts) + f": {self.memory(plan) / 2**20:.0f} MiB by the plan's model"

    def candidates(self) -> Iterator[Plan]:
        units = cdiv(self.N, ROW_MULTIPLE)
        for chunks in sorted({cdiv(units, cdiv(units, n)) for n in range(1, MOST_CHUNKS + 1)}):
            rows = cdiv(units, chunks) * ROW_MULTIPLE
            yield from (self._plan(rows, block) for block in self.blocks(rows))

    def blocks(self, chunk_rows: int) -> Iterator[int]:
        """Yield the rows that a chunk's blocks may have."""
        units = cdiv(chunk_rows, ROW_MULTIPLE)
        parts = (2**k for k in range(MOST_BLOCKS.bit_length() if self.separate else 1))
        each = {cdiv(units, n) for n in parts}
        yield from sorted(min(n * ROW_MULTIPLE, chunk_rows) for n in each)

    def _plan(self, chunk_rows: int, block_rows: int) -> Plan:
        most = DYNAMIC_ROUNDED_CHUNKS if self.dynamic else ROUNDED_CHUNKS
        # The range of float16 does not hold the sums of scaled gradients.
        return Plan(chunk_rows, block_rows, not self.is_float16 and cdiv(self.N, chunk_rows) <= most)

    def memory(self, plan: Plan) -> int:
        """Return the bytes that a plan holds at its peak, besides the input, the weight and dx."""
        weight, chunk = self.V * self.H * self.element, min(plan.chunk_rows, self.N)
        sums = weight if plan.rounded_sums else 4 * self.V * self.H
        block = self.layers * min(plan.block_rows, self.N)
        logits = self.V * (block * self.logit + (chunk * self.element if self.separate else 0))
        rounding = 0 if plan.rounded_sums else weight
        if self.dynamic and chunk < self.N:
            sums += weight  # a chunk's product, before it is added
        scaling = 0 if self.remade else 2 * weight  # what the backward pass takes, when there are no logits
        return max(sums + logits, sums + rounding, scaling)

    def time(self, plan: Plan) -> float:
        """Return the seconds of the products and of what they do not hide of the traffic, or of the host."""
        chunks = cdiv(self.N, plan.chunk_rows)
        blocks = chunks * cdiv(plan.chunk_rows, plan.block_rows)
        weight = self.V * self.H * self.element
        sums = 2 * (weight if plan.rounded_sums else 4 * self.V * self.H)
        # Where only the device knows the number of rows a kernel adds each product to the sums, or makes it the first.
        added = (chunks - plan.rounded_sums) * (weight + sums) if self.dynamic else 0
        traffic = blocks * weight + chunks * (weight + (weight if self.dynamic else sums))
        logits = LOGIT_BYTES * self.N * self.V
        device = 6 * self.N * self.V * self.H / FLOPS + (logits + EXPOSED * traffic + added) / BYTES
        return max(device, blocks * BLOCK_SECONDS + chunks * CHUNK_SECONDS)

    def price(self, plan: Plan) -> float:
        return self.time(plan) * self.memory(plan) ** MEMORY_EXPONENT
