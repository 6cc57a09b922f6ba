"""Dynamic-row products: products of the first rows of a matrix, whose number only the device knows.

`torch.nn.functional.grouped_mm` with one group takes the number of rows as a tensor and does no work past it. Results
past it are left unwritten, and operands past it are not read. It has no float32 results, so the product that makes
float32 logits is a kernel of ours.
"""

import torch
import triton.language as tl
from torch import Tensor
from torch.nn.functional import grouped_mm

from llmk.ops.common.products import grouped_tile, product_tile
from llmk.ops.common.rows import matrices_aligned
from llmk.registry import cdiv, jit, next_power_of_2, wrap_triton
from llmk.registry.devices import INTERPRET, has_device_offsets

ROW_BYTES = 16
"""The alignment of the operands' rows and row strides."""


def can_group_rows(x: Tensor) -> bool:
    """Return True if contiguous rows of x `[..., H]` can be multiplied so, with a weight that can."""
    if x.dtype != torch.bfloat16 or x.numel() == 0 or x.shape[-1] * x.element_size() % ROW_BYTES:
        return False
    return not x.is_cuda or has_device_offsets(x.device)


def can_group_classes(weight: Tensor) -> bool:
    """Return True if a weight `[V, H]` can be multiplied so with such rows, in both directions."""
    return weight.numel() > 0 and weight.stride(-1) == 1 and matrices_aligned(weight)


def outputs(x: Tensor, weight: Tensor, end: Tensor) -> Tensor:
    """Compute `x @ weight.t()`, `[C, V]`, for the first `end` rows of x `[C, H]`; `end [1]` is int32.

    Its rows are multiples of ROW_BYTES apart, whatever V is.
    """
    result = grouped_mm(x, weight.t().unsqueeze(0), offs=end)
    if result.stride(0) * result.element_size() % ROW_BYTES == 0:
        return result
    V, apart = result.shape[1], ROW_BYTES // result.element_size()  # the CPU's result
    padded = torch.empty((x.shape[0], cdiv(V, apart) * apart), dtype=x.dtype, device=x.device)[:, :V]
    return padded.copy_(result)


@jit
def product_kernel(
    x_ptr, w_ptr, z_ptr, end_ptr, M, N, K, x_stride, w_stride, z_stride,
    EVEN_K: tl.constexpr, WIDEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Compute a tile of z = x @ w^T in float32, unless all its rows are past the end."""
    first_row, first_col = grouped_tile(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    if first_row >= tl.load(end_ptr):
        return
    z = product_tile(
        x_ptr, w_ptr, first_row, first_col, M, N, K, x_stride, 1, w_stride, 1,
        EVEN_K, WIDEN, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES,
    )  # fmt: skip
    rows, cols = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    mask = (rows < M - first_row)[:, None] & (cols < N - first_col)[None, :]
    tl.store(z_ptr + first_row * z_stride + first_col + (rows[:, None] * z_stride + cols[None, :]), z, mask=mask)


def float32_outputs(x: Tensor, weight: Tensor, end: Tensor, logits: Tensor) -> None:
    """Write `x @ weight.t()` into float32 logits `[C, V]`, for the tiles that have one of the first `end` rows."""
    (M, K), N, block_n = x.shape, weight.shape[0], 256
    block_k = min(64, max(16, next_power_of_2(K)))
    # Sixteen tiles of rows are as many as a plan's block mostly has: the weight is read once. H100, 1500x3072x200064:
    # 2.65 ms, in groups of eight 2.84, with three stages 3.00; the vendor's 2.59.
    wrap_triton(product_kernel)[(cdiv(M, 128) * cdiv(N, block_n),)](
        x, weight, logits, end, M, N, K, x.stride(0), weight.stride(0), logits.stride(0),
        EVEN_K=K % block_k == 0, WIDEN=INTERPRET, BLOCK_M=128, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=16,
        NUM_STAGES=4, num_warps=8,
    )  # fmt: skip


def input_gradient(dlogits: Tensor, weight: Tensor, end: Tensor) -> Tensor:
    """Compute `dlogits @ weight`, `[C, H]`, for the first rows of `dlogits [C, V]`."""
    return grouped_mm(dlogits, weight.unsqueeze(0), offs=end)


def weight_gradient(dlogits: Tensor, x: Tensor, end: Tensor) -> Tensor:
    """Compute `dlogits.t() @ x`, `[V, H]`, over the first rows of both; zeros over none."""
    return grouped_mm(dlogits.t(), x, offs=end)[0]


@jit
def add_kernel(total_ptr, part_ptr, end_ptr, N, BLOCK_N: tl.constexpr):
    if tl.load(end_ptr) > 0:
        offsets = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        total = tl.load(total_ptr + offsets, mask=offsets < N, other=0.0).to(tl.float32)
        total += tl.load(part_ptr + offsets, mask=offsets < N, other=0.0).to(tl.float32)
        tl.store(total_ptr + offsets, total.to(total_ptr.dtype.element_ty), mask=offsets < N)


def add_where_any(total: Tensor, part: Tensor, end: Tensor) -> None:
    """Add `part` to `total`, rounded once; where `end` is 0, and the part zeros, neither is read."""
    N = total.numel()
    wrap_triton(add_kernel)[(cdiv(N, 4096),)](total, part, end, N, BLOCK_N=4096, num_warps=8)
