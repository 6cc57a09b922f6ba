r"""What several residual streams become after a layer: each gets of its output, and they are mixed.

Sources: hyper-connections, https://arxiv.org/abs/2409.19606; with a mixing matrix whose rows and columns sum to 1,
https://arxiv.org/abs/2512.24880.

Forward, for a token's N streams x_i of H values, the layer's output f [H], and the token's q [N] and C [N, N]:

    y_j = q_j * f + sum over i of C_ij * x_i

Backward, given dy:

    dx_i  = sum over j of C_ij * dy_j
    df    = sum over j of q_j * dy_j
    dq_j  = sum(dy_j * f)
    dC_ij = sum(dy_j * x_i)

Both read the streams once. A program has a block of columns of all streams of a token; its parts of dq and dC are added
to those of the other blocks in a fixed order.
"""

from collections.abc import Iterator
from functools import partial

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.rows import as_rows
from llmk.ops.common.samples import normal_resized
from llmk.ops.common.sums import sum_partials
from llmk.ops.streams._patterns import WRITE_STREAMS
from llmk.ops.streams.tiles import check_streams, check_weights, tile_of
from llmk.registry import Cost, KernelOp, Sample, cdiv, check_parameter, empty, jit, public_op, wrap_triton


def write_streams_reference(streams: Tensor, output: Tensor, weights: Tensor, mix: Tensor) -> Tensor:
    mixed = torch.matmul(mix.to(streams.dtype).transpose(-1, -2), streams)
    return (weights.unsqueeze(-1) * output.unsqueeze(-2) + mixed).to(streams.dtype)


