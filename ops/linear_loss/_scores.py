"""How logits become what a softmax is taken of."""

import triton
import triton.language as tl

from llmk.ops.common.math import cap


@triton.jit
def scores(z, inner, outer, SOFTCAP: tl.constexpr):
    """outer * cap(inner * z), and that cap, in float32."""
    u = z.to(tl.float32) * inner
    if SOFTCAP > 0:
        u = cap(u, SOFTCAP, z.dtype == tl.float32)
    return u * outer, u
