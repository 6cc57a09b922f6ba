r"""Kullback-Leibler divergence of log-probabilities from a target distribution.

Source: Kullback and Leibler, "On Information and Sufficiency", 1951, https://doi.org/10.1214/aoms/1177729694;
`torch.nn.functional.kl_div` for the semantics, at probabilities of zero too.

Forward, elementwise, with x log-probabilities and t the target, probabilities or their logarithms:

    loss = t * log(t) - t * x        where 0 * log(0) = 0
    loss = exp(t) * (t - x)          with log_target

and its sum, divided by the number of elements ("mean") or of rows ("batchmean"). Backward, given g, the gradient of
each element's loss:

    dx = -g * t             dt = g * (log(t) + t / t - x)      NaN where t is 0, as PyTorch's
    dx = -g * exp(t)        dt = g * exp(t) * (t - x + 1)      with log_target

where g * log(t) is 0 if g is, of a negative t too: PyTorch's xlogy(g, t). dx does not need x, which is kept for the
backward pass only if the target wants a gradient. The forward pass reads both tensors once; a sum is taken by each
program over its own tiles in float32, then over the programs in a fixed order.
"""

from collections.abc import Iterator

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.math import exp, log_for_product
from llmk.ops.common.rows import as_long_rows
from llmk.ops.common.sums import sum_to_scalar
from llmk.ops.loss.divergence_math import exp_of
from llmk.ops.loss.patterns import KL_DIV
from llmk.registry import (
    PARTIAL,
    Cost,
    KernelOp,
    Sample,
    axes,
    cdiv,
    check_dtype,
    check_like,
    check_option,
    empty,
    grid_cap,
    jit,
    next_power_of_2,
    num_programs,
    public_op,
    wrap_triton,
)

REDUCTIONS = ("none", "mean", "sum", "batchmean")


def kl_div_reference(input: Tensor, target: Tensor, *, reduction: str = "mean", log_target: bool = False) -> Tensor:
    if reduction != "none":
        wide = torch.promote_types(input.dtype, torch.float32)
        input, target = input.to(wide), target.to(wide)
    losses = torch.nn.functional.kl_div(input, target, reduction="none", log_target=log_target)
    if reduction == "none":
        return losses
    return losses.sum() / _denominator(input, reduction)


@jit
def _losses(x, t, LOG_TARGET: tl.constexpr):
    if LOG_TARGET:
        return exp(t) * (t - x)
    log_t = tl.where(t < 0, float("nan"), log_for_product(t))
    return t * log_t - t * x


