r"""Sinkhorn and Knopp's projection: a square matrix whose rows and columns sum to 1.

Sources: Sinkhorn and Knopp, 1967; the residual matrices of manifold-constrained hyper-connections,
https://arxiv.org/abs/2512.24880, as DeepSeek-V4 has them.

Forward, for each matrix x [N, N]:

    A_1     = columns(softmax over each row of x + eps)
    A_(t+1) = columns(rows(A_t))                             up to t = iterations

where rows divides each row by its sum + eps, and columns each column.

Backward, through every division y = a / (s + eps), last one first, with the sums over the row or the column:

    da = (dy - sum(dy * y)) / (s + eps)
    dx = p * (da - sum(p * da))                              of the softmax p

The gradient is that of the divisions that were made and not that of the limit: after so many of them the matrix is not
the limit, and another's gradient would not be what training computes elsewhere. The implicit one would not be cheaper
either, for a matrix and all its iterations fit in registers, and it solves a singular system of 2 N unknowns.

A program holds some matrices. The backward pass keeps only x: it makes the iterations again, leaves each A_t in scratch
memory, and walks back over the same numbers.
"""

from collections.abc import Iterator
from functools import partial

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.math import exp
from llmk.ops.common.samples import normal_resized, normal_workloads
from llmk.ops.streams._patterns import SINKHORN
from llmk.ops.streams.tiles import MAX_SIZE
from llmk.registry import (
    Cost,
    KernelOp,
    Sample,
    cdiv,
    check_dtype,
    check_not_negative,
    check_size,
    empty,
    jit,
    like_first,
    next_power_of_2,
    public_op,
    wrap_triton,
)


def sinkhorn_reference(input: Tensor, iterations: int = 20, eps: float = 1e-6) -> Tensor:
    matrix = input.to(torch.promote_types(input.dtype, torch.float32)).softmax(-1) + eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix.to(input.dtype)


@jit
def _divisors(a, eps, N, axis: tl.constexpr, BLOCK_N: tl.constexpr):
    """The sums along an axis, and eps; 1 for the rows and columns that fill the block."""
    sums = tl.sum(a, axis=axis, keep_dims=True) + eps
    index = tl.reshape(tl.arange(0, BLOCK_N), (1, 1, BLOCK_N) if axis == 1 else (1, BLOCK_N, 1))
    return tl.where(index < N, sums, 1.0)


@jit
def _normalized(a, eps, N, axis: tl.constexpr, BLOCK_N: tl.constexpr):
    divisors = _divisors(a, eps, N, axis, BLOCK_N)
    return tl.div_rn(a, tl.broadcast_to(divisors, a.shape))


@jit
def _normalized_gradient(dy, y, divisors, axis: tl.constexpr):
    return tl.div_rn(dy - tl.sum(dy * y, axis=axis, keep_dims=True), tl.broadcast_to(divisors, dy.shape))


@jit
def _softmax(x_ptr, offsets, mask):
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    largest = tl.max(tl.where(mask, x, float("-inf")), axis=2, keep_dims=True)
    powers = tl.where(mask, exp(tl.where(mask, x - largest, 0.0)), 0.0)
    total = tl.sum(powers, axis=2, keep_dims=True)
    return tl.div_rn(powers, tl.broadcast_to(tl.where(total == 0.0, 1.0, total), powers.shape))


@jit
def _places(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The offsets of a program's matrices, and what of them is there."""
    matrices = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None, None]
    rows, cols = tl.arange(0, BLOCK_N)[None, :, None], tl.arange(0, BLOCK_N)[None, None, :]
    return (matrices * N + rows) * N + cols, (matrices < M) & (rows < N) & (cols < N)


