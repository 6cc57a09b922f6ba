r"""Sparsemax over any axis: the point of the probability simplex that is nearest to a row.

Source: Martins and Astudillo, "From Softmax to Sparsemax", 2016, https://arxiv.org/abs/1602.02068. The threshold is
found without sorting, as Michelot, "A finite algorithm for finding the projection of a point onto the canonical simplex
of R^n", 1986, has it.

Forward, for each row x of N values, with z = x - max(x) and S the positions where z > tau:

    tau = (sum of z over S - 1) / |S|
    y   = max(z - tau, 0)

tau begins at -1, below which no position of S is; each turn takes S and then tau anew. Without rounding positions only
leave S, and when none did, tau is the threshold. With it a value within a unit of tau may come back and leave again,
without end, so a turn that leaves S no smaller than it was is the last: on random rows there are a few turns, and at
most one more than there are positions.

Backward, given dy; y is all that is kept:

    dx = dy - mean of dy over S        0 where y is 0, NaN where y is NaN

Forward a row is held in registers and read once; past 32,768 columns it goes through plain PyTorch, which sorts it.
"""

import math
from collections.abc import Iterator
from functools import partial

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.rows import as_rows
from llmk.ops.common.samples import normal_resized, normal_workloads
from llmk.registry import (
    Cost,
    KernelOp,
    Sample,
    check_dtype,
    empty,
    jit,
    like_first,
    next_power_of_2,
    public_op,
    split_around_dim,
    wrap_triton,
)
from llmk.registry.private.compilers import known


def sparsemax_reference(input: Tensor, dim: int = -1) -> Tensor:
    if input.dim() == 0:
        return sparsemax_reference(input.view(1)).view(())
    if known(input.shape[dim] == 0):  # an axis of no positions has no maximum
        return input.clone()
    z = (input - input.detach().amax(dim, keepdim=True)).movedim(dim, -1)
    ordered = z.sort(dim=-1, descending=True).values
    sums = ordered.cumsum(-1) - 1
    counts = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)
    size = (ordered * counts > sums).sum(-1, keepdim=True)
    tau = sums.gather(-1, (size - 1).clamp(min=0)) / size
    tau = tau.masked_fill(z.isnan().any(-1, keepdim=True), math.nan)  # wherever the device sorts NaN to
    y = torch.where(z <= tau, 0.0, z - tau)  # where z is tau it has no gradient
    undefined = z * tau.detach()  # a row without a threshold is NaN, and so is its gradient
    return torch.where(tau.isnan(), undefined, y).movedim(-1, dim)


@jit
def _above(z, tau):
    """The sum of the entries above tau, which is NaN if any entry is, and their number."""
    total = tl.sum(tl.where((z > tau) | (z != z), z, 0.0), axis=0)
    return total, tl.sum((z > tau).to(tl.int32), axis=0)


@jit
def _threshold(total, count):
    """NaN where no position is above: of a row of -inf alone, or with inf in it."""
    return tl.where(count > 0, tl.div_rn(total - 1.0, tl.maximum(count, 1).to(tl.float32)), float("nan"))


@jit
def sparsemax_kernel(x_ptr, y_ptr, N, x_stride, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + row * x_stride + cols, mask=cols < N, other=float("-inf")).to(tl.float32)
    z = x - tl.max(x, axis=0)
    total, count = _above(z, -1.0)
    tau, last, turn = _threshold(total, count), N + 1, 0
    while (turn <= N) and (count < last):
        turn += 1
        last = count
        total, count = _above(z, tau)
        tau = _threshold(total, count)
    y = tl.where(z <= tau, 0.0, z - tau)
    tl.store(y_ptr + row * N + cols, y.to(y_ptr.dtype.element_ty), mask=cols < N)


