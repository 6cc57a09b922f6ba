"""The recurrence in chunks with a decay for each channel, in Triton: what of it differs from `_chunk_kernels.py`.

The package's docstring has the formulas, and names are theirs. Queries and keys that meet a state are decayed before,
each channel by itself, so the kernels that go from chunk to chunk find no decays of tokens there, and one of the whole
chunk for each channel. Pairs of tokens are made by halves of blocks of 2, 4, .. C tokens. Each half's decays are sums
along its own tokens, taken anew for each size: no sum is the difference of two.
"""

import triton.language as tl

from llmk.ops.common.math import exp
from llmk.ops.recurrence._chunk_kernels import (
    _index,
    _load,
    _load_tokens,
    _load_transposed,
    _product,
    _states_products,
    _store,
    _values_products,
)
from llmk.registry import jit


@jit
def _sums(x, SIZE: tl.constexpr, REVERSE: tl.constexpr):
    """Sums along the rows `[C, BLOCK]`, from the first to each, or from the last, of so many rows at a time."""
    C: tl.constexpr = x.shape[0]
    BLOCK: tl.constexpr = x.shape[1]
    if SIZE == 1:
        return x
    blocks = tl.reshape(x, (C // SIZE, SIZE, BLOCK))
    return tl.reshape(tl.cumsum(blocks, axis=1, reverse=REVERSE), (C, BLOCK))


@jit
def _sums_of_columns(x, SIZE: tl.constexpr):
    """Sums along the columns `[BLOCK, C]`, from the last of so many to each."""
    BLOCK: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    if SIZE == 1:
        return x
    blocks = tl.reshape(x, (BLOCK, C // SIZE, SIZE))
    return tl.reshape(tl.cumsum(blocks, axis=2, reverse=True), (BLOCK, C))


@jit
def _corners(i, j, SIZE: tl.constexpr):
    """Whether token i is in the second half and j in the first of the same block of 2 * SIZE tokens."""
    return (i // (2 * SIZE) == j // (2 * SIZE)) & (i // SIZE > j // SIZE)


@jit
def _from_start(g, index_ptr, rows, chunk, T, C: tl.constexpr):
    """d."""
    d = exp(tl.cumsum(g, axis=0))
    if index_ptr is not None:
        same = _index(index_ptr, rows, T) == _index(index_ptr, chunk * C - 1, T)
        d = tl.where(same[:, None], d, 0.0)
    return d


@jit
def _to_end(following, index_ptr, rows, chunk, T, C: tl.constexpr):
    """e, from each next token's log decay, 0 for the last."""
    e = exp(tl.cumsum(following, axis=0, reverse=True))
    if index_ptr is not None:
        same = _index(index_ptr, rows, T) == _index(index_ptr, chunk * C + C - 1, T)
        e = tl.where(same[:, None], e, 0.0)
    return e


@jit
def _same_sequence(index_ptr, rows, T, below):
    if index_ptr is not None:
        index = _index(index_ptr, rows, T)
        below &= index[:, None] == index[None, :]
    return below


@jit
def _add_level(qk, kk, q, k, kt, g, following_t, CORRECTED: tl.constexpr, SIZE: tl.constexpr):
    """Add the pairs of tokens from the two halves of blocks of 2 * SIZE."""
    C: tl.constexpr = qk.shape[0]
    t = tl.arange(0, C)
    corners = _corners(t[:, None], t[None, :], SIZE)
    from_middle = exp(_sums(g, SIZE, False))
    inside = ((t + 1) % SIZE != 0)[None, :]
    to_middle = exp(_sums_of_columns(tl.where(inside, following_t, 0.0), SIZE))
    earlier = (kt.to(tl.float32) * to_middle).to(kt.dtype)
    qk += tl.where(corners, _product((q.to(tl.float32) * from_middle).to(q.dtype), earlier), 0.0)
    if CORRECTED:
        kk += tl.where(corners, _product((k.to(tl.float32) * from_middle).to(k.dtype), earlier), 0.0)
    return qk, kk


@jit
def channel_scores_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, index_ptr, queries_ptr, keys_ptr, ends_ptr, whole_ptr, scores_ptr, kk_ptr, a_ptr,
    scale, T, N, H, HK, K, C: tl.constexpr, BLOCK_K: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """d Q, d K, e K, d_C, P and A of one chunk, and A before it is multiplied by beta."""
    chunk, row = tl.program_id(0).to(tl.int64) % N, tl.program_id(0).to(tl.int64) // N
    b, h = row // H, row % H
    q_ptr += (b * T * HK + h // (H // HK)) * K
    k_ptr += (b * T * HK + h // (H // HK)) * K
    channels = (b * T * H + h) * K
    if index_ptr is not None:
        index_ptr += b * T
    t = tl.arange(0, C)
    rows = chunk * C + t
    qk = tl.zeros((C, C), dtype=tl.float32)
    kk = tl.zeros((C, C), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K)
        q, k = _load(q_ptr, rows, cols, T, K, HK * K), _load(k_ptr, rows, cols, T, K, HK * K)
        kt = _load_transposed(k_ptr, rows, cols, T, K, HK * K)
        g = _load(g_ptr + channels, rows, cols, T, K, H * K).to(tl.float32)
        following_t = _load_transposed(g_ptr + channels, rows + 1, cols, T, K, H * K).to(tl.float32)
        qk += tl.where(t[:, None] == t[None, :], _product(q, kt), 0.0)
        for level in tl.static_range(LEVELS):
            qk, kk = _add_level(qk, kk, q, k, kt, g, following_t, beta_ptr is not None, 2**level)
        following = _load(g_ptr + channels, rows + 1, cols, T, K, H * K).to(tl.float32)
        d = _from_start(g, index_ptr, rows, chunk, T, C)
        e = _to_end(tl.where((t + 1 < C)[:, None], following, 0.0), index_ptr, rows, chunk, T, C)
        _store(queries_ptr + channels, q.to(tl.float32) * d, rows, cols, T, K, H * K)
        _store(ends_ptr + channels, k.to(tl.float32) * e, rows, cols, T, K, H * K)
        if beta_ptr is not None:
            _store(keys_ptr + channels, k.to(tl.float32) * d, rows, cols, T, K, H * K)
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
    dscores, da, dbeta = _values_products(do_ptr, v_ptr, u_ptr, dr_ptr, values, rows, T, V, H, C, BLOCK_V)
    same = _same_sequence(index_ptr, rows, T, t[:, None] >= t[None, :])
    _store(dscores_ptr + matrix, tl.where(same, dscores, 0.0) * tl.cast(scale, tl.float32), t, t, C, C, C)
    if beta_ptr is not None:
        da = tl.where(same & (t[:, None] > t[None, :]), da, 0.0)
        dbeta += tl.sum(da * _load(kk_ptr + matrix, t, t, C, C, C), axis=1)
        tl.store(dbeta_ptr + (b * T + rows) * H + h, dbeta, mask=rows < T)
        beta = _load_tokens(beta_ptr + b * T * H + h, rows, T, H)
        _store(dkk_ptr + matrix, beta[:, None] * da, t, t, C, C, C)


@jit
def _level_gradients(
    q, k, g, following, dscores_ptr, dkk_ptr, matrix, DTYPE: tl.constexpr, SIZE: tl.constexpr
):
    """The gradients of q and k through the pairs of tokens from the two halves of blocks of 2 * SIZE, and those of the
    log decays: what belongs to each token's, and what to the next one's.
    """
    C: tl.constexpr = q.shape[0]
    t = tl.arange(0, C)
    i, j = t[:, None], t[None, :]
    second, inside = (t // SIZE % 2 == 1)[:, None], ((t + 1) % SIZE != 0)[:, None]
    to_middle = _sums(tl.where(inside, following, 0.0), SIZE, True)
    decay = exp(tl.where(second, _sums(g, SIZE, False), to_middle))
    kd = (k * decay).to(DTYPE)
    corners, corners_t = _corners(i, j, SIZE), _corners(j, i, SIZE)
    pairs, pairs_t = matrix + i * C + j, matrix + j * C + i
    dq = decay * _product(tl.load(dscores_ptr + pairs, mask=corners, other=0.0), kd)
    dk = _product(tl.load(dscores_ptr + pairs_t, mask=corners_t, other=0.0), (q * decay).to(DTYPE))
    if dkk_ptr is not None:
        dk += _product(tl.load(dkk_ptr + pairs, mask=corners, other=0.0), kd)
        dk += _product(tl.load(dkk_ptr + pairs_t, mask=corners_t, other=0.0), kd)
    dk *= decay
    dlog = q * dq + k * dk
    own = tl.where(second, _sums(dlog, SIZE, True), 0.0)
    next_ones = tl.where((t // SIZE % 2 == 0)[:, None] & inside, _sums(dlog, SIZE, False), 0.0)
    return dq, dk, own, next_ones


@jit
def channel_keys_backward_kernel(
    do_ptr, q_ptr, k_ptr, g_ptr, u_ptr, dr_ptr, beta_ptr, index_ptr, states_ptr, dstates_ptr, dscores_ptr, dkk_ptr,
    dbeta_part_ptr, dq_ptr, dk_ptr, dg_ptr, dbeta_ptr, scale, T, N, H, HK, K, V,
    C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """The gradients of q, k and g of one chunk, for one value head, and the rest of that of beta."""
    chunk, row = tl.program_id(0).to(tl.int64) % N, tl.program_id(0).to(tl.int64) // N
    b, h = row // H, row % H
    q_ptr += (b * T * HK + h // (H // HK)) * K
    k_ptr += (b * T * HK + h // (H // HK)) * K
    values, matrix, state = (b * T * H + h) * V, (row * N + chunk) * C * C, (row * N + chunk) * K * V
    channels = (b * T * H + h) * K
    if index_ptr is not None:
        index_ptr += b * T
    t = tl.arange(0, C)
    rows = chunk * C + t
    diagonal = tl.load(dscores_ptr + matrix + t * C + t).to(tl.float32)[:, None]
    predicted = tl.zeros((C,), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        keys = start + tl.arange(0, BLOCK_K)
        whole = tl.zeros((BLOCK_K,), dtype=tl.float32)
        from_out, from_r, from_end, whole = _states_products(
            do_ptr, u_ptr, dr_ptr, states_ptr + state, dstates_ptr + state, whole, values, rows, keys, T, H, K, V,
            C, BLOCK_K, BLOCK_V,
        )  # fmt: skip
        q = _load(q_ptr, rows, keys, T, K, HK * K).to(tl.float32)
        k = _load(k_ptr, rows, keys, T, K, HK * K).to(tl.float32)
        g = _load(g_ptr + channels, rows, keys, T, K, H * K).to(tl.float32)
        following = _load(g_ptr + channels, rows + 1, keys, T, K, H * K).to(tl.float32)
        following = tl.where((t + 1 < C)[:, None], following, 0.0)
        d = _from_start(g, index_ptr, rows, chunk, T, C)
        from_out *= tl.cast(scale, tl.float32) * d
        from_end *= _to_end(following, index_ptr, rows, chunk, T, C)
        whole *= tl.sum(tl.where((t == C - 1)[:, None], d, 0.0), axis=0)
        dq, dk = from_out + diagonal * k, from_end + diagonal * q
        from_start = q * from_out
        if beta_ptr is not None:
            from_r *= d
            predicted += tl.sum(k * from_r, axis=1)
            from_r *= _load_tokens(beta_ptr + b * T * H + h, rows, T, H)[:, None]
            dk -= from_r
            from_start -= k * from_r
        own = whole[None, :] + tl.cumsum(from_start, axis=0, reverse=True)
        next_ones = tl.cumsum(k * from_end, axis=0)
        for level in tl.static_range(LEVELS):
            level_dq, level_dk, level_own, level_next = _level_gradients(
                q, k, g, following, dscores_ptr, dkk_ptr, matrix, q_ptr.dtype.element_ty, 2**level
            )
            dq += level_dq
            dk += level_dk
            own += level_own
            next_ones += level_next
        # The memory of dq carries each token's share to the thread that has the next one.
        after = tl.where(t + 1 < C, rows + 1, T)
        _store(dq_ptr + channels, next_ones, after, keys, T, K, H * K)
        tl.debug_barrier()
        own += _load(dq_ptr + channels, tl.where(t > 0, rows, T), keys, T, K, H * K)
        tl.debug_barrier()
        _store(dg_ptr + channels, own, rows, keys, T, K, H * K)
        _store(dq_ptr + channels, dq, rows, keys, T, K, H * K)
        _store(dk_ptr + channels, dk, rows, keys, T, K, H * K)
    if beta_ptr is not None:
        tokens = (b * T + rows) * H + h
        dbeta = tl.load(dbeta_part_ptr + tokens, mask=rows < T, other=0.0) - predicted
        tl.store(dbeta_ptr + tokens, dbeta.to(dbeta_ptr.dtype.element_ty), mask=rows < T)
