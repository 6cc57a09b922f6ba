"""Dynamic-row products: products of the first rows of a matrix, whose number only the device knows.

`torch.nn.functional.grouped_mm` with one group takes the number of rows as a tensor and does no work past it. Results
past it are left unwritten, and operands past it are not read.
"""

import torch
import triton.language as tl
from torch import Tensor
from torch.nn.functional import grouped_mm

from llmk.ops.common.rows import matrices_aligned
from llmk.registry import cdiv, jit, wrap_triton
from llmk.registry.devices import has_device_offsets

ROW_BYTES = 16
"""The alignment of the operands' rows and row strides."""


def can_group(x: Tensor, weight: Tensor) -> bool:
    """Return True if contiguous rows of x `[..., H]` can be multiplied with weight `[V, H]` so, in both directions."""
    if x.dtype != torch.bfloat16 or x.numel() == 0 or weight.numel() == 0 or weight.stride(-1) != 1:
        return False
    if x.shape[-1] * x.element_size() % ROW_BYTES or not matrices_aligned(weight):
        return False
    return not x.is_cuda or has_device_offsets(x.device)


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
