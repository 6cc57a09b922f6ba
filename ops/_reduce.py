"""The last step of a scalar loss: one number out of the float32 sums that a kernel's programs left behind."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmk.registry import empty, wrap_triton


@triton.jit
def sum_to_scalar_kernel(partial_ptr, out_ptr, P, divisor, BLOCK_P: tl.constexpr):
    total = tl.zeros((BLOCK_P,), dtype=tl.float32)
    for start in range(0, P, BLOCK_P):
        index = start + tl.arange(0, BLOCK_P)
        total += tl.load(partial_ptr + index, mask=index < P, other=0.0)
    tl.store(out_ptr, tl.div_rn(tl.sum(total, axis=0), tl.cast(divisor, tl.float32)))


def sum_to_scalar(partials: Tensor, divisor: int = 1) -> Tensor:
    """`sum(partials) / divisor` of float32 `[P]` as a float32 scalar, by one program in a fixed order: no atomics.

    The divisor is divided by here so that a mean costs no further launch; 0 of 0 is NaN.
    """
    out = empty((), torch.float32, partials.device)
    wrap_triton(sum_to_scalar_kernel)[(1,)](partials, out, partials.shape[0], divisor, BLOCK_P=1024, num_warps=4)
    return out
