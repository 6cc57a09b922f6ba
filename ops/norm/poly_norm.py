r"""PolyNorm: an activation of three normalized powers, weighted by three learned numbers.

Source: Zhuo et al., "Polynomial Composition Activations", 2024, https://arxiv.org/abs/2411.03884; the order of the
weights and the root mean square in place of the norm are those of the authors' code.

Forward, for each row x of N values, with powers u_1 = x^3, u_2 = x^2, u_3 = x:

    y = b + sum over k of w_k * u_k / sqrt(ms_k)    with ms_k = mean(u_k^2) + eps

Backward, given dy, with m_k = mean(dy * u_k):

    dx   = sum over k of w_k / sqrt(ms_k) * (dy - u_k * m_k / ms_k) * du_k/dx
    dw_k = sum over rows of N * m_k / sqrt(ms_k)
    db   = sum of dy

The sixth powers of values past 2^21 overflow. Of a row with values past 2^16, s * x with a power of two s that brings
the largest below 2^16 stands for x, eps * s^2k for eps, and s * dx is made: the u_k / sqrt(ms_k) are the same numbers.
Such a row's sums are made twice. The three ms and s are kept.

A program takes one row after another, each in blocks, of which there is one where it fits; the second pass over a row
finds it in a cache. Sums are float32, those of the programs added in a fixed order: no atomics.
"""

from collections.abc import Iterator
from functools import partial

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.rows import as_rows
from llmk.ops.common.samples import normal_resized, normal_workloads
from llmk.ops.common.sums import sum_partials
from llmk.registry import (
    Cost,
    KernelOp,
    Sample,
    check_dtype,
    check_not_negative,
    check_parameter,
    check_rows,
    check_same,
    empty,
    grid_cap,
    jit,
    next_power_of_2,
    num_programs,
    public_op,
    split_rows,
    wrap_triton,
)


def poly_norm_reference(input: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6) -> Tensor:
    y = bias
    for k, power in enumerate((input**3, input**2, input)):
        y = y + weight[k] * power * torch.rsqrt(power.square().mean(-1, keepdim=True) + eps)
    return y.to(input.dtype)


LARGEST = 2.0**16
"""Sixth powers of smaller values are below 2^96, with room for as many of them as a row can have."""
_LARGEST = tl.constexpr(LARGEST)


@jit
def _overflow_scale(largest):
    """The power of two that brings a row's largest value below LARGEST, or 1 where it is or is infinite."""
    power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where((largest >= _LARGEST) & (largest < float("inf")), tl.div_rn(0.5 * _LARGEST, power), 1.0)


@jit
def poly_norm_kernel(x_ptr, w_ptr, b_ptr, y_ptr, ms_ptr, M, N, x_stride, eps, BLOCK_N: tl.constexpr):
    eps = tl.cast(eps, tl.float32)
    w1, w2, w3 = (tl.load(w_ptr).to(tl.float32), tl.load(w_ptr + 1).to(tl.float32), tl.load(w_ptr + 2).to(tl.float32))
    b = tl.load(b_ptr).to(tl.float32)
    for row in range(tl.program_id(0).to(tl.int64), M, tl.num_programs(0)):
        s1 = tl.zeros((BLOCK_N,), dtype=tl.float32)
        s2 = tl.zeros((BLOCK_N,), dtype=tl.float32)
        s3 = tl.zeros((BLOCK_N,), dtype=tl.float32)
        s = tl.cast(1.0, tl.float32)
        tries = tl.cast(2, tl.int32)
        while tries > 0:  # the same code makes both sums: a copy of it would take registers from rows that need none
            s1 = tl.zeros((BLOCK_N,), dtype=tl.float32)
            s2 = tl.zeros((BLOCK_N,), dtype=tl.float32)
            s3 = tl.zeros((BLOCK_N,), dtype=tl.float32)
            largest = tl.zeros((BLOCK_N,), dtype=tl.float32)
            for start in range(0, N, BLOCK_N):
                cols = start + tl.arange(0, BLOCK_N)
                x = tl.load(x_ptr + row * x_stride + cols, mask=cols < N, other=0.0).to(tl.float32) * s
                square = x * x
                s1 += (square * x) * (square * x)
                s2 += square * square
                s3 += square
                largest = tl.maximum(largest, tl.abs(x))
            smaller = _overflow_scale(tl.max(largest, axis=0))
            tries = tl.where(smaller < 1.0, tries - 1, 0)
            s *= smaller
        ms1 = tl.sum(s1, axis=0) / N + eps * (s * s * s) * (s * s * s)
        ms2 = tl.sum(s2, axis=0) / N + eps * (s * s) * (s * s)
        ms3 = tl.sum(s3, axis=0) / N + eps * (s * s)
        tl.store(ms_ptr + row * 4, ms1)
        tl.store(ms_ptr + row * 4 + 1, ms2)
        tl.store(ms_ptr + row * 4 + 2, ms3)
        tl.store(ms_ptr + row * 4 + 3, s)
        r1 = w1 * tl.div_rn(1.0, tl.sqrt_rn(ms1))
        r2 = w2 * tl.div_rn(1.0, tl.sqrt_rn(ms2))
        r3 = w3 * tl.div_rn(1.0, tl.sqrt_rn(ms3))
        for start in range(0, N, BLOCK_N):
            cols = start + tl.arange(0, BLOCK_N)
            x = tl.load(x_ptr + row * x_stride + cols, mask=cols < N, other=0.0).to(tl.float32) * s
            y = (r1 * (x * x * x) + r2 * (x * x)) + (r3 * x + b)
            tl.store(y_ptr + row * N + cols, y.to(y_ptr.dtype.element_ty), mask=cols < N)


