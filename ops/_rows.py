"""What the row kernels share: a tensor as rows, and the sum over programs of a weight gradient's partials."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmk.registry import cdiv, wrap_triton


def as_rows(x: Tensor) -> Tensor:
    """`[..., N]` as `[M, N]` with neighbouring columns side by side; copies only where strides leave no way."""
    x = x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit
def sum_partials_kernel(partial_ptr, out_ptr, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    cols = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_P, BLOCK_N), dtype=tl.float32)
    for start in range(0, P, BLOCK_P):
        rows = start + tl.arange(0, BLOCK_P)
        mask = (rows < P)[:, None] & (cols < N)[None, :]
        total += tl.load(partial_ptr + rows[:, None] * N + cols[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + cols, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=cols < N)


def sum_partials(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum float32 `[P, N]` over its rows in a fixed order and round once to `dtype`: `[N]`."""
    P, N = partials.shape
    out = torch.empty((N,), dtype=dtype, device=partials.device)
    # Narrow blocks of columns make enough programs; wide rows have enough anyway and read longer stretches.
    block_p, block_n = (64, 32) if N <= 8192 else (8, 256)
    wrap_triton(sum_partials_kernel)[(cdiv(N, block_n),)](
        partials, out, P, N, BLOCK_P=block_p, BLOCK_N=block_n, num_warps=8
    )
    return out
