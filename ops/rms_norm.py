r"""Root mean square layer normalization.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, https://arxiv.org/abs/1910.07467.
The offset is Gemma's, whose weight is stored minus one: https://arxiv.org/abs/2403.08295.

Forward, for each row x of N values, with w = weight + offset:

    ms   = mean(x^2) + eps
    rstd = 1 / sqrt(ms)
    y    = x * rstd * w

Backward, given dy:

    dx = rstd * (dy * w - x * mean(dy * w * x) / ms)
    dw = sum over rows of dy * x * rstd

ms is what is kept for the backward pass: dividing by it costs one rounding where rstd^2 would cost three, which shows
where the two terms of dx nearly cancel, in rows of few values. In a row of one value they cancel to eps:
dx = rstd * dy * w * eps / ms.

A row that fits in registers is read once in either direction; a longer one is walked in blocks, twice. The weight's
gradient is summed in float32 by each program over its own rows, then over the programs in a fixed order: no atomics.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmk.ops._rows import as_rows, sum_partials
from llmk.registry import (
    Cost,
    KernelOp,
    Sample,
    cdiv,
    check_dtype,
    check_same,
    check_shape,
    int_min,
    next_power_of_2,
    num_programs,
    public_op,
    wrap_triton,
)


def rms_norm_reference(
    input: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, offset: float = 0.0
) -> Tensor:
    scale = weight + offset if weight is not None and offset else weight
    return torch.nn.functional.rms_norm(input, input.shape[-1:], scale, eps)


@triton.jit
def rms_norm_kernel(
    x_ptr, w_ptr, y_ptr, ms_ptr, M, N, x_stride, eps, offset, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    eps = tl.cast(eps, tl.float32)
    offset = tl.cast(offset, tl.float32)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    ms = tl.sum(x * x, axis=1) / N + eps  # [BLOCK_M]
    y = x * tl.div_rn(1.0, tl.sqrt_rn(ms))[:, None]
    if w_ptr is not None:
        y *= (tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) + offset)[None, :]
    tl.store(y_ptr + rows[:, None] * N + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(ms_ptr + rows, ms, mask=rows < M)


@triton.jit
def rms_norm_long_kernel(x_ptr, w_ptr, y_ptr, ms_ptr, N, x_stride, eps, offset, BLOCK_N: tl.constexpr):
    eps = tl.cast(eps, tl.float32)
    offset = tl.cast(offset, tl.float32)
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + row * x_stride + cols, mask=cols < N, other=0.0).to(tl.float32)
        squares += x * x
    ms = tl.sum(squares, axis=0) / N + eps
    tl.store(ms_ptr + row, ms)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(ms))
    for start in range(0, N, BLOCK_N):  # the second pass finds the row in L2
        cols = start + tl.arange(0, BLOCK_N)
        y = tl.load(x_ptr + row * x_stride + cols, mask=cols < N, other=0.0).to(tl.float32) * rstd
        if w_ptr is not None:
            y *= tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) + offset
        tl.store(y_ptr + row * N + cols, y.to(y_ptr.dtype.element_ty), mask=cols < N)


@triton.jit
def rms_norm_backward_kernel(
    dy_ptr, x_ptr, w_ptr, ms_ptr, dx_ptr, dw_ptr, M, N, dy_stride, x_stride, eps, offset,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    eps = tl.cast(eps, tl.float32)
    offset = tl.cast(offset, tl.float32)
    program = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_N)
    if w_ptr is not None:
        w = (tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) + offset)[None, :]
    dw = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    # Persistent: the next rows are prefetched while these are computed, and dw stays in registers.
    for start in tl.range(program * BLOCK_M, M, tl.num_programs(0) * BLOCK_M, num_stages=NUM_STAGES):
        rows = start + tl.arange(0, BLOCK_M)
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        ms = tl.load(ms_ptr + rows, mask=rows < M, other=1.0)
        rstd = tl.div_rn(1.0, tl.sqrt_rn(ms))[:, None]
        if dw_ptr is not None:
            dw += dy * (x * rstd)
        if w_ptr is not None:
            dy *= w
        if N == 1:
            dx = rstd * dy * tl.div_rn(eps, ms)[:, None]
        else:
            dx = rstd * (dy - x * tl.div_rn(tl.sum(dy * x, axis=1) / N, ms)[:, None])
        tl.store(dx_ptr + rows[:, None] * N + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if dw_ptr is not None:
        tl.store(dw_ptr + program * N + cols, tl.sum(dw, axis=0), mask=cols < N)


@triton.jit
def rms_norm_long_backward_dot_kernel(
    dy_ptr, x_ptr, w_ptr, ms_ptr, dot_ptr, N, dy_stride, x_stride, offset, BLOCK_N: tl.constexpr
):
    """mean(dy * w * x) / ms of each row."""
    offset = tl.cast(offset, tl.float32)
    row = tl.program_id(0).to(tl.int64)
    dot = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + row * x_stride + cols, mask=cols < N, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_stride + cols, mask=cols < N, other=0.0).to(tl.float32)
        if w_ptr is not None:
            dy *= tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) + offset
        dot += dy * x
    tl.store(dot_ptr + row, tl.div_rn(tl.sum(dot, axis=0) / N, tl.load(ms_ptr + row)))


@triton.jit
def rms_norm_long_backward_kernel(
    dy_ptr, x_ptr, w_ptr, ms_ptr, dot_ptr, dx_ptr, dw_ptr, M, N, dy_stride, x_stride, offset, BLOCK_N: tl.constexpr
):
    """One block of columns, a share of the rows."""
    offset = tl.cast(offset, tl.float32)
    program = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    if w_ptr is not None:
        w = tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) + offset
    dw = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for row in tl.range(program, M, tl.num_programs(0), num_stages=2):
        rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.load(ms_ptr + row)))
        x = tl.load(x_ptr + row * x_stride + cols, mask=cols < N, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_stride + cols, mask=cols < N, other=0.0).to(tl.float32)
        if dw_ptr is not None:
            dw += dy * (x * rstd)
        if w_ptr is not None:
            dy *= w
        dx = rstd * (dy - x * tl.load(dot_ptr + row))
        tl.store(dx_ptr + row * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < N)
    if dw_ptr is not None:
        tl.store(dw_ptr + program * N + cols, dw, mask=cols < N)


# Widest row that one program holds in registers: forward it holds x, backward x, dy, the weight and its gradient.
MAX_FORWARD_BLOCK = 32768
MAX_BACKWARD_BLOCK = 8192


def _tile(N: int, elements: int) -> dict[str, int]:
    """Rows per program, to make up so many elements, and warps for rows that fit."""
    block_n = next_power_of_2(N)
    block_m = max(1, elements // block_n)
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": min(16, max(4, block_m * block_n // 512))}


def _forward_tile(N: int) -> dict[str, int]:
    # H200, bf16, times the floor: 1.07 at 32768x4096, 1.13 at 8192x8192, 1.14 at 4096x16384, 1.09 at 65536x1024,
    # 1.17 at 262144x128; twice the warps cost up to 0.14 more.
    return _tile(N, 2048)


def _backward_tile(N: int) -> dict[str, int]:
    # H200, bf16, times the floor: 1.08 at 32768x4096, 1.15 at 8192x8192, 1.16 at 65536x1024, 1.33 at 262144x128, each
    # with the programs of _programs and three stages of prefetch; one stage costs 0.1 more.
    return _tile(N, 4096) | {"num_warps": 8, "NUM_STAGES": 3}


LONG_FORWARD = {"BLOCK_N": 4096, "num_warps": 8}
LONG_BACKWARD_BLOCK = 1024


def _long_backward_warps(element_size: int) -> int:
    # H200, bf16, 4096x16384: 1.85 times the floor, which counts one reading of x and dy where this makes two; twice the
    # warps 2.02. In float32 two warps spill.
    return 2 if element_size == 2 else 4


def _programs(N: int, device: torch.device) -> int:
    """Of the backward pass: each costs one row of float32 partials, and two hide each other's latency."""
    return num_programs(device, 2 if N <= 4096 else 1)


