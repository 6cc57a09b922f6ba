r"""A linear layer with few outputs of rows that are divided by their root mean square, all in float32.

It is what weights of residual streams are made of, https://arxiv.org/abs/2512.24880: of N * H values of a token there
come N * N + 2 * N numbers, with a weight in float32. In plain PyTorch the streams are copied to float32 for it.

Forward, for rows x [K] and a weight W [P, K]:

    r = 1 / sqrt(mean(x^2) + eps)
    y = r * W x

Backward, given dy:

    dx = r * W^T dy - r^2 * sum(dy * y) / K * x
    dW = sum over rows of r * dy x^T

Both read x once. A program of the forward pass has some rows and walks their columns; one of the backward pass has a
block of columns and walks a share of the rows, and its part of dW is added to those of the others in a fixed order.
Products are of three TF32 numbers where tensor cores have them, which is as good as float32.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.rows import as_rows
from llmk.ops.common.samples import normal_resized
from llmk.ops.common.sums import sum_partials
from llmk.ops.streams._patterns import RMS_LINEAR
from llmk.registry import (
    REPLICATE,
    Cost,
    KernelOp,
    Sample,
    cdiv,
    check_not_negative,
    check_rows,
    check_same,
    check_shape,
    empty,
    grid_cap,
    jit,
    max_warps,
    next_power_of_2,
    num_programs,
    or_no_gradient,
    public_op,
    row_axes,
    wrap_triton,
)

MAX_OUTPUTS = 64
"""The most outputs that a program holds of its rows."""


def rms_linear_reference(input: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    x = input.to(torch.promote_types(input.dtype, torch.float32))
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return torch.nn.functional.linear(x, weight.to(x.dtype))


@jit
def rms_linear_kernel(
    x_ptr, w_ptr, y_ptr, ms_ptr, M, K, P, x_stride, eps,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    eps = tl.cast(eps, tl.float32)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    outs, ks = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_K)
    squares = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
    y = tl.zeros((BLOCK_M, BLOCK_P), dtype=tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=3):
        cols = start + ks
        mask = (rows < M)[:, None] & (cols < K)[None, :]
        x = tl.load(x_ptr + (rows * x_stride)[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        w_mask = (cols < K)[:, None] & (outs < P)[None, :]
        w = tl.load(w_ptr + outs[None, :] * K + cols[:, None], mask=w_mask, other=0.0).to(tl.float32)
        squares += x * x
        y = tl.dot(x, w, y, input_precision=PRECISION)
    ms = tl.sum(squares, axis=1) / K + eps
    y *= tl.div_rn(1.0, tl.sqrt_rn(ms))[:, None]
    tl.store(ms_ptr + rows, ms, mask=rows < M)
    tl.store(y_ptr + (rows * P)[:, None] + outs[None, :], y, mask=(rows < M)[:, None] & (outs < P)[None, :])


@jit
def rms_linear_backward_kernel(
    dy_ptr, x_ptr, w_ptr, y_ptr, ms_ptr, dx_ptr, partial_ptr, M, K, P, x_stride,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    share, shares = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    outs = tl.arange(0, BLOCK_P)
    cols = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    w_mask = (outs < P)[:, None] & (cols < K)[None, :]
    w = tl.load(w_ptr + outs[:, None] * K + cols[None, :], mask=w_mask, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK_P, BLOCK_K), dtype=tl.float32)
    for start in range(share * BLOCK_M, M, shares * BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        mask = (rows < M)[:, None] & (outs < P)[None, :]
        offsets = (rows * P)[:, None] + outs[None, :]
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0)
        y = tl.load(y_ptr + offsets, mask=mask, other=0.0)
        ms = tl.load(ms_ptr + rows, mask=rows < M, other=1.0)
        dy_r = dy * tl.div_rn(1.0, tl.sqrt_rn(ms))[:, None]
        of_x = tl.div_rn(tl.sum(dy * y, axis=1), ms * K)
        x_mask = (rows < M)[:, None] & (cols < K)[None, :]
        x = tl.load(x_ptr + (rows * x_stride)[:, None] + cols[None, :], mask=x_mask, other=0.0).to(tl.float32)
        dx = tl.dot(dy_r, w, input_precision=PRECISION) - of_x[:, None] * x
        tl.store(dx_ptr + (rows * K)[:, None] + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=x_mask)
        dw = tl.dot(tl.trans(dy_r), x, dw, input_precision=PRECISION)
    if partial_ptr is not None:
        tl.store(partial_ptr + (share * P + outs)[:, None] * K + cols[None, :], dw, mask=w_mask)


def _tile(K: int, P: int) -> dict[str, Any]:
    """Tensor cores take 16 numbers at the least. AMD's have no three TF32 numbers, but float32 itself."""
    precision = "tf32x3" if max_warps() == 32 else "ieee"
    block_k, block_p = (min(64, max(16, next_power_of_2(n))) for n in (K, P))
    block_m = 2048 // max(32, block_p)  # with more rows of 64 outputs the backward pass spills registers
    return {"PRECISION": precision, "BLOCK_M": block_m, "BLOCK_P": block_p, "BLOCK_K": block_k, "num_warps": 8}


