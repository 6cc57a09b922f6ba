"""The gradient through the activation of a linear layer: dz from dy and what was kept of z, and with it the bias's."""

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.activations import activate_with_slope, activation_with_slope
from llmk.ops.common.rows import as_rows
from llmk.ops.common.sums import sum_partials
from llmk.registry import cdiv, grid_cap, jit, next_power_of_2, num_programs, wrap_triton


@jit
def _dz(dy, kept, ACTIVATION: tl.constexpr, FROM_Y: tl.constexpr):
    """dy * f'(z); kept is y where FROM_Y, else z. Zero where a relu is, whatever dy."""
    if ACTIVATION == "relu":
        dz = tl.where(kept <= 0.0, 0.0, dy)
    elif ACTIVATION == "relu_squared":
        root = tl.sqrt_rn(kept) if FROM_Y else kept
        dz = tl.where(kept <= 0.0, 0.0, dy * (2.0 * root))
    else:
        _, slope = activate_with_slope(kept, ACTIVATION)
        dz = dy * slope
    return dz


@jit
def linear_act_backward_kernel(
    dy_ptr, kept_ptr, dz_ptr, db_ptr, M, N, dy_stride,
    ACTIVATION: tl.constexpr, FROM_Y: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
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
    wrap_triton(linear_act_backward_kernel)[(blocks, shares)](
        dy, kept, dz, partials, M, N, dy.stride(0),
        ACTIVATION=activation, FROM_Y=not keeps_z(activation, grad.dtype), **tile,
    )  # fmt: skip
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
    return dy * activation_with_slope(kept, activation)[1]