@jit
def sinkhorn_kernel(x_ptr, y_ptr, M, N, iterations, eps, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    eps = tl.cast(eps, tl.float32)
    offsets, mask = _places(M, N, BLOCK_M, BLOCK_N)
    a = tl.where(mask, _softmax(x_ptr, offsets, mask) + eps, 0.0)
    a = _normalized(a, eps, N, 1, BLOCK_N)
    for _ in range(1, iterations):
        a = _normalized(_normalized(a, eps, N, 2, BLOCK_N), eps, N, 1, BLOCK_N)
    tl.store(y_ptr + offsets, a.to(y_ptr.dtype.element_ty), mask=mask)


@jit
def sinkhorn_backward_kernel(
    dy_ptr, x_ptr, scratch_ptr, dx_ptr, M, N, iterations, eps, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    eps = tl.cast(eps, tl.float32)
    offsets, mask = _places(M, N, BLOCK_M, BLOCK_N)
    distance = tl.cast(M, tl.int64) * N * N
    p = _softmax(x_ptr, offsets, mask)
    first = tl.where(mask, p + eps, 0.0)
    first_divisors = _divisors(first, eps, N, 1, BLOCK_N)
    a = tl.div_rn(first, tl.broadcast_to(first_divisors, first.shape))
    for t in range(1, iterations):
        tl.store(scratch_ptr + t * distance + offsets, a, mask=mask)
        a = _normalized(_normalized(a, eps, N, 2, BLOCK_N), eps, N, 1, BLOCK_N)
    tl.debug_barrier()
    da = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    for i in range(1, iterations):
        before = tl.load(scratch_ptr + (iterations - i) * distance + offsets, mask=mask, other=0.0)
        row_divisors = _divisors(before, eps, N, 2, BLOCK_N)
        rows = tl.div_rn(before, tl.broadcast_to(row_divisors, before.shape))
        da = _normalized_gradient(da, a, _divisors(rows, eps, N, 1, BLOCK_N), 1)
        da = _normalized_gradient(da, rows, row_divisors, 2)
        a = before
    da = _normalized_gradient(da, a, first_divisors, 1)
    dx = p * (da - tl.sum(tl.where(mask, p * da, 0.0), axis=2, keep_dims=True))
    tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)


def _tile(N: int) -> dict[str, int]:
    """A warp for matrices of up to 16, whose sums wait for no other; four elements a thread where they are small."""
    block_n = next_power_of_2(N)
    return {"BLOCK_M": max(1, 128 // block_n**2), "BLOCK_N": block_n, "num_warps": max(1, block_n**2 // 512)}


def _sinkhorn_fwd(input: Tensor, iterations: int, eps: float) -> Tensor:
    x, N = input.contiguous(), input.shape[-1]
    M = x.numel() // (N * N)
    y = empty(x.shape, x.dtype, x.device)
    tile = _tile(N)
    wrap_triton(sinkhorn_kernel)[(cdiv(M, tile["BLOCK_M"]),)](x, y, M, N, iterations, eps, **tile)
    return y


def _sinkhorn_bwd(grad: Tensor, input: Tensor, iterations: int, eps: float) -> Tensor:
    x, N = input.contiguous(), input.shape[-1]
    M = x.numel() // (N * N)
    scratch = empty((iterations, *x.shape), torch.float32, x.device)
    dx = empty(x.shape, x.dtype, x.device)
    tile = _tile(N)
    wrap_triton(sinkhorn_backward_kernel)[(cdiv(M, tile["BLOCK_M"]),)](
        grad.contiguous(), x, scratch, dx, M, N, iterations, eps, **tile
    )
    return dx


sinkhorn_fwd = KernelOp(_sinkhorn_fwd, launch_cached=True)
sinkhorn_bwd = KernelOp(_sinkhorn_bwd, launch_cached=True)


@sinkhorn_fwd.register_kernel("cpu")
def _(input, iterations, eps):
    return sinkhorn_reference(input, iterations, eps).contiguous()


@sinkhorn_bwd.register_kernel("cpu")
def _(grad, input, iterations, eps):
    p = input.float().softmax(-1)
    steps, a = [], p + eps
    for i in range(2 * iterations - 1):
        dim = -2 if i % 2 == 0 else -1
        divisors = a.sum(dim, keepdim=True) + eps
        a = a / divisors
        steps.append((dim, divisors, a))
    da = grad.float()
    for dim, divisors, y in reversed(steps):
        da = (da - (da * y).sum(dim, keepdim=True)) / divisors
    return (p * (da - (p * da).sum(-1, keepdim=True))).to(input.dtype).contiguous()


sinkhorn_fwd.register_fake(like_first)
sinkhorn_fwd.register_backward(sinkhorn_bwd)


@sinkhorn_fwd.register_sharding
def _(input):
    """Along the axes of the matrices."""
    return [([axis], [axis]) for axis in range(input.ndim - 2)]


def sinkhorn_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    randn = partial(torch.randn, device=device, dtype=dtype)
    yield Sample((randn(9, 4, 4),), why="four streams")
    yield Sample((randn(2, 3, 5, 5), 3, 1e-3), why="two axes of matrices, an odd size")
    yield Sample((randn(2, 2), 2), why="one matrix")
    yield Sample((randn(3, 1, 1),), why="one stream")
    yield Sample((randn(5, 4, 4), 1), why="one iteration: columns alone")
    yield Sample((randn(5, 3, 3), 4, 0.0), why="no eps")
    yield Sample((randn(0, 4, 4),), why="no matrices")
    yield Sample((randn(5, 4, 4).transpose(1, 2),), why="transposed")
    yield Sample((4 * randn(5, 4, 4),), why="far from uniform")
    yield Sample((randn(2, 33, 33), 2), why="several warps")


@public_op(
    reference=sinkhorn_reference,
    differentiable=("input",),
    kernel_ops=(sinkhorn_fwd, sinkhorn_bwd),
    samples=sinkhorn_samples,
    resized=normal_resized(lambda rows: ((rows, 4, 4),)),
    workloads=normal_workloads([(8192, 4, 4), (16384, 4, 4)], lambda *shape: [shape]),
    cost=Cost.passes(2, 5),
    patterns=SINKHORN,
)
def sinkhorn(input: Tensor, iterations: int = 20, eps: float = 1e-6) -> Tensor:
    """Matrices whose columns sum to 1, and their rows as far as so many iterations go. In float32 with one rounding.

    The softmax of each row is divided by the sums of its columns, then of its rows and its columns in turn.

    Args:
        input: Logits `[..., N, N]` with N from 1 to 64, float32, float16 or bfloat16, any strides.
        iterations: How often columns are divided by their sums, at least 1.
        eps: Added to the softmax and to every sum that is divided by, at least 0.

    Returns:
        The shape and dtype of `input`, contiguous. Its gradient is that of the divisions, each of them.

    Raises:
        TypeError: `input` is not float32, float16 or bfloat16, or `iterations` is no int.
        ValueError: The last two axes are not of one size from 1 to 64, or an option is out of range.

    Sources: Sinkhorn and Knopp, 1967; Xie et al., 2025, https://arxiv.org/abs/2512.24880.
    """
    check_dtype("input", input)
    N = input.shape[-1] if input.dim() else 0
    if input.dim() < 2 or input.shape[-2] != N or not 1 <= N <= MAX_SIZE:
        raise ValueError(f"input: expected shape [..., N, N] with N from 1 to {MAX_SIZE}, got {tuple(input.shape)}")
    check_size("iterations", iterations)
    check_not_negative("eps", eps)
    return sinkhorn_fwd(input, iterations, eps)
