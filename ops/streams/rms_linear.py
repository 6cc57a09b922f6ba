r"""A linear layer with few outputs of rows that are divided by their root mean square, all in float32.

It is what weights of residual streams are made of, https://arxiv.org/abs/2512.24880: of N * H values of a token there
come N * N + 2 * N numbers, with a weight in float32. In plain PyTorch the streams are copied to float32 for it.

Forward, for rows x [K] and a weight W [P, K]:

    r = 1 / sqrt(mean(x^2) + eps)
    y = r * W x

Backward, given dy:

    dx = r * W^T dy - r^2 * sum(dy * y) / K * x
    dW = sum over rows of r * dy x^T

Both read x once. A program of the forward pass has some rows and a part of their columns, whose sums another kernel
adds up in a fixed order; one of the backward pass has a block of columns and walks a share of the rows, and its part of
dW is added to those of the others.

A product of float32 numbers is one of their parts: a number is the sum of three of bfloat16, which tensor cores
multiply exactly. x in bfloat16 is one such part. Where x is not bfloat16, parts are TF32 numbers.

H200, 8192 x 16384 in bfloat16, 24 outputs: forward 0.095 ms, with the backward pass 0.277, which is 1.47 and 1.43 times
what bytes need, and compiled PyTorch takes 0.47 and 1.25. The parts of dy are made once, by a kernel of their own: a
backward pass whose walk over x makes them takes 0.226 ms instead of 0.182.
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
from llmk.ops.streams.tiles import MAX_OUTPUTS
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
from llmk.registry.devices import INTERPRET

COLUMNS = 2048
"""Those of a part: so a row's sums are the same among any number of rows."""


def rms_linear_reference(input: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    x = input.to(torch.promote_types(input.dtype, torch.float32))
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return torch.nn.functional.linear(x, weight.to(x.dtype))


_PART = tl.constexpr(tl.float32 if INTERPRET else tl.bfloat16)
"""The interpreter multiplies the integers that it keeps bfloat16 in."""


@jit
def _rest(x, high):
    """Return what a part leaves of a number: nothing of infinity."""
    return tl.where(tl.abs(high) < float("inf"), x - high, 0.0)


@jit
def _parts(x):
    """Return the three numbers of bfloat16 whose sum is x."""
    high = x.to(tl.bfloat16).to(tl.float32)
    rest = _rest(x, high)
    middle = rest.to(tl.bfloat16).to(tl.float32)
    return high.to(_PART), middle.to(_PART), _rest(rest, middle).to(_PART)


@jit
def _store_parts(ptrs, step, x, mask):
    parts = _parts(x)
    for i in tl.static_range(3):  # pyright: ignore[reportGeneralTypeIssues]
        tl.store(ptrs + i * step, parts[i].to(tl.bfloat16), mask=mask)


@jit
def _load_parts(ptrs, step, mask):
    high, middle = tl.load(ptrs, mask=mask, other=0.0), tl.load(ptrs + step, mask=mask, other=0.0)
    return high.to(_PART), middle.to(_PART), tl.load(ptrs + 2 * step, mask=mask, other=0.0).to(_PART)


@jit
def _product_of_parts(x, high, middle, low):
    """Return x times a sum of parts, over one block of columns.

    Tensor cores round sums of bfloat16 products towards 0: over 2048 columns that makes 7e-6 of a result, over a block
    of them from the smallest part on 3e-7.
    """
    x = x.to(_PART)
    return tl.dot(x, high, tl.dot(x, middle, tl.dot(x, low)))


@jit
def rms_linear_parts_kernel(w_ptr, part_ptr, N, BLOCK_N: tl.constexpr):
    """Store the parts `[3, N]` of N numbers."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    w = tl.load(w_ptr + offsets, mask=offsets < N, other=0.0).to(tl.float32)
    _store_parts(part_ptr + offsets, tl.cast(N, tl.int64), w, offsets < N)


@jit
def rms_linear_kernel(
    x_ptr, w_ptr, part_ptr, square_ptr, M, K, P, x_stride, PRECISION: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute W x and the sums of squares over some columns, a part `[P, M]` of one and `[M]` of the other."""
    part = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    outs, ks = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_K)
    first, end = part * COLUMNS, tl.minimum(part * COLUMNS + COLUMNS, K)
    squares = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
    y = tl.zeros((BLOCK_M, BLOCK_P), dtype=tl.float32)
    for start in tl.range(first, end, BLOCK_K, num_stages=3):
        cols = start + ks
        mask = (rows < M)[:, None] & (cols < end)[None, :]
        x = tl.load(x_ptr + (rows * x_stride)[:, None] + cols[None, :], mask=mask, other=0.0)
        w_mask, w_ptrs = (cols < end)[:, None] & (outs < P)[None, :], w_ptr + outs[None, :] * K + cols[:, None]
        squares += x.to(tl.float32) * x.to(tl.float32)
        if PRECISION == "parts":
            high, middle, low = _load_parts(w_ptrs, P * K, w_mask)
            y += _product_of_parts(x, high, middle, low)
        else:
            w = tl.load(w_ptrs, mask=w_mask, other=0.0).to(tl.float32)
            y = tl.dot(x.to(tl.float32), w, y, input_precision=PRECISION)
    tl.store(square_ptr + part * M + rows, tl.sum(squares, axis=1), mask=rows < M)
    out_mask = (rows < M)[:, None] & (outs < P)[None, :]
    tl.store(part_ptr + (part * P + outs)[None, :] * M + rows[:, None], y, mask=out_mask)