@jit
def _tile(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows, columns and mask of a tile."""
    row, col = tile * 0, tile
    if M != 1:  # contiguous tensors are one long row: they are spared the division
        across = tl.cast(tl.cdiv(N, BLOCK_N), tl.int32)  # a number, not a tensor, where N is 1
        row, col = tile // across, tile % across
    rows = tl.cast(row, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = tl.cast(col, tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    return rows, cols, (rows < M) & (cols < N)


@jit
def kl_div_kernel(
    x_ptr, t_ptr, loss_ptr, M, N, x_stride, t_stride, tiles,
    LOG_TARGET: tl.constexpr, REDUCED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write the losses of some tiles, or where they are reduced the sum of all of them."""
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        rows, cols, mask = _tile(tile, M, N, BLOCK_M, BLOCK_N)
        x = tl.load(x_ptr + rows * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
        t = tl.load(t_ptr + rows * t_stride + cols, mask=mask, other=0.0).to(tl.float32)
        loss = _losses(x, t, LOG_TARGET)
        if REDUCED:
            total += loss
        else:
            tl.store(loss_ptr + rows * N + cols, loss.to(loss_ptr.dtype.element_ty), mask=mask)
    if REDUCED:
        tl.store(loss_ptr + tl.program_id(0), tl.sum(tl.sum(total, axis=1), axis=0))


@jit
def kl_div_backward_kernel(
    grad_ptr, x_ptr, t_ptr, dx_ptr, dt_ptr, M, N, grad_stride_m, grad_stride_n, x_stride, t_stride, denominator,
    LOG_TARGET: tl.constexpr, REDUCED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Last tiles first: the forward pass ended there, and left them in L2.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    rows, cols, mask = _tile(tile, M, N, BLOCK_M, BLOCK_N)
    target = tl.load(t_ptr + rows * t_stride + cols, mask=mask, other=0.0)
    t = target.to(tl.float32)
    if REDUCED:
        g = tl.div_rn(tl.load(grad_ptr).to(tl.float32), tl.cast(denominator, tl.float32))
    else:
        g = tl.load(grad_ptr + rows * grad_stride_m + cols * grad_stride_n, mask=mask, other=0.0).to(tl.float32)
    weight = exp_of(t, target.dtype == tl.float32) if LOG_TARGET else t
    if dx_ptr is not None:
        tl.store(dx_ptr + rows * N + cols, (-g * weight).to(dx_ptr.dtype.element_ty), mask=mask)
    if dt_ptr is not None:
        x = tl.load(x_ptr + rows * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
        if LOG_TARGET:
            dt = weight * (t - x) + weight
        else:
            one = tl.where(t == 0, float("nan"), 1.0 + (t - t))  # t / t
            nothing = tl.broadcast_to(g, t.shape) == 0.0
            log_t = tl.where(nothing & (t < 0.0), 0.0, tl.log(t))
            dt = log_t + one - x
        tl.store(dt_ptr + rows * N + cols, (g * dt).to(dt_ptr.dtype.element_ty), mask=mask)


# Two loads of 16 bytes from each tensor a thread, and registers for as many programs as the sums ask for. H200, bf16,
# times the floor: 1.09 at 4096x32000, 1.04 at 4096x128256.
TILE = 2048
NUM_WARPS = 4
SUM_PROGRAMS = 8


def _layout(*tensors: Tensor) -> tuple[list[Tensor], dict[str, int]]:
    """The tensors as `[M, N]`, and the tile to cut them into.

    Contiguous ones are one long row: its tiles are full, and aligned for the widest loads whatever the last axis is.
    """
    rows = as_long_rows(*tensors)
    M, N = rows[0].shape
    block_n = TILE if M == 1 else min(TILE, next_power_of_2(max(N, 1)))
    return rows, {"BLOCK_M": TILE // block_n, "BLOCK_N": block_n, "num_warps": NUM_WARPS}


def _tiles(x: Tensor, tile: dict[str, int]) -> int:
    return cdiv(x.shape[0], tile["BLOCK_M"]) * cdiv(x.shape[1], tile["BLOCK_N"])


def _denominator(input: Tensor, reduction: str) -> int:
    if reduction == "mean":
        return input.numel()
    return input.shape[0] if reduction == "batchmean" and input.dim() > 0 else 1


def _kl_div_fwd(input: Tensor, target: Tensor, reduced: bool, denominator: int, log_target: bool) -> Tensor:
    """The losses, or with `reduced` their sum over the denominator, which counts what other processes hold too."""
    (x, t), tile = _layout(input, target)
    tiles = _tiles(x, tile)
    programs = grid_cap(tiles, num_programs(input.device, SUM_PROGRAMS)) if reduced else tiles
    losses = empty((programs,) if reduced else input.shape, torch.float32 if reduced else input.dtype, input.device)
    wrap_triton(kl_div_kernel)[(programs,)](
        x, t, losses, *x.shape, x.stride(0), t.stride(0), tiles, LOG_TARGET=log_target, REDUCED=reduced, **tile
    )
    return sum_to_scalar(losses, denominator) if reduced else losses


def _kl_div_bwd(
    grad: Tensor,
    input: Tensor | None,
    target: Tensor,
    reduced: bool,
    denominator: int,
    log_target: bool,
    need_input: bool,
    need_target: bool,
) -> tuple[Tensor, Tensor]:
    """`input` is there if the target's gradient is needed."""
    (t, *rest), tile = _layout(target) if input is None else _layout(target, input)
    M, N = t.shape
    x = rest[0] if rest else None
    g = grad if reduced else grad.reshape(M, N)
    dinput, dtarget = (
        empty(target.shape if needed else (0,), target.dtype, target.device) for needed in (need_input, need_target)
    )
    gradients = dinput if need_input else None, dtarget if need_target else None
    strides = *((0, 0) if reduced else g.stride()), 0 if x is None else x.stride(0), t.stride(0)
    wrap_triton(kl_div_backward_kernel)[(_tiles(t, tile),)](
        g, x, t, *gradients, M, N, *strides, denominator, LOG_TARGET=log_target, REDUCED=reduced, **tile
    )
    return dinput, dtarget


kl_div_fwd = KernelOp(_kl_div_fwd, launch_cached=True)
kl_div_bwd = KernelOp(_kl_div_bwd, launch_cached=True)


@kl_div_fwd.register_kernel("cpu")
def _(input: Tensor, target: Tensor, reduced: bool, denominator: int, log_target: bool) -> Tensor:
    x, t = input.float(), target.float()
    losses = t.exp() * (t - x) if log_target else torch.xlogy(t, t) - t * x
    return losses.sum() / denominator if reduced else losses.to(input.dtype).contiguous()


@kl_div_bwd.register_kernel("cpu")
def _(grad, input, target, reduced, denominator, log_target, need_input, need_target):
    g, t = grad.float() / denominator if reduced else grad.float(), target.float()
    weight = t.exp() if log_target else t
    dinput = dtarget = torch.empty((0,), dtype=target.dtype, device=target.device)
    if need_input:
        dinput = (-g * weight).to(target.dtype).contiguous()
    if need_target:
        x = input.float()
        log_t = torch.where((g == 0) & (t < 0), 0.0, t.log())
        dt = weight * (t - x) + weight if log_target else log_t + t / t - x
        dtarget = (g * dt).to(target.dtype).contiguous()
    return dinput, dtarget


@kl_div_fwd.register_fake
def _(input, reduced):
    return input.new_empty((), dtype=torch.float32) if reduced else input.new_empty(input.shape)


@kl_div_bwd.register_fake
def _(target, need_input, need_target):
    dinput, dtarget = (target.new_empty(target.shape if needed else (0,)) for needed in (need_input, need_target))
    return dinput, dtarget


kl_div_fwd.register_backward(kl_div_bwd, saved_if={"input": lambda need_target: need_target})


@kl_div_fwd.register_sharding
def _(target, reduced):
    return [([PARTIAL if reduced else axis], [axis, axis]) for axis in axes(target)]


def kl_div_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    def logs(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype).log_softmax(-1)

    def probabilities(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype).softmax(-1)

    yield Sample((logs(4, 16), probabilities(4, 16)), why="powers of two")
    yield Sample((logs(2, 3, 37), logs(2, 3, 37)), {"log_target": True}, why="three dimensions, odd width")
    for reduction in ("none", "sum", "batchmean"):
        yield Sample((logs(5, 21), probabilities(5, 21)), {"reduction": reduction}, why=reduction)
        yield Sample((logs(5, 21), logs(5, 21)), {"reduction": reduction, "log_target": True}, why=f"{reduction}, logs")
    sparse = torch.where(torch.arange(40, device=device, dtype=torch.int64) < 20, 0.0, probabilities(3, 40))
    never = torch.where(torch.arange(40, device=device, dtype=torch.int64) % 8 == 1, float("-inf"), logs(3, 40))
    yield Sample((never, sparse), {"reduction": "none"}, why="probabilities of zero, logarithms of zero, both: NaN")
    yield Sample((logs(3, 40), never), {"reduction": "none", "log_target": True}, why="a target's logarithms of zero")
    yield Sample((logs(7, 1), 2 * probabilities(7, 1)), {"reduction": "batchmean"}, why="one column")
    yield Sample((logs(7, 3)[:, 1:2], probabilities(7, 1)), {"reduction": "none"}, why="one column of wider rows")
    yield Sample((logs(0, 16), probabilities(0, 16)), {"reduction": "sum"}, why="no rows")
    yield Sample((logs(0, 16), probabilities(0, 16)), why="the mean of no rows: NaN")
    yield Sample((logs(24, 6).t(), probabilities(6, 24)), why="input strided, target not")
    yield Sample(
        (logs(6, 80)[:, 16:48], probabilities(1, 32).expand(6, 32)), {"reduction": "none"}, why="a slice and one row"
    )
    large = torch.randn(3, 64, device=device, dtype=dtype)
    yield Sample((-1e4 * large.abs(), 1e4 * large.flip(0).abs()), {"reduction": "sum"}, why="large values")
    yield Sample((logs(2, 100_003), probabilities(2, 100_003)), {"reduction": "batchmean"}, why="100,003 columns")


def kl_div_resized(rows: int, device: torch.device, dtype: torch.dtype) -> Sample:
    x, t = (torch.randn(rows, 48, device=device, dtype=dtype) for _ in range(2))
    return Sample((x.log_softmax(-1), t.softmax(-1)), {"reduction": "sum"}, why="resized")


def kl_div_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for rows, columns in [(4096, 32000), (4096, 128256)]:
        x, t = (torch.randn(rows, columns, device=device, dtype=dtype).log_softmax(-1) for _ in range(2))
        yield Sample((x, t.exp()), {"reduction": "batchmean"}, why=f"{rows}x{columns}")
    yield Sample((x, t), {"reduction": "batchmean", "log_target": True}, why=f"{rows}x{columns}, logs")


def kl_div_cost(input: Tensor, target: Tensor, *, reduction: str = "mean", log_target: bool = False) -> Cost:
    tensor = input.numel() * input.element_size()
    losses = tensor if reduction == "none" else 0
    return Cost(bytes_forward=2 * tensor + losses, bytes_full=4 * tensor + 2 * losses)


@public_op(
    reference=kl_div_reference,
    differentiable=("input", "target"),
    trained=("input",),
    kernel_ops=(kl_div_fwd, kl_div_bwd),
    samples=kl_div_samples,
    resized=kl_div_resized,
    workloads=kl_div_workloads,
    cost=kl_div_cost,
    patterns=KL_DIV,
)
def kl_div(input: Tensor, target: Tensor, *, reduction: str = "mean", log_target: bool = False) -> Tensor:
    """Kullback-Leibler divergence, as `torch.nn.functional.kl_div`, computed and summed in float32.

    Args:
        input: Log-probabilities, any shape and strides, float32, float16 or bfloat16.
        target: Probabilities, or their logarithms with `log_target`; shape and dtype of `input`. It may want a gradient
            too; then, and only then, `input` is kept for the backward pass.
        reduction: "none", "sum", "mean" over all elements, or "batchmean", the sum divided by `input.shape[0]`.
        log_target: The target holds logarithms.

    Returns:
        A float32 scalar; with reduction "none", the shape and dtype of `input`.

    Raises:
        TypeError: A dtype is not one of these, or the two differ.
        ValueError: The shapes or devices differ, or there is no such reduction.

    Source: Kullback and Leibler, 1951, https://doi.org/10.1214/aoms/1177729694; `torch.nn.functional.kl_div`.
    """
    check_dtype("input", input)
    check_like("target", target, "input", input)
    check_option("reduction", reduction, REDUCTIONS)
    return kl_div_fwd(input, target, reduction != "none", _denominator(input, reduction), log_target)
