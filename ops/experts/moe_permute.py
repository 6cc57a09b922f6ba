r"""Tokens put in the order of their experts, and the experts' results added up for each token.

Sources: `torch.sort` and indexing; the reference is a stable sort and a gather, and its inverse with a sum.

Forward, for x [T, H] and indices [T, K], with N = T * K pairs p = t K + k sorted by expert, equal ones in their order:

    permuted[r] = x[order[r] // K]            rows of no expert are zeros
    y[t]        = sum_k w[t, k] * permuted[positions[t, k]]

Backward: the gradient of the first is the second without weights; that of the second is

    dpermuted[positions[t, k]] = w[t, k] * dy[t]
    dw[t, k]                   = permuted[positions[t, k]] . dy[t]

The device alone knows how many rows an expert has: nothing waits for it, and a graph is one for any split.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from llmk.ops.experts._gather_scatter import dot_rows, gather_rows, scatter_rows, sum_rows
from llmk.ops.experts._sorting import (
    check_indices,
    check_tokens,
    check_weights,
    positions_of,
    raise_out_of_range,
    sort_by_expert,
)
from llmk.registry import Cost, KernelOp, Sample, check_dtype, check_same, or_no_gradient, public_op, replicate_only


def moe_permute_reference(input: Tensor, indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    flat = indices.flatten().long()
    ordered, order = torch.sort(flat, stable=True)
    permuted = input[order // indices.shape[1]] * (ordered < num_experts).unsqueeze(1)
    positions = torch.argsort(order).view(indices.shape)
    experts = torch.arange(num_experts, dtype=torch.int64, device=input.device)
    return permuted, positions.int(), (flat[None, :] <= experts[:, None]).sum(1).int()


def moe_unpermute_reference(input: Tensor, positions: Tensor, weights: Tensor | None = None) -> Tensor:
    rows = input[positions.long()]
    if weights is not None:
        rows = rows * weights.unsqueeze(-1)
    return rows.sum(1).to(input.dtype)


def _moe_permute_fwd(input: Tensor, indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    order, offsets = sort_by_expert(indices, num_experts)
    positions = positions_of(order, indices.shape)
    return gather_rows(input, positions, offsets), positions, offsets


def _moe_permute_bwd(grad: Tensor, positions: Tensor, offsets: Tensor) -> Tensor:
    return sum_rows(grad, positions, offsets=offsets)


def _moe_unpermute_fwd(input: Tensor, positions: Tensor, weights: Tensor | None) -> Tensor:
    return sum_rows(input, positions, weights)


def _moe_unpermute_bwd(
    grad: Tensor, input: Tensor, positions: Tensor, weights: Tensor | None, need_input: bool, need_weights: bool
) -> tuple[Tensor, Tensor]:
    dx = scatter_rows(grad, positions, weights, input.shape[0]) if need_input else None
    dw = dot_rows(input, positions, grad, weights.dtype) if weights is not None and need_weights else None
    return or_no_gradient(dx, grad), or_no_gradient(dw, grad)


# A graph keeps each as one node: on a CPU the values of indices are looked at.
moe_permute_fwd = KernelOp(_moe_permute_fwd, opaque=True)
moe_permute_bwd = KernelOp(_moe_permute_bwd, opaque=True)
moe_unpermute_fwd = KernelOp(_moe_unpermute_fwd, opaque=True)
moe_unpermute_bwd = KernelOp(_moe_unpermute_bwd, opaque=True)


@moe_permute_fwd.register_kernel("cpu")
def _(input: Tensor, indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    raise_out_of_range(indices, num_experts)
    order, offsets = sort_by_expert(indices, num_experts)
    permuted = input[order // indices.shape[1]]
    permuted[int(offsets[-1]) :] = 0
    return permuted, positions_of(order, indices.shape), offsets


@moe_permute_bwd.register_kernel("cpu")
def _(grad: Tensor, positions: Tensor, offsets: Tensor) -> Tensor:
    rows = grad[positions.long()].float() * (positions < offsets[-1]).unsqueeze(-1)
    return rows.sum(1).to(grad.dtype)


@moe_unpermute_fwd.register_kernel("cpu")
def _(input: Tensor, positions: Tensor, weights: Tensor | None) -> Tensor:
    every = torch.arange(input.shape[0], dtype=torch.int64, device=input.device)
    if not torch.equal(positions.flatten().sort().values.long(), every):
        raise IndexError(f"positions: expected each of the {input.shape[0]} rows of input once")
    rows = input[positions.long()].float()
    if weights is not None:
        rows = rows * weights.float().unsqueeze(-1)
    return rows.sum(1).to(input.dtype)


@moe_unpermute_bwd.register_kernel("cpu")
def _(grad, input, positions, weights, need_input, need_weights) -> tuple[Tensor, Tensor]:
    dx = dw = None
    if need_input:
        rows = grad.float().unsqueeze(1).expand(*positions.shape, -1)
        rows = rows if weights is None else rows * weights.float().unsqueeze(-1)
        dx = torch.empty(input.shape, dtype=grad.dtype, device=grad.device)
        dx[positions.flatten().long()] = rows.flatten(0, 1).to(grad.dtype)
    if weights is not None and need_weights:
        dw = (input[positions.long()].float() * grad.float().unsqueeze(1)).sum(-1).to(weights.dtype)
    return or_no_gradient(dx, grad), or_no_gradient(dw, grad)


@moe_permute_fwd.register_fake
def _(input: Tensor, indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    T, K = indices.shape
    return (
        input.new_empty((T * K, input.shape[1])),
        indices.new_empty((T, K), dtype=torch.int32),
        indices.new_empty((num_experts,), dtype=torch.int32),
    )


@moe_permute_bwd.register_fake
def _(grad: Tensor, positions: Tensor, offsets: Tensor) -> Tensor:
    return grad.new_empty((positions.shape[0], grad.shape[1]))


@moe_unpermute_fwd.register_fake
def _(input: Tensor, positions: Tensor, weights: Tensor | None) -> Tensor:
    return input.new_empty((positions.shape[0], input.shape[1]))


for _op in (moe_permute_fwd, moe_unpermute_fwd):
    _op.register_sharding(replicate_only)
moe_permute_fwd.register_backward(moe_permute_bwd, outputs=("permuted", "positions", "offsets"), depends_on=[["input"]])
moe_unpermute_fwd.register_backward(moe_unpermute_bwd, depends_on=[["input", "weights"]])


def moe_permute_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    randn = partial(torch.randn, device=device, dtype=dtype)

    def experts(E: int, *shape: int) -> Tensor:
        return torch.randint(0, E, shape, device=device)

    yield Sample((randn(8, 16), experts(4, 8, 2), 4), why="powers of two")
    yield Sample((randn(7, 37), experts(9, 7, 3).int(), 9), why="odd sizes, int32")
    yield Sample((randn(6, 20), experts(5, 6, 2) // 4 * 4, 8), why="experts without tokens")
    yield Sample((randn(5, 8), torch.full((5, 2), 3, device=device, dtype=torch.int64), 4), why="one expert has all")
    yield Sample((randn(9, 12), experts(5, 9, 2), 4), why="some pairs of no expert")
    yield Sample((randn(1, 8), experts(4, 1, 1), 4), why="one token")
    yield Sample((randn(0, 8), experts(4, 0, 2), 4), why="no tokens")
    yield Sample((randn(12, 9).t(), experts(4, 2, 9).t(), 4), why="everything strided")
    yield Sample((randn(2, 5003), experts(2, 2, 2), 2), why="several blocks of columns")


def moe_permute_resized(rows: int, device: torch.device, dtype: torch.dtype) -> Sample:
    x = torch.randn(rows, 24, device=device, dtype=dtype)
    return Sample((x, torch.randint(0, 6, (rows, 2), device=device), 6), why="resized")


def _shapes(device: torch.device) -> Iterator[tuple[int, int, int, int]]:
    """Tokens, experts, the top k and H, of Qwen3-MoE's and of GPT-OSS's experts."""
    yield from [(16384, 128, 8, 2048), (16384, 32, 4, 2880)]


def moe_permute_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for T, E, K, H in _shapes(device):
        x = torch.randn(T, H, device=device, dtype=dtype)
        yield Sample((x, torch.randint(0, E, (T, K), device=device), E), why=f"{T}x{H}, {K} of {E} experts")


def moe_permute_cost(input: Tensor, indices: Tensor, num_experts: int) -> Cost:
    tokens = input.numel() * input.element_size()
    moved = (1 + indices.shape[1]) * tokens + indices.numel() * 8
    return Cost(bytes_forward=moved, bytes_full=2 * moved)


@public_op(
    reference=moe_permute_reference,
    differentiable=("input",),
    kernel_ops=(moe_permute_fwd, moe_permute_bwd),
    samples=moe_permute_samples,
    resized=moe_permute_resized,
    workloads=moe_permute_workloads,
    cost=moe_permute_cost,
)
def moe_permute(input: Tensor, indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """A copy of each token for each of its experts, sorted by expert: what a grouped product takes.

    Nothing waits for the device. Copies of one expert are in the order of the tokens.

    Args:
        input: Tokens `[T, H]`, float32, float16 or bfloat16, any strides.
        indices: Their experts `[T, K]`, int64 or int32. `num_experts` is none: the expert of another process.
        num_experts: How many experts there are, at least 1.

    Returns:
        The rows of the experts `[T * K, H]`, in the dtype of `input`; the row of each pair, `[T, K]` int32, for
        `moe_unpermute`; and the end of each expert's rows, `[num_experts]` int32. Rows after the last of these are
        zeros, one for each pair of no expert.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape, a device or `num_experts` does not fit.
        IndexError: On the CPU, an index is neither an expert nor `num_experts`. On a GPU it counts as none.

    Source: a stable `torch.sort` of the indices, and indexing.
    """
    check_tokens(input)
    check_indices(indices, input)
    if num_experts < 1:
        raise ValueError(f"num_experts: expected at least 1, got {num_experts}")
    return moe_permute_fwd(input, indices, num_experts)


def moe_unpermute_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    randn = partial(torch.randn, device=device, dtype=dtype)

    def rows(T: int, K: int) -> Tensor:
        return torch.randperm(T * K, device=device).view(T, K).int()

    yield Sample((randn(16, 16), rows(8, 2), randn(8, 2)), why="powers of two")
    yield Sample(
        (randn(21, 37), rows(7, 3).long(), torch.rand(7, 3, device=device, dtype=torch.float32)),
        why="odd, float32 weights, int64",
    )
    yield Sample((randn(12, 20), rows(6, 2)), why="without weights")
    yield Sample((randn(1, 8), rows(1, 1), randn(1, 1)), why="one row")
    yield Sample((randn(0, 8), rows(0, 2), randn(0, 2)), why="no rows")
    yield Sample((randn(12, 18).t(), rows(9, 2), randn(2, 9).t()), why="everything strided")
    yield Sample((randn(4, 5003), rows(2, 2), randn(2, 2)), why="several blocks of columns")


def moe_unpermute_resized(rows: int, device: torch.device, dtype: torch.dtype) -> Sample:
    x = torch.randn(2 * rows, 24, device=device, dtype=dtype)
    positions = torch.randperm(2 * rows, device=device).view(rows, 2)
    return Sample((x, positions, torch.randn(rows, 2, device=device, dtype=dtype)), why="resized")


def moe_unpermute_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for T, E, K, H in _shapes(device):
        rows = torch.randn(T * K, H, device=device, dtype=dtype)
        positions = torch.randperm(T * K, device=device).view(T, K).int()
        weights = torch.rand(T, K, device=device, dtype=dtype)
        yield Sample((rows, positions, weights), why=f"{T}x{H}, {K} of {E} experts")


def moe_unpermute_cost(input: Tensor, positions: Tensor, weights: Tensor | None = None) -> Cost:
    rows = input.numel() * input.element_size()
    tokens = rows // positions.shape[1]
    # Backward it reads the rows only for the gradient of the weights.
    return Cost(rows + tokens, 2 * (rows + tokens) + (rows if weights is not None else 0))


@public_op(
    reference=moe_unpermute_reference,
    differentiable=("input", "weights"),
    kernel_ops=(moe_unpermute_fwd, moe_unpermute_bwd),
    samples=moe_unpermute_samples,
    resized=moe_unpermute_resized,
    workloads=moe_unpermute_workloads,
    cost=moe_unpermute_cost,
)
def moe_unpermute(input: Tensor, positions: Tensor, weights: Tensor | None = None) -> Tensor:
    """The weighted sum of the rows of each token's experts, in float32 and in the order of its experts.

    Args:
        input: The experts' rows `[T * K, H]`, float32, float16 or bfloat16, any strides.
        positions: Where each pair's row is, `[T, K]`, int32 or int64, as `moe_permute` gives it: each row once.
        weights: `[T, K]`, float32 or the dtype of `input`; None for all 1.

    Returns:
        `[T, H]`, contiguous, in the dtype of `input`.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape or a device does not fit.
        IndexError: On the CPU, `positions` does not name each row once. On a GPU one out of range counts as a row of
            zeros.

    Source: indexing by the inverse of the order, and a sum.
    """
    check_tokens(input)
    check_dtype("positions", positions, (torch.int32, torch.int64))
    check_same("positions", positions, "input", input)
    if positions.dim() != 2 or positions.shape[1] == 0 or positions.numel() != input.shape[0]:
        raise ValueError(
            f"positions: expected shape [T, K] with one position for each of the {input.shape[0]} rows of input, "
            f"got {tuple(positions.shape)}"
        )
    if weights is not None:
        check_weights(weights, positions, "positions", input, "input")
    return moe_unpermute_fwd(input, positions, weights)
