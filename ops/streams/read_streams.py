r"""What a layer reads of several residual streams: their sum with weights of each token.

Source: hyper-connections, https://arxiv.org/abs/2409.19606, as DeepSeek-V4 has them.

Forward, for a token's N streams x_i of H values and its weights p [N]:

    y = sum over i of p_i * x_i

Backward, given dy:

    dx_i = p_i * dy
    dp_i = sum(dy * x_i)

Both read the streams once. A program has a block of columns of all streams of a token; its part of dp is added to those
of the other blocks in a fixed order.
"""

from collections.abc import Iterator
from functools import partial

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.rows import as_rows
from llmk.ops.common.samples import normal_resized
from llmk.ops.common.sums import sum_partials
from llmk.ops.streams.tiles import check_streams, check_weights, tile_of
from llmk.registry import Cost, KernelOp, Sample, cdiv, empty, jit, public_op, wrap_triton


def read_streams_reference(streams: Tensor, weights: Tensor) -> Tensor:
    return (weights.unsqueeze(-1) * streams).sum(-2).to(streams.dtype)


@jit
def read_streams_kernel(
    x_ptr, p_ptr, y_ptr, H, x_stride, N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    streams, cols = tl.arange(0, BLOCK_S), tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = (streams < N)[:, None] & (cols < H)[None, :]
    x = tl.load(x_ptr + ((token * N + streams) * x_stride)[:, None] + cols[None, :], mask=mask, other=0.0)
    p = tl.load(p_ptr + token * N + streams, mask=streams < N, other=0.0).to(tl.float32)
    y = tl.sum(x.to(tl.float32) * p[:, None], axis=0)
    tl.store(y_ptr + token * H + cols, y.to(y_ptr.dtype.element_ty), mask=cols < H)


@jit
def read_streams_backward_kernel(
    dy_ptr, x_ptr, p_ptr, dx_ptr, partial_ptr, H, dy_stride, x_stride,
    N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    token, tokens = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    streams, cols = tl.arange(0, BLOCK_S), tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = (streams < N)[:, None] & (cols < H)[None, :]
    x = tl.load(x_ptr + ((token * N + streams) * x_stride)[:, None] + cols[None, :], mask=mask, other=0.0)
    p = tl.load(p_ptr + token * N + streams, mask=streams < N, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + token * dy_stride + cols, mask=cols < H, other=0.0).to(tl.float32)
    dx = p[:, None] * dy[None, :]
    offsets = ((token * N + streams) * H)[:, None] + cols[None, :]
    tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    dp = tl.sum(x.to(tl.float32) * dy[None, :], axis=1)
    row = tl.program_id(1).to(tl.int64) * tokens + token
    tl.store(partial_ptr + row * N + streams, dp, mask=streams < N)


def _read_streams_fwd(streams: Tensor, weights: Tensor) -> Tensor:
    x, (N, H) = as_rows(streams), streams.shape[-2:]
    y = empty((*streams.shape[:-2], H), streams.dtype, streams.device)
    tile = tile_of(N, H)
    grid = (x.shape[0] // N, cdiv(H, tile["BLOCK_H"]))
    wrap_triton(read_streams_kernel)[grid](x, weights.contiguous(), y, H, x.stride(0), **tile)
    return y


def _read_streams_bwd(grad: Tensor, streams: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    x, dy, (N, H) = as_rows(streams), as_rows(grad), streams.shape[-2:]
    dx = empty(streams.shape, streams.dtype, streams.device)
    tile = tile_of(N, H)
    grid = (x.shape[0] // N, cdiv(H, tile["BLOCK_H"]))
    partials = empty((grid[1], *weights.shape), torch.float32, x.device)
    wrap_triton(read_streams_backward_kernel)[grid](
        dy, x, weights.contiguous(), dx, partials, H, dy.stride(0), x.stride(0), **tile
    )
    return dx, sum_partials(partials, weights.dtype, of_tokens=True)


read_streams_fwd = KernelOp(_read_streams_fwd, launch_cached=True)
read_streams_bwd = KernelOp(_read_streams_bwd, launch_cached=True)


@read_streams_fwd.register_kernel("cpu")
def _(streams, weights):
    return (weights.float().unsqueeze(-1) * streams.float()).sum(-2).to(streams.dtype).contiguous()


@read_streams_bwd.register_kernel("cpu")
def _(grad, streams, weights):
    dy = grad.float().unsqueeze(-2)
    dx = (weights.float().unsqueeze(-1) * dy).to(streams.dtype)
    return dx.contiguous(), (dy * streams.float()).sum(-1).to(weights.dtype).contiguous()


@read_streams_fwd.register_fake
def _(streams):
    return streams.new_empty((*streams.shape[:-2], streams.shape[-1]))


read_streams_fwd.register_backward(read_streams_bwd)


@read_streams_fwd.register_sharding
def _(streams):
    """Along the axes of the tokens."""
    return [([axis], [axis, axis]) for axis in range(streams.ndim - 2)]


def read_streams_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    randn = partial(torch.randn, device=device, dtype=dtype)
    yield Sample((randn(5, 4, 32), randn(5, 4)), why="four streams")
    weights = torch.randn(2, 3, 4, device=device, dtype=torch.float32)
    yield Sample((randn(2, 3, 4, 37), weights), why="two axes of tokens, weights in float32, an odd width")
    yield Sample((randn(3, 16), randn(3)), why="one token, three streams")
    yield Sample((randn(5, 1, 16), randn(5, 1)), why="one stream")
    yield Sample((randn(0, 4, 16), randn(0, 4)), why="no tokens")
    yield Sample((randn(2, 4, 1030), randn(2, 4)), why="two blocks of columns")
    yield Sample((randn(4, 5, 16).transpose(0, 1), randn(4, 5).t()), why="streams before tokens")
    yield Sample((randn(5, 2, 48)[..., 16:32], randn(5, 2)), why="slices of wider ones")
    yield Sample((randn(2, 16, 40), randn(2, 16)), why="as many streams as can be")


def read_streams_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    weights = torch.rand(8192, 4, device=device, dtype=torch.float32)
    yield Sample((torch.randn(8192, 4, 4096, device=device, dtype=dtype), weights), why="8192, 4 streams of 4096")


def read_streams_cost(streams: Tensor, weights: Tensor) -> Cost:
    size, of_weights = streams.element_size(), weights.numel() * weights.element_size()
    all_streams, one = streams.numel() * size, streams.numel() // streams.shape[-2] * size
    return Cost(all_streams + one + of_weights, 3 * all_streams + 2 * one + 3 * of_weights)


@public_op(
    reference=read_streams_reference,
    differentiable=("streams", "weights"),
    kernel_ops=(read_streams_fwd, read_streams_bwd),
    samples=read_streams_samples,
    resized=normal_resized(lambda rows: ((rows, 4, 48), (rows, 4))),
    workloads=read_streams_workloads,
    cost=read_streams_cost,
)
def read_streams(streams: Tensor, weights: Tensor) -> Tensor:
    """The sum of each token's residual streams with its weights, which a layer reads. In float32 with one rounding.

    Args:
        streams: `[..., N, H]` with N from 1 to 16, float32, float16 or bfloat16, any strides.
        weights: `[..., N]`, any of these dtypes.

    Returns:
        `[..., H]`, contiguous, in the dtype of `streams`.

    Raises:
        TypeError: A tensor is not float32, float16 or bfloat16.
        ValueError: A shape or a device does not fit.

    Source: Zhu et al., 2024, https://arxiv.org/abs/2409.19606.
    """
    check_streams(streams)
    check_weights("weights", weights, streams)
    return read_streams_fwd(streams, weights)