@jit
def sparsemax_backward_kernel(dy_ptr, y_ptr, dx_ptr, N, dy_stride, BLOCK_N: tl.constexpr):
    """A row in blocks, of which there is one where it fits."""
    row = tl.program_id(0).to(tl.int64)
    dy_ptr += row * dy_stride
    totals = tl.zeros((BLOCK_N,), dtype=tl.float32)
    counts = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        y = tl.load(y_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        totals += tl.where(y != 0.0, dy, 0.0)
        counts += tl.where(y != 0.0, 1.0, 0.0)
    mean = tl.div_rn(tl.sum(totals, axis=0), tl.sum(counts, axis=0))
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        y = tl.load(y_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        dx = tl.where(y == y, tl.where(y != 0.0, dy - mean, 0.0), float("nan"))
        tl.store(dx_ptr + row * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < N)


WIDEST = 32768
"""The widest row that a program holds; the backward pass takes a quarter of it at a time."""


def _tile(N: int, widest: int) -> dict[str, int]:
    """Sixteen elements a thread, which takes a warp for a row of up to 512, and more where rows are wider."""
    block = min(widest, next_power_of_2(max(N, 1)))
    return {"BLOCK_N": block, "num_warps": max(1, min(16, block // 512))}


def _sparsemax_fwd(input: Tensor, dim: int) -> Tensor:
    input = input.movedim(dim, -1)
    x = as_rows(input)
    M, N = x.shape
    if N > WIDEST:
        return _moved_back(_forward_plain(input, -1), dim)
    y = empty(input.shape, input.dtype, input.device)
    wrap_triton(sparsemax_kernel)[(M,)](x, y, N, x.stride(0), **_tile(N, WIDEST))
    return _moved_back(y, dim)


def _sparsemax_bwd(grad: Tensor, output: Tensor, dim: int) -> Tensor:
    dy, y = as_rows(grad.movedim(dim, -1)), output.movedim(dim, -1).contiguous()
    M, N = dy.shape
    dx = empty(y.shape, output.dtype, output.device)
    wrap_triton(sparsemax_backward_kernel)[(M,)](dy, y, dx, N, dy.stride(0), **_tile(N, WIDEST // 4))
    return _moved_back(dx, dim)


def _moved_back(rows: Tensor, dim: int) -> Tensor:
    """Move the last axis back to where it was, contiguous in that layout."""
    return rows if dim == rows.dim() - 1 else rows.movedim(-1, dim).contiguous()


def _forward_plain(input: Tensor, dim: int) -> Tensor:
    return sparsemax_reference(input.float(), dim).to(input.dtype).contiguous()


sparsemax_fwd = KernelOp(_sparsemax_fwd, launch_cached=True)
sparsemax_bwd = KernelOp(_sparsemax_bwd, launch_cached=True)


sparsemax_fwd.register_kernel("cpu")(_forward_plain)


@sparsemax_bwd.register_kernel("cpu")
def _(grad, output, dim):
    dy, inside = grad.float(), output != 0
    mean = torch.where(inside, dy, 0.0).sum(dim, keepdim=True) / inside.sum(dim, keepdim=True)
    return torch.where(inside, dy - mean, 0.0).masked_fill(output.isnan(), math.nan).to(output.dtype).contiguous()


sparsemax_fwd.register_fake(like_first)
sparsemax_bwd.register_fake(like_first)
sparsemax_fwd.register_backward(sparsemax_bwd)
sparsemax_fwd.register_sharding(split_around_dim)
sparsemax_bwd.register_sharding(split_around_dim)


def sparsemax_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    randn = partial(torch.randn, device=device, dtype=dtype)
    yield Sample((randn(4, 16),), why="powers of two")
    yield Sample((randn(2, 3, 37),), why="three dimensions, odd width")
    yield Sample((randn(3, 37, 5), 1), why="the middle axis")
    yield Sample((randn(70, 6).t(), 0), why="the first axis, strided")
    yield Sample((randn(7, 1),), why="one column")
    yield Sample((randn(()),), why="no dimension")
    yield Sample((randn(0, 16),), why="no rows")
    yield Sample((randn(3, 0),), why="no columns")
    yield Sample((randn(6, 80)[:, 16:48],), why="a slice of a wider row")
    yield Sample((randn(1, 16).expand(5, 16),), why="one row expanded")
    yield Sample((1e4 * randn(3, 64),), why="large values: one position of each row")
    yield Sample((1e-3 * randn(3, 64),), why="small values: all positions")
    hidden = torch.arange(40, device=device, dtype=torch.int64) % 3 == 0
    yield Sample((randn(3, 40).masked_fill(hidden, float("-inf")),), why="some positions at -inf")
    undefined = torch.tensor([[-math.inf, -math.inf], [math.inf, 0.0], [math.nan, 0.0]], device=device, dtype=dtype)
    yield Sample((torch.cat([undefined, randn(3, 38).sub(50.0)], 1),), why="rows with inf or NaN in them: NaN")
    yield Sample((torch.full((2, 40), -math.inf, device=device, dtype=dtype),), why="rows of -inf alone: NaN")
    yield Sample((randn(2, 9001) / 8,), why="a row that is read several times")


@public_op(
    reference=sparsemax_reference,
    differentiable=("input",),
    kernel_ops=(sparsemax_fwd, sparsemax_bwd),
    samples=sparsemax_samples,
    resized=normal_resized(lambda rows: ((rows, 48),)),
    workloads=normal_workloads([(8192, 4096), (4096, 32768)], lambda M, N: ((M, N),)),
    cost=Cost.passes(2, 5),
)
def sparsemax(input: Tensor, dim: int = -1) -> Tensor:
    """Sparsemax over an axis: like softmax, but most of the smaller values become zero. In float32 with one rounding.

    A kernel holds rows of up to 32,768 values; longer ones go through plain PyTorch, which sorts them.

    Args:
        input: Any shape and strides, float32, float16 or bfloat16. Over another axis than the last it is copied.
        dim: The axis, counted from the end if negative.

    Returns:
        The shape and dtype of `input`, contiguous. A row that is all -inf, or has NaN or inf in it, is NaN.

    Raises:
        TypeError: `input` is not float32, float16 or bfloat16.
        IndexError: `input` has no such axis.

    Source: Martins and Astudillo, 2016, https://arxiv.org/abs/1602.02068.
    """
    check_dtype("input", input)
    count = max(input.dim(), 1)
    if not -count <= dim < count:
        raise IndexError(f"dim: expected an axis from {-count} to {count - 1}, got {dim}")
    if input.dim() == 0:
        return sparsemax_fwd(input.view(1), 0).view(())
    return sparsemax_fwd(input, dim % count)