@jit
def write_streams_kernel(
    x_ptr, f_ptr, q_ptr, mix_ptr, y_ptr, H, x_stride, f_stride,
    N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    streams, cols = tl.arange(0, BLOCK_S), tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    f = tl.load(f_ptr + token * f_stride + cols, mask=cols < H, other=0.0).to(tl.float32)
    q = tl.load(q_ptr + token * N + streams, mask=streams < N, other=0.0).to(tl.float32)
    y = q[:, None] * f[None, :]
    for i in tl.static_range(N):  # pyright: ignore[reportGeneralTypeIssues]
        x = tl.load(x_ptr + (token * N + i) * x_stride + cols, mask=cols < H, other=0.0).to(tl.float32)
        of_x = tl.load(mix_ptr + (token * N + i) * N + streams, mask=streams < N, other=0.0).to(tl.float32)
        y += of_x[:, None] * x[None, :]
    offsets = ((token * N + streams) * H)[:, None] + cols[None, :]
    mask = (streams < N)[:, None] & (cols < H)[None, :]
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@jit
def write_streams_backward_kernel(
    dy_ptr, x_ptr, f_ptr, q_ptr, mix_ptr, dx_ptr, df_ptr, dq_ptr, dmix_ptr, H, dy_stride, x_stride, f_stride,
    N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    token, tokens = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    streams, cols = tl.arange(0, BLOCK_S), tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = (streams < N)[:, None] & (cols < H)[None, :]
    dy = tl.load(dy_ptr + ((token * N + streams) * dy_stride)[:, None] + cols[None, :], mask=mask, other=0.0)
    dy = dy.to(tl.float32)
    row = tl.program_id(1).to(tl.int64) * tokens + token
    f = tl.load(f_ptr + token * f_stride + cols, mask=cols < H, other=0.0).to(tl.float32)
    q = tl.load(q_ptr + token * N + streams, mask=streams < N, other=0.0).to(tl.float32)
    df = tl.sum(q[:, None] * dy, axis=0)
    tl.store(df_ptr + token * H + cols, df.to(df_ptr.dtype.element_ty), mask=cols < H)
    tl.store(dq_ptr + row * N + streams, tl.sum(dy * f[None, :], axis=1), mask=streams < N)
    for i in tl.static_range(N):
        x = tl.load(x_ptr + (token * N + i) * x_stride + cols, mask=cols < H, other=0.0).to(tl.float32)
        of_x = tl.load(mix_ptr + (token * N + i) * N + streams, mask=streams < N, other=0.0).to(tl.float32)
        dx = tl.sum(of_x[:, None] * dy, axis=0)
        tl.store(dx_ptr + (token * N + i) * H + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < H)
        tl.store(dmix_ptr + (row * N + i) * N + streams, tl.sum(dy * x[None, :], axis=1), mask=streams < N)


def _write_streams_fwd(streams: Tensor, output: Tensor, weights: Tensor, mix: Tensor) -> Tensor:
    x, f, (N, H) = as_rows(streams), as_rows(output), streams.shape[-2:]
    y = empty(streams.shape, streams.dtype, streams.device)
    tile = tile_of(N, H)
    grid = (x.shape[0] // N, cdiv(H, tile["BLOCK_H"]))
    wrap_triton(write_streams_kernel)[grid](
        x, f, weights.contiguous(), mix.contiguous(), y, H, x.stride(0), f.stride(0), **tile
    )
    return y


def _write_streams_bwd(
    grad: Tensor, streams: Tensor, output: Tensor, weights: Tensor, mix: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dy, x, f, (N, H) = as_rows(grad), as_rows(streams), as_rows(output), streams.shape[-2:]
    dx, df = (empty(tensor.shape, tensor.dtype, tensor.device) for tensor in (streams, output))
    tile = tile_of(N, H)
    grid = (x.shape[0] // N, cdiv(H, tile["BLOCK_H"]))
    dq, dmix = (empty((grid[1], *tensor.shape), torch.float32, x.device) for tensor in (weights, mix))
    wrap_triton(write_streams_backward_kernel)[grid](
        dy, x, f, weights.contiguous(), mix.contiguous(), dx, df, dq, dmix,
        H, dy.stride(0), x.stride(0), f.stride(0), **tile,
    )  # fmt: skip
    dweights, dmix = (sum_partials(each, like.dtype, of_tokens=True) for each, like in ((dq, weights), (dmix, mix)))
    return dx, df, dweights, dmix


write_streams_fwd = KernelOp(_write_streams_fwd, launch_cached=True)
write_streams_bwd = KernelOp(_write_streams_bwd, launch_cached=True)


@write_streams_fwd.register_kernel("cpu")
def _(streams, output, weights, mix):
    mixed = mix.float().transpose(-1, -2) @ streams.float()
    y = weights.float().unsqueeze(-1) * output.float().unsqueeze(-2) + mixed
    return y.to(streams.dtype).contiguous()


@write_streams_bwd.register_kernel("cpu")
def _(grad, streams, output, weights, mix):
    dy, q = grad.float(), weights.float().unsqueeze(-1)
    dx, df = (mix.float() @ dy).to(streams.dtype), (q * dy).sum(-2).to(output.dtype)
    dq = (dy * output.float().unsqueeze(-2)).sum(-1).to(weights.dtype)
    dmix = (streams.float() @ dy.transpose(-1, -2)).to(mix.dtype)
    return dx.contiguous(), df.contiguous(), dq.contiguous(), dmix.contiguous()


@write_streams_fwd.register_fake
def _(streams):
    return streams.new_empty(streams.shape)


write_streams_fwd.register_backward(write_streams_bwd, outputs=("result",))


@write_streams_fwd.register_sharding
def _(streams):
    """Along the axes of the tokens."""
    return [([axis], [axis] * 4) for axis in range(streams.ndim - 2)]


def write_streams_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    randn = partial(torch.randn, device=device, dtype=dtype)

    def of(streams: Tensor, float32: bool = False) -> tuple[Tensor, ...]:
        *tokens, N, H = streams.shape
        weights, mix = randn(*tokens, N), randn(*tokens, N, N)
        return streams, randn(*tokens, H), *((weights.float(), mix.float()) if float32 else (weights, mix))

    yield Sample(of(randn(5, 4, 32)), why="four streams")
    yield Sample(of(randn(2, 3, 4, 37), True), why="two axes of tokens, weights in float32, an odd width")
    yield Sample(of(randn(3, 16)), why="one token, three streams")
    yield Sample(of(randn(5, 1, 16)), why="one stream")
    yield Sample(of(randn(0, 4, 16)), why="no tokens")
    yield Sample(of(randn(2, 4, 1030)), why="two blocks of columns")
    yield Sample(of(randn(4, 5, 16).transpose(0, 1)), why="streams before tokens")
    x, f, q, mix = of(randn(5, 2, 48)[..., 16:32])
    yield Sample((x, f, q, mix.transpose(1, 2)), why="slices of wider ones, a transposed matrix")
    yield Sample(of(randn(2, 16, 40)), why="as many streams as can be")


def write_streams_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    streams, output = (torch.randn(8192, *shape, device=device, dtype=dtype) for shape in ((4, 4096), (4096,)))
    weights, mix = (torch.rand(8192, *shape, device=device, dtype=torch.float32) for shape in ((4,), (4, 4)))
    yield Sample((streams, output, weights, mix), why="8192, 4 streams of 4096")


def write_streams_cost(streams: Tensor, output: Tensor, weights: Tensor, mix: Tensor) -> Cost:
    all_streams, one, *small = (x.numel() * x.element_size() for x in (streams, output, weights, mix))
    return Cost(2 * all_streams + one + sum(small), 5 * all_streams + 3 * one + 3 * sum(small))


@public_op(
    reference=write_streams_reference,
    differentiable=("streams", "output", "weights", "mix"),
    kernel_ops=(write_streams_fwd, write_streams_bwd),
    samples=write_streams_samples,
    resized=normal_resized(lambda rows: ((rows, 4, 48), (rows, 48), (rows, 4), (rows, 4, 4))),
    workloads=write_streams_workloads,
    cost=write_streams_cost,
    patterns=WRITE_STREAMS,
)
def write_streams(streams: Tensor, output: Tensor, weights: Tensor, mix: Tensor) -> Tensor:
    """Each token's residual streams mixed, and its layer's output added to each with a weight.

    In float32 with one rounding.

    Args:
        streams: `[..., N, H]` with N from 1 to 16, float32, float16 or bfloat16, any strides.
        output: What the layer made of them, `[..., H]`, any of these dtypes.
        weights: What each stream gets of it, `[..., N]`, any of these dtypes.
        mix: What stream j gets of stream i, at `[..., i, j]`, `[..., N, N]`, any of these dtypes.

    Returns:
        The shape and dtype of `streams`, contiguous.

    Raises:
        TypeError: A tensor is not float32, float16 or bfloat16.
        ValueError: A shape or a device does not fit.

    Sources: Zhu et al., 2024, https://arxiv.org/abs/2409.19606; Xie et al., 2025, https://arxiv.org/abs/2512.24880.
    """
    check_streams(streams)
    N, H = streams.shape[-2:]
    check_parameter("output", output, (*streams.shape[:-2], H), "a row for each token", "streams", streams)
    check_weights("weights", weights, streams)
    check_weights("mix", mix, streams, N)
    return write_streams_fwd(streams, output, weights, mix)
