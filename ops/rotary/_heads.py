"""The rotation, layouts and argument checks that the operators on heads of queries and keys share.

Tensors are `[B, H, S, D]`; of a head's D features the first R turn in R/2 pairs (a, b) and the rest pass. Results lie
in memory as [B, S, H, D], which is how projections write q and k and read their gradients.
"""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from llmk.registry import REPLICATE, check_dtype, check_same, empty, jit, next_power_of_2


@jit
def pair_columns(R, INTERLEAVED: tl.constexpr, BLOCK_PAIRS: tl.constexpr):
    """Where the pairs (a, b) lie in a head: the columns of a, those of b, and which of the block are there."""
    pairs = tl.arange(0, BLOCK_PAIRS)
    a_cols = 2 * pairs if INTERLEAVED else pairs
    b_cols = a_cols + (1 if INTERLEAVED else R // 2)
    return a_cols, b_cols, pairs < R // 2


@jit
def turn(a, b, ca, cb, sa, sb, BACKWARD: tl.constexpr):
    """The pairs (a, b), in float32, turned by their angles; BACKWARD turns them back."""
    if BACKWARD:
        ya = a * ca + b * sb
        yb = b * cb - a * sa
    else:
        ya = a * ca - b * sa
        yb = b * cb + a * sb
    return ya, yb


@jit
def load_row(x_ptr, cols, mask):
    """A row of parameters for all heads: [1, columns] in float32."""
    return tl.load(x_ptr + cols, mask=mask, other=0.0).to(tl.float32)[None, :]


MAX_FEATURES = 2048
"""The limit for a head: a thread block holds it in registers, and 4096 features spill on sm_90."""


def pair_blocks(D: int, R: int) -> dict[str, int]:
    """Blocks that hold the pairs of a head, and the features that pass, if any."""
    return {"BLOCK_PAIRS": next_power_of_2(R // 2), "BLOCK_PASS": next_power_of_2(D - R) if R < D else 0}


def head_splits(cos: Any) -> list[tuple[int, int | str]]:
    """How q and k may be split, and cos and sin with them: by batch, by heads, by tokens."""
    return [(0, 0 if cos.shape[0] > 1 else REPLICATE), (1, REPLICATE), (2, 1)]


def empty_heads(x: Tensor) -> Tensor:
    """Like x `[B, H, S, D]`, lying in memory as `[B, S, H, D]`."""
    B, H, S, D = x.shape
    return empty((B, S, H, D), x.dtype, x.device).transpose(1, 2)


def batch_stride(angles: Tensor) -> int:
    """The batch stride of cos or sin `[1 or B, S, R]`; 0 where one table serves the whole batch."""
    return angles.stride(0) if angles.shape[0] > 1 else 0


def turn_on_cpu(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, backward: bool) -> Tensor:
    """The rotation in plain PyTorch: float32 x `[B, S, H, D]`, with its features in place."""
    R = cos.shape[-1]
    a_cols, b_cols = (slice(0, R, 2), slice(1, R, 2)) if interleaved else (slice(0, R // 2), slice(R // 2, R))
    cos, sin = cos.float().unsqueeze(2), sin.float().unsqueeze(2)
    ca, cb, sa, sb = cos[..., a_cols], cos[..., b_cols], sin[..., a_cols], sin[..., b_cols]
    a, b = x[..., a_cols], x[..., b_cols]
    pair = (a * ca + b * sb, b * cb - a * sa) if backward else (a * ca - b * sa, b * cb + a * sb)
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((turned, x[..., R:]), dim=-1) if x.shape[-1] > R else turned


def as_tokens(x: Tensor) -> Tensor:
    """`[B, H, S, D]` as float32 `[B, S, H, D]`: in the order of memory Inductor makes one kernel of what follows."""
    return x.transpose(1, 2).float()


def heads_on_cpu(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`[B, S, H, D]`, fresh, as `[B, H, S, D]` of `dtype` that lies in memory as it did."""
    return x.to(dtype).contiguous().transpose(1, 2)


def check_heads(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """q `[B, HQ, S, D]` and k `[B, HK, S, D]` of one dtype, cos and sin `[1 or B, S, R]` of one dtype, R even."""
    check_dtype("q", q)
    check_dtype("cos", cos)
    if q.dim() != 4:
        raise ValueError(f"q: expected shape [B, HQ, S, D], got {tuple(q.shape)}")
    B, _, S, D = q.shape
    if D > MAX_FEATURES:
        raise ValueError(f"q: expected at most {MAX_FEATURES} features in a head, got {D}")
    if cos.dim() in (2, 3) and q.shape[1] == cos.shape[-2] != S:
        layout = f"[B, HQ, S, D] with the {cos.shape[-2]} positions of cos"
        raise ValueError(f"q: expected shape {layout}, got {tuple(q.shape)}; transpose(1, 2) swaps S and HQ")
    if k.dim() != 4 or (k.shape[0], k.shape[2], k.shape[3]) != (B, S, D):
        raise ValueError(f"k: expected shape [{B}, HK, {S}, {D}] to fit q, got {tuple(k.shape)}")
    if cos.dim() != 3 or cos.shape[0] not in (1, B) or cos.shape[1] != S or not 0 < cos.shape[2] <= D:
        raise ValueError(f"cos: expected shape [1 or {B}, {S}, R] with 0 < R <= {D}, got {tuple(cos.shape)}")
    if cos.shape[2] % 2 == 1:
        raise ValueError(f"cos: expected an even number of features to turn, got {cos.shape[2]}")
    if sin.shape != cos.shape:
        raise ValueError(f"sin: expected the shape of cos {tuple(cos.shape)}, got {tuple(sin.shape)}")
    check_same("k", k, "q", q, dtype=True)
    check_same("sin", sin, "cos", cos, dtype=True)
    check_same("cos", cos, "q", q)


def angles(B: int, S: int, R: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin `[B, S, R]` for samples."""
    positions = torch.arange(S, device=device, dtype=torch.float32)
    angles = positions[:, None] * 10_000 ** (-torch.arange(0, R, 2, device=device, dtype=torch.float32) / R)
    angles = torch.cat((angles, angles), dim=-1).expand(B, S, R)
    return angles.cos().to(dtype), angles.sin().to(dtype)
