r"""RMSNorm of each head of queries and keys, then their rotary position embedding.

Source: Qwen3 and Gemma 3, as Hugging Face transformers computes them: `q_norm(q_proj(x).view(B, S, H, D))`, transposed,
then `apply_rotary_pos_emb`; k likewise. The normalization is rms_norm.py's, over a head's D features, and the rotation
rope.py's, of the first R of them. One rounding at the end where the separate steps make three.

Forward, for each head x of q and of k, with w = weight + offset (the offset 1.0 is Gemma's):

    ms   = mean(x^2) + eps
    rstd = 1 / sqrt(ms)
    y    = rotate(x * rstd * w)   computed as rstd * rotate(x * w)

Backward, given dy, with the transposed rotation first and then the normalization's; ms is computed again, so that only
q and k are kept:

    g  = rotate^T(dy)
    dx = rstd * (g * w - x * mean(g * w * x) / ms)
    dw = sum over batches, heads and positions of g * x * rstd

One program takes all heads of one token forward, of several tokens backward, first q's and then k's. The weights'
gradients are summed in float32 by each program, then over the programs in a fixed order: no atomics.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.rows import contiguous_last_dim, swapped
from llmk.ops.common.sums import sum_two_partials
from llmk.ops.norm.rms_norm import rms_norm_reference
from llmk.ops.rotary.rope import (
    angles,
    as_tokens,
    check_heads,
    empty_heads,
    head_splits,
    kernel_strides,
    load_row,
    pair_blocks,
    pair_columns,
    projected,
    rope_reference,
    rotate_cpu,
    rotate_pairs,
)
from llmk.registry import (
    REPLICATE,
    Cost,
    KernelOp,
    Sample,
    check_finite,
    check_not_negative,
    check_parameter,
    empty,
    grid_cap,
    jit,
    next_power_of_2,
    no_gradient,
    num_programs,
    public_op,
    wrap_triton,
)


def qk_norm_rope_reference(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    q, k = (rms_norm_reference(x, w, eps, offset=offset).to(x.dtype) for x, w in ((q, q_weight), (k, k_weight)))
    return rope_reference(q, k, cos, sin, interleaved=interleaved)


@jit
def _normalize_and_rotate(
    pointers, angles, H, D, R, x_stride_h, eps, offset,
    INTERLEAVED: tl.constexpr, NUM_STAGES: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_PASS: tl.constexpr,
):  # fmt: skip
    x_ptr, w_ptr, y_ptr = pointers
    cos_ptr, sin_ptr = angles
    a_cols, b_cols, pair_mask = pair_columns(R, INTERLEAVED, BLOCK_PAIRS)
    ca, cb = load_row(cos_ptr, a_cols, pair_mask), load_row(cos_ptr, b_cols, pair_mask)
    sa, sb = load_row(sin_ptr, a_cols, pair_mask), load_row(sin_ptr, b_cols, pair_mask)
    wa, wb = load_row(w_ptr, a_cols, pair_mask) + offset, load_row(w_ptr, b_cols, pair_mask) + offset
    # Weight and angles in one: rotate(x * w) takes four factors of a pair instead of six, and as many registers.
    a_to_a, b_to_a, a_to_b, b_to_b = wa * ca, wb * sa, wa * sb, wb * cb
    a_cols, b_cols, pair_mask = a_cols[None, :], b_cols[None, :], pair_mask[None, :]
    for start in tl.range(0, H, BLOCK_H, num_stages=NUM_STAGES):  # type: ignore[misc]
        heads = (start + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
        mask = (heads < H) & pair_mask
        a = tl.load(x_ptr + heads * x_stride_h + a_cols, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(x_ptr + heads * x_stride_h + b_cols, mask=mask, other=0.0).to(tl.float32)
        squares = tl.sum(a * a + b * b, axis=1)
        if BLOCK_PASS > 0:
            cols = R + tl.arange(0, BLOCK_PASS)
            pass_mask = (heads < H) & (cols < D)[None, :]
            p = tl.load(x_ptr + heads * x_stride_h + cols[None, :], mask=pass_mask, other=0.0).to(tl.float32)
            squares += tl.sum(p * p, axis=1)
        rstd = tl.div_rn(1.0, tl.sqrt_rn(squares / D + eps))[:, None]
        ya, yb = rstd * (a * a_to_a - b * b_to_a), rstd * (b * b_to_b + a * a_to_b)
        tl.store(y_ptr + heads * D + a_cols, ya.to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(y_ptr + heads * D + b_cols, yb.to(y_ptr.dtype.element_ty), mask=mask)
        if BLOCK_PASS > 0:
            yp = p * rstd * (load_row(w_ptr, cols, cols < D) + offset)
            tl.store(y_ptr + heads * D + cols[None, :], yp.to(y_ptr.dtype.element_ty), mask=pass_mask)


@jit
def qk_norm_rope_kernel(
    q_ptr, k_ptr, wq_ptr, wk_ptr, cos_ptr, sin_ptr, yq_ptr, yk_ptr, S, HQ, HK, D, R,
    q_stride_b, q_stride_h, q_stride_s, k_stride_b, k_stride_h, k_stride_s,
    cos_stride_b, cos_stride_s, sin_stride_b, sin_stride_s, eps, offset,
    INTERLEAVED: tl.constexpr, NUM_STAGES: tl.constexpr,
    BLOCK_HQ: tl.constexpr, BLOCK_HK: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_PASS: tl.constexpr,
):  # fmt: skip
    eps = tl.cast(eps, tl.float32)
    offset = tl.cast(offset, tl.float32)
    token = tl.program_id(0).to(tl.int64)
    batch, s = token // S, token % S
    cos_ptr += batch * cos_stride_b + s * cos_stride_s
    sin_ptr += batch * sin_stride_b + s * sin_stride_s
    q_ptr += batch * q_stride_b + s * q_stride_s
    k_ptr += batch * k_stride_b + s * k_stride_s
    angles = (cos_ptr, sin_ptr)
    q_ptrs = (q_ptr, wq_ptr, yq_ptr + token * HQ * D)
    _normalize_and_rotate(
        q_ptrs, angles, HQ, D, R, q_stride_h, eps, offset, INTERLEAVED, NUM_STAGES, BLOCK_HQ, BLOCK_PAIRS, BLOCK_PASS
    )
    k_ptrs = (k_ptr, wk_ptr, yk_ptr + token * HK * D)
    _normalize_and_rotate(
        k_ptrs, angles, HK, D, R, k_stride_h, eps, offset, INTERLEAVED, NUM_STAGES, BLOCK_HK, BLOCK_PAIRS, BLOCK_PASS
    )


@jit
def _heads_backward(
    pointers,
    angles,
    strides,
    sizes,
    eps,
    offset,
    INTERLEAVED: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_PASS: tl.constexpr,
):
    """Make the gradients of all heads, of q or of k, of this program's tokens."""
    dy_ptr, x_ptr, w_ptr, dx_ptr, dw_ptr = pointers
    cos_ptr, sin_ptr, cos_stride_b, cos_stride_s, sin_stride_b, sin_stride_s = angles
    dy_stride_b, dy_stride_h, dy_stride_s, x_stride_b, x_stride_h, x_stride_s = strides
    tokens, S, H, D, R = sizes
    program = tl.program_id(0).to(tl.int64)
    a_cols, b_cols, pair_mask = pair_columns(R, INTERLEAVED, BLOCK_PAIRS)
    wa, wb = load_row(w_ptr, a_cols, pair_mask) + offset, load_row(w_ptr, b_cols, pair_mask) + offset
    dwa = tl.zeros((BLOCK_H, BLOCK_PAIRS), dtype=tl.float32)
    dwb = tl.zeros((BLOCK_H, BLOCK_PAIRS), dtype=tl.float32)
    if BLOCK_PASS > 0:
        pass_cols = R + tl.arange(0, BLOCK_PASS)
        wp = load_row(w_ptr, pass_cols, pass_cols < D) + offset
        dwp = tl.zeros((BLOCK_H, BLOCK_PASS), dtype=tl.float32)
    for token in range(program, tokens, tl.num_programs(0)):
        batch, s = token // S, token % S
        cos_row = cos_ptr + batch * cos_stride_b + s * cos_stride_s
        sin_row = sin_ptr + batch * sin_stride_b + s * sin_stride_s
        ca, cb = load_row(cos_row, a_cols, pair_mask), load_row(cos_row, b_cols, pair_mask)
        sa, sb = load_row(sin_row, a_cols, pair_mask), load_row(sin_row, b_cols, pair_mask)
        dy_token = dy_ptr + batch * dy_stride_b + s * dy_stride_s
        x_token = x_ptr + batch * x_stride_b + s * x_stride_s
        dx_token = dx_ptr + token * H * D
        for start in tl.range(0, H, BLOCK_H, num_stages=NUM_STAGES):  # type: ignore[misc]
            heads = (start + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
            mask = (heads < H) & pair_mask[None, :]
            dy_rows, x_rows, dx_rows = (
                dy_token + heads * dy_stride_h,
                x_token + heads * x_stride_h,
                dx_token + heads * D,
            )
            dya = tl.load(dy_rows + a_cols[None, :], mask=mask, other=0.0).to(tl.float32)
            dyb = tl.load(dy_rows + b_cols[None, :], mask=mask, other=0.0).to(tl.float32)
            a = tl.load(x_rows + a_cols[None, :], mask=mask, other=0.0).to(tl.float32)
            b = tl.load(x_rows + b_cols[None, :], mask=mask, other=0.0).to(tl.float32)
            ga, gb = rotate_pairs(dya, dyb, ca, cb, sa, sb, True)
            squares = tl.sum(a * a + b * b, axis=1)
            dot = tl.sum(ga * wa * a + gb * wb * b, axis=1)
            if BLOCK_PASS > 0:
                pass_mask = (heads < H) & (pass_cols < D)[None, :]
                gp = tl.load(dy_rows + pass_cols[None, :], mask=pass_mask, other=0.0).to(tl.float32)
                p = tl.load(x_rows + pass_cols[None, :], mask=pass_mask, other=0.0).to(tl.float32)
                squares += tl.sum(p * p, axis=1)
                dot += tl.sum(gp * wp * p, axis=1)
            ms = squares / D + eps
            rstd = tl.div_rn(1.0, tl.sqrt_rn(ms))[:, None]
            projection = tl.div_rn(dot / D, ms)[:, None]
            da, db = rstd * (ga * wa - a * projection), rstd * (gb * wb - b * projection)
            tl.store(dx_rows + a_cols[None, :], da.to(dx_ptr.dtype.element_ty), mask=mask)
            tl.store(dx_rows + b_cols[None, :], db.to(dx_ptr.dtype.element_ty), mask=mask)
            dwa += ga * (a * rstd)
            dwb += gb * (b * rstd)
            if BLOCK_PASS > 0:
                dp = rstd * (gp * wp - p * projection)
                tl.store(dx_rows + pass_cols[None, :], dp.to(dx_ptr.dtype.element_ty), mask=pass_mask)
                dwp += gp * (p * rstd)
    if dw_ptr is not None:
        dw_ptr += program * D
        tl.store(dw_ptr + a_cols, tl.sum(dwa, axis=0), mask=pair_mask)
        tl.store(dw_ptr + b_cols, tl.sum(dwb, axis=0), mask=pair_mask)
        if BLOCK_PASS > 0:
            tl.store(dw_ptr + pass_cols, tl.sum(dwp, axis=0), mask=pass_cols < D)


@jit
def qk_norm_rope_backward_kernel(
    dyq_ptr, dyk_ptr, q_ptr, k_ptr, wq_ptr, wk_ptr, cos_ptr, sin_ptr, dq_ptr, dk_ptr, dwq_ptr, dwk_ptr,
    tokens, S, HQ, HK, D, R,
    dyq_stride_b, dyq_stride_h, dyq_stride_s, dyk_stride_b, dyk_stride_h, dyk_stride_s,
    q_stride_b, q_stride_h, q_stride_s, k_stride_b, k_stride_h, k_stride_s,
    cos_stride_b, cos_stride_s, sin_stride_b, sin_stride_s, eps, offset,
    INTERLEAVED: tl.constexpr, NUM_STAGES: tl.constexpr,
    BLOCK_HQ: tl.constexpr, BLOCK_HK: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_PASS: tl.constexpr,
):  # fmt: skip
    eps = tl.cast(eps, tl.float32)
    offset = tl.cast(offset, tl.float32)
    angles = (cos_ptr, sin_ptr, cos_stride_b, cos_stride_s, sin_stride_b, sin_stride_s)
    q_ptrs = (dyq_ptr, q_ptr, wq_ptr, dq_ptr, dwq_ptr)
    q_strides = (dyq_stride_b, dyq_stride_h, dyq_stride_s, q_stride_b, q_stride_h, q_stride_s)
    q_sizes = (tokens, S, HQ, D, R)
    _heads_backward(
        q_ptrs, angles, q_strides, q_sizes, eps, offset, INTERLEAVED, NUM_STAGES, BLOCK_HQ, BLOCK_PAIRS, BLOCK_PASS
    )
    k_ptrs = (dyk_ptr, k_ptr, wk_ptr, dk_ptr, dwk_ptr)
    k_strides = (dyk_stride_b, dyk_stride_h, dyk_stride_s, k_stride_b, k_stride_h, k_stride_s)
    k_sizes = (tokens, S, HK, D, R)
    _heads_backward(
        k_ptrs, angles, k_strides, k_sizes, eps, offset, INTERLEAVED, NUM_STAGES, BLOCK_HK, BLOCK_PAIRS, BLOCK_PASS
    )


# H200, bf16, times the floor: 1.35 at B4 S4096 32/8 heads, 1.49 at B8 S2048 16/8.
# Counted in sm_90's code: where a thread has 8 pairs of a head, what does not depend on the head (cos, sin, weights,
# addresses) takes as many instructions as a head, and those are scarcer than bandwidth. One warp for all heads of a
# token spends them least often; prefetching makes up for few warps.
STAGES = 3
ELEMENTS_PER_WARP = 512
BACKWARD_PROGRAMS = 12  # of a multiprocessor: what its registers have room for


def _config(HQ: int, HK: int, D: int, R: int) -> dict[str, int]:
    blocks = pair_blocks(D, R)
    # More than 8 heads of a few features spill on sm_90: each takes an address and statistics of its own.
    width = max(64, next_power_of_2(2 * blocks["BLOCK_PAIRS"] + blocks["BLOCK_PASS"]))
    rows, warps = max(1, ELEMENTS_PER_WARP // width), min(16, max(1, width // ELEMENTS_PER_WARP))
    block_hq, block_hk = (max(1, min(rows, next_power_of_2(H))) for H in (HQ, HK))
    return blocks | {"BLOCK_HQ": block_hq, "BLOCK_HK": block_hk, "num_warps": warps, "NUM_STAGES": STAGES}


def _qk_norm_rope_fwd(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    offset: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    q, k, q_weight, k_weight, cos, sin = (contiguous_last_dim(x) for x in (q, k, q_weight, k_weight, cos, sin))
    B, HQ, S, D = q.shape
    HK, R = k.shape[1], cos.shape[-1]
    yq, yk = empty_heads(q), empty_heads(k)
    tensors, strides = (q, k, q_weight, k_weight, cos, sin, yq, yk), kernel_strides(q, k, cos=cos, sin=sin)
    wrap_triton(qk_norm_rope_kernel)[(B * S,)](
        *tensors, S, HQ, HK, D, R, *strides, eps, offset, INTERLEAVED=interleaved, **_config(HQ, HK, D, R)
    )
    return yq, yk


def _qk_norm_rope_bwd(
    grad_q: Tensor,
    grad_k: Tensor,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    offset: float,
    interleaved: bool,
    need_q_weight: bool,
    need_k_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dyq, dyk, q, k = (contiguous_last_dim(x) for x in (grad_q, grad_k, q, k))
    wq, wk, cos, sin = (contiguous_last_dim(x) for x in (q_weight, k_weight, cos, sin))
    B, HQ, S, D = q.shape
    HK, R = k.shape[1], cos.shape[-1]
    dq, dk = empty_heads(q), empty_heads(k)
    needed = (wq, need_q_weight), (wk, need_k_weight)
    dwq, dwk = (empty((D,), w.dtype, w.device) if needs else no_gradient(grad_q) for w, needs in needed)
    programs = grid_cap(B * S, num_programs(q.device, BACKWARD_PROGRAMS))
    partials_q, partials_k = (empty((programs, D), torch.float32, q.device) if needs else None for _, needs in needed)
    tensors = dyq, dyk, q, k, wq, wk, cos, sin, dq, dk, partials_q, partials_k
    sizes, strides = (B * S, S, HQ, HK, D, R), kernel_strides(dyq, dyk, q, k, cos=cos, sin=sin)
    wrap_triton(qk_norm_rope_backward_kernel)[(programs,)](
        *tensors, *sizes, *strides, eps, offset, INTERLEAVED=interleaved, **_config(HQ, HK, D, R)
    )
    if need_q_weight or need_k_weight:
        sum_two_partials(partials_q, partials_k, dwq, dwk)
    return dq, dk, dwq, dwk


qk_norm_rope_fwd = KernelOp(_qk_norm_rope_fwd, launch_cached=True)
qk_norm_rope_bwd = KernelOp(_qk_norm_rope_bwd, launch_cached=True)


@qk_norm_rope_fwd.register_kernel("cpu")
def _(q, k, q_weight, k_weight, cos, sin, eps, offset, interleaved):
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        dtype, x = x.dtype, as_tokens(x)
        normalized = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight.float() + offset)
        return swapped(rotate_cpu(normalized, cos, sin, interleaved, False), dtype)

    return forward(q, q_weight), forward(k, k_weight)


@qk_norm_rope_bwd.register_kernel("cpu")
def _(grad_q, grad_k, q, k, q_weight, k_weight, cos, sin, eps, offset, interleaved, need_q_weight, need_k_weight):
    def backward(dy: Tensor, x: Tensor, weight: Tensor, need_dw: bool) -> tuple[Tensor, Tensor]:
        dtype, x = x.dtype, as_tokens(x)
        ms = x.square().mean(-1, keepdim=True) + eps
        rstd = torch.rsqrt(ms)
        g = rotate_cpu(as_tokens(dy), cos, sin, interleaved, True)
        wg = g * (weight.float() + offset)
        dx = rstd * (wg - x * ((wg * x).mean(-1, keepdim=True) / ms))
        if need_dw:
            # On a CPU Inductor adds up rows one after the other; what that loses in float32 shows.
            dw = (g * (x * rstd)).sum((0, 1, 2), dtype=torch.float64 if x.is_cpu else torch.float32).to(weight.dtype)
        else:
            dw = no_gradient(grad_q)
        return swapped(dx, dtype), dw

    dq, dwq = backward(grad_q, q, q_weight, need_q_weight)
    dk, dwk = backward(grad_k, k, k_weight, need_k_weight)
    return dq, dk, dwq, dwk


@qk_norm_rope_fwd.register_fake
def _(q, k):
    return empty_heads(q), empty_heads(k)


@qk_norm_rope_bwd.register_fake
def _(grad_q, q, k, q_weight, k_weight, need_q_weight, need_k_weight):
    needed = (q_weight, need_q_weight), (k_weight, need_k_weight)
    dwq, dwk = (w.new_empty(w.shape) if needs else no_gradient(grad_q) for w, needs in needed)
    return empty_heads(q), empty_heads(k), dwq, dwk


qk_norm_rope_fwd.register_backward(
    qk_norm_rope_bwd, outputs=("yq", "yk"), depends_on=[("q", "q_weight"), ("k", "k_weight")]
)


@qk_norm_rope_fwd.register_sharding
def _(cos):
    return [([heads] * 2, [heads, heads, REPLICATE, REPLICATE, angle, angle]) for heads, angle in head_splits(cos)]


def qk_norm_rope_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    randn = partial(torch.randn, device=device, dtype=dtype)

    def sample(q: Tensor, k: Tensor, R: int, why: str, angle_dtype: torch.dtype = dtype, **kwargs: float) -> Sample:
        D, S = q.shape[-1], q.shape[2]
        return Sample((q, k, randn(D), randn(D), *angles(1, S, R, device, angle_dtype)), kwargs, why=why)

    yield sample(*projected(2, 5, 4, 2, 16, device, dtype), 16, "as projected")
    as_gemma = projected(2, 3, 3, 1, 32, device, dtype)
    yield sample(*as_gemma, 32, "Gemma's offset", offset=1.0, eps=1e-5)
    yield sample(randn(2, 2, 4, 12), randn(2, 1, 4, 12), 12, "neighbours in pairs", interleaved=True)
    yield sample(randn(1, 3, 3, 100), randn(1, 1, 3, 100), 100, "100 features, cos in float32", torch.float32)
    yield sample(randn(1, 5, 3, 20), randn(1, 1, 3, 20), 12, "partial, odd sizes", offset=1.0)
    yield sample(randn(1, 5, 3, 20), randn(1, 1, 3, 20), 6, "partial, neighbours in pairs", interleaved=True)
    yield sample(randn(1, 1, 1, 2), randn(1, 1, 1, 2), 2, "one pair")
    yield sample(randn(2, 2, 0, 8), randn(2, 1, 0, 8), 8, "no tokens")
    yield sample(randn(2, 2, 8, 4).transpose(2, 3), randn(2, 1, 8, 4).transpose(2, 3), 8, "features strided")
    yield sample(1e4 * randn(1, 2, 5, 64), 1e4 * randn(1, 1, 5, 64), 64, "large values")
    yield Sample(
        (randn(1, 2, 3, 8).expand(2, 2, 3, 8), randn(2, 1, 3, 8), randn(8), randn(8), randn(2, 3, 8), randn(2, 3, 8)),
        why="q expanded, an angle for each batch, halves of cos differ",
    )
    yield sample(randn(1, 70, 2, 64), randn(1, 3, 2, 64), 64, "heads in blocks")


def qk_norm_rope_resized(rows: int, device: torch.device, dtype: torch.dtype) -> Sample:
    heads = projected(2, rows, 4, 2, 16, device, dtype)
    weights = (torch.randn(16, device=device, dtype=dtype) for _ in range(2))
    return Sample((*heads, *weights, *angles(1, rows, 16, device, dtype)), why="resized")


def qk_norm_rope_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for B, S, HQ, HK, D in [(4, 4096, 32, 8, 128), (8, 2048, 16, 8, 128)]:
        heads = projected(B, S, HQ, HK, D, device, dtype)
        weights = (torch.randn(D, device=device, dtype=dtype) for _ in range(2))
        yield Sample((*heads, *weights, *angles(1, S, D, device, dtype)), why=f"B{B} S{S} {HQ}/{HK} heads D{D}")


def qk_norm_rope_cost(q: Tensor, k: Tensor, *args: Tensor, **options: Any) -> Cost:
    tensors = (q.numel() + k.numel()) * q.element_size()
    return Cost(bytes_forward=2 * tensors, bytes_full=5 * tensors)


@public_op(
    reference=qk_norm_rope_reference,
    differentiable=("q", "k", "q_weight", "k_weight"),
    kernel_ops=(qk_norm_rope_fwd, qk_norm_rope_bwd),
    samples=qk_norm_rope_samples,
    resized=qk_norm_rope_resized,
    workloads=qk_norm_rope_workloads,
    cost=qk_norm_rope_cost,
)
def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Normalize every head of queries and keys by its root mean square, then rotate it, as `rope(rms_norm(q), ...)`.

    Args:
        q: `[B, HQ, S, D]` with D at most 2048, float32, float16 or bfloat16, any strides.
        k: `[B, HK, S, D]`, dtype of `q`.
        q_weight: `[D]`, any of these dtypes: the scale of each feature of q's normalized heads.
        k_weight: `[D]`, likewise of k's.
        cos: `[1 or B, S, R]`, any of these dtypes, R even and at most D; features R to D are not rotated.
        sin: Shape and dtype of `cos`.
        eps: Added to the mean square, at least 0.
        offset: Added to the weights: 1.0 for Gemma's, which are stored minus one.
        interleaved: Rotate neighbours (0, 1), (2, 3), ... instead of feature i with feature i + R/2; cos and sin are
            then laid out the same way.

    Returns:
        The normalized and rotated q and k, with their shapes and dtypes, lying in memory as `[B, S, H, D]`.

    Raises:
        TypeError: A dtype is not one of these, or k's is not q's, or sin's is not cos's.
        ValueError: A shape or device does not fit, or a number is out of range.
        NotImplementedError: cos or sin requires a gradient.

    Source: `Qwen3Attention` and `Gemma3Attention` of Hugging Face transformers; Zhang and Sennrich, 2019,
    https://arxiv.org/abs/1910.07467; Su et al., 2021, https://arxiv.org/abs/2104.09864.
    """
    check_heads(q, k, cos, sin)
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        check_parameter(name, weight, q.shape[-1:], "the last axis of q", "q", q)
    check_not_negative("eps", eps)
    check_finite("offset", offset)
    return qk_norm_rope_fwd(q, k, q_weight, k_weight, cos, sin, eps, offset, interleaved)
