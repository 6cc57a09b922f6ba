"""The backward pass of the recurrence in chunks, in Triton; the package's docstring has the formulas."""

import triton.language as tl

from llmk.ops.recurrence._chunk_kernels import (
    _between,
    _column,
    _keys_products,
    _load,
    _load_tokens,
    _load_transposed,
    _next_state,
    _plus_product,
    _product,
    _same_sequence,
    _store,
    _sum_and_rest,
    _sums_from_start,
    _times_state,
    _transposed,
)
from llmk.registry import jit


@jit
def _store_symmetric(ptr, lower, t, C: tl.constexpr):
    """Store L + L^T of a matrix that is 0 above the diagonal, and its diagonal once."""
    values = lower.to(ptr.dtype.element_ty)
    _store(ptr, tl.where(t[:, None] >= t[None, :], values, tl.trans(values)), t, t, C, C, C)


@jit
def _decayed(x, d):
    """x times decays; where one is 0, as between two sequences, it does not matter what x is."""
    return tl.where(d == 0.0, 0.0, x * d)


@jit
def _unless_first(state, chunk, initial_ptr, keys, cols, K, V):
    """A block of the state before a chunk; of the first chunk as it was given, where nothing has rounded it.

    A branch would keep the compiler from loading operands ahead.
    """
    return tl.where(chunk == 0, _load(initial_ptr, keys, cols, tl.where(chunk == 0, K, 0), V, V), state)


@jit
def _factors(beta_ptr, start_ptr, row, chunk, first, t, T, N, H, C: tl.constexpr):
    """Beta and d of a chunk's tokens, and the decay of all of it; 1 where queries and keys have it in them."""
    beta = tl.full((C,), 1.0, dtype=tl.float32)
    d, whole = beta, 1.0
    if beta_ptr is not None:
        beta = _load_tokens(beta_ptr + first, chunk * C + t, T, H)
    if start_ptr is not None:
        d = tl.load(start_ptr + (row * N + chunk) * C + t)
        whole = tl.load(start_ptr + (row * N + chunk) * C + C - 1)
    return beta, d, whole