@jit
def poly_norm_backward_kernel(
    dy_ptr, x_ptr, w_ptr, ms_ptr, dx_ptr, partial_ptr, M, N, dy_stride, x_stride, BLOCK_N: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    w1, w2, w3 = (tl.load(w_ptr).to(tl.float32), tl.load(w_ptr + 1).to(tl.float32), tl.load(w_ptr + 2).to(tl.float32))
    dw1 = tl.cast(0.0, tl.float32)
    dw2 = tl.cast(0.0, tl.float32)
    dw3 = tl.cast(0.0, tl.float32)
    db = tl.cast(0.0, tl.float32)
    for row in range(program, M, tl.num_programs(0)):
        s0 = tl.zeros((BLOCK_N,), dtype=tl.float32)
        s1 = tl.zeros((BLOCK_N,), dtype=tl.float32)
        s2 = tl.zeros((BLOCK_N,), dtype=tl.float32)
        s3 = tl.zeros((BLOCK_N,), dtype=tl.float32)
        s = tl.load(ms_ptr + row * 4 + 3)
        for start in range(0, N, BLOCK_N):
            cols = start + tl.arange(0, BLOCK_N)
            x = tl.load(x_ptr + row * x_stride + cols, mask=cols < N, other=0.0).to(tl.float32) * s
            dy = tl.load(dy_ptr + row * dy_stride + cols, mask=cols < N, other=0.0).to(tl.float32)
            s0 += dy
            s1 += dy * (x * x * x)
            s2 += dy * (x * x)
            s3 += dy * x
        ms1, ms2, ms3 = (tl.load(ms_ptr + row * 4), tl.load(ms_ptr + row * 4 + 1), tl.load(ms_ptr + row * 4 + 2))
        r1 = tl.div_rn(1.0, tl.sqrt_rn(ms1))
        r2 = tl.div_rn(1.0, tl.sqrt_rn(ms2))
        r3 = tl.div_rn(1.0, tl.sqrt_rn(ms3))
        t1, t2, t3 = (tl.sum(s1, axis=0), tl.sum(s2, axis=0), tl.sum(s3, axis=0))
        dw1 += t1 * r1
        dw2 += t2 * r2
        dw3 += t3 * r3
        db += tl.sum(s0, axis=0)
        m1, m2, m3 = (tl.div_rn(t1 / N, ms1), tl.div_rn(t2 / N, ms2), tl.div_rn(t3 / N, ms3))
        for start in range(0, N, BLOCK_N):
            cols = start + tl.arange(0, BLOCK_N)
            x = tl.load(x_ptr + row * x_stride + cols, mask=cols < N, other=0.0).to(tl.float32) * s
            dy = tl.load(dy_ptr + row * dy_stride + cols, mask=cols < N, other=0.0).to(tl.float32)
            dx = w1 * r1 * (dy - (x * x * x) * m1) * (3.0 * (x * x))
            dx += w2 * r2 * (dy - (x * x) * m2) * (2.0 * x)
            dx += w3 * r3 * (dy - x * m3)
            tl.store(dx_ptr + row * N + cols, (dx * s).to(dx_ptr.dtype.element_ty), mask=cols < N)
    if partial_ptr is not None:
        tl.store(partial_ptr + program * 4, dw1)
        tl.store(partial_ptr + program * 4 + 1, dw2)
        tl.store(partial_ptr + program * 4 + 2, dw3)
        tl.store(partial_ptr + program * 4 + 3, db)


def _tile(N: int) -> dict[str, int]:
    """Eight elements a thread, of no more than 256: with the sums beside them 512 threads would spill."""
    block = min(2048, next_power_of_2(N))
    return {"BLOCK_N": block, "num_warps": max(1, min(16, block // 256))}


def _programs(M: int, N: int, device: torch.device) -> int:
    """Enough to fill a multiprocessor's 2048 threads."""
    return grid_cap(M, num_programs(device, 64 // _tile(N)["num_warps"]))


def _poly_norm_fwd(input: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x = as_rows(input)
    M, N = x.shape
    y = empty(input.shape, input.dtype, input.device)
    ms = empty((*input.shape[:-1], 4), torch.float32, input.device)
    wrap_triton(poly_norm_kernel)[(_programs(M, N, x.device),)](
        x, weight.contiguous(), bias, y, ms, M, N, x.stride(0), eps, **_tile(N)
    )
    return y, ms


def _poly_norm_bwd(
    grad: Tensor, input: Tensor, weight: Tensor, bias: Tensor, ms: Tensor, need_weight: bool, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dy, x = as_rows(grad), as_rows(input)
    M, N = x.shape
    programs = _programs(M, N, x.device)
    dx = empty(input.shape, input.dtype, input.device)
    partials = empty((programs, 4), torch.float32, x.device) if need_weight or need_bias else None
    wrap_triton(poly_norm_backward_kernel)[(programs,)](
        dy, x, weight.contiguous(), ms.contiguous(), dx, partials, M, N, dy.stride(0), x.stride(0), **_tile(N)
    )
    return dx, *_parameter_gradients(None if partials is None else sum_partials(partials, torch.float32), weight, bias)


def _parameter_gradients(sums: Tensor | None, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of weight and bias from float32 `[4]`."""
    if sums is None:
        return empty((0,), weight.dtype, weight.device), empty((0,), bias.dtype, bias.device)
    return sums[:3].to(weight.dtype, copy=True), sums[3].to(bias.dtype, copy=True).view(bias.shape)


poly_norm_fwd = KernelOp(_poly_norm_fwd, launch_cached=True)
poly_norm_bwd = KernelOp(_poly_norm_bwd)  # what casts its three numbers has no launch cache


@poly_norm_fwd.register_kernel("cpu")
def _(input, weight, bias, eps):
    x = input.float()
    s = _overflow_scale_cpu(x.abs().amax(-1, keepdim=True))
    x = x * s
    powers = torch.stack([x * x * x, x * x, x])  # [3, ..., N]
    s = s.squeeze(-1)
    ms = powers.square().mean(-1) + eps * torch.stack([s * s * s, s * s, s]).square()
    scale = weight.float().view(3, *[1] * x.dim())
    y = (scale * powers * torch.rsqrt(ms).unsqueeze(-1)).sum(0) + bias.float()
    return y.to(input.dtype).contiguous(), torch.cat([ms, s.unsqueeze(0)]).movedim(0, -1).contiguous()


def _overflow_scale_cpu(largest: Tensor) -> Tensor:
    power = (largest.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where((largest >= LARGEST) & largest.isfinite(), 0.5 * LARGEST / power, 1.0)


@poly_norm_bwd.register_kernel("cpu")
def _(grad, input, weight, bias, ms, need_weight, need_bias):
    ms, s = ms[..., :3], ms[..., 3:]
    x, dy = input.float() * s, grad.float()
    powers, derivatives = torch.stack([x * x * x, x * x, x]), torch.stack([3 * x * x, 2 * x, torch.ones_like(x)])
    ms = ms.movedim(-1, 0).unsqueeze(-1)
    rstd, means = torch.rsqrt(ms), (dy * powers).mean(-1, keepdim=True)
    scale = weight.float().view(3, *[1] * x.dim())
    dx = (scale * rstd * (dy - powers * (means / ms)) * derivatives).sum(0) * s
    dw = (means * x.shape[-1] * rstd).flatten(1).sum(1)
    sums = torch.cat([dw, dy.sum().view(1)]) if need_weight or need_bias else None
    return dx.to(input.dtype).contiguous(), *_parameter_gradients(sums, weight, bias)


@poly_norm_fwd.register_fake
def _(input):
    return input.new_empty(input.shape), input.new_empty((*input.shape[:-1], 4), dtype=torch.float32)


@poly_norm_bwd.register_fake
def _(grad, input, weight, bias, ms, need_weight, need_bias):
    both = need_weight or need_bias
    return (
        input.new_empty(input.shape),
        weight.new_empty(weight.shape if both else (0,)),
        bias.new_empty(bias.shape if both else (0,)),
    )


poly_norm_fwd.register_backward(poly_norm_bwd, outputs=("output", "ms"))
poly_norm_fwd.register_sharding(split_rows(outputs=2, inputs=1, parameters=2))


def poly_norm_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    randn = partial(torch.randn, device=device, dtype=dtype)
    yield Sample((randn(4, 16), randn(3), randn(1)), why="powers of two")
    yield Sample((randn(2, 3, 37), randn(3), randn(()), 1e-5), why="three dimensions, odd width, a bias without axes")
    yield Sample((randn(33), randn(3, dtype=torch.float32), randn(1)), why="one dimension, float32 weights")
    yield Sample((30 * randn(3, 64), randn(3), randn(1)), why="large values")
    if dtype != torch.float16:
        large = 1e18 * randn(3, 64) * torch.tensor([[1e-18], [1e-12], [1.0]], device=device, dtype=dtype)
        yield Sample((large, randn(3), randn(1)), why="values whose sixth powers overflow")
    yield Sample((randn(0, 16), randn(3), randn(1)), why="no rows")
    yield Sample((randn(24, 6).t(), randn(6)[::2], randn(1)), why="columns strided")
    yield Sample((randn(6, 80)[:, 16:48], randn(3), randn(1)), why="a slice of a wider row")
    yield Sample((randn(300, 24), randn(3), randn(1)), why="more rows than programs")
    yield Sample((randn(2, 5003), randn(3), randn(1)), why="several blocks of columns")


@public_op(
    reference=poly_norm_reference,
    differentiable=("input", "weight", "bias"),
    kernel_ops=(poly_norm_fwd, poly_norm_bwd),
    samples=poly_norm_samples,
    resized=normal_resized(lambda rows: ((rows, 48), (3,), (1,))),
    workloads=normal_workloads([(32768, 4096), (8192, 14336)], lambda M, N: ((M, N), (3,), (1,))),
    cost=Cost.passes(2, 5),
)
def poly_norm(input: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6) -> Tensor:
    """PolyNorm over the last axis: the cube, the square and the value, each divided by its root mean square, weighted.

    In float32 with one rounding.

    Args:
        input: `[..., N]`, float32, float16 or bfloat16, any strides.
        weight: `[3]`, of the cube, the square and the value, any of these dtypes.
        bias: `[1]` or `[]`, any of these dtypes.
        eps: Added to each mean square, at least 0.

    Returns:
        `[..., N]`, contiguous, in the dtype of `input`.

    Raises:
        TypeError: A tensor is not float32, float16 or bfloat16.
        ValueError: `input` has no axis or its last one is empty, another's shape or device does not fit, or `eps` is
            out of range.

    Source: Zhuo et al., 2024, https://arxiv.org/abs/2411.03884.
    """
    check_rows("input", input, "N")
    check_parameter("weight", weight, (3,), "one for each power", "input", input)
    check_dtype("bias", bias)
    check_same("bias", bias, "input", input)
    if bias.dim() > 1 or bias.numel() != 1:
        raise ValueError(f"bias: expected shape (1,) or (), got {tuple(bias.shape)}")
    check_not_negative("eps", eps)
    y, _ = poly_norm_fwd(input, weight, bias, eps)
    return y
