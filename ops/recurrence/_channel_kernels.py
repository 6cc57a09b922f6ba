"""The kernels of the recurrence with a decay for each channel; the package's docstring has the formulas.

They make what takes the place of d Q, d K and e K, a matrix of each value head's own, and one number of the whole chunk
for each channel. Pairs of tokens are made by halves of 2, 4, .. C tokens: those of one block of 16 tokens in products
of all blocks at once, `[C / 16, 16, 16]`, and the others in products of the whole chunk, `[C, C]`. Functions take the
places i of rows and j of columns in their block or chunk, and so serve both.
"""

import triton.language as tl

from llmk.ops.common.math import LOG2E, exp, exp_of_decay
from llmk.ops.recurrence._chunk_backward_kernels import (
    _decayed,
    _states_products,
    _store_symmetric,
    _values_products,
    _whole_gradient,
)
from llmk.ops.recurrence._chunk_kernels import (
    _index,
    _load,
    _load_tokens,
    _ones,
    _product,
    _same_sequence,
    _store,
    _sums_of,
)
from llmk.registry import jit

BLOCK = tl.constexpr(16)
"""Tokens of a block: the fewest rows that a product has."""


@jit
def _load_blocks(ptr, rows, cols, T, K, stride):
    """`_load` of rows `[C / 16, 16, 1]` and columns `[1, 1, BLOCK_K]`."""
    return tl.load(ptr + rows * stride + cols, mask=(rows < T) & (cols < K), other=0.0)


