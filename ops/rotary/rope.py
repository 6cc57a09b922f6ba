r"""Rotary position embedding of queries and keys.

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021,
https://arxiv.org/abs/2104.09864; layout and formula as in Hugging Face transformers.

Forward, for the first R features of a head (the rest pass), with cos and sin of the token's position:

    y = x * cos + rotate_half(x) * sin

    rotate_half([a, b]) = [-b, a]                     halves a and b of R/2 features (default), or
    rotate_half([a0, b0, a1, b1, ..]) = [-b0, a0, ..] neighbours in pairs (interleaved)

so that each pair (a, b) is rotated; with (ca, cb), (sa, sb) the values of cos and sin at the pair's two features:

    ya = a * ca - b * sa
    yb = b * cb + a * sb

Backward, the transpose of the same pair:

    da = dya * ca + dyb * sb
    db = dyb * cb - dya * sa

One program rotates all heads of one token, q and k, so that cos and sin are read once. Results lie in memory as
[B, S, H, D], which is how projections write q and k and read their gradients.
"""

import functools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.rows import contiguous_last_dim, swapped
from llmk.ops.rotary._patterns import ROPE
from llmk.registry import (
    REPLICATE,
    Cost,
    KernelOp,
    Sample,
    check_dtype,
    check_same,
    empty_in_order,
    jit,
    next_power_of_2,
    public_op,
    wrap_triton,
)