@jit
def chunk_states_backward_kernel(
    do_ptr, dfinal_ptr, q_ptr, k_ptr, ends_ptr, beta_ptr, start_ptr, end_ptr, whole_ptr, scores_ptr, inverse_ptr,
    initial_ptr, states_ptr, dstates_ptr, dwhole_ptr, dr_ptr, dv_ptr, dinitial_ptr, scale,
    T, N, H, HK, K, V, C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """The state's gradient from the last chunk to the first, of one block of columns, dR and dV."""
    scale = tl.cast(scale, tl.float32)
    blocks = tl.cdiv(V, BLOCK_V)
    row, block = tl.program_id(0).to(tl.int64) // blocks, tl.program_id(0) % blocks
    b, h = row // H, row % H
    q_ptr += (b * T * HK + h // (H // HK)) * K
    k_ptr += (b * T * HK + h // (H // HK)) * K
    if ends_ptr is not None:
        ends_ptr += (b * T * HK + h // (H // HK)) * K
    values = (b * T * H + h) * V
    t, keys, cols = tl.arange(0, C), tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    dstate = _load(dfinal_ptr + row * K * V, keys, cols, K, V, V)
    rest = tl.zeros((BLOCK_K, BLOCK_V), dtype=tl.float32)
    if PART == 0:
        last = tl.cast(N - 1, tl.int64)
        next_beta, next_d, next_whole = _factors(beta_ptr, start_ptr, row, last, b * T * H + h, t, T, N, H, C)
    for step in range(0, N):
        chunk = tl.cast(N - 1 - step, tl.int64)
        rows, matrix = chunk * C + t, (row * N + chunk) * C * C
        state_place = (row * N + chunk) * K * V
        # What no product loads ahead comes while the first products are made, or a chunk before; not with products in
        # parts, beside which it does not fit in registers.
        if PART == 0:
            state = _load(states_ptr + state_place, keys, cols, K, V, V)
            beta, d, whole = next_beta, next_d, next_whole
            following = tl.maximum(chunk - 1, 0)
            next_beta, next_d, next_whole = _factors(beta_ptr, start_ptr, row, following, b * T * H + h, t, T, N, H, C)
        else:
            beta, d, whole = _factors(beta_ptr, start_ptr, row, chunk, b * T * H + h, t, T, N, H, C)
        if whole_ptr is not None:
            whole = _column(whole_ptr + (row * N + chunk) * K, keys, K)
        stored_ptr = dstates_ptr + state_place
        _store(stored_ptr, dstate, keys, cols, K, V, V)
        do = _load(do_ptr + values, rows, cols, T, V, H * V)
        k = _load(k_ptr, rows, keys, T, K, HK * K)
        if ends_ptr is not None:
            ends = _load(ends_ptr, rows, keys, T, K, HK * K)
            dr = _times_state(ends, ends_ptr, dstate, stored_ptr, rows, cols, T, K, V, HK * K, PART)
        else:
            dr = _times_state(k, k_ptr, dstate, stored_ptr, rows, cols, T, K, V, HK * K, PART)
            dr *= tl.load(end_ptr + (row * N + chunk) * C + t)[:, None]
        dr = _plus_product(dr, _load_transposed(scores_ptr + matrix, t, t, C, C, C), do)
        if PART > 0:
            state = _load(states_ptr + state_place, keys, cols, K, V, V)
        wide = state.to(tl.float32)
        if initial_ptr is not None:
            wide = _unless_first(wide, chunk, initial_ptr + row * K * V, keys, cols, K, V)
        dwhole_ptrs = dwhole_ptr + ((row * N + chunk) * blocks + block) * K + keys
        tl.store(dwhole_ptrs, tl.sum(wide * dstate, axis=1), mask=keys < K)
        qt = _load_transposed(q_ptr, rows, keys, T, K, HK * K)
        decayed_do = ((scale * d)[:, None] * do).to(k_ptr.dtype.element_ty)
        dstate, rest = _next_state(dstate, rest, whole, qt, decayed_do)
        if beta_ptr is not None:
            inverse_t = _load_transposed(inverse_ptr + matrix, t, t, C, C, C)
            dr = _product(inverse_t, dr.to(k_ptr.dtype.element_ty))
            _store(dr_ptr + values, dr, rows, cols, T, V, H * V)
            dr *= beta[:, None]
            if ends_ptr is not None:
                kt = _load_transposed(k_ptr, rows, keys, T, K, HK * K)
            else:
                kt = _transposed(k, k_ptr, rows, keys, T, K, HK * K, PART)
            through_r = _product(kt, (d[:, None] * dr).to(k_ptr.dtype.element_ty))
            if k_ptr.dtype.element_ty == tl.float32:
                dstate, rest = _sum_and_rest(dstate, rest - through_r)
            else:
                dstate -= through_r
        _store(dv_ptr + values, dr, rows, cols, T, V, H * V)
    if dinitial_ptr is not None:
        _store(dinitial_ptr + row * K * V, dstate, keys, cols, K, V, V)


@jit
def _values_products(
    do_ptr, u_ptr, dr_ptr, v_ptr, values, rows, T, V, H, C: tl.constexpr, BLOCK_V: tl.constexpr
):  # fmt: skip
    """dO U^T and dR U^T, `[C, C]`, and the products of the rows of dR and V, `[C]`."""
    from_out = tl.zeros((C, C), dtype=tl.float32)
    from_r = tl.zeros((C, C), dtype=tl.float32)
    dr_v = tl.zeros((C,), dtype=tl.float32)
    for start in range(0, V, BLOCK_V):
        cols = start + tl.arange(0, BLOCK_V)
        ut = tl.trans(_load(u_ptr + values, rows, cols, T, V, H * V))
        from_out += _product(_load(do_ptr + values, rows, cols, T, V, H * V), ut)
        if dr_ptr is not None:
            dr = _load(dr_ptr + values, rows, cols, T, V, H * V)
            from_r += _product(dr, ut)
            dr_v += tl.sum(dr.to(tl.float32) * _load(v_ptr + values, rows, cols, T, V, H * V).to(tl.float32), axis=1)
    return from_out, from_r, dr_v


@jit
def chunk_scores_backward_kernel(
    do_ptr, q_ptr, k_ptr, v_ptr, u_ptr, dr_ptr, g_ptr, beta_ptr, index_ptr,
    dscores_ptr, dkk_ptr, dg_ptr, dbeta_ptr, scale, T, N, H, HK, K, V, HEADS,
    C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The gradients of Q K^T and K K^T in one chunk, summed over HEADS value heads of one key head, and what comes
    through these to g and beta.
    """
    chunk, group = tl.program_id(0).to(tl.int64) % N, tl.program_id(0).to(tl.int64) // N
    b, h = group * HEADS // H, group * HEADS % H
    q_ptr += (b * T * HK + h // (H // HK)) * K
    k_ptr += (b * T * HK + h // (H // HK)) * K
    if index_ptr is not None:
        index_ptr += b * T
    t = tl.arange(0, C)
    rows, matrix = chunk * C + t, (group * N + chunk) * C * C
    below, last = t[:, None] > t[None, :], t == C - 1
    following = tl.where(last, chunk * C, rows + 1)
    pairs = _same_sequence(index_ptr, rows, T, t[:, None] >= t[None, :])
    qk, kk = _keys_products(q_ptr, k_ptr, rows, T, K, HK, beta_ptr is not None, C, BLOCK_K)
    qk *= tl.cast(scale, tl.float32)
    dscores = tl.zeros((C, C), dtype=tl.float32)
    dkk = tl.zeros((C, C), dtype=tl.float32)
    for head in range(0, HEADS):
        tokens, values = b * T * H + h + head, (b * T * H + h + head) * V
        from_out, from_r, dr_v = _values_products(do_ptr, u_ptr, dr_ptr, v_ptr, values, rows, T, V, H, C, BLOCK_V)
        coarse, fine = _sums_from_start(_load_tokens(g_ptr + tokens, rows, T, H))
        d = _between(coarse, fine)
        through_d = tl.where(pairs, from_out * d, 0.0)
        dscores += through_d
        between = tl.where(below, through_d * qk, 0.0)
        if beta_ptr is not None:
            da = tl.where(pairs & below, -from_r * d, 0.0)
            tl.store(dbeta_ptr + tokens + rows * H, dr_v + tl.sum(da * kk, axis=1), mask=rows < T)
            da *= _load_tokens(beta_ptr + tokens, rows, T, H)[:, None]
            dkk += da
            between += da * kk
        until = tl.cumsum(between, axis=1)  # [i, s]: of all j <= s
        spans = tl.sum(tl.where(below, until, 0.0), axis=0)  # [s]: of those with j <= s < i, the gradient of g at s + 1
        tl.store(dg_ptr + tokens + following * H, tl.where(last, 0.0, spans), mask=following < T)
    _store(dscores_ptr + matrix, dscores * tl.cast(scale, tl.float32), t, t, C, C, C)
    if beta_ptr is not None:
        _store_symmetric(dkk_ptr + matrix, dkk, t, C)


@jit
def _states_products(
    do_ptr, u_ptr, dr_ptr, state_ptr, dstate_ptr, values, rows, keys, T, H, K, V,
    C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """dO S^T, dR S^T and U dS'^T of a block of keys."""
    from_out = tl.zeros((C, BLOCK_K), dtype=tl.float32)
    from_r = tl.zeros((C, BLOCK_K), dtype=tl.float32)
    from_end = tl.zeros((C, BLOCK_K), dtype=tl.float32)
    for first in range(0, V, BLOCK_V):
        cols = first + tl.arange(0, BLOCK_V)
        begin = _load_transposed(state_ptr, keys, cols, K, V, V)
        end = _load_transposed(dstate_ptr, keys, cols, K, V, V)
        from_out += _product(_load(do_ptr + values, rows, cols, T, V, H * V), begin)
        from_end += _product(_load(u_ptr + values, rows, cols, T, V, H * V), end)
        if dr_ptr is not None:
            from_r += _product(_load(dr_ptr + values, rows, cols, T, V, H * V), begin)
    return from_out, from_r, from_end


@jit
def _whole_gradient(dwhole_ptr, keys, blocks, K):
    """The rows of S . dS', whose blocks of columns are summed apart."""
    total = tl.zeros(keys.shape, dtype=tl.float32)
    for block in range(0, blocks):
        total += tl.load(dwhole_ptr + block * K + keys, mask=keys < K, other=0.0)
    return total


@jit
def chunk_keys_backward_kernel(
    do_ptr, q_ptr, k_ptr, u_ptr, dr_ptr, beta_ptr, start_ptr, end_ptr, states_ptr, dstates_ptr, dscores_ptr,
    dkk_ptr, dq_ptr, dk_ptr, from_start_ptr, to_end_ptr, predicted_ptr, scale, T, N, H, HK, K, V, tokens, HEADS,
    C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of the channels of q and k in one chunk, summed over HEADS value heads of one key head,
    and that block's parts of what `chunk_gates_backward_kernel` adds up, `[blocks, tokens]`.
    """
    scale = tl.cast(scale, tl.float32)
    blocks = tl.cdiv(K, BLOCK_K)
    block, place = tl.program_id(0) % blocks, tl.program_id(0).to(tl.int64) // blocks
    chunk, first = place % N, place // N * HEADS
    b, h = first // H, first % H
    q_ptr += (b * T * HK + h // (H // HK)) * K
    k_ptr += (b * T * HK + h // (H // HK)) * K
    t, keys = tl.arange(0, C), block * BLOCK_K + tl.arange(0, BLOCK_K)
    rows = chunk * C + t
    q, k = _load(q_ptr, rows, keys, T, K, HK * K), _load(k_ptr, rows, keys, T, K, HK * K)
    dq = tl.zeros((C, BLOCK_K), dtype=tl.float32)
    dk = tl.zeros((C, BLOCK_K), dtype=tl.float32)
    for head in range(0, HEADS):
        place = (first + head) * N + chunk
        values, state = (b * T * H + h + head) * V, place * K * V
        from_out, from_r, from_end = _states_products(
            do_ptr, u_ptr, dr_ptr, states_ptr + state, dstates_ptr + state, values, rows, keys, T, H, K, V,
            C, BLOCK_K, BLOCK_V,
        )  # fmt: skip
        d, e = tl.load(start_ptr + place * C + t), tl.load(end_ptr + place * C + t)
        # What decays to nothing, as between two sequences, may have overflowed.
        from_out = tl.where((d == 0.0)[:, None], 0.0, from_out)
        from_r = tl.where((d == 0.0)[:, None], 0.0, from_r)
        from_end = tl.where((e == 0.0)[:, None], 0.0, from_end)
        dq += (scale * d)[:, None] * from_out
        dk += e[:, None] * from_end
        part = block * tl.cast(tokens, tl.int64) + place * C + t
        tl.store(from_start_ptr + part, scale * d * tl.sum(q.to(tl.float32) * from_out, axis=1))
        tl.store(to_end_ptr + part, e * tl.sum(k.to(tl.float32) * from_end, axis=1))
        if beta_ptr is not None:
            tl.store(predicted_ptr + part, d * tl.sum(k.to(tl.float32) * from_r, axis=1))
            beta = _load_tokens(beta_ptr + b * T * H + h + head, rows, T, H)
            dk -= (beta * d)[:, None] * from_r
    matrix, sums, stride = (first // HEADS * N + chunk) * C * C, (b * T * H + h) // HEADS * K, H // HEADS * K
    dscores = _load(dscores_ptr + matrix, t, t, C, C, C)
    dq = _plus_product(dq, dscores, k)
    dk = _plus_product(dk, tl.trans(dscores), q)
    if beta_ptr is not None:
        dk = _plus_product(dk, _load(dkk_ptr + matrix, t, t, C, C, C), k)
    _store(dq_ptr + sums, dq, rows, keys, T, K, stride)
    _store(dk_ptr + sums, dk, rows, keys, T, K, stride)


@jit
def _sum_of_blocks(ptr, tokens, blocks, C: tl.constexpr):
    """The sum of the parts of C tokens."""
    total = tl.zeros((C,), dtype=tl.float32)
    for block in range(0, blocks):
        total += tl.load(ptr + block * tl.cast(tokens, tl.int64) + tl.arange(0, C))
    return total


@jit
def chunk_gates_backward_kernel(
    from_start_ptr, to_end_ptr, predicted_ptr, start_ptr, dwhole_ptr, beta_ptr, between_ptr, from_a_ptr,
    dg_ptr, dbeta_ptr, T, N, H, K, tokens, blocks, value_blocks, C: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The gradients of g and beta in one chunk: through the pairs of its tokens, which are given, and the states."""
    chunk, row = tl.program_id(0).to(tl.int64) % N, tl.program_id(0).to(tl.int64) // N
    b, h, place = row // H, row % H, row * N + chunk
    t, keys = tl.arange(0, C), tl.arange(0, BLOCK_K)
    rows = chunk * C + t
    at, inside = (b * T + rows) * H + h, rows < T
    from_start = _sum_of_blocks(from_start_ptr + place * C, tokens, blocks, C)
    to_end = _sum_of_blocks(to_end_ptr + place * C, tokens, blocks, C)
    if beta_ptr is not None:
        predicted = _sum_of_blocks(predicted_ptr + place * C, tokens, blocks, C)
        from_start -= tl.load(beta_ptr + at, mask=inside, other=0.0).to(tl.float32) * predicted
        dbeta = tl.load(from_a_ptr + at, mask=inside, other=0.0) - predicted
        tl.store(dbeta_ptr + at, dbeta.to(dbeta_ptr.dtype.element_ty), mask=inside)
    whole = tl.sum(_whole_gradient(dwhole_ptr + place * value_blocks * K, keys, value_blocks, K), axis=0)
    dg = tl.load(between_ptr + at, mask=inside, other=0.0)
    dg += tl.cumsum(from_start, axis=0, reverse=True)
    dg += tl.sum(tl.where(t[:, None] < t[None, :], to_end[:, None], 0.0), axis=0)
    dg += _decayed(whole, tl.load(start_ptr + place * C + C - 1))
    tl.store(dg_ptr + at, dg.to(dg_ptr.dtype.element_ty), mask=inside)


@jit
def sum_heads_kernel(grad_ptr, x_ptr, dx_ptr, M, K, GROUP, eps, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """The gradient of queries or keys from those of their value heads, through their L2 norm where x is given."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_K)
    dx = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
    for head in range(0, GROUP):
        dx += _load(grad_ptr + head * K, rows, cols, M, K, GROUP * K)
    if x_ptr is not None:
        x = _load(x_ptr, rows, cols, M, K, K).to(tl.float32)
        rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(x * x, axis=1) + tl.cast(eps, tl.float32)))[:, None]
        n = x * rstd
        dx = rstd * (dx - n * tl.sum(n * dx, axis=1)[:, None])
    _store(dx_ptr, dx, rows, cols, M, K, K)
