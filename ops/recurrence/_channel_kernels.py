"""The recurrence in chunks with a decay for each channel, in Triton: what of it differs from `_chunk_kernels.py`.

The package's docstring has the formulas, and names are theirs. Queries and keys that meet a state are decayed before,
each channel by itself, so the kernels that go from chunk to chunk find no decays of tokens there, and one of the whole
chunk for each channel. Pairs of tokens are made by halves of blocks of 2, 4, .. C tokens.

Each half's log decays are sums along its own tokens, and grow with the halves: those from the start of a block of 2 s
tokens are those from the start of a half, and in the second half the sum of the first more. `channel_sums_kernel` makes
the sums of all halves. No sum is the difference of two.
"""

import triton.language as tl

from llmk.ops.common.math import exp
from llmk.ops.recurrence._chunk_kernels import (
    _decayed,
    _index,
    _load,
    _load_tokens,
    _load_transposed,
    _product,
    _states_products,
    _store,
    _store_symmetric,
    _values_product,
    _values_rows,
    _whole_gradient,
)
from llmk.registry import jit


@jit
def channel_sums_kernel(g_ptr, sums_ptr, T, N, H, K, C: tl.constexpr, BLOCK_K: tl.constexpr, LEVELS: tl.constexpr):
    """The sums of the log decays of each 2, 4, .. C tokens of one chunk, as a heap: row 1 has that of all, rows 2 and 3
    those of the halves, and so on. Row 0 is 0.
    """
    blocks = tl.cdiv(K, BLOCK_K)
    block, place = tl.program_id(0) % blocks, tl.program_id(0).to(tl.int64) // blocks
    chunk, row = place % N, place // N
    b, h = row // H, row % H
    cols = block * BLOCK_K + tl.arange(0, BLOCK_K)
    sums_ptr += place * C * K
    x = _load(g_ptr + (b * T * H + h) * K, chunk * C + tl.arange(0, C), cols, T, K, H * K).to(tl.float32)
    tl.store(sums_ptr + cols, tl.zeros((BLOCK_K,), dtype=tl.float32), mask=cols < K)
    for level in tl.static_range(1, LEVELS + 1):
        x = tl.sum(tl.reshape(x, (C >> level, 2, BLOCK_K)), axis=1)
        _store(sums_ptr, x, (C >> level) + tl.arange(0, C >> level), cols, C, K, K)


@jit
def _siblings(g_ptr, sums_ptr, rows, cols, level, T, H, K, C: tl.constexpr):
    """The sum of log decays of the other half of each token's block of 2 << level tokens."""
    if level == 0:
        sums = _load(g_ptr, rows ^ 1, cols, T, K, H * K).to(tl.float32)
    else:
        sums = _load(sums_ptr, (C >> level) + ((tl.arange(0, C) >> level) ^ 1), cols, C, K, K)
    return sums


@jit
def _second(t, level):
    """True where a token is in the second half of its block of 2 << level tokens."""
    return (t >> level) & 1 == 1


@jit
def _corners(i, j, level):
    """True where token i is in the second half and j in the first of the same block of 2 << level tokens."""
    return (i >> (level + 1) == j >> (level + 1)) & (i >> level > j >> level)


@jit
def _same_as(index_ptr, rows, other, T):
    """True where tokens are in one sequence with another."""
    return _index(index_ptr, rows, T) == _index(index_ptr, other, T)


@jit
def _same_sequence(index_ptr, rows, T, pairs):
    if index_ptr is not None:
        index = _index(index_ptr, rows, T)
        pairs &= index[:, None] == index[None, :]
    return pairs


@jit
def _half_decay(from_middle, to_middle, level):
    """The decays from a block's middle, of the tokens of its second half, and to it."""
    second = _second(tl.arange(0, from_middle.shape[0]), level)[:, None]
    return exp(tl.where(second, from_middle, to_middle))


