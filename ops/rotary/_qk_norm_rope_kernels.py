"""The kernels of the normalization and rotation of heads; qk_norm_rope.py has the formulas."""

import triton.language as tl

from llmk.ops.rotary._heads import load_row, pair_columns, turn
from llmk.registry import jit


@jit
def _normalize_and_turn(
    x_ptr, w_ptr, cos_ptr, sin_ptr, y_ptr, H, D, R, x_stride_h, eps, offset,
    INTERLEAVED: tl.constexpr, NUM_STAGES: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_PASS: tl.constexpr,
):  # fmt: skip
    a_cols, b_cols, pair_mask = pair_columns(R, INTERLEAVED, BLOCK_PAIRS)
    ca, cb = load_row(cos_ptr, a_cols, pair_mask), load_row(cos_ptr, b_cols, pair_mask)
    sa, sb = load_row(sin_ptr, a_cols, pair_mask), load_row(sin_ptr, b_cols, pair_mask)
    wa, wb = load_row(w_ptr, a_cols, pair_mask) + offset, load_row(w_ptr, b_cols, pair_mask) + offset
    # Weight and angles in one: turn(x * w) takes four factors of a pair instead of six, and as many registers.
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
    _normalize_and_turn(
        q_ptr, wq_ptr, cos_ptr, sin_ptr, yq_ptr + token * HQ * D, HQ, D, R, q_stride_h, eps, offset,
        INTERLEAVED, NUM_STAGES, BLOCK_HQ, BLOCK_PAIRS, BLOCK_PASS,
    )  # fmt: skip
    _normalize_and_turn(
        k_ptr, wk_ptr, cos_ptr, sin_ptr, yk_ptr + token * HK * D, HK, D, R, k_stride_h, eps, offset,
        INTERLEAVED, NUM_STAGES, BLOCK_HK, BLOCK_PAIRS, BLOCK_PASS,
    )  # fmt: skip


@jit
def _backward_of_heads(
    dy_ptr, x_ptr, w_ptr, cos_ptr, sin_ptr, dx_ptr, dw_ptr, tokens, S, H, D, R,
    dy_stride_b, dy_stride_h, dy_stride_s, x_stride_b, x_stride_h, x_stride_s,
    cos_stride_b, cos_stride_s, sin_stride_b, sin_stride_s, eps, offset,
    INTERLEAVED: tl.constexpr, NUM_STAGES: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_PASS: tl.constexpr,
):  # fmt: skip
    """All heads, of q or of k, of this program's tokens."""
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
            ga, gb = turn(dya, dyb, ca, cb, sa, sb, True)
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
            share = tl.div_rn(dot / D, ms)[:, None]
            da, db = rstd * (ga * wa - a * share), rstd * (gb * wb - b * share)
            tl.store(dx_rows + a_cols[None, :], da.to(dx_ptr.dtype.element_ty), mask=mask)
            tl.store(dx_rows + b_cols[None, :], db.to(dx_ptr.dtype.element_ty), mask=mask)
            dwa += ga * (a * rstd)
            dwb += gb * (b * rstd)
            if BLOCK_PASS > 0:
                dp = rstd * (gp * wp - p * share)
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
    _backward_of_heads(
        dyq_ptr, q_ptr, wq_ptr, cos_ptr, sin_ptr, dq_ptr, dwq_ptr, tokens, S, HQ, D, R,
        dyq_stride_b, dyq_stride_h, dyq_stride_s, q_stride_b, q_stride_h, q_stride_s,
        cos_stride_b, cos_stride_s, sin_stride_b, sin_stride_s, eps, offset,
        INTERLEAVED, NUM_STAGES, BLOCK_HQ, BLOCK_PAIRS, BLOCK_PASS,
    )  # fmt: skip
    _backward_of_heads(
        dyk_ptr, k_ptr, wk_ptr, cos_ptr, sin_ptr, dk_ptr, dwk_ptr, tokens, S, HK, D, R,
        dyk_stride_b, dyk_stride_h, dyk_stride_s, k_stride_b, k_stride_h, k_stride_s,
        cos_stride_b, cos_stride_s, sin_stride_b, sin_stride_s, eps, offset,
        INTERLEAVED, NUM_STAGES, BLOCK_HK, BLOCK_PAIRS, BLOCK_PASS,
    )  # fmt: skip