def rope_reference(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    R = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [1 or B, 1, S, R]

    def rotate_half(x: Tensor) -> Tensor:
        if interleaved:
            return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        return torch.cat((-x[..., R // 2 :], x[..., : R // 2]), dim=-1)

    def rotate(x: Tensor) -> Tensor:
        rotated, passed = x[..., :R], x[..., R:]
        rotated = rotated * cos + rotate_half(rotated) * sin
        return (torch.cat((rotated, passed), dim=-1) if x.shape[-1] > R else rotated).to(x.dtype)

    return rotate(q), rotate(k)


@jit
def pair_columns(R, INTERLEAVED: tl.constexpr, BLOCK_PAIRS: tl.constexpr):
    """Return the columns of a and of b, of the pairs (a, b) of a head, and a mask of the pairs that are there."""
    pairs = tl.arange(0, BLOCK_PAIRS)
    a_cols = 2 * pairs if INTERLEAVED else pairs
    b_cols = a_cols + (1 if INTERLEAVED else R // 2)
    return a_cols, b_cols, pairs < R // 2


@jit
def rotate_pairs(a, b, ca, cb, sa, sb, BACKWARD: tl.constexpr):
    """Rotate the pairs (a, b), in float32, by their angles; BACKWARD rotates them back."""
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
    """Splits of q and k, and of cos and sin with them: by batch, by heads, by tokens."""
    return [(0, 0 if cos.shape[0] > 1 else REPLICATE), (1, REPLICATE), (2, 1)]


def empty_heads(x: Tensor) -> Tensor:
    """Like x `[B, H, S, D]`, lying in memory as `[B, S, H, D]`."""
    return empty_in_order(x.shape, (0, 2, 1, 3), x.dtype, x.device)


def kernel_strides(*heads: Tensor, cos: Tensor, sin: Tensor) -> list[int]:
    """Return what is not 1 of the strides of heads, and of cos and sin, whose batch has 0 where one table serves it."""
    strides = [stride for x in heads for stride in x.stride()[:3]]
    return strides + [stride for x in (cos, sin) for stride in (x.stride(0) if x.shape[0] > 1 else 0, x.stride(1))]


def rotate_cpu(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, backward: bool) -> Tensor:
    """The rotation in plain PyTorch: float32 x `[B, S, H, D]`, with its features in place."""
    R = cos.shape[-1]
    a_cols, b_cols = (slice(0, R, 2), slice(1, R, 2)) if interleaved else (slice(0, R // 2), slice(R // 2, R))
    cos, sin = cos.float().unsqueeze(2), sin.float().unsqueeze(2)
    ca, cb, sa, sb = cos[..., a_cols], cos[..., b_cols], sin[..., a_cols], sin[..., b_cols]
    a, b = x[..., a_cols], x[..., b_cols]
    pair = (a * ca + b * sb, b * cb - a * sa) if backward else (a * ca - b * sa, b * cb + a * sb)
    rotated = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((rotated, x[..., R:]), dim=-1) if x.shape[-1] > R else rotated


def as_tokens(x: Tensor) -> Tensor:
    """`[B, H, S, D]` as float32 `[B, S, H, D]`: in the order of memory Inductor makes one kernel of what follows."""
    return x.transpose(1, 2).float()


def check_heads(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """q `[B, HQ, S, D]` and k `[B, HK, S, D]` of one dtype, cos and sin `[1 or B, S, R]` of one dtype, R even."""
    check_dtype("q", q)
    check_dtype("cos", cos)
    if q.dim() != 4:
        raise ValueError(f"q: expected shape [B, HQ, S, D], got {tuple(q.shape)}")
    B, _, S, D = q.shape
    if D > MAX_FEATURES:
        raise ValueError(f"q: expected at most {MAX_FEATURES} features in a head, got {D}")
    if cos.dim() in (2, 3) and cos.shape[-2] != S and q.shape[1] == cos.shape[-2]:
        layout = f"[B, HQ, S, D] with the {cos.shape[-2]} positions of cos"
        raise ValueError(f"q: expected shape {layout}, got {tuple(q.shape)}; transpose(1, 2) swaps S and HQ")
    if k.dim() != 4 or (k.shape[0], k.shape[2], k.shape[3]) != (B, S, D):
        raise ValueError(f"k: expected shape [{B}, HK, {S}, {D}] to fit q, got {tuple(k.shape)}")
    if cos.dim() != 3 or cos.shape[0] not in (1, B) or cos.shape[1] != S or not 0 < cos.shape[2] <= D:
        raise ValueError(f"cos: expected shape [1 or {B}, {S}, R] with 0 < R <= {D}, got {tuple(cos.shape)}")
    if cos.shape[2] % 2 == 1:
        raise ValueError(f"cos: expected an even number of features to rotate, got {cos.shape[2]}")
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


def projected(
    B: int, S: int, HQ: int, HK: int, D: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """q and k for samples, lying in memory as projections write them."""
    q, k = (torch.randn(B, S, H, D, device=device, dtype=dtype).transpose(1, 2) for H in (HQ, HK))
    return q, k


@jit
def _rotate_heads(
    x_ptr,
    y_ptr,
    angles,
    pairs,
    H,
    D,
    R,
    x_stride_h,
    BACKWARD: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_PASS: tl.constexpr,
):
    ca, cb, sa, sb = angles
    a_cols, b_cols, pair_mask = pairs
    for start in tl.range(0, H, BLOCK_H, num_stages=NUM_STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        heads = (start + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
        mask = (heads < H) & pair_mask
        a = tl.load(x_ptr + heads * x_stride_h + a_cols, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(x_ptr + heads * x_stride_h + b_cols, mask=mask, other=0.0).to(tl.float32)
        ya, yb = rotate_pairs(a, b, ca, cb, sa, sb, BACKWARD)
        tl.store(y_ptr + heads * D + a_cols, ya.to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(y_ptr + heads * D + b_cols, yb.to(y_ptr.dtype.element_ty), mask=mask)
        if BLOCK_PASS > 0:
            cols = (R + tl.arange(0, BLOCK_PASS))[None, :]
            mask = (heads < H) & (cols < D)
            passed = tl.load(x_ptr + heads * x_stride_h + cols, mask=mask, other=0.0)
            tl.store(y_ptr + heads * D + cols, passed, mask=mask)


@jit
def rope_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, yq_ptr, yk_ptr, S, HQ, HK, D, R,
    q_stride_b, q_stride_h, q_stride_s, k_stride_b, k_stride_h, k_stride_s,
    cos_stride_b, cos_stride_s, sin_stride_b, sin_stride_s,
    INTERLEAVED: tl.constexpr, BACKWARD: tl.constexpr, NUM_STAGES: tl.constexpr,
    BLOCK_HQ: tl.constexpr, BLOCK_HK: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_PASS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    batch, s = token // S, token % S
    a_cols, b_cols, mask = pair_columns(R, INTERLEAVED, BLOCK_PAIRS)
    cos_ptr += batch * cos_stride_b + s * cos_stride_s
    sin_ptr += batch * sin_stride_b + s * sin_stride_s
    ca, cb = load_row(cos_ptr, a_cols, mask), load_row(cos_ptr, b_cols, mask)
    sa, sb = load_row(sin_ptr, a_cols, mask), load_row(sin_ptr, b_cols, mask)
    a_cols, b_cols, mask = a_cols[None, :], b_cols[None, :], mask[None, :]
    q_ptr += batch * q_stride_b + s * q_stride_s
    k_ptr += batch * k_stride_b + s * k_stride_s
    angles, pairs = (ca, cb, sa, sb), (a_cols, b_cols, mask)
    _rotate_heads(
        q_ptr, yq_ptr + token * HQ * D, angles, pairs, HQ, D, R, q_stride_h, BACKWARD, NUM_STAGES, BLOCK_HQ, BLOCK_PASS
    )
    _rotate_heads(
        k_ptr, yk_ptr + token * HK * D, angles, pairs, HK, D, R, k_stride_h, BACKWARD, NUM_STAGES, BLOCK_HK, BLOCK_PASS
    )


# H200, bf16, 32/8 heads of 128, times the floor of forward and backward: 1.11; without prefetch 1.13, half the warps
# 1.17, twice as many 1.25, 16 heads of q at a time 1.11 too, all of them 1.27.
MAX_PAIRS, PAIRS_PER_WARP, STAGES = 2048, 128, 3


def _config(HK: int, D: int, R: int) -> dict[str, int]:
    """Heads in blocks of the smaller head count, k's, but not more than MAX_PAIRS at a time."""
    blocks = pair_blocks(D, R)
    pairs = max(blocks["BLOCK_PAIRS"], blocks["BLOCK_PASS"] // 2)
    block_h = max(1, min(next_power_of_2(HK), MAX_PAIRS // pairs))
    warps = min(8, max(1, block_h * pairs // PAIRS_PER_WARP))
    return blocks | {"BLOCK_HQ": block_h, "BLOCK_HK": block_h, "num_warps": warps, "NUM_STAGES": STAGES}


def _rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, backward: bool) -> tuple[Tensor, Tensor]:
    q, k, cos, sin = (contiguous_last_dim(x) for x in (q, k, cos, sin))
    B, HQ, S, D = q.shape
    HK, R = k.shape[1], cos.shape[-1]
    yq, yk = empty_heads(q), empty_heads(k)
    strides, options = kernel_strides(q, k, cos=cos, sin=sin), {"INTERLEAVED": interleaved, "BACKWARD": backward}
    wrap_triton(rope_kernel)[(B * S,)](
        q, k, cos, sin, yq, yk, S, HQ, HK, D, R, *strides, **options, **_config(HK, D, R)
    )
    return yq, yk


def _rope_fwd(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    return _rope(q, k, cos, sin, interleaved, backward=False)


def _rope_bwd(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    return _rope(q, k, cos, sin, interleaved, backward=True)


rope_fwd = KernelOp(_rope_fwd, launch_cached=True)
rope_bwd = KernelOp(_rope_bwd, launch_cached=True)


def _rope_cpu(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, backward: bool
) -> tuple[Tensor, Tensor]:
    yq, yk = (swapped(rotate_cpu(as_tokens(x), cos, sin, interleaved, backward), x.dtype) for x in (q, k))
    return yq, yk


for op, derivative in ((rope_fwd, rope_bwd), (rope_bwd, rope_fwd)):  # each rotation is the other's transpose
    op.register_kernel("cpu")(functools.partial(_rope_cpu, backward=op is rope_bwd))
    op.register_fake(lambda q, k: (empty_heads(q), empty_heads(k)))
    op.register_sharding(
        lambda cos: [([heads, heads], [heads, heads, angle, angle]) for heads, angle in head_splits(cos)]
    )
    op.register_backward(derivative, outputs=("yq", "yk"), depends_on=[("q",), ("k",)])


def rope_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    randn = partial(torch.randn, device=device, dtype=dtype)

    as_projected = projected(2, 5, 4, 2, 16, device, dtype)
    yield Sample((*as_projected, *angles(1, 5, 16, device, dtype)), why="as projected")
    yield Sample((randn(2, 3, 5, 8), randn(2, 3, 5, 8), *angles(2, 5, 8, device, dtype)), why="an angle for each batch")
    yield Sample(
        (randn(2, 6, 4, 12), randn(2, 2, 4, 12), *angles(1, 4, 12, device, dtype)),
        {"interleaved": True},
        why="neighbours in pairs",
    )
    yield Sample((randn(1, 5, 3, 20), randn(1, 1, 3, 20), *angles(1, 3, 12, device, dtype)), why="partial, odd sizes")
    yield Sample(
        (randn(1, 5, 3, 20), randn(1, 1, 3, 20), *angles(1, 3, 6, device, dtype)),
        {"interleaved": True},
        why="partial, neighbours in pairs",
    )
    yield Sample((randn(1, 1, 1, 2), randn(1, 1, 1, 2), *angles(1, 1, 2, device, dtype)), why="one pair")
    yield Sample((randn(2, 2, 0, 8), randn(2, 1, 0, 8), *angles(1, 0, 8, device, dtype)), why="no tokens")
    yield Sample(
        (randn(2, 2, 8, 4).transpose(2, 3), randn(2, 2, 8, 4).transpose(2, 3), *angles(1, 4, 8, device, dtype)),
        why="features strided",
    )
    yield Sample((randn(1, 2, 3, 8), randn(1, 2, 3, 8), randn(1, 3, 8), randn(1, 3, 8)), why="halves of cos differ")
    yield Sample((randn(1, 70, 2, 64), randn(1, 3, 2, 64), *angles(1, 2, 64, device, dtype)), why="heads in blocks")
    yield Sample(
        (randn(1, 1, 4, 100), randn(1, 1, 4, 100), *angles(1, 4, 100, device, torch.float32)),
        why="one head of 100 features, cos in float32",
    )
    yield Sample(
        (1e4 * randn(1, 2, 5, 16), 1e4 * randn(1, 1, 5, 16), *angles(1, 5, 16, device, dtype)), why="large values"
    )


def rope_resized(rows: int, device: torch.device, dtype: torch.dtype) -> Sample:
    heads = projected(2, rows, 4, 2, 16, device, dtype)
    return Sample((*heads, *angles(1, rows, 16, device, dtype)), why="resized")


def rope_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    heads = projected(4, 4096, 32, 8, 128, device, dtype)
    yield Sample((*heads, *angles(1, 4096, 128, device, dtype)), why="B4 S4096 32/8 heads D128")


def rope_cost(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Cost:
    tensors = 2 * (q.numel() + k.numel()) * q.element_size()
    return Cost(bytes_forward=tensors, bytes_full=2 * tensors)


@public_op(
    reference=rope_reference,
    differentiable=("q", "k"),
    kernel_ops=(rope_fwd, rope_bwd),
    samples=rope_samples,
    resized=rope_resized,
    workloads=rope_workloads,
    cost=rope_cost,
    patterns=ROPE,
    choices=(
        "1.13 times the floor on an H200, as for compiled PyTorch and both of Liger's; QuACK's reaches 1.10. 12 tiles "
        "were tried, heads of q all at once, by 16 or by 8, with and without prefetch (1.11 to 1.35 in an earlier "
        "run)",
    ),
)
def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their positions' angles: `x * cos + rotate_half(x) * sin` on R features of a head.

    Args:
        q: `[B, HQ, S, D]` with D at most 2048, float32, float16 or bfloat16, any strides.
        k: `[B, HK, S, D]`, dtype of `q`.
        cos: `[1 or B, S, R]`, any of these dtypes, R even and at most D; the first R features are
            rotated, the others pass unchanged.
        sin: Shape and dtype of `cos`.
        interleaved: Rotate neighbours (0, 1), (2, 3), ... instead of feature i with feature i + R/2; cos and sin are
            then laid out the same way.

    Returns:
        The rotated q and k, with their shapes and dtypes, lying in memory as `[B, S, H, D]`.

    Raises:
        TypeError: A dtype is not one of these, or k's is not q's, or sin's is not cos's.
        ValueError: A shape or device does not fit.
        NotImplementedError: cos or sin requires a gradient.

    Source: Su et al., 2021, https://arxiv.org/abs/2104.09864; `apply_rotary_pos_emb` of Hugging Face transformers.
    """
    check_heads(q, k, cos, sin)
    return rope_fwd(q, k, cos, sin, interleaved)