@jit
def _grown(from_middle, to_middle, sums, level):
    """The sums of log decays of halves of twice the size, whose middle is where the block ended or began."""
    second = _second(tl.arange(0, from_middle.shape[0]), level)[:, None]
    return from_middle + tl.where(second, sums, 0.0), to_middle + tl.where(second, 0.0, sums)


@jit
def _add_pairs(qk, kk, q, k, decay, level, CORRECTED: tl.constexpr):
    """Add the pairs of tokens from the two halves of blocks of 2 << level."""
    t = tl.arange(0, qk.shape[0])
    corners = _corners(t[:, None], t[None, :], level)
    kd = (k * decay).to(k.dtype)
    earlier = tl.trans(kd)
    qk += tl.where(corners, _product((q * decay).to(q.dtype), earlier), 0.0)
    if CORRECTED:
        kk += tl.where(corners, _product(kd, earlier), 0.0)
    return qk, kk


@jit
def channel_scores_kernel(
    q_ptr, k_ptr, g_ptr, sums_ptr, beta_ptr, index_ptr, queries_ptr, keys_ptr, ends_ptr, whole_ptr, scores_ptr, kk_ptr,
    a_ptr, scale, T, N, H, HK, K, C: tl.constexpr, BLOCK_K: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """d Q, d K, e K, d_C, P and A of one chunk, and A before it is multiplied by beta."""
    chunk, row = tl.program_id(0).to(tl.int64) % N, tl.program_id(0).to(tl.int64) // N
    b, h = row // H, row % H
    q_ptr += (b * T * HK + h // (H // HK)) * K
    k_ptr += (b * T * HK + h // (H // HK)) * K
    channels = (b * T * H + h) * K
    g_ptr += channels
    sums_ptr += (row * N + chunk) * C * K
    if index_ptr is not None:
        index_ptr += b * T
    t = tl.arange(0, C)
    rows = chunk * C + t
    qk = tl.zeros((C, C), dtype=tl.float32)
    kk = tl.zeros((C, C), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K)
        q, k = _load(q_ptr, rows, cols, T, K, HK * K), _load(k_ptr, rows, cols, T, K, HK * K)
        qk += tl.where(t[:, None] == t[None, :], _product(q, tl.trans(k)), 0.0)
        from_middle = _load(g_ptr, rows, cols, T, K, H * K).to(tl.float32)
        to_middle = tl.zeros((C, BLOCK_K), dtype=tl.float32)
        for level in range(0, LEVELS):
            decay = _half_decay(from_middle, to_middle, level)
            qk, kk = _add_pairs(qk, kk, q, k, decay, level, beta_ptr is not None)
            sums = _siblings(g_ptr, sums_ptr, rows, cols, level, T, H, K, C)
            from_middle, to_middle = _grown(from_middle, to_middle, sums, level)
        d, e = exp(from_middle), exp(to_middle)  # the chunk's: it is the half of no larger block
        if index_ptr is not None:
            d = tl.where(_same_as(index_ptr, rows, chunk * C - 1, T)[:, None], d, 0.0)
            e = tl.where(_same_as(index_ptr, rows, chunk * C + C - 1, T)[:, None], e, 0.0)
        _store(queries_ptr + channels, q * d, rows, cols, T, K, H * K)
        if beta_ptr is not None:
            _store(keys_ptr + channels, k * d, rows, cols, T, K, H * K)
        _store(ends_ptr + channels, k * e, rows, cols, T, K, H * K)
        whole = tl.sum(tl.where((t == C - 1)[:, None], d, 0.0), axis=0)
        tl.store(whole_ptr + (row * N + chunk) * K + cols, whole, mask=cols < K)
    matrix = (row * N + chunk) * C * C
    same = _same_sequence(index_ptr, rows, T, t[:, None] >= t[None, :])
    _store(scores_ptr + matrix, tl.where(same, qk, 0.0) * tl.cast(scale, tl.float32), t, t, C, C, C)
    if beta_ptr is not None:
        kk = tl.where(same, kk, 0.0)
        if kk_ptr is not None:
            _store(kk_ptr + matrix, kk, t, t, C, C, C)
        beta = _load_tokens(beta_ptr + b * T * H + h, rows, T, H)
        _store(a_ptr + matrix, beta[:, None] * kk, t, t, C, C, C)


@jit
def channel_scores_backward_kernel(
    do_ptr, v_ptr, u_ptr, dr_ptr, beta_ptr, index_ptr, kk_ptr, dscores_ptr, dkk_ptr, dbeta_ptr, scale, T, N, H, V,
    C: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """M and N of one chunk, without D, and what comes through the latter to beta."""
    chunk, row = tl.program_id(0).to(tl.int64) % N, tl.program_id(0).to(tl.int64) // N
    b, h = row // H, row % H
    values = (b * T * H + h) * V
    if index_ptr is not None:
        index_ptr += b * T
    t = tl.arange(0, C)
    rows, matrix = chunk * C + t, (row * N + chunk) * C * C
    dscores = _values_product(do_ptr, u_ptr, values, rows, T, V, H, C, BLOCK_V)
    same = _same_sequence(index_ptr, rows, T, t[:, None] >= t[None, :])
    _store(dscores_ptr + matrix, tl.where(same, dscores, 0.0) * tl.cast(scale, tl.float32), t, t, C, C, C)
    if beta_ptr is not None:
        da = -_values_product(dr_ptr, u_ptr, values, rows, T, V, H, C, BLOCK_V)
        da = tl.where(same & (t[:, None] > t[None, :]), da, 0.0)
        dbeta = _values_rows(dr_ptr, v_ptr, values, rows, T, V, H, C, BLOCK_V)
        dbeta += tl.sum(da * _load(kk_ptr + matrix, t, t, C, C, C), axis=1)
        tl.store(dbeta_ptr + (b * T + rows) * H + h, dbeta, mask=rows < T)
        beta = _load_tokens(beta_ptr + b * T * H + h, rows, T, H)
        _store_symmetric(dkk_ptr + matrix, beta[:, None] * da, t, C)


@jit
def _sums_of(chosen, x, dtype: tl.constexpr):
    """The sums of chosen rows of x, which is float32: two products of bfloat16 of its first and next 8 bits are faster
    than one of float32, and lose 2**-17 of each number, which a product of 16-bit operands has to 2**-9 or 2**-12.
    """
    if dtype == tl.float32:
        sums = _product(chosen.to(tl.float32), x)
    else:
        chosen = chosen.to(tl.float32).to(tl.bfloat16)
        first = x.to(tl.bfloat16)
        rest = (x - first.to(tl.float32)).to(tl.bfloat16)
        sums = _product(chosen, rest) + _product(chosen, first)
    return sums


@jit
def _add_gradients(dq, dk, dg, q, k, from_middle, to_middle, dscores_ptr, dkk_ptr, level):
    """Add the gradients of q, k and g through the pairs of tokens from the two halves of blocks of 2 << level."""
    C: tl.constexpr = q.shape[0]
    t = tl.arange(0, C)
    i, j = t[:, None], t[None, :]
    second = _second(i, level)
    decay = _half_decay(from_middle, to_middle, level)
    kd = (k * decay).to(k.dtype)
    corners, corners_t = _corners(i, j, level), _corners(j, i, level)
    dscores, dscores_t = _load(dscores_ptr, t, t, C, C, C), _load_transposed(dscores_ptr, t, t, C, C, C)
    level_dq = decay * _product(tl.where(corners, dscores, 0.0), kd)
    level_dk = _product(tl.where(corners_t, dscores_t, 0.0), (q * decay).to(q.dtype))
    if dkk_ptr is not None:
        level_dk += _product(tl.where(corners | corners_t, _load(dkk_ptr, t, t, C, C, C), 0.0), kd)
    level_dk *= decay
    # A log decay is in the sums from the middle to it and later tokens, or from earlier tokens to the middle.
    spans = (i >> level == j >> level) & ((second & (j >= i)) | (~second & (j < i)))
    dg += _sums_of(spans, q * level_dq + k * level_dk, q.dtype)
    return dq + level_dq, dk + level_dk, dg


@jit
def channel_pairs_backward_kernel(
    q_ptr, k_ptr, g_ptr, sums_ptr, dscores_ptr, dkk_ptr, dq_ptr, dk_ptr, dg_ptr, T, N, H, HK, K,
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
    sums_ptr += place * C * K
    dscores_ptr += place * C * C
    if dkk_ptr is not None:
        dkk_ptr += place * C * C
    t, keys = tl.arange(0, C), block * BLOCK_K + tl.arange(0, BLOCK_K)
    rows = chunk * C + t
    q, k = _load(q_ptr, rows, keys, T, K, HK * K), _load(k_ptr, rows, keys, T, K, HK * K)
    diagonal = tl.load(dscores_ptr + t * C + t).to(tl.float32)[:, None]
    dq, dk, dg = diagonal * k, diagonal * q, tl.zeros((C, BLOCK_K), dtype=tl.float32)
    from_middle = _load(g_ptr + channels, rows, keys, T, K, H * K).to(tl.float32)
    to_middle = tl.zeros((C, BLOCK_K), dtype=tl.float32)
    for level in range(0, LEVELS):
        tl.debug_barrier()  # keeps the compiler from holding the matrices of all turns in registers, and so q and k
        q, k = _load(q_ptr, rows, keys, T, K, HK * K), _load(k_ptr, rows, keys, T, K, HK * K)
        dq, dk, dg = _add_gradients(dq, dk, dg, q, k, from_middle, to_middle, dscores_ptr, dkk_ptr, level)
        sums = _siblings(g_ptr + channels, sums_ptr, rows, keys, level, T, H, K, C)
        from_middle, to_middle = _grown(from_middle, to_middle, sums, level)
    _store(dq_ptr + channels, dq, rows, keys, T, K, H * K)
    _store(dk_ptr + channels, dk, rows, keys, T, K, H * K)
    _store(dg_ptr + channels, dg, rows, keys, T, K, H * K)


@jit
def channel_keys_backward_kernel(
    do_ptr, q_ptr, k_ptr, g_ptr, u_ptr, dr_ptr, beta_ptr, index_ptr, states_ptr, dstates_ptr, dwhole_ptr, dg_part_ptr,
    dq_ptr, dk_ptr, dg_ptr, dbeta_ptr, scale, T, N, H, HK, K, V, tokens, value_blocks,
    C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Add what comes through the states of one chunk to the gradients of a block of the channels of q and k, for one
    value head, and g; and that block's part of the gradient of beta `[blocks, tokens]`.
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
    g = _load(g_ptr + channels, rows, keys, T, K, H * K).to(tl.float32)
    following = _load(g_ptr + channels, rows + 1, keys, T, K, H * K).to(tl.float32)
    following = tl.where((t + 1 < C)[:, None], following, 0.0)
    d, e = exp(tl.cumsum(g, axis=0)), exp(tl.cumsum(following, axis=0, reverse=True))
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
    dg = _decayed(whole, tl.sum(tl.where((t == C - 1)[:, None], d, 0.0), axis=0))[None, :]
    dg += _sums_of(t[:, None] > t[None, :], k * from_end, q_ptr.dtype.element_ty)
    dg += tl.cumsum(through_start, axis=0, reverse=True)
    dg += _load(dg_part_ptr + channels, rows, keys, T, K, H * K)
    from_out += _load(dq_ptr + channels, rows, keys, T, K, H * K)
    dk += _load(dk_ptr + channels, rows, keys, T, K, H * K)
    _store(dg_ptr + channels, dg, rows, keys, T, K, H * K)
    _store(dq_ptr + channels, from_out, rows, keys, T, K, H * K)
    _store(dk_ptr + channels, dk, rows, keys, T, K, H * K)