@jit
def _block_places(C: tl.constexpr):
    """The first tokens of the blocks, and the places of rows and columns in one."""
    t = tl.arange(0, BLOCK)
    return (tl.arange(0, C // BLOCK) * BLOCK)[:, None, None], t[None, :, None], t[None, None, :]


@jit
def _log_decays(g):
    """Log decays in float32. Of less than -512, where nothing is left, they are -512: 0 times -inf would be NaN."""
    g = g.to(tl.float32)
    return tl.where(g < -512.0, -512.0, g)


@jit
def _across(i, j, level):
    """True where tokens i and j are in different halves of the same block of 2 << level tokens."""
    return i >> level == (j >> level) ^ 1


@jit
def _is_second(i, level):
    """True where token i is in the second half of its block of 2 << level tokens."""
    return (i >> level) & 1 == 1


@jit
def _half_spans(q, i, j, level):
    """The matrix of the sums of log decays from the middles of blocks of 2 << level tokens, or to these, for each q."""
    second, begin = _is_second(i, level), i >> level << level
    spans = (j >= tl.where(second, begin, i + 1)) & (j <= tl.where(second, i, begin + (1 << level) - 1))
    return _ones(tl.broadcast_to(spans, q.shape[:-1] + (q.shape[-2],)), q.dtype)


@jit
def _same_as(index_ptr, rows, other, T):
    """True where tokens are in one sequence with another."""
    return _index(index_ptr, rows, T) == _index(index_ptr, other, T)


@jit
def _exp(x, dtype: tl.constexpr):
    """Exponentials of sums of log decays: to all places of float32 only where nothing rounds what they multiply."""
    return exp(x) if dtype == tl.float32 else tl.exp2(x * LOG2E)


@jit
def _transposed(x):
    """The transposes of one matrix or of several."""
    return tl.trans(x) if len(x.shape) == 2 else tl.trans(x, (0, 2, 1))


@jit
def _half_products(q, k, g, i, j, level, CORRECTED: tl.constexpr):
    """Q K^T and K K^T decayed from and to the middles of blocks of 2 << level tokens: right where `_across` is."""
    decay = _exp(_sums_of(_half_spans(q, i, j, level), g), q.dtype)
    halves = (tl.where(_is_second(i, level), q, k) * decay).to(k.dtype)
    qk = _product(halves, _transposed(halves))
    kk = qk
    if CORRECTED:
        kd = (k * decay).to(k.dtype)
        kk = _product(kd, _transposed(kd))
    return qk, kk


@jit
def channel_blocks_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, index_ptr, scores_ptr, kk_ptr, a_ptr, scale, T, N, H, HK, K,
    C: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The pairs of tokens of one block in P and A of one chunk, and in A before it is multiplied by beta."""
    blocks: tl.constexpr = C // BLOCK
    chunk, row = tl.program_id(0).to(tl.int64) % N, tl.program_id(0).to(tl.int64) // N
    b, h = row // H, row % H
    q_ptr += (b * T * HK + h // (H // HK)) * K
    k_ptr += (b * T * HK + h // (H // HK)) * K
    g_ptr += (b * T * H + h) * K
    first, i, j = _block_places(C)
    rows = chunk * C + first + i
    qk = tl.zeros((blocks, BLOCK, BLOCK), dtype=tl.float32)
    kk = tl.zeros((blocks, BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        cols = (start + tl.arange(0, BLOCK_K))[None, None, :]
        q, k = _load_blocks(q_ptr, rows, cols, T, K, HK * K), _load_blocks(k_ptr, rows, cols, T, K, HK * K)
        g = _log_decays(_load_blocks(g_ptr, rows, cols, T, K, H * K))
        qk += tl.where(i == j, _product(q, _transposed(k)), 0.0)
        for level in range(0, 4):
            level_qk, level_kk = _half_products(q, k, g, i, j, level, a_ptr is not None)
            qk += tl.where(_across(i, j, level) & (i > j), level_qk, 0.0)
            if a_ptr is not None:
                kk += tl.where(_across(i, j, level) & (i > j), level_kk, 0.0)
    if index_ptr is not None:
        index_ptr += b * T
        same = _index(index_ptr, rows, T) == _index(index_ptr, chunk * C + first + j, T)
        qk, kk = tl.where(same, qk, 0.0), tl.where(same, kk, 0.0)
    at = (row * N + chunk) * C * C + (first + i) * C + first + j
    tl.store(scores_ptr + at, (qk * tl.cast(scale, tl.float32)).to(scores_ptr.dtype.element_ty))
    if a_ptr is not None:
        if kk_ptr is not None:
            tl.store(kk_ptr + at, kk)
        beta = tl.load(beta_ptr + (b * T + rows) * H + h, mask=rows < T, other=0.0).to(tl.float32)
        tl.store(a_ptr + at, beta * kk)


@jit
def _store_where(ptr, values, at, chosen):
    tl.store(ptr + at, values.to(ptr.dtype.element_ty), mask=chosen)


@jit
def channel_scores_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, index_ptr, scores_ptr, kk_ptr, a_ptr, scale, T, N, H, HK, K,
    C: tl.constexpr, BLOCK_K: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Compute what `channel_blocks_kernel` leaves of P and A of one chunk, A also before its product with beta; one
    program makes the pairs of tokens from halves of one size.
    """
    levels: tl.constexpr = LEVELS - 4
    level, place = 4 + tl.program_id(0) % levels, tl.program_id(0).to(tl.int64) // levels
    chunk, row = place % N, place // N
    b, h = row // H, row % H
    q_ptr += (b * T * HK + h // (H // HK)) * K
    k_ptr += (b * T * HK + h // (H // HK)) * K
    g_ptr += (b * T * H + h) * K
    if index_ptr is not None:
        index_ptr += b * T
    t = tl.arange(0, C)
    i, j, rows = t[:, None], t[None, :], chunk * C + t
    qk = tl.zeros((C, C), dtype=tl.float32)
    kk = tl.zeros((C, C), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K)
        q, k = _load(q_ptr, rows, cols, T, K, HK * K), _load(k_ptr, rows, cols, T, K, HK * K)
        g = _log_decays(_load(g_ptr, rows, cols, T, K, H * K))
        block_qk, block_kk = _half_products(q, k, g, i, j, level, a_ptr is not None)
        qk += block_qk
        if a_ptr is not None:
            kk += block_kk
    # Above the diagonal all is 0, and each level stores what mirrors its own pairs.
    at, stored = place * C * C + i * C + j, tl.max_constancy(i >> level == (j >> level) ^ 1, [1, 16])
    pairs = _same_sequence(index_ptr, rows, T, stored & (i > j))
    _store_where(scores_ptr, tl.where(pairs, qk, 0.0) * tl.cast(scale, tl.float32), at, stored)
    if a_ptr is not None:
        kk = tl.where(pairs, kk, 0.0)
        if kk_ptr is not None:
            _store_where(kk_ptr, kk, at, stored)
        _store_where(a_ptr, _load_tokens(beta_ptr + b * T * H + h, rows, T, H)[:, None] * kk, at, stored)


@jit
def channel_decays_kernel(
    q_ptr, k_ptr, g_ptr, index_ptr, queries_ptr, keys_ptr, ends_ptr, whole_ptr, T, N, H, HK, K,
    C: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """d Q, d K, e K and d_C of one chunk and one block of channels."""
    blocks = tl.cdiv(K, BLOCK_K)
    block, place = tl.program_id(0) % blocks, tl.program_id(0).to(tl.int64) // blocks
    chunk, row = place % N, place // N
    b, h = row // H, row % H
    q_ptr += (b * T * HK + h // (H // HK)) * K
    k_ptr += (b * T * HK + h // (H // HK)) * K
    channels = (b * T * H + h) * K
    if index_ptr is not None:
        index_ptr += b * T
    t, cols = tl.arange(0, C), block * BLOCK_K + tl.arange(0, BLOCK_K)
    rows = chunk * C + t
    q, k = _load(q_ptr, rows, cols, T, K, HK * K), _load(k_ptr, rows, cols, T, K, HK * K)
    g = _log_decays(_load(g_ptr + channels, rows, cols, T, K, H * K))
    whole = exp_of_decay(tl.sum(g, axis=0))
    earlier = _ones(t[:, None] > t[None, :], q.dtype)
    d = _exp(_sums_of(_ones(t[:, None] >= t[None, :], q.dtype), g), q.dtype)
    if index_ptr is not None:
        whole = tl.where(_same_as(index_ptr, chunk * C - 1, chunk * C + C - 1, T), whole, 0.0)
        d = tl.where(_same_as(index_ptr, rows, chunk * C - 1, T)[:, None], d, 0.0)
    tl.store(whole_ptr + place * K + cols, whole, mask=cols < K)
    _store(queries_ptr + channels, q * d, rows, cols, T, K, H * K)
    if keys_ptr is not None:
        _store(keys_ptr + channels, k * d, rows, cols, T, K, H * K)
    e = _exp(_sums_of(tl.trans(earlier), g), q.dtype)
    if index_ptr is not None:
        e = tl.where(_same_as(index_ptr, rows, chunk * C + C - 1, T)[:, None], e, 0.0)
    _store(ends_ptr + channels, k * e, rows, cols, T, K, H * K)


@jit
def channel_scores_backward_kernel(
    do_ptr, v_ptr, u_ptr, dr_ptr, beta_ptr, index_ptr, kk_ptr, dscores_ptr, dkk_ptr, dbeta_ptr, scale, T, N, H, V,
    C: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """M + M^T and N + N^T of one chunk, without D, the diagonal of M once, and what comes through N to beta."""
    chunk, row = tl.program_id(0).to(tl.int64) % N, tl.program_id(0).to(tl.int64) // N
    b, h = row // H, row % H
    values = (b * T * H + h) * V
    if index_ptr is not None:
        index_ptr += b * T
    t = tl.arange(0, C)
    rows, matrix = chunk * C + t, (row * N + chunk) * C * C
    dscores, from_r, dr_v = _values_products(do_ptr, u_ptr, dr_ptr, v_ptr, values, rows, T, V, H, C, BLOCK_V)
    same = _same_sequence(index_ptr, rows, T, t[:, None] >= t[None, :])
    _store_symmetric(dscores_ptr + matrix, tl.where(same, dscores, 0.0) * tl.cast(scale, tl.float32), t, C)
    if beta_ptr is not None:
        da = tl.where(same & (t[:, None] > t[None, :]), -from_r, 0.0)
        dbeta = dr_v + tl.sum(da * _load(kk_ptr + matrix, t, t, C, C, C), axis=1)
        tl.store(dbeta_ptr + (b * T + rows) * H + h, dbeta, mask=rows < T)
        beta = _load_tokens(beta_ptr + b * T * H + h, rows, T, H)
        _store_symmetric(dkk_ptr + matrix, beta[:, None] * da, t, C)


@jit
def _add_gradients(dq, dk, dg, q, k, g, dscores_ptr, dkk_ptr, at, i, j, level):
    """Add the gradients of q, k and g through the pairs of tokens from the two halves of blocks of 2 << level.

    M + M^T and N + N^T are at `at`. Of the former one product makes both: of q in second halves, and of k in first.
    """
    spans = _half_spans(q, i, j, level)
    decay = _exp(_sums_of(spans, g), q.dtype)
    is_second, across = _is_second(i, level), _across(i, j, level)
    halves = tl.where(is_second, q, k)
    through_qk = decay * _product(tl.where(across, tl.load(dscores_ptr + at), 0.0), (halves * decay).to(q.dtype))
    dq += tl.where(is_second, through_qk, 0.0)
    dk += tl.where(is_second, 0.0, through_qk)
    through_decay = halves * through_qk
    if dkk_ptr is not None:
        through_kk = decay * _product(tl.where(across, tl.load(dkk_ptr + at), 0.0), (k * decay).to(k.dtype))
        dk += through_kk
        through_decay += k * through_kk
    dg += _sums_of(_transposed(spans), through_decay)
    return dq, dk, dg


@jit
def _block_gradients(
    q_ptr, k_ptr, g_ptr, dscores_ptr, dkk_ptr, token, keys, T, H, HK, K, C: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """The gradients of q, k and g through the pairs of tokens of one block."""
    first, i, j = _block_places(C)
    rows, cols = token + first + i, keys[None, None, :]
    at = first * (C + 1) + i * C + j
    q, k = _load_blocks(q_ptr, rows, cols, T, K, HK * K), _load_blocks(k_ptr, rows, cols, T, K, HK * K)
    g = _log_decays(_load_blocks(g_ptr, rows, cols, T, K, H * K))
    diagonal = tl.load(dscores_ptr + (first + i) * (C + 1)).to(tl.float32)
    dq, dk, dg = diagonal * k, diagonal * q, tl.zeros(g.shape, dtype=tl.float32)
    for level in range(0, 4):
        dq, dk, dg = _add_gradients(dq, dk, dg, q, k, g, dscores_ptr, dkk_ptr, at, i, j, level)
    return tl.reshape(dq, (C, BLOCK_K)), tl.reshape(dk, (C, BLOCK_K)), tl.reshape(dg, (C, BLOCK_K))


@jit
def channel_pairs_backward_kernel(
    q_ptr, k_ptr, g_ptr, dscores_ptr, dkk_ptr, dq_ptr, dk_ptr, dg_ptr, T, N, H, HK, K,
    C: tl.constexpr, BLOCK_K: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of the channels of q, k and g through the pairs of tokens of one chunk."""
    blocks = tl.cdiv(K, BLOCK_K)
    block, place = tl.program_id(0) % blocks, tl.program_id(0).to(tl.int64) // blocks
    chunk, row = place % N, place // N
    b, h = row // H, row % H
    q_ptr += (b * T * HK + h // (H // HK)) * K
    k_ptr += (b * T * HK + h // (H // HK)) * K
    channels = (b * T * H + h) * K
    dscores_ptr += place * C * C
    if dkk_ptr is not None:
        dkk_ptr += place * C * C
    t, keys = tl.arange(0, C), block * BLOCK_K + tl.arange(0, BLOCK_K)
    i, j, rows = t[:, None], t[None, :], chunk * C + t
    dq, dk, dg = _block_gradients(
        q_ptr, k_ptr, g_ptr + channels, dscores_ptr, dkk_ptr, chunk * C, keys, T, H, HK, K, C, BLOCK_K
    )
    for level in range(4, LEVELS):
        tl.debug_barrier()  # keeps the compiler from holding the matrices of all turns in registers, and so q, k and g
        q, k = _load(q_ptr, rows, keys, T, K, HK * K), _load(k_ptr, rows, keys, T, K, HK * K)
        g = _log_decays(_load(g_ptr + channels, rows, keys, T, K, H * K))
        dq, dk, dg = _add_gradients(dq, dk, dg, q, k, g, dscores_ptr, dkk_ptr, i * C + j, i, j, level)
    _store(dq_ptr + channels, dq, rows, keys, T, K, H * K)
    _store(dk_ptr + channels, dk, rows, keys, T, K, H * K)
    _store(dg_ptr + channels, dg, rows, keys, T, K, H * K)


@jit
def channel_keys_backward_kernel(
    do_ptr, q_ptr, k_ptr, g_ptr, u_ptr, dr_ptr, beta_ptr, index_ptr, states_ptr, dstates_ptr, whole_ptr, dwhole_ptr,
    dg_part_ptr, dq_part_ptr, dk_part_ptr, dq_ptr, dk_ptr, dg_ptr, dbeta_ptr, scale,
    T, N, H, HK, K, V, tokens, value_blocks,
    C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Add what comes through the states of one chunk to the parts by pairs of the gradients of a block of the channels
    of q and k, for one value head, and g; and that block's part of the gradient of beta `[blocks, tokens]`.
    """
    blocks = tl.cdiv(K, BLOCK_K)
    block, place = tl.program_id(0) % blocks, tl.program_id(0).to(tl.int64) // blocks
    chunk, row = place % N, place // N
    b, h = row // H, row % H
    q_ptr += (b * T * HK + h // (H // HK)) * K
    k_ptr += (b * T * HK + h // (H // HK)) * K
    values, state, channels = (b * T * H + h) * V, place * K * V, (b * T * H + h) * K
    if index_ptr is not None:
        index_ptr += b * T
    t, keys = tl.arange(0, C), block * BLOCK_K + tl.arange(0, BLOCK_K)
    rows = chunk * C + t
    from_out, from_r, from_end = _states_products(
        do_ptr, u_ptr, dr_ptr, states_ptr + state, dstates_ptr + state, values, rows, keys, T, H, K, V,
        C, BLOCK_K, BLOCK_V,
    )  # fmt: skip
    q = _load(q_ptr, rows, keys, T, K, HK * K).to(tl.float32)
    k = _load(k_ptr, rows, keys, T, K, HK * K).to(tl.float32)
    g = _log_decays(_load(g_ptr + channels, rows, keys, T, K, H * K))
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    earlier = _ones(t[:, None] > t[None, :], dtype)
    d, e = _exp(g + _sums_of(earlier, g), dtype), _exp(_sums_of(tl.trans(earlier), g), dtype)
    if index_ptr is not None:
        d = tl.where(_same_as(index_ptr, rows, chunk * C - 1, T)[:, None], d, 0.0)
        e = tl.where(_same_as(index_ptr, rows, chunk * C + C - 1, T)[:, None], e, 0.0)
    from_out = _decayed(from_out, tl.cast(scale, tl.float32) * d)
    from_end = _decayed(from_end, e)
    dk, through_start = from_end, q * from_out
    if beta_ptr is not None:
        from_r = _decayed(from_r, d)
        part = block * tl.cast(tokens, tl.int64) + (b * T + rows) * H + h
        tl.store(dbeta_ptr + part, -tl.sum(k * from_r, axis=1), mask=rows < T)
        from_r *= _load_tokens(beta_ptr + b * T * H + h, rows, T, H)[:, None]
        dk -= from_r
        through_start -= k * from_r
    whole = _whole_gradient(dwhole_ptr + place * value_blocks * K, keys, value_blocks, K)
    dg = _decayed(whole, tl.load(whole_ptr + place * K + keys, mask=keys < K, other=0.0))[None, :]
    dg += _sums_of(earlier, k * from_end) + through_start + _sums_of(tl.trans(earlier), through_start)
    dg += _load(dg_part_ptr + channels, rows, keys, T, K, H * K)
    if index_ptr is not None:
        # A first token decays no state. Of an infinity at another token a sum that is a product makes NaN there too.
        dg = tl.where(_same_as(index_ptr, rows, rows - 1, T)[:, None], dg, 0.0)
    from_out += _load(dq_part_ptr + channels, rows, keys, T, K, H * K)
    dk += _load(dk_part_ptr + channels, rows, keys, T, K, H * K)
    _store(dg_ptr + channels, dg, rows, keys, T, K, H * K)
    _store(dq_ptr + channels, from_out, rows, keys, T, K, H * K)
    _store(dk_ptr + channels, dk, rows, keys, T, K, H * K)
