"""Products y = f(x @ W^T + b), and the gradient through their activation, dz from dy and what was kept of z.

A product is one kernel in Triton (its tiles: `ops/common/products.py`), cuBLASLt's with its own epilogue, or cuBLAS's
with a kernel over it.
"""

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.activations import activate, activate_with_grad, activation_with_grad
from llmk.ops.common.products import (
    BLOCK_M,
    BLOCK_N,
    MAX_STRIDE,
    column_halves,
    first_of_tile,
    product_tile,
    product_tile_sizes,
)
from llmk.ops.common.rows import aligned, as_rows, contiguous
from llmk.ops.common.sums import sum_partials
from llmk.registry import cdiv, grid_cap, jit, next_power_of_2, num_programs, size_hint, wrap_triton
from llmk.registry.devices import INTERPRET
from llmk.registry.private.tensors import addmm_activation


@jit
def activate_kernel(z_ptr, y_ptr, count, ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    z = tl.load(z_ptr + offsets, mask=offsets < count, other=0.0).to(tl.float32)
    tl.store(y_ptr + offsets, activate(z, ACTIVATION).to(y_ptr.dtype.element_ty), mask=offsets < count)


@jit
def _store(z, bias_ptr, y_ptr, z_ptr, M, N, first_row, first_col, ACTIVATION: tl.constexpr):
    """The epilogue of some columns: bias, activation, stores."""
    rows, cols = tl.arange(0, z.shape[0]), tl.arange(0, z.shape[1])
    if bias_ptr is not None:
        z += tl.load(bias_ptr + first_col + cols, mask=cols < N - first_col, other=0.0).to(tl.float32)[None, :]
    mask = (rows < M - first_row)[:, None] & (cols < N - first_col)[None, :]
    first, offsets = first_row * N + first_col, rows[:, None] * N + cols[None, :]
    if z_ptr is not None:
        tl.store(z_ptr + first + offsets, z.to(z_ptr.dtype.element_ty), mask=mask)
    tl.store(y_ptr + first + offsets, activate(z, ACTIVATION).to(y_ptr.dtype.element_ty), mask=mask)


@jit
def matmul_activation_kernel(
    x_ptr, w_ptr, bias_ptr, y_ptr, z_ptr, M, N, K, x_stride_m, x_stride_k, w_stride_n, w_stride_k,
    ACTIVATION: tl.constexpr, EVEN_K: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    first_row, first_col = first_of_tile(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    z = product_tile(
        x_ptr, w_ptr, first_row, first_col, M, N, K, x_stride_m, x_stride_k, w_stride_n, w_stride_k,
        EVEN_K, WIDEN, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES,
    )  # fmt: skip
    left, right = column_halves(z)
    _store(left, bias_ptr, y_ptr, z_ptr, M, N, first_row, first_col, ACTIVATION)
    _store(right, bias_ptr, y_ptr, z_ptr, M, N, first_row, first_col + BLOCK_N // 2, ACTIVATION)


def suits(x: Tensor, weight: Tensor) -> bool:
    """Return True if rows can be read 16 bytes at a time, and there are tiles for every multiprocessor."""
    (M, K), N = x.shape, weight.shape[0]
    if not aligned(K) or N >= MAX_STRIDE:
        return False
    if not all(t.stride(1) == 1 and aligned(t.stride(0)) and t.stride(0) < MAX_STRIDE for t in (x, weight)):
        return False
    return cdiv(size_hint(M), BLOCK_M) * cdiv(N, BLOCK_N) >= num_programs(x.device, 1)


def fused_product(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, z: Tensor | None, activation: str) -> None:
    """y = f(x @ weight^T + bias) and, where wanted, z = x @ weight^T + bias; y and z are contiguous."""
    (M, K), N = x.shape, weight.shape[0]
    tile = product_tile_sizes(N, K, x.element_size())
    bias = contiguous(bias)
    options = {"ACTIVATION": activation, "EVEN_K": K % tile["BLOCK_K"] == 0, "WIDEN": INTERPRET}
    wrap_triton(matmul_activation_kernel)[(cdiv(M, tile["BLOCK_M"]) * cdiv(N, tile["BLOCK_N"]),)](
        x, weight, bias, y, z, M, N, K, *x.stride(), *weight.stride(), **options, **tile
    )


def product(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """y = x @ weight^T + bias by cuBLAS or the CPU's BLAS, which take any strides."""
    if bias is None:
        torch.mm(x, weight.t(), out=y)
    else:
        torch.addmm(bias, x, weight.t(), out=y)


def product_activation(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, activation: str) -> None:
    """y = f(x @ weight^T + bias) by cuBLASLt, for relu and gelu_tanh."""
    if bias is None:  # the epilogue has no form without
        bias = torch.zeros(weight.shape[:1], dtype=x.dtype, device=x.device)
    # Where it cannot be fused, as for one row, PyTorch activates the rounded product in a kernel of its own.
    addmm_activation(bias.contiguous(), x, weight.t(), y, gelu=activation == "gelu_tanh")


ACTIVATE_BLOCK = 4096
"""Elements a program: 32 bytes a thread in 16-bit dtypes."""


def activate_product(z: Tensor, y: Tensor, activation: str) -> None:
    """y = f(z), both contiguous; they may be one tensor."""
    wrap_triton(activate_kernel)[(cdiv(y.numel(), ACTIVATE_BLOCK),)](
        z, y, y.numel(), ACTIVATION=activation, BLOCK_N=ACTIVATE_BLOCK, num_warps=8
    )


@jit
def _dz(dy, kept, ACTIVATION: tl.constexpr, FROM_Y: tl.constexpr):
    """dy * f'(z); kept is y where FROM_Y, else z. Zero where a relu is, whatever dy."""
    if ACTIVATION == "relu":
        dz = tl.where(kept <= 0.0, 0.0, dy)
    elif ACTIVATION == "relu_squared":
        root = tl.sqrt_rn(kept) if FROM_Y else kept
        dz = tl.where(kept <= 0.0, 0.0, dy * (2.0 * root))
    else:
        _, grad = activate_with_grad(kept, ACTIVATION)
        dz = dy * grad
    return dz


@jit
def linear_act_backward_kernel(
    dy_ptr,
    kept_ptr,
    dz_ptr,
    db_ptr,
    M,
    N,
    dy_stride,
    ACTIVATION: tl.constexpr,
    FROM_Y: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """dz in one block of columns and a share of the rows, and that share's part of db."""
    cols = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    share = tl.program_id(1).to(tl.int64)
    db = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in tl.range(share * BLOCK_M, M, tl.num_programs(1) * BLOCK_M, num_stages=NUM_STAGES):
        rows = start + tl.arange(0, BLOCK_M)
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        offsets = rows[:, None] * N + cols[None, :]
        dy = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        kept = tl.load(kept_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        dz = _dz(dy, kept, ACTIVATION, FROM_Y)
        tl.store(dz_ptr + offsets, dz.to(dz_ptr.dtype.element_ty), mask=mask)
        if db_ptr is not None:
            db += dz
    if db_ptr is not None:
        tl.store(db_ptr + share * N + cols, tl.sum(db, axis=0), mask=cols < N)


def keeps_z(activation: str, dtype: torch.dtype) -> bool:
    """Return True if the backward pass needs z; else y, or nothing."""
    return activation in ("gelu", "gelu_tanh", "silu") or (activation == "relu_squared" and dtype == torch.float16)


def _backward_tile(N: int) -> dict[str, int]:
    # As the norms' backward pass, which has the same traffic: 4096 elements, three stages of prefetch.
    block_n = min(1024, max(16, next_power_of_2(N)))
    return {"BLOCK_M": 4096 // block_n, "BLOCK_N": block_n, "NUM_STAGES": 3, "num_warps": 8}


def activation_gradient(grad: Tensor, kept: Tensor, activation: str, need_db: bool) -> tuple[Tensor, Tensor]:
    """dz, and db or an empty tensor."""
    dy = as_rows(grad)
    M, N = dy.shape
    tile = _backward_tile(N)
    blocks = cdiv(N, tile["BLOCK_N"])
    # Four programs of 8 warps keep a multiprocessor's memory busy; each share of the rows costs a row of partials.
    shares = grid_cap(cdiv(M, tile["BLOCK_M"]), max(1, num_programs(grad.device, 4) // max(1, blocks)))
    dz = torch.empty((M, N), dtype=grad.dtype, device=grad.device)
    partials = torch.empty((shares, N), dtype=torch.float32, device=grad.device) if need_db else None
    options = {"ACTIVATION": activation, "FROM_Y": not keeps_z(activation, grad.dtype)}
    wrap_triton(linear_act_backward_kernel)[(blocks, shares)](
        dy, kept, dz, partials, M, N, dy.stride(0), **options, **tile
    )
    if partials is None:
        return dz, torch.empty((0,), dtype=grad.dtype, device=grad.device)
    return dz, sum_partials(partials, grad.dtype)


def activation_gradient_reference(grad: Tensor, kept: Tensor | None, activation: str) -> Tensor:
    """dz `[M, N]` in float32, in plain PyTorch; without an activation nothing is kept, and it is dy."""
    dy = grad.float()
    if kept is None:
        return dy
    kept, from_y = kept.float(), not keeps_z(activation, grad.dtype)
    if activation == "relu":
        return torch.where(kept <= 0, 0.0, dy)
    if activation == "relu_squared":
        return torch.where(kept <= 0, 0.0, dy * (2 * (kept.sqrt() if from_y else kept)))
    return dy * activation_with_grad(kept, activation)[1]
