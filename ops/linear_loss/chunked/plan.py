"""The plan of a loss over a vocabulary: how many rows of P exist at a time, and in what dtype dW is summed.

    memory   dW's sums + C V e, of a chunk of C rows; in the backward pass dW twice, as it is scaled
             with logits in memory, of a block of B rows at a time, 4 B V for each float32 matrix of these
    time     3 products of 2 N V H FLOPs, that of dx in waves of tiles, one more for each further matrix of logits, and
             for each chunk what it reads of W and what it reads and writes of dW

A block's logits take what P takes, if these are BLOCK_ROWS or more: a product of fewer reads W for longer than it
multiplies.

dW is summed in the weight's own dtype over up to ROUNDED_CHUNKS chunks: each adds its float32 product to what is there
and rounds once. With rows and exponentials that are rounded the accuracy rule has no room for more; beyond, and in
float16, it is summed in float32. The plan whose time times memory ** MEMORY_EXPONENT is least is chosen; memory up to
what a loss may take for `free` counts as that much.

Where a second pass makes the gradients, the exponentials of all rows are kept for it if they fit KEPT_BUDGET.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch

from llmk.ops.linear_loss.kernels.tiles import gradient_cost
from llmk.registry import cdiv

FLOPS = 7.8e14
"""A second, of products of bfloat16 matrices on an H100, as what follows is."""
BYTES = 3e12
"""Read or written a second."""
MULTIPROCESSORS = 132
"""The H100's multiprocessors, which the tiles of dx fill in waves."""
EXPOSED = 0.46
"""The part of a chunk's traffic of weights that its products do not hide."""
MEMORY_EXPONENT = 0.15
"""A plan may take 1.5% more time where it takes 10% less memory."""
FREE_MEMORY = 2**30
"""Bytes that a loss without a vocabulary may take for `free`, where PyTorch holds several times as many."""
CPU_LOGITS = 2**20
"""Elements of one chunk's logits on a CPU: they stay in cache."""
ROW_MULTIPLE = 128
"""A chunk is a multiple of it, which keeps the products' tiles whole."""
ROUNDED_CHUNKS = 2
"""The most chunks over which dW is summed in the weight's own dtype."""
BLOCK_ROWS = 512
"""Rows by which a product multiplies twice as long as it reads W in 16 bits: 2 FLOPS / BYTES, in whole tiles."""
MOST_CHUNKS = 64
GROUP_BUDGET = 8 * 2**30
"""The most bytes that one group's P may take for the logits to be made once."""
KEPT_BUDGET = 2 * 2**30
"""The most bytes of exponentials that are kept for a second pass, which other losses of the same step may add to."""
FLOAT32_MATRICES = 3
"""Float32 matrices of a chunk that plain PyTorch holds beside P."""


@dataclass(frozen=True)
class Plan:
    """The rows of a loss over N rows whose P exists at a time, and whether dW is summed in its own dtype.

    Where logits are in memory, those of a block of rows of a chunk are, in so many float32 matrices.
    """

    chunk_rows: int
    rounded_sums: bool
    block_rows: int = 0
    matrices: int = 0


def kept_rows(N: Any, V: Any, element: int) -> Any:
    """Return N if the exponentials of N rows are kept for a second pass, else 0; sizes may be symbolic."""
    fit = KEPT_BUDGET // (torch.sym_max(N, 1) * torch.sym_max(V, 1) * element)
    return N * torch.sym_min(fit, 1)


def fits(group: int, V: int, element: int) -> bool:
    """Return True if the P of one group of rows exists at a time."""
    return group * V * element <= GROUP_BUDGET


