r"""Dynamic tanh: a learned squashing of each feature, in the place of a normalization.

Source: Zhu et al., "Transformers without Normalization", 2025, https://arxiv.org/abs/2503.10622.

Forward, for each row x of N values:

    t = tanh(alpha * x)
    y = w * t + b

Backward, given dy, with s = 1 - t^2 from e = exp(-2 |alpha x|) as 4 e / (1 + e)^2, which cancels nowhere:

    dx     = alpha * dy * w * s
    dalpha = sum over all of dy * w * s * x
    dw     = sum over rows of dy * t
    db     = sum over rows of dy

Only x is kept. Each program of the backward pass walks over its share of the rows in one block of columns; sums are
float32, and those of the programs are added in a fixed order: no atomics.
"""

from collections.abc import Iterator
from functools import partial

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.math import exp, tanh, tanh_reference
from llmk.ops.common.rows import as_rows, contiguous
from llmk.ops.common.samples import normal_resized
from llmk.ops.common.sums import sum_affine, sum_to_scalar
from llmk.registry import (
    Cost,
    KernelOp,
    Sample,
    cdiv,
    check_parameter,
    check_rows,
    empty,
    grid_cap,
    jit,
    like_first,
    no_gradient,
    num_programs,
    or_no_gradient,
    public_op,
    split_rows,
    wrap_triton,
)