def _rms_linear_fwd(input: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x, (P, K) = as_rows(input), weight.shape
    M = x.shape[0]
    y = empty((*input.shape[:-1], P), torch.float32, x.device)
    ms = empty(input.shape[:-1], torch.float32, x.device)
    tile = _tile(K, P)
    wrap_triton(rms_linear_kernel)[(cdiv(M, tile["BLOCK_M"]),)](
        x, weight.contiguous(), y, ms, M, K, P, x.stride(0), eps, **tile
    )
    return y, ms


def _rms_linear_bwd(
    grad: Tensor, input: Tensor, weight: Tensor, output: Tensor, ms: Tensor, need_weight: bool
) -> tuple[Tensor, Tensor]:
    x, (P, K) = as_rows(input), weight.shape
    tile = _tile(K, P)
    M, blocks = x.shape[0], cdiv(K, tile["BLOCK_K"])
    shares = grid_cap(cdiv(M, tile["BLOCK_M"]), max(1, num_programs(x.device, 8) // blocks))
    dx = empty(input.shape, input.dtype, x.device)
    partials = empty((shares, P, K), torch.float32, x.device) if need_weight else None
    wrap_triton(rms_linear_backward_kernel)[(blocks, shares)](
        grad.contiguous(), x, weight.contiguous(), output.contiguous(), ms.contiguous(), dx, partials,
        M, K, P, x.stride(0), **tile,
    )  # fmt: skip
    dw = None if partials is None else sum_partials(partials, weight.dtype)
    return dx, or_no_gradient(dw, grad)


rms_linear_fwd = KernelOp(_rms_linear_fwd, launch_cached=True)
rms_linear_bwd = KernelOp(_rms_linear_bwd, launch_cached=True)


@rms_linear_fwd.register_kernel("cpu")
def _(input, weight, eps):
    x = input.float()
    ms = x.square().mean(-1) + eps
    y = torch.nn.functional.linear(x, weight.float()) * torch.rsqrt(ms).unsqueeze(-1)
    return y.contiguous(), ms.contiguous()


@rms_linear_bwd.register_kernel("cpu")
def _(grad, input, weight, output, ms, need_weight):
    x, ms = input.float(), ms.unsqueeze(-1)
    dy = grad * torch.rsqrt(ms)
    dx = dy @ weight.float() - (grad * output).sum(-1, keepdim=True) / (ms * x.shape[-1]) * x
    dw = (dy.flatten(0, -2).mT @ x.flatten(0, -2)).to(weight.dtype) if need_weight else None
    return dx.to(input.dtype).contiguous(), or_no_gradient(dw, grad)


@rms_linear_fwd.register_fake
def _(input, weight):
    y = input.new_empty((*input.shape[:-1], weight.shape[0]), dtype=torch.float32)
    return y, input.new_empty(input.shape[:-1], dtype=torch.float32)


rms_linear_fwd.register_backward(rms_linear_bwd, outputs=("output", "ms"))


@rms_linear_fwd.register_sharding
def _(input):
    return [([axis, axis], [axis, REPLICATE]) for axis in row_axes(input)]


def rms_linear_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    randn = partial(torch.randn, device=device, dtype=dtype)
    yield Sample((randn(5, 64), randn(24, 64)), why="four streams of 16")
    yield Sample((randn(2, 3, 37), torch.randn(5, 37, device=device, dtype=torch.float32)), why="odd, a float32 weight")
    yield Sample((randn(1, 16), randn(1, 16), 1e-3), why="one row, one output")
    yield Sample((randn(0, 16), randn(3, 16)), why="no rows")
    yield Sample((randn(70, 130), randn(64, 130)), why="several blocks, as many outputs as can be")
    yield Sample((randn(24, 9).t(), randn(4, 24)), why="strided")
    yield Sample((randn(5, 80)[:, 16:48], randn(4, 32)), why="slices of wider rows")


def rms_linear_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    weight = 0.02 * torch.randn(24, 16384, device=device, dtype=torch.float32)
    yield Sample((torch.randn(8192, 16384, device=device, dtype=dtype), weight), why="8192, 4 streams of 4096")


def rms_linear_cost(input: Tensor, weight: Tensor, eps: float = 1e-6) -> Cost:
    x, w = (tensor.numel() * tensor.element_size() for tensor in (input, weight))
    y = 4 * input.numel() // weight.shape[1] * weight.shape[0]
    return Cost(x + w + y, 3 * x + 3 * w + 3 * y)


@public_op(
    reference=rms_linear_reference,
    differentiable=("input", "weight"),
    kernel_ops=(rms_linear_fwd, rms_linear_bwd),
    samples=rms_linear_samples,
    resized=normal_resized(lambda rows: ((rows, 48), (24, 48))),
    workloads=rms_linear_workloads,
    cost=rms_linear_cost,
    patterns=RMS_LINEAR,
)
def rms_linear(input: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """A linear layer with few outputs of rows divided by their root mean square, in float32.

    Args:
        input: `[..., K]`, float32, float16 or bfloat16, any strides.
        weight: `[P, K]` with P from 1 to 64, any of these dtypes.
        eps: Added to each mean square, at least 0.

    Returns:
        `[..., P]`, float32, contiguous.

    Raises:
        TypeError: A tensor is not float32, float16 or bfloat16.
        ValueError: A shape or a device does not fit, or `eps` is out of range.

    Source: Xie et al., 2025, https://arxiv.org/abs/2512.24880.
    """
    check_rows("input", input, "K")
    check_rows("weight", weight, "K")
    if weight.dim() != 2 or not 1 <= weight.shape[0] <= MAX_OUTPUTS:
        expected = f"[P, K] with P from 1 to {MAX_OUTPUTS}"
        raise ValueError(f"weight: expected shape {expected}, got {tuple(weight.shape)}")
    check_shape("weight", weight, (weight.shape[0], input.shape[-1]), "the last axis of input")
    check_same("weight", weight, "input", input)
    check_not_negative("eps", eps)
    y, _ = rms_linear_fwd(input, weight, eps)
    return y