def _contiguous(weight: Tensor | None) -> Tensor | None:
    return weight.contiguous() if weight is not None else None


def _rms_norm_fwd(input: Tensor, weight: Tensor | None, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    x, weight = as_rows(input), _contiguous(weight)
    M, N = x.shape
    y = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    ms = torch.empty((M,), dtype=torch.float32, device=input.device)
    if N <= MAX_FORWARD_BLOCK:
        tile = _forward_tile(N)
        wrap_triton(rms_norm_kernel)[(cdiv(M, tile["BLOCK_M"]),)](
            x, weight, y, ms, M, N, x.stride(0), eps, offset, **tile
        )
    else:
        wrap_triton(rms_norm_long_kernel)[(M,)](x, weight, y, ms, N, x.stride(0), eps, offset, **LONG_FORWARD)
    return y, ms


def _rms_norm_bwd(
    grad: Tensor, input: Tensor, weight: Tensor | None, ms: Tensor, eps: float, offset: float, need_dw: bool
) -> tuple[Tensor, Tensor]:
    dy, x, weight = as_rows(grad), as_rows(input), _contiguous(weight)
    M, N = x.shape
    dx = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    programs = int_min(M, _programs(N, input.device))
    partials = torch.empty((programs, N), dtype=torch.float32, device=input.device) if need_dw else None
    if N <= MAX_BACKWARD_BLOCK:
        wrap_triton(rms_norm_backward_kernel)[(programs,)](
            dy, x, weight, ms, dx, partials, M, N, dy.stride(0), x.stride(0), eps, offset, **_backward_tile(N)
        )
    else:
        dot = torch.empty((M,), dtype=torch.float32, device=input.device)
        wrap_triton(rms_norm_long_backward_dot_kernel)[(M,)](
            dy, x, weight, ms, dot, N, dy.stride(0), x.stride(0), offset, **LONG_FORWARD
        )
        wrap_triton(rms_norm_long_backward_kernel)[(programs, cdiv(N, LONG_BACKWARD_BLOCK))](
            dy, x, weight, ms, dot, dx, partials, M, N, dy.stride(0), x.stride(0), offset,
            BLOCK_N=LONG_BACKWARD_BLOCK, num_warps=_long_backward_warps(x.element_size()),
        )  # fmt: skip
    if weight is None or partials is None:
        return dx, torch.empty((0,), dtype=input.dtype, device=input.device)
    return dx, sum_partials(partials, weight.dtype)


rms_norm_fwd = KernelOp(_rms_norm_fwd)
rms_norm_bwd = KernelOp(_rms_norm_bwd)


@rms_norm_fwd.register_kernel("cpu")
def _(input: Tensor, weight: Tensor | None, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    x = input.float()
    ms = x.square().mean(-1, keepdim=True) + eps
    y = x * torch.rsqrt(ms)
    if weight is not None:
        y = y * (weight.float() + offset)
    return y.to(input.dtype).contiguous(), ms.flatten()


@rms_norm_bwd.register_kernel("cpu")
def _(
    grad: Tensor, input: Tensor, weight: Tensor | None, ms: Tensor, eps: float, offset: float, need_dw: bool
) -> tuple[Tensor, Tensor]:
    ms = ms.view(*input.shape[:-1], 1)
    rstd = torch.rsqrt(ms)
    x, dy = input.float(), grad.float()
    wdy = dy if weight is None else dy * (weight.float() + offset)
    rest = wdy * (eps / ms) if input.shape[-1] == 1 else wdy - x * ((wdy * x).mean(-1, keepdim=True) / ms)
    dx = rstd * rest
    if weight is None or not need_dw:
        dw = torch.empty((0,), dtype=input.dtype, device=input.device)
    else:
        dw = (dy * (x * rstd)).flatten(0, -2).sum(0) if input.dim() > 1 else dy * (x * rstd)
        dw = dw.to(weight.dtype)
    return dx.to(input.dtype).contiguous(), dw


@rms_norm_fwd.register_fake
def _(input: Tensor, weight: Tensor | None, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    rows = input.numel() // input.shape[-1]
    return input.new_empty(input.shape), input.new_empty((rows,), dtype=torch.float32)


@rms_norm_bwd.register_fake
def _(
    grad: Tensor, input: Tensor, weight: Tensor | None, ms: Tensor, eps: float, offset: float, need_dw: bool
) -> tuple[Tensor, Tensor]:
    dw = input.new_empty((0,)) if weight is None or not need_dw else weight.new_empty(weight.shape)
    return input.new_empty(input.shape), dw


def _setup_context(ctx, inputs, output) -> None:
    input, weight, ctx.eps, ctx.offset = inputs
    _, ms = output
    ctx.mark_non_differentiable(ms)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(input, weight, ms)


def _backward(ctx, grad, _grad_ms):
    input, weight, ms = ctx.saved_tensors
    need_dw = ctx.needs_input_grad[1]
    dx, dw = rms_norm_bwd(grad, input, weight, ms, ctx.eps, ctx.offset, need_dw)
    return dx, dw if need_dw else None, None, None


rms_norm_fwd.register_autograd(_backward, setup_context=_setup_context)


def rms_norm_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    yield Sample((randn(4, 16), randn(16)), why="powers of two")
    yield Sample((randn(2, 3, 37), randn(37), 1e-5), {"offset": 1.0}, why="three dimensions, odd width, Gemma's offset")
    yield Sample((randn(5, 40),), why="no weight")
    yield Sample((randn(33), randn(33)), why="one dimension")
    yield Sample((randn(7, 1), randn(1)), why="one column")
    yield Sample((randn(0, 16), randn(16)), why="no rows")
    yield Sample((randn(24, 6).t(), randn(24)), why="columns strided")
    yield Sample((randn(6, 80)[:, 16:48], randn(32)), why="a slice of a wider row")
    yield Sample((randn(1, 16).expand(5, 16), randn(16)), why="one row expanded")
    yield Sample((randn(300, 24), randn(24)), why="more rows than programs")
    yield Sample((1e4 * randn(3, 64), randn(64)), why="large values")
    yield Sample((randn(2, 70_001), randn(70_001)), why="a row past 65,536 columns")


def rms_norm_resized(rows: int, device: torch.device, dtype: torch.dtype) -> Sample:
    return Sample(
        (torch.randn(rows, 48, device=device, dtype=dtype), torch.randn(48, device=device, dtype=dtype)), why="resized"
    )


def rms_norm_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for rows, columns in [(32768, 4096), (8192, 4096), (8192, 8192), (4096, 16384), (65536, 1024), (262144, 128)]:
        x = torch.randn(rows, columns, device=device, dtype=dtype)
        yield Sample((x, torch.randn(columns, device=device, dtype=dtype)), why=f"{rows}x{columns}")


def rms_norm_cost(input: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, offset: float = 0.0) -> Cost:
    tensor = input.numel() * input.element_size()
    return Cost(bytes_forward=2 * tensor, bytes_full=5 * tensor)


@public_op(
    "rms_norm(Tensor input, Tensor? weight=None, float eps=1e-6, *, float offset=0.0) -> Tensor",
    reference=rms_norm_reference,
    differentiable=("input", "weight"),
    kernel_ops=(rms_norm_fwd, rms_norm_bwd),
    samples=rms_norm_samples,
    resized=rms_norm_resized,
    workloads=rms_norm_workloads,
    cost=rms_norm_cost,
)
def rms_norm(input: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, offset: float = 0.0) -> Tensor:
    """Root mean square normalization over the last axis: `input / rms(input) * (weight + offset)`.

    Like `torch.nn.functional.rms_norm` over the last axis, with statistics and products in float32 and one rounding.

    Args:
        input: `[..., N]`, float32, float16 or bfloat16, any strides.
        weight: `[N]`, any of these dtypes; None for no scale.
        eps: Added to the mean square.
        offset: Added to the weight: 1.0 for Gemma's, which is stored minus one.

    Returns:
        `[..., N]`, contiguous, in the dtype of `input`.

    Raises:
        TypeError: A tensor is not float32, float16 or bfloat16.
        ValueError: `input` has no axis, its last one is empty, or `weight` is not `[N]` on the same device.

    Source: Zhang and Sennrich, 2019, https://arxiv.org/abs/1910.07467.
    """
    check_dtype("input", input)
    if input.dim() == 0 or input.shape[-1] == 0:
        raise ValueError(f"input: expected shape [..., N] with N at least 1, got {tuple(input.shape)}")
    if weight is not None:
        check_dtype("weight", weight)
        check_shape("weight", weight, input.shape[-1:], "the last axis of input")
        check_same("weight", weight, "input", input)
    y, _ = rms_norm_fwd(input, weight, eps, offset)
    return y