@jit
def rms_linear_sum_kernel(
    part_ptr, square_ptr, y_ptr, ms_ptr, M, K, P, parts, eps, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr
):
    """Add up the parts of rows in their order, and divide by the root mean square."""
    eps = tl.cast(eps, tl.float32)
    rows, outs = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_P)
    mask = (rows < M)[:, None] & (outs < P)[None, :]
    y, squares = tl.zeros((BLOCK_M, BLOCK_P), dtype=tl.float32), tl.zeros((BLOCK_M,), dtype=tl.float32)
    for part in range(parts):
        at = tl.cast(part, tl.int64)
        y += tl.load(part_ptr + (at * P + outs)[None, :] * M + rows[:, None], mask=mask, other=0.0)
        squares += tl.load(square_ptr + at * M + rows, mask=rows < M, other=0.0)
    ms = squares / K + eps
    tl.store(ms_ptr + rows, ms, mask=rows < M)
    tl.store(y_ptr + (rows * P)[:, None] + outs[None, :], y * tl.div_rn(1.0, tl.sqrt_rn(ms))[:, None], mask=mask)


@jit
def rms_linear_rows_kernel(
    dy_ptr, y_ptr, ms_ptr, scaled_ptr, of_x_ptr, M, K, P,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Compute r dy of rows, or its parts, with zeros up to a block of outputs, and sum(dy * y) r^2 / K."""
    rows, outs = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_P)
    row_mask = (rows < M)[:, None]
    mask, offsets = row_mask & (outs < P)[None, :], (rows * P)[:, None] + outs[None, :]
    dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0)
    y = tl.load(y_ptr + offsets, mask=mask, other=0.0)
    ms = tl.load(ms_ptr + rows, mask=rows < M, other=1.0)
    scaled, scaled_ptrs = dy * tl.div_rn(1.0, tl.sqrt_rn(ms))[:, None], scaled_ptr + (rows * BLOCK_P)[:, None] + outs
    if PRECISION == "parts":
        _store_parts(scaled_ptrs, tl.cast(M, tl.int64) * BLOCK_P, scaled, row_mask)
    else:
        tl.store(scaled_ptrs, scaled, mask=row_mask)
    tl.store(of_x_ptr + rows, tl.div_rn(tl.sum(dy * y, axis=1), ms * K), mask=rows < M)


@jit
def rms_linear_backward_kernel(
    scaled_ptr, of_x_ptr, x_ptr, w_ptr, dx_ptr, partial_ptr, M, K, P, x_stride, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    share, shares = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    outs, cols = tl.arange(0, BLOCK_P), tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    w_mask = (outs < P)[:, None] & (cols < K)[None, :]
    w = tl.load(w_ptr + outs[:, None] * K + cols[None, :], mask=w_mask, other=0.0).to(tl.float32)
    w_high, w_middle, _w_low = _parts(w)
    block = tl.arange(0, BLOCK_M).to(tl.int64)  # pointers of each block anew take registers that there are not
    x_ptrs, dx_ptrs = x_ptr + (block * x_stride)[:, None] + cols[None, :], dx_ptr + (block * K)[:, None] + cols[None, :]
    dy_ptrs, step = scaled_ptr + (block * BLOCK_P)[:, None] + outs[None, :], tl.cast(M, tl.int64) * BLOCK_P
    dw = tl.zeros((BLOCK_K, BLOCK_P), dtype=tl.float32)
    STAGES: tl.constexpr = 3 if PRECISION == "parts" else 2  # with a third, TF32 numbers of odd rows spill registers
    for start in tl.range(share * BLOCK_M, M, shares * BLOCK_M, num_stages=STAGES):
        row_mask = (block < M - start)[:, None]
        mask = row_mask & (cols < K)[None, :]
        of_x = tl.load(of_x_ptr + start + block, mask=block < M - start, other=0.0)
        x = tl.load(x_ptrs + start * x_stride, mask=mask, other=0.0)
        dx = -of_x[:, None] * x.to(tl.float32)
        if PRECISION == "parts":  # dx is rounded to bfloat16: what three products leave out is 2**-16 of a term
            high, middle, low = _load_parts(dy_ptrs + start * BLOCK_P, step, row_mask)
            dx = tl.dot(high, w_high, tl.dot(high, w_middle, tl.dot(middle, w_high, dx)))
            dw += _product_of_parts(tl.trans(x), high, middle, low)
        else:
            dy = tl.load(dy_ptrs + start * BLOCK_P, mask=row_mask, other=0.0)
            dw = tl.dot(tl.trans(x.to(tl.float32)), dy, dw, input_precision=PRECISION)
            dx = tl.dot(dy, w, dx, input_precision=PRECISION)
        tl.store(dx_ptrs + start * K, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if partial_ptr is not None:
        partial_ptrs = partial_ptr + (share * P + outs)[None, :] * K + cols[:, None]
        tl.store(partial_ptrs, dw, mask=(cols < K)[:, None] & (outs < P)[None, :])


def _tile(x: Tensor, P: int, columns: int) -> dict[str, Any]:
    """Tensor cores take 16 numbers at the least. AMD's have no three TF32 numbers, but float32 itself."""
    block_p, precision = max(16, next_power_of_2(P)), "tf32x3" if max_warps() == 32 else "ieee"
    return {
        "PRECISION": "parts" if x.dtype == torch.bfloat16 else precision,
        "BLOCK_M": 2048 // max(32, block_p),  # more rows spill registers: of 64 outputs, or of odd length
        "BLOCK_P": block_p,
        "BLOCK_K": min(columns, max(16, next_power_of_2(x.shape[1]))),
    }


def _parts_of(weight: Tensor) -> Tensor:
    """Return the parts `[3, P, K]`: split by every block of rows instead, they make the product 1.2 times as long."""
    parts = empty((3, *weight.shape), torch.bfloat16, weight.device)
    grid = (cdiv(weight.numel(), 1024),)
    wrap_triton(rms_linear_parts_kernel)[grid](weight, parts, weight.numel(), BLOCK_N=1024, num_warps=4)
    return parts


def _rms_linear_fwd(input: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x, weight, (P, K), split = as_rows(input), weight.contiguous(), weight.shape, input.dtype == torch.bfloat16
    M, parts, device = x.shape[0], cdiv(K, COLUMNS), x.device
    y = empty((*input.shape[:-1], P), torch.float32, device)
    ms = empty(input.shape[:-1], torch.float32, device)
    sums, squares = empty((parts, P, M), torch.float32, device), empty((parts, M), torch.float32, device)
    tile, operand = _tile(x, P, 64), _parts_of(weight) if split else weight
    wrap_triton(rms_linear_kernel)[(cdiv(M, tile["BLOCK_M"]), parts)](
        x, operand, sums, squares, M, K, P, x.stride(0), COLUMNS=COLUMNS, **tile, num_warps=4
    )
    wrap_triton(rms_linear_sum_kernel)[(cdiv(M, 32),)](
        sums, squares, y, ms, M, K, P, parts, eps, BLOCK_M=32, BLOCK_P=tile["BLOCK_P"], num_warps=4
    )
    return y, ms


def _rms_linear_bwd(
    grad: Tensor, input: Tensor, weight: Tensor, output: Tensor, ms: Tensor, need_weight: bool
) -> tuple[Tensor, Tensor]:
    x, (P, K), split = as_rows(input), weight.shape, input.dtype == torch.bfloat16
    tile = _tile(x, P, 128 if split else 64)
    M, blocks, block_p = x.shape[0], cdiv(K, tile["BLOCK_K"]), tile["BLOCK_P"]
    of_x = empty((M,), torch.float32, x.device)
    scaled = empty((3 if split else 1, M, block_p), torch.bfloat16 if split else torch.float32, x.device)
    wrap_triton(rms_linear_rows_kernel)[(cdiv(M, 32),)](
        grad.contiguous(), output.contiguous(), ms.contiguous(), scaled, of_x, M, K, P,
        PRECISION=tile["PRECISION"], BLOCK_M=32, BLOCK_P=block_p, num_warps=4,
    )  # fmt: skip
    shares = grid_cap(cdiv(M, tile["BLOCK_M"]), max(1, num_programs(x.device, 2) // blocks))
    dx = empty(input.shape, input.dtype, x.device)
    partials = empty((shares, P, K), torch.float32, x.device) if need_weight else None
    wrap_triton(rms_linear_backward_kernel)[(blocks, shares)](
        scaled, of_x, x, weight.contiguous(), dx, partials, M, K, P, x.stride(0),
        **tile, num_warps=4 if split else 8,  # of TF32 numbers four warps have too few registers
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