def dyt_reference(input: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = weight * tanh_reference(alpha * input)
    return (y if bias is None else y + bias).to(input.dtype)


@jit
def dyt_kernel(x_ptr, alpha_ptr, w_ptr, b_ptr, y_ptr, N, x_stride, BLOCK_N: tl.constexpr):
    blocks = tl.cdiv(N, BLOCK_N)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + row * x_stride + cols, mask=cols < N, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    y = w * tanh(tl.load(alpha_ptr).to(tl.float32) * x)
    if b_ptr is not None:
        y += tl.load(b_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * N + cols, y.to(y_ptr.dtype.element_ty), mask=cols < N)


@jit
def dyt_backward_kernel(
    dy_ptr, x_ptr, alpha_ptr, w_ptr, dx_ptr, partial_ptr, dalpha_ptr, M, N, dy_stride, x_stride,
    HAS_DW: tl.constexpr, HAS_DB: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    share = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    w = tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    alpha = tl.load(alpha_ptr).to(tl.float32)
    dw = tl.zeros((BLOCK_N,), dtype=tl.float32)
    db = tl.zeros((BLOCK_N,), dtype=tl.float32)
    dalpha = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for row in tl.range(share, M, tl.num_programs(0), num_stages=NUM_STAGES):
        x = tl.load(x_ptr + row * x_stride + cols, mask=cols < N, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_stride + cols, mask=cols < N, other=0.0).to(tl.float32)
        e = exp(-2.0 * tl.abs(alpha * x))
        du = dy * w * tl.div_rn(4.0 * e, (1.0 + e) * (1.0 + e))
        tl.store(dx_ptr + row * N + cols, (alpha * du).to(dx_ptr.dtype.element_ty), mask=cols < N)
        dalpha += tl.where(cols < N, du * x, 0.0)
        if HAS_DW:
            dw += dy * tanh(alpha * x)
        if HAS_DB:
            db += dy
    offsets = share * ((HAS_DW + HAS_DB) * N) + cols
    if HAS_DW:
        tl.store(partial_ptr + offsets, dw, mask=cols < N)
    if HAS_DB:
        tl.store(partial_ptr + offsets + HAS_DW * N, db, mask=cols < N)
    if dalpha_ptr is not None:
        tl.store(dalpha_ptr + share * tl.num_programs(1) + tl.program_id(1), tl.sum(dalpha, axis=0))


# Eight elements a thread: each access of 16 bits is 16 bytes wide.
BLOCK = {"BLOCK_N": 1024, "num_warps": 4}


def _shares(rows: int, blocks: int, device: torch.device) -> int:
    """Into how many the rows are divided, for 16 programs on each multiprocessor; each share costs a row of partials.

    There is one for each multiprocessor, but of very wide rows no more than fill it.
    """
    return grid_cap(rows, cdiv(num_programs(device, 16), max(16, blocks)))


def _dyt_fwd(input: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    x = as_rows(input)
    M, N = x.shape
    y = empty(input.shape, input.dtype, input.device)
    wrap_triton(dyt_kernel)[(M * cdiv(N, BLOCK["BLOCK_N"]),)](
        x, alpha, weight.contiguous(), contiguous(bias), y, N, x.stride(0), **BLOCK
    )
    return y


def _dyt_bwd(
    grad: Tensor,
    input: Tensor,
    alpha: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    need_alpha: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dy, x = as_rows(grad), as_rows(input)
    (M, N), device = x.shape, input.device
    blocks = cdiv(N, BLOCK["BLOCK_N"])
    shares = _shares(M, blocks, device)
    dx = empty(input.shape, input.dtype, device)
    sums = empty((shares, need_weight + need_bias, N), torch.float32, device) if need_weight or need_bias else None
    alphas = empty((shares, blocks), torch.float32, device) if need_alpha else None
    needed, sizes = {"HAS_DW": need_weight, "HAS_DB": need_bias}, (M, N, dy.stride(0), x.stride(0))
    wrap_triton(dyt_backward_kernel)[(shares, blocks)](
        dy, x, alpha, weight.contiguous(), dx, sums, alphas, *sizes, **needed, NUM_STAGES=3, **BLOCK
    )
    dw = empty((N,), weight.dtype, device) if need_weight else None
    db = empty((N,), bias.dtype, device) if need_bias and bias is not None else None
    if sums is not None:
        sum_affine(sums, dw, db)
    dalpha = None if alphas is None else sum_to_scalar(alphas).to(alpha.dtype).view(1)
    return dx, or_no_gradient(dalpha, grad), or_no_gradient(dw, grad), or_no_gradient(db, grad)


dyt_fwd = KernelOp(_dyt_fwd, launch_cached=True)
dyt_bwd = KernelOp(_dyt_bwd, launch_cached=True)


@dyt_fwd.register_kernel("cpu")
def _(input, alpha, weight, bias):
    y = weight.float() * torch.tanh(alpha.float() * input.float())
    y = y if bias is None else y + bias.float()
    return y.to(input.dtype).contiguous()


@dyt_bwd.register_kernel("cpu")
def _(grad, input, alpha, weight, bias, need_alpha, need_weight, need_bias):
    x, dy = input.float(), grad.float()
    u = alpha.float() * x
    e = torch.exp(-2.0 * u.abs())
    du = dy * weight.float() * (4.0 * e / (1.0 + e).square())
    dalpha, dw, db = (no_gradient(grad) for _ in range(3))
    if need_alpha:
        dalpha = (du * x).sum().to(alpha.dtype).view(1)
    if need_weight:
        dw = (dy * torch.tanh(u)).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
    if need_bias:
        db = dy.reshape(-1, x.shape[-1]).sum(0).to(bias.dtype)
    return (alpha.float() * du).to(input.dtype).contiguous(), dalpha, dw, db


dyt_fwd.register_fake(like_first)
dyt_fwd.register_backward(dyt_bwd)
dyt_fwd.register_sharding(split_rows(outputs=1, inputs=1, parameters=3))


def dyt_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    randn = partial(torch.randn, device=device, dtype=dtype)
    alpha = torch.full((1,), 0.5, device=device, dtype=dtype)
    yield Sample((randn(4, 16), alpha, randn(16), randn(16)), why="powers of two")
    yield Sample((randn(2, 3, 37), -alpha, randn(37)), why="three dimensions, odd width, no bias, a negative alpha")
    yield Sample((randn(33), alpha.float(), randn(33, dtype=torch.float32), randn(33)), why="one dimension, float32")
    yield Sample((30 * randn(5, 40), alpha, randn(40), randn(40)), why="saturated")
    yield Sample((1e-3 * randn(5, 40), alpha, randn(40), randn(40)), why="nearly linear")
    yield Sample((randn(0, 16), alpha, randn(16), randn(16)), why="no rows")
    yield Sample((randn(24, 6).t(), alpha, randn(48)[::2], randn(24)), why="columns strided")
    yield Sample((randn(6, 80)[:, 16:48], alpha, randn(32), randn(32)), why="a slice of a wider row")
    yield Sample((randn(300, 24), alpha, randn(24), randn(24)), why="more rows than programs")
    yield Sample((randn(2, 5003), alpha, randn(5003), randn(5003)), why="several blocks of columns")


def dyt_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for rows, columns in [(32768, 4096), (8192, 8192)]:
        x, alpha = torch.randn(rows, columns, device=device, dtype=dtype), torch.ones(1, device=device, dtype=dtype)
        weight, bias = torch.randn(2, columns, device=device, dtype=dtype).unbind()
        yield Sample((x, alpha, weight, bias), why=f"{rows}x{columns}")


@public_op(
    reference=dyt_reference,
    differentiable=("input", "alpha", "weight", "bias"),
    kernel_ops=(dyt_fwd, dyt_bwd),
    samples=dyt_samples,
    resized=normal_resized(lambda rows: ((rows, 48), (1,), (48,), (48,))),
    workloads=dyt_workloads,
    cost=Cost.passes(2, 5),
)
def dyt(input: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Dynamic tanh over the last axis: `weight * tanh(alpha * input) + bias`, in float32 with one rounding.

    Args:
        input: `[..., N]`, float32, float16 or bfloat16, any strides.
        alpha: `[1]`, any of these dtypes.
        weight: `[N]`, any of these dtypes.
        bias: `[N]`, any of these dtypes; None for none.

    Returns:
        `[..., N]`, contiguous, in the dtype of `input`.

    Raises:
        TypeError: A tensor is not float32, float16 or bfloat16.
        ValueError: `input` has no axis or its last one is empty, or another's shape or device does not fit.

    Source: Zhu et al., 2025, https://arxiv.org/abs/2503.10622.
    """
    check_rows("input", input, "N")
    columns = input.shape[-1:]
    for name, tensor, shape, meaning in (
        ("alpha", alpha, (1,), "one number"),
        ("weight", weight, columns, "the last axis of input"),
        ("bias", bias, columns, "the last axis of input"),
    ):
        check_parameter(name, tensor, shape, meaning, "input", input)
    return dyt_fwd(input, alpha, weight, bias)