@functools.lru_cache(maxsize=1024)
def plan(
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    on_host: bool,
    chunk_size: int = 0,
    group: int = 1,
    matrices: int = 0,
    free: int = 0,
) -> Plan:
    """Choose the plan of a loss over `sizes`, N rows of H features and V classes, in chunks of whole groups of rows.

    `matrices` is the number of float32 matrices of a block's logits, and of what is like them, that exist at a time. A
    plan that takes less than `free` bytes is not chosen for that.
    """
    N, H, V = sizes
    if not V * H > 0 or N == 0:
        rows = max(N, group, 1)
        return Plan(rows, True, rows if matrices else 0, matrices)
    if on_host:
        chunk_size = chunk_size or max(64, CPU_LOGITS // (V * max(matrices, 1)))

    def of(rows: int) -> Plan:
        rounded = dtype != torch.float16 and cdiv(N, rows) <= ROUNDED_CHUNKS
        return Plan(rows, rounded, _block_rows(rows, dtype, matrices, on_host), matrices)

    if chunk_size:
        return of(max(chunk_size // group, 1) * group)
    unit = group if group > 1 else ROW_MULTIPLE
    units = cdiv(N, unit)
    candidates = {cdiv(units, n) * unit for n in range(1, MOST_CHUNKS + 1)}
    return min(map(of, candidates), key=lambda each: _price(sizes, dtype, each, free))


def _block_rows(chunk_rows: int, dtype: torch.dtype, matrices: int, on_host: bool) -> int:
    """Return the rows whose logits take no more than a chunk's P, but BLOCK_ROWS at least; 0 without logits."""
    if not matrices or on_host:
        return chunk_rows if matrices else 0
    rows = chunk_rows * dtype.itemsize // (torch.float32.itemsize * matrices)
    return min(chunk_rows, max(rows // ROW_MULTIPLE * ROW_MULTIPLE, BLOCK_ROWS))


def memory(N: int, H: int, V: int, dtype: torch.dtype, plan: Plan) -> int:
    """Return the bytes that a plan holds at its peak, besides the input, the weight and dx."""
    chunk = dtype.itemsize * (1 + (FLOAT32_MATRICES if dtype == torch.float32 else 0)) * min(plan.chunk_rows, N)
    block = torch.float32.itemsize * plan.matrices * min(plan.block_rows, N)
    weight = V * H * dtype.itemsize
    sums = weight if plan.rounded_sums else 4 * V * H
    return max(sums + (chunk + block) * V, 2 * weight)


def _price(sizes: tuple[int, int, int], dtype: torch.dtype, plan: Plan, free: int) -> float:
    N, H, V = sizes
    weight = V * H * dtype.itemsize
    sums = weight if plan.rounded_sums else 4 * V * H
    chunks, rest = divmod(N, plan.chunk_rows)
    rows = chunks * plan.chunk_rows * gradient_cost(plan.chunk_rows, H, MULTIPROCESSORS)
    if rest:
        rows += rest * gradient_cost(rest, H, MULTIPROCESSORS)
    products = 2 * (2 + max(plan.matrices - 1, 0)) * N + 2 * rows
    time = products * V * H / FLOPS + cdiv(N, plan.chunk_rows) * EXPOSED * (3 * weight + 2 * sums) / BYTES
    return time * max(memory(N, H, V, dtype, plan), free) ** MEMORY_EXPONENT


def described(
    sizes: tuple[int, int, int], dtype: torch.dtype, *, on_host: bool, matrices: int = 0, **options: int
) -> str:
    """Say what plan is chosen, given the `chunk_size` and what is `free`."""
    (N, H, V), chosen = sizes, plan(sizes, dtype, on_host=on_host, matrices=matrices, **options)
    found = f"no logits in memory but {32 if on_host else 8 * dtype.itemsize}-bit exponentials"
    if matrices:
        found = f"32-bit logits of {min(chosen.block_rows, N)} at a time"
    parts = [f"{min(chosen.chunk_rows, N)} tokens a chunk, {found}"]
    parts.append(f"the gradient of the weight summed in {8 * dtype.itemsize if chosen.rounded_sums else 32} bits")
    return ", ".join(parts) + f": {memory(N, H, V, dtype, chosen) / 2**20:.0f} MiB by the plan's model"
