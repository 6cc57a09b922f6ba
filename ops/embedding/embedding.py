r"""Embedding: rows of a table by their numbers, with a gradient that is the same bits each time.

Source: `torch.nn.functional.embedding`.

Forward, for indices i [N] and the table W [V, H]:

    y[n] = W[i[n]]

Backward, given dy; only the indices are kept:

    dW[v] = sum of dy[n] over the n whose index is v, in their order        0 for the padding's row

The positions are sorted by their index, a stable sort of N small integers, and each row of the table is the sum of its
own positions: float32 with one rounding, no atomics, and every row is written once, those without a position as zeros.
Where a row's positions fill chunks of the sorted order, each chunk is summed by a program of its own before, so that a
row with many thousand positions takes no program long. For PyTorch's own in a graph Inductor adds with atomics, whose
order is another each time.
"""

from collections.abc import Iterator
from functools import partial

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.math import everywhere
from llmk.ops.common.rows import as_rows, contiguous_last_dim
from llmk.registry import (
    PARTIAL,
    REPLICATE,
    Cost,
    KernelOp,
    Sample,
    axes,
    cdiv,
    check_dtype,
    check_same,
    empty,
    jit,
    next_power_of_2,
    public_op,
    wrap_triton,
)


def embedding_reference(input: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    return torch.nn.functional.embedding(input, weight, padding_idx)


@jit
def embedding_kernel(indices_ptr, w_ptr, y_ptr, V, H, w_stride, BLOCK_H: tl.constexpr):
    blocks = tl.cdiv(H, BLOCK_H)
    position = (tl.program_id(0) // blocks).to(tl.int64)
    cols = (tl.program_id(0) % blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    index = tl.load(indices_ptr + position).to(tl.int64)
    within = everywhere((index >= 0) & (index < V), cols)
    row = tl.load(w_ptr + index * w_stride + cols, mask=(cols < H) & within, other=float("nan"))
    tl.store(y_ptr + position * H + cols, row, mask=cols < H)


@jit
def embedding_keys_kernel(indices_ptr, keys_ptr, N, V, padding_idx, BLOCK_N: tl.constexpr):
    """The rows to sort by: padding and what is no row come last."""
    positions = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    index = tl.load(indices_ptr + positions, mask=positions < N, other=0).to(tl.int64)
    counts = (index >= 0) & (index < V) & (index != padding_idx)
    tl.store(keys_ptr + positions, tl.where(counts, index, V).to(tl.int32), mask=positions < N)


@jit
def _add_positions(total, dy_ptr, order_ptr, begin, end, cols, H, dy_stride, BLOCK_M: tl.constexpr):
    for start in range(begin, end, BLOCK_M):
        sorted_positions = start + tl.arange(0, BLOCK_M)
        positions = tl.load(order_ptr + sorted_positions, mask=sorted_positions < end, other=0)
        mask = (sorted_positions < end)[:, None] & (cols < H)[None, :]
        total += tl.load(dy_ptr + positions[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    return total


@jit
def embedding_backward_chunk_kernel(
    dy_ptr,
    order_ptr,
    keys_ptr,
    chunk_ptr,
    V,
    H,
    dy_stride,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """The sum of a chunk of the sorted positions, if all of it belongs to one row."""
    blocks = tl.cdiv(H, BLOCK_H)
    chunk = tl.program_id(0) // blocks
    cols = (tl.program_id(0) % blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    begin = chunk * CHUNK
    first, last = tl.load(keys_ptr + begin), tl.load(keys_ptr + begin + (CHUNK - 1))
    if (first == last) & (first < V):
        total = tl.zeros((BLOCK_M, BLOCK_H), dtype=tl.float32)
        total = _add_positions(total, dy_ptr, order_ptr, begin, begin + CHUNK, cols, H, dy_stride, BLOCK_M)
        tl.store(chunk_ptr + chunk.to(tl.int64) * H + cols, tl.sum(total, axis=0), mask=cols < H)


@jit
def embedding_backward_kernel(
    dy_ptr, order_ptr, ends_ptr, chunk_ptr, dw_ptr, V, H, dy_stride,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(H, BLOCK_H)
    first = (tl.program_id(0) // blocks).to(tl.int64) * ROWS
    cols = (tl.program_id(0) % blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    rows = first + tl.arange(0, ROWS)
    begins = tl.load(ends_ptr + rows - 1, mask=(rows > 0) & (rows < V), other=0)
    without = (begins == tl.load(ends_ptr + rows, mask=rows < V, other=-1)) & (rows < V)
    zeros = tl.zeros((ROWS, BLOCK_H), dtype=dw_ptr.dtype.element_ty)
    tl.store(dw_ptr + rows[:, None] * H + cols[None, :], zeros, mask=without[:, None] & (cols < H)[None, :])
    for row in range(first, tl.minimum(first + ROWS, V)):
        begin = tl.load(ends_ptr + row - 1, mask=row > 0, other=0)
        end = tl.load(ends_ptr + row)
        if end > begin:
            first_chunk, last_chunk = tl.cdiv(begin, CHUNK), end // CHUNK
            whole = last_chunk > first_chunk
            head_end = tl.where(whole, first_chunk * CHUNK, end)
            tail_begin = tl.where(whole, last_chunk * CHUNK, end)
            total = tl.zeros((BLOCK_M, BLOCK_H), dtype=tl.float32)
            total = _add_positions(total, dy_ptr, order_ptr, begin, head_end, cols, H, dy_stride, BLOCK_M)
            for start in range(first_chunk, last_chunk, BLOCK_M):
                chunks = (start + tl.arange(0, BLOCK_M)).to(tl.int64)
                mask = (chunks < last_chunk)[:, None] & (cols < H)[None, :]
                total += tl.load(chunk_ptr + (chunks * H)[:, None] + cols[None, :], mask=mask, other=0.0)
            total = _add_positions(total, dy_ptr, order_ptr, tail_begin, end, cols, H, dy_stride, BLOCK_M)
            dw = tl.sum(total, axis=0)
            tl.store(dw_ptr + row * H + cols, dw.to(dw_ptr.dtype.element_ty), mask=cols < H)


CHUNK = 64
"""Positions. A row is a sum of at most twice as many, and of chunks."""

ROWS = 8
"""Rows of the table to a program: most have no position, and a program of one would end before it could begin."""


def _block(H: int) -> dict[str, int]:
    """Eight elements a thread, so that each access of 16 bits is 16 bytes wide."""
    block = min(1024, next_power_of_2(max(H, 1)))
    return {"BLOCK_H": block, "num_warps": max(1, block // 256)}


def _embedding_fwd(input: Tensor, weight: Tensor, padding_idx: int) -> Tensor:
    weight, (V, H) = contiguous_last_dim(weight), weight.shape
    y = empty((*input.shape, H), weight.dtype, weight.device)
    block = _block(H)
    wrap_triton(embedding_kernel)[(input.numel() * cdiv(H, block["BLOCK_H"]),)](
        input.contiguous(), weight, y, V, H, weight.stride(0), **block
    )
    return y


def _sorted_positions(input: Tensor, V: int, padding_idx: int) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of the positions in order, with padding and what is no row last; the positions; where each row's end."""
    N = input.numel()
    keys = empty((N,), torch.int32, input.device)
    wrap_triton(embedding_keys_kernel)[(cdiv(N, 1024),)](
        input.contiguous(), keys, N, V, padding_idx, BLOCK_N=1024, num_warps=4
    )
    ordered, order = torch.sort(keys, stable=True)
    rows = torch.arange(V, dtype=torch.int32, device=input.device)
    return ordered, order, torch.searchsorted(ordered, rows, right=True, out_int32=True)


def _embedding_bwd(grad: Tensor, input: Tensor, num_rows: int, padding_idx: int) -> Tensor:
    ordered, order, ends = _sorted_positions(input, num_rows, padding_idx)
    H = grad.shape[-1]
    dy = as_rows(grad)
    dw = empty((num_rows, H), grad.dtype, grad.device)
    block = _block(H)
    blocks, whole_chunks = cdiv(H, block["BLOCK_H"]), input.numel() // CHUNK
    chunks = empty((whole_chunks, H), torch.float32, grad.device)
    wrap_triton(embedding_backward_chunk_kernel)[(whole_chunks * blocks,)](
        dy, order, ordered, chunks, num_rows, H, dy.stride(0), CHUNK=CHUNK, BLOCK_M=4, **block
    )
    wrap_triton(embedding_backward_kernel)[(cdiv(num_rows, ROWS) * blocks,)](
        dy, order, ends, chunks, dw, num_rows, H, dy.stride(0), CHUNK=CHUNK, ROWS=ROWS, BLOCK_M=4, **block
    )
    return dw


# A graph keeps each as one node: on a CPU the values of the indices are looked at.
embedding_fwd = KernelOp(_embedding_fwd, opaque=True)
embedding_bwd = KernelOp(_embedding_bwd, opaque=True)


@embedding_fwd.register_kernel("cpu")
def _(input: Tensor, weight: Tensor, padding_idx: int) -> Tensor:
    V = weight.shape[0]
    if input.numel() and not 0 <= int(input.min()) <= int(input.max()) < V:
        raise IndexError(f"input: expected rows from 0 to {V - 1}, got {int(input.min())} to {int(input.max())}")
    return weight.index_select(0, input.reshape(-1).long()).view(*input.shape, weight.shape[1])


@embedding_bwd.register_kernel("cpu")
def _(grad: Tensor, input: Tensor, num_rows: int, padding_idx: int) -> Tensor:
    dy = grad.reshape(-1, grad.shape[-1]).float()
    dw = torch.zeros((num_rows, dy.shape[1]), dtype=torch.float32, device=grad.device)
    dw.index_add_(0, input.reshape(-1).long(), dy)
    if padding_idx >= 0:
        dw[padding_idx] = 0
    return dw.to(grad.dtype)


@embedding_fwd.register_fake
def _(input: Tensor, weight: Tensor, padding_idx: int) -> Tensor:
    return weight.new_empty((*input.shape, weight.shape[1]))


@embedding_bwd.register_fake
def _(grad: Tensor, input: Tensor, num_rows: int, padding_idx: int) -> Tensor:
    return grad.new_empty((num_rows, grad.shape[-1]))


@embedding_fwd.register_sharding
def _(input):
    return [([axis], [axis, REPLICATE]) for axis in axes(input)]


@embedding_bwd.register_sharding
def _(input):
    return [([PARTIAL], [axis, axis]) for axis in axes(input)]


def _setup_context(ctx, inputs, output) -> None:
    input, weight, ctx.padding_idx = inputs
    ctx.num_rows = weight.shape[0]
    ctx.save_for_backward(input)


def _backward(ctx, grad):
    return None, embedding_bwd(grad, *ctx.saved_tensors, ctx.num_rows, ctx.padding_idx), None


embedding_fwd.register_autograd(_backward, setup_context=_setup_context)


def embedding_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    randn = partial(torch.randn, device=device, dtype=dtype)

    def rows(V: int, *shape: int) -> Tensor:
        return torch.randint(0, V, shape, device=device)

    yield Sample((rows(8, 4, 4), randn(8, 16)), why="powers of two")
    yield Sample((rows(11, 2, 3, 5).int(), randn(11, 37)), {"padding_idx": 3}, why="odd sizes, int32, padding")
    yield Sample((rows(5, 40) // 4 * 4, randn(6, 24), -1), why="two rows have all, the last one is padding")
    yield Sample((rows(20, 300).clamp(max=5), randn(7, 24)), why="one row has most positions")
    yield Sample((rows(3, 0), randn(3, 8)), why="no positions")
    yield Sample((rows(5), randn(5, 8)), why="one position and no axis")
    yield Sample((rows(9, 4, 6).t(), randn(20, 9).t()), why="everything strided")
    yield Sample((rows(4, 70), randn(4, 1500)), why="several blocks of columns")


def embedding_resized(rows: int, device: torch.device, dtype: torch.dtype) -> Sample:
    weight = torch.randn(10, 24, device=device, dtype=dtype)
    return Sample((torch.randint(0, 10, (rows,), device=device), weight), why="resized")


def embedding_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for N, V, H in [(16384, 151936, 2048), (8192, 32000, 4096)]:
        indices = torch.randint(0, V, (N,), device=device)
        yield Sample((indices, torch.randn(V, H, device=device, dtype=dtype)), why=f"{N} of {V}x{H}")
    hot = torch.randint(0, 2, (N,), device=device) * indices
    yield Sample((hot, torch.randn(V, H, device=device, dtype=dtype)), why=f"{N} of {V}x{H}, half of them one row")


def embedding_cost(input: Tensor, weight: Tensor, padding_idx: int | None = None) -> Cost:
    rows = input.numel() * weight.shape[1] * weight.element_size()
    table = weight.numel() * weight.element_size()
    return Cost(bytes_forward=2 * rows, bytes_full=3 * rows + table)


@public_op(
    reference=embedding_reference,
    differentiable=("weight",),
    kernel_ops=(embedding_fwd, embedding_bwd),
    samples=embedding_samples,
    resized=embedding_resized,
    workloads=embedding_workloads,
    cost=embedding_cost,
)
def embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """Rows of a table, as `torch.nn.functional.embedding`; the table's gradient is the same bits each time.

    Args:
        input: The rows' numbers, any shape and strides, int64 or int32.
        weight: The table `[V, H]`, float32, float16 or bfloat16, any strides.
        padding_idx: A row that has no gradient, counted from the end if negative.

    Returns:
        `[..., H]`, contiguous, in the dtype of `weight`.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape, a device or `padding_idx` does not fit.
        IndexError: On the CPU, a number is none of a row. On a GPU such a position becomes NaN and has no gradient.

    Source: `torch.nn.functional.embedding`.
    """
    check_dtype("input", input, (torch.int64, torch.int32))
    check_dtype("weight", weight)
    if weight.dim() != 2 or weight.numel() == 0:
        raise ValueError(f"weight: expected shape [V, H], both at least 1, got {tuple(weight.shape)}")
    check_same("weight", weight, "input", input)
    V = weight.shape[0]
    if padding_idx is not None and not -V <= padding_idx < V:
        raise ValueError(f"padding_idx: expected a row from {-V} to {V - 1}, got {padding_idx}")
    return embedding_fwd(input, weight, -1 if padding_idx is None else padding_idx % V)
