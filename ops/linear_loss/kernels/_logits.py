"""The transform of logits before their softmax, and the columns of a row that one thread reads."""

import triton.language as tl

from llmk.ops.common.math import cap
from llmk.registry import jit

COLUMNS = tl.constexpr(8)
"""Consecutive columns that one thread reads and reduces by itself: threads synchronize once a row, not once a block."""


@jit
def thread_columns(BLOCK_V: tl.constexpr):
    """Return the columns of a block, `[BLOCK_V / COLUMNS, COLUMNS]`."""
    return tl.arange(0, BLOCK_V // COLUMNS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@jit
def logit_transform(z, inner, outer, softcap):
    """Return outer * cap(inner * z) and the cap alone, in float32; a softcap of None is off."""
    u = z.to(tl.float32) * inner
    if softcap is not None:
        u = cap(u, softcap, z.dtype == tl.float32)
    return u * outer, u
