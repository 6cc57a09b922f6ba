"""The kernels of the causal convolution, on blocks of tokens `[BLOCK_T, 1]` and channels `[1, BLOCK_D]`.

Products are added by `fma`, so that the compiler rounds those of a packed sequence as those of one that is alone.
"""

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.activations import activate, activate_with_grad
from llmk.ops.common.rows import aligned, byte_offset, contiguous
from llmk.ops.common.sums import sum_partials
from llmk.registry import cdiv, empty, empty_in_order, jit, no_gradient, or_no_gradient, wrap_triton

TOKENS = 128
"""Tokens of a program that walks over them. Backward each makes a row of partial sums, `[D, K + 1]` float32."""
AHEAD = tl.constexpr(3)
UNROLL = tl.constexpr(4)
"""Walked tokens between two that find their windows in the same registers, where four is the number of taps."""


@jit
def _tokens(x_ptr, state_ptr, t, d, there, T, x_t, x_d, K: tl.constexpr):
    """The inputs at tokens t; before the first token those of the initial state, and zero before and after these."""
    x = tl.load(x_ptr + t * x_t + d * x_d, mask=there & (t >= 0) & (t < T), other=0.0)
    if state_ptr is not None:
        before = there & (t < 0) & (t > -K)
        x = tl.where(t < 0, tl.load(state_ptr + d * (K - 1) + (t + K - 1), mask=before, other=0.0), x)
    return x


@jit
def _sequence(ids_ptr, t, T):
    """The sequences of tokens t: what is before the first token or after the last belongs to that token's."""
    return tl.load(ids_ptr + tl.minimum(tl.maximum(t, 0), T - 1))


@jit
def _store_final_state(x_ptr, state_ptr, ids_ptr, final_ptr, d, there, T, x_t, x_d, K: tl.constexpr):
    last = T - 1 + tl.zeros((1, 1), tl.int64)
    for k in tl.static_range(K - 1):
        s = last - (K - 2) + k
        x = _tokens(x_ptr, state_ptr, s, d, there, T, x_t, x_d, K)
        if ids_ptr is not None:
            x = tl.where(_sequence(ids_ptr, s, T) == _sequence(ids_ptr, last, T), x, 0.0)
        tl.store(final_ptr + d * (K - 1) + k, x.to(final_ptr.dtype.element_ty), mask=there)


@jit
def _parameter(ptr, d, stride, D, value: tl.constexpr):
    """A value of each channel in float32, one number where there is none."""
    if ptr is None:
        parameter = tl.full(d.shape, value, tl.float32)
    else:
        parameter = tl.load(ptr + d * stride, mask=d < D, other=0.0).to(tl.float32)
    return parameter


@jit
def _program(D, BLOCK_D: tl.constexpr):
    """A program's batch row and tokens' block, which are one number, and its channels: neighbours have neighbours."""
    blocks = tl.cdiv(D, BLOCK_D)
    program = tl.program_id(0).to(tl.int64)
    return program // blocks, ((program % blocks) * BLOCK_D + tl.arange(0, BLOCK_D))[None, :]


@jit
def _convolve(xs, sequences, w, z, FIRST: tl.constexpr, K: tl.constexpr, PACKED: tl.constexpr):
    """z plus the convolution at the token whose taps are xs[FIRST] to xs[FIRST + K - 1]."""
    for k in tl.static_range(K):  # pyright: ignore[reportGeneralTypeIssues]
        z = tl.fma(_same(sequences, FIRST + k, FIRST + K - 1, xs[FIRST + k], PACKED), w[k], z)
    return z


@jit
def _same(sequences, ONE: tl.constexpr, OTHER: tl.constexpr, value, PACKED: tl.constexpr):
    """The value, or 0 where two tokens are of different sequences."""
    if PACKED:
        value = tl.where(sequences[ONE] == sequences[OTHER], value, 0.0)
    return value


@jit
def causal_conv1d_tile_kernel(
    x_ptr, w_ptr, b_ptr, ids_ptr, state_ptr, y_ptr, final_ptr, D, T,
    x_b, x_d, x_t, y_b, y_d, y_t,
    ACTIVATION: tl.constexpr, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A block of tokens at once, loaded K times, shifted: all but one of the loads come from the cache."""
    tiles = tl.cdiv(T, BLOCK_T)
    block, d = _program(D, BLOCK_D)
    row, tile = block // tiles, block % tiles
    x_ptr += row * x_b
    y_ptr += row * y_b
    final_ptr += row * D * (K - 1)
    if ids_ptr is not None:
        ids_ptr += row * T
    if state_ptr is not None:
        state_ptr += row * D * (K - 1)
    there = d < D
    t = (tile * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    y = tl.zeros((BLOCK_T, BLOCK_D), tl.float32) + _parameter(b_ptr, d, 1, D, 0.0)
    for k in tl.static_range(K):
        s = t - (K - 1) + k
        x = _tokens(x_ptr, state_ptr, s, d, there & (t < T), T, x_t, x_d, K).to(tl.float32)
        if ids_ptr is not None:
            x = tl.where(_sequence(ids_ptr, s, T) == _sequence(ids_ptr, t, T), x, 0.0)
        y = tl.fma(x, _parameter(w_ptr + k, d, K, D, 0.0), y)
    y = activate(y, ACTIVATION).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + t * y_t + d * y_d, y, mask=there & (t < T))
    if tile == tiles - 1:
        _store_final_state(x_ptr, state_ptr, ids_ptr, final_ptr, d, there, T, x_t, x_d, K)


@jit
def causal_conv1d_walk_kernel(
    x_ptr, w_ptr, b_ptr, ids_ptr, state_ptr, y_ptr, final_ptr, D, T,
    x_b, x_d, x_t, y_b, y_d, y_t,
    ACTIVATION: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A token after the other: the K inputs that it is made of are in registers."""
    PACKED: tl.constexpr = tl.constexpr(ids_ptr is not None)
    chunks = tl.cdiv(T, TOKENS)
    block, d = _program(D, BLOCK_D)
    row, chunk = block // chunks, block % chunks
    x_ptr += row * x_b
    y_ptr += row * y_b
    final_ptr += row * D * (K - 1)
    if ids_ptr is not None:
        ids_ptr += row * T
    if state_ptr is not None:
        state_ptr += row * D * (K - 1)
    there = d < D
    begin = chunk * TOKENS + tl.zeros((1, 1), tl.int64)
    tokens = tl.minimum(T - chunk * TOKENS, TOKENS).to(tl.int32)
    bias = _parameter(b_ptr, d, 1, D, 0.0)
    w, xs, sequences = (), (), ()
    for k in tl.static_range(K):
        w = w + (_parameter(w_ptr + k, d, K, D, 0.0),)
        xs = xs + (_tokens(x_ptr, state_ptr, begin + (k - K), d, there, T, x_t, x_d, K).to(tl.float32),)
        if PACKED:
            sequences = sequences + (_sequence(ids_ptr, begin + (k - K), T),)
    next_xs = ()  # asked for AHEAD tokens before they are needed
    for i in tl.static_range(AHEAD):
        next_xs = next_xs + (_tokens(x_ptr, state_ptr, begin + i, d, there, T, x_t, x_d, K),)
    x_ptrs, left = x_ptr + (begin + AHEAD) * x_t + d * x_d, tl.minimum(T - begin - AHEAD, TOKENS).to(tl.int32)
    y_ptrs = y_ptr + begin * y_t + d * y_d
    for i in tl.range(0, tokens, loop_unroll_factor=UNROLL):
        next_xs = next_xs + (tl.load(x_ptrs, mask=there & (i < left), other=0.0),)
        xs, next_xs = xs[1:] + (next_xs[0].to(tl.float32),), next_xs[1:]
        if PACKED:
            sequences = sequences[1:] + (_sequence(ids_ptr, begin + i, T),)
        y = activate(_convolve(xs, sequences, w, bias, 0, K, PACKED), ACTIVATION)
        tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=there)
        x_ptrs += x_t
        y_ptrs += y_t
    if chunk == chunks - 1:
        _store_final_state(x_ptr, state_ptr, ids_ptr, final_ptr, d, there, T, x_t, x_d, K)


@jit
def _gradients(dy_ptr, t, d, there, T, dy_t, dy_d):
    """The gradients of the output at tokens t; zero where there is no token."""
    return tl.load(dy_ptr + t * dy_t + d * dy_d, mask=there & (t >= 0) & (t < T), other=0.0)


@jit
def _before_activation(dy, z, ACTIVATION: tl.constexpr):
    """The gradient of the convolution z from that of its activation."""
    _, slope = activate_with_grad(z, ACTIVATION)
    return dy.to(tl.float32) * slope


@jit
def _spread(dxs, g, w, sequences, K: tl.constexpr, PACKED: tl.constexpr):
    """Add what a token's gradient g gives to the K tokens up to itself."""
    new = ()
    for k in tl.static_range(K):  # pyright: ignore[reportGeneralTypeIssues]
        new = new + (tl.fma(_same(sequences, k, K - 1, g, PACKED), w[k], dxs[k]),)
    return new


@jit
def _through_final_state(dfinal_ptr, ids_ptr, s, d, there, T, K: tl.constexpr):
    """The gradient of tokens s through the final state."""
    last = T - 1 + tl.zeros_like(s)
    place = s - last + K - 2
    dx = tl.load(dfinal_ptr + d * (K - 1) + place, mask=there & (place >= 0) & (s <= last), other=0.0).to(tl.float32)
    if ids_ptr is not None:
        dx = tl.where(_sequence(ids_ptr, s, T) == _sequence(ids_ptr, last, T), dx, 0.0)
    return dx


@jit
def _store_gradient(dx, dx_ptrs, dstate_ptr, s, d, mask, K: tl.constexpr):
    """Store the gradient of tokens s, before the first token that of the initial state."""
    if dstate_ptr is None:
        tl.store(dx_ptrs, dx.to(dx_ptrs.dtype.element_ty), mask=mask)
    else:
        tl.store(dx_ptrs, dx.to(dx_ptrs.dtype.element_ty), mask=mask & (s >= 0))
        dstate = dx.to(dstate_ptr.dtype.element_ty)
        tl.store(dstate_ptr + d * (K - 1) + (s + K - 1), dstate, mask=mask & (s < 0))


@jit
def causal_conv1d_backward_tile_kernel(
    dy_ptr, dfinal_ptr, x_ptr, w_ptr, b_ptr, ids_ptr, state_ptr, dx_ptr, dstate_ptr, dw_ptr, db_ptr, D, T,
    dy_b, dy_d, dy_t, x_b, x_d, x_t, dx_b, dx_d, dx_t,
    ACTIVATION: tl.constexpr, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A block of tokens at once: the convolution is computed again at each token and the K - 1 after it."""
    PACKED: tl.constexpr = tl.constexpr(ids_ptr is not None)
    FIRST: tl.constexpr = tl.constexpr(0 if state_ptr is None else 1 - K)
    tiles = tl.cdiv(T - FIRST, BLOCK_T)
    block, d = _program(D, BLOCK_D)
    row, tile = block // tiles, block % tiles
    dy_ptr += row * dy_b
    x_ptr += row * x_b
    dx_ptr += row * dx_b
    dfinal_ptr += row * D * (K - 1)
    if ids_ptr is not None:
        ids_ptr += row * T
    if state_ptr is not None:
        state_ptr += row * D * (K - 1)
        dstate_ptr += row * D * (K - 1)
    there = d < D
    s = (tile * BLOCK_T + FIRST + tl.arange(0, BLOCK_T))[:, None]
    bias = tl.zeros((BLOCK_T, BLOCK_D), tl.float32) + _parameter(b_ptr, d, 1, D, 0.0)
    w = ()
    for k in tl.static_range(K):
        w = w + (_parameter(w_ptr + k, d, K, D, 0.0),)
    xs, sequences = (), ()
    for j in tl.static_range(2 * K - 1):
        xs = xs + (_tokens(x_ptr, state_ptr, s + (j + 1 - K), d, there, T, x_t, x_d, K).to(tl.float32),)
        if PACKED:
            sequences = sequences + (_sequence(ids_ptr, s + (j + 1 - K), T),)
    dx = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for after in tl.static_range(K):
        z = _convolve(xs, sequences, w, bias, after, K, PACKED)
        dy = _gradients(dy_ptr, s + after, d, there, T, dy_t, dy_d)
        is_token = (s + after >= 0) & (s + after < T)
        g = tl.where(is_token, _before_activation(dy, z, ACTIVATION), 0.0)  # where there is none, z may be anything
        dx = tl.fma(_same(sequences, K - 1, K - 1 + after, g, PACKED), w[K - 1 - after], dx)
        if after == 0:
            if db_ptr is not None:
                tl.store(db_ptr + block * D + d, tl.sum(g, axis=0)[None, :], mask=there)
            if dw_ptr is not None:
                for k in tl.static_range(K):
                    dw = tl.sum(g * _same(sequences, k, K - 1, xs[k], PACKED), axis=0)[None, :]
                    tl.store(dw_ptr + (block * D + d) * K + k, dw, mask=there)
    dx += _through_final_state(dfinal_ptr, ids_ptr, s, d, there, T, K)
    _store_gradient(dx, dx_ptr + s * dx_t + d * dx_d, dstate_ptr, s, d, there & (s < T), K)


@jit
def causal_conv1d_backward_walk_kernel(
    dy_ptr, dfinal_ptr, x_ptr, w_ptr, b_ptr, ids_ptr, state_ptr, dx_ptr, dstate_ptr, dw_ptr, db_ptr, D, T,
    dy_b, dy_d, dy_t, x_b, x_d, x_t, dx_b, dx_d, dx_t,
    ACTIVATION: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A token after the other: the K inputs and the K gradients that it has a part in stay in registers."""
    PACKED: tl.constexpr = tl.constexpr(ids_ptr is not None)
    FIRST: tl.constexpr = tl.constexpr(0 if state_ptr is None else 1 - K)
    chunks = tl.cdiv(T - FIRST, TOKENS)
    block, d = _program(D, BLOCK_D)
    row, chunk = block // chunks, block % chunks
    dy_ptr += row * dy_b
    x_ptr += row * x_b
    dx_ptr += row * dx_b
    dfinal_ptr += row * D * (K - 1)
    if ids_ptr is not None:
        ids_ptr += row * T
    if state_ptr is not None:
        state_ptr += row * D * (K - 1)
        dstate_ptr += row * D * (K - 1)
    there = d < D
    begin = chunk * TOKENS + FIRST + tl.zeros((1, 1), tl.int64)
    tokens = tl.minimum(T - FIRST - chunk * TOKENS, TOKENS).to(tl.int32)
    bias = _parameter(b_ptr, d, 1, D, 0.0)
    zero = tl.zeros((1, BLOCK_D), tl.float32)
    db = zero
    w, xs, sequences, dxs, dws = (), (), (), (), ()
    for k in tl.static_range(K):
        w = w + (_parameter(w_ptr + k, d, K, D, 0.0),)
        xs = xs + (_tokens(x_ptr, state_ptr, begin + (k - K), d, there, T, x_t, x_d, K).to(tl.float32),)
        dxs, dws = dxs + (zero,), dws + (zero,)
        if PACKED:
            sequences = sequences + (_sequence(ids_ptr, begin + (k - K), T),)
    next_xs, next_dys = (), ()  # asked for K - 1 tokens before they are needed
    for i in tl.static_range(K - 1):
        next_xs = next_xs + (_tokens(x_ptr, state_ptr, begin + i, d, there, T, x_t, x_d, K),)
        next_dys = next_dys + (_gradients(dy_ptr, begin + i, d, there, T, dy_t, dy_d),)
    ahead = begin + (K - 1)
    left = tl.minimum(T - ahead, TOKENS).to(tl.int32)
    x_ptrs, dy_ptrs = x_ptr + ahead * x_t + d * x_d, dy_ptr + ahead * dy_t + d * dy_d
    dx_ptrs, before = dx_ptr + (begin - (K - 1)) * dx_t + d * dx_d, tl.full((1, 1), K - 1, tl.int32)
    for i in tl.range(0, tokens, loop_unroll_factor=UNROLL):
        t = begin + i
        next_xs = next_xs + (tl.load(x_ptrs, mask=there & (i < left), other=0.0),)
        next_dys = next_dys + (tl.load(dy_ptrs, mask=there & (i < left), other=0.0),)
        xs = xs[1:] + (next_xs[0].to(tl.float32),)
        if PACKED:
            sequences = sequences[1:] + (_sequence(ids_ptr, t, T),)
        z = _convolve(xs, sequences, w, bias, 0, K, PACKED)
        g = _before_activation(next_dys[0], z, ACTIVATION)
        if state_ptr is not None:
            g = tl.where(t < 0, 0.0, g)
        next_xs, next_dys = next_xs[1:], next_dys[1:]
        db += g
        new_dws = ()
        for k in tl.static_range(K):
            new_dws = new_dws + (tl.fma(g, _same(sequences, k, K - 1, xs[k], PACKED), dws[k]),)
        dws = new_dws
        dxs = _spread(dxs, g, w, sequences, K, PACKED)
        _store_gradient(dxs[0], dx_ptrs, dstate_ptr, t - (K - 1), d, there & (i >= before), K)
        dxs = dxs[1:] + (zero,)
        x_ptrs += x_t
        dy_ptrs += dy_t
        dx_ptrs += dx_t
    for i in tl.static_range(K - 1):  # the tokens after them are another program's: only what they give to these
        t = begin + tokens + i
        xs = xs[1:] + (next_xs[i].to(tl.float32),)
        if PACKED:
            sequences = sequences[1:] + (_sequence(ids_ptr, t, T),)
        z = _convolve(xs, sequences, w, bias, 0, K, PACKED)
        g = tl.where((t >= 0) & (t < T), _before_activation(next_dys[i], z, ACTIVATION), 0.0)
        dxs = _spread(dxs, g, w, sequences, K, PACKED)
        s = t - (K - 1)
        dx = dxs[0] + _through_final_state(dfinal_ptr, ids_ptr, s, d, there, T, K)
        _store_gradient(dx, dx_ptr + s * dx_t + d * dx_d, dstate_ptr, s, d, there & (s >= begin), K)
        dxs = dxs[1:] + (zero,)
    if db_ptr is not None:
        tl.store(db_ptr + block * D + d, db, mask=there)
    if dw_ptr is not None:
        for k in tl.static_range(K):
            tl.store(dw_ptr + (block * D + d) * K + k, dws[k], mask=there)


def channels_last(x: Tensor) -> bool:
    """Return True if channels of `[B, D, T]` are closer to each other in memory than tokens."""
    return x.stride(1) < x.stride(2)


def empty_like_layout(x: Tensor) -> Tensor:
    """Allocate for `[B, D, T]` a dense tensor with channels or tokens side by side, as they are in x."""
    return empty_in_order(x.shape, (0, 2, 1) if channels_last(x) else (0, 1, 2), x.dtype, x.device)


def _walk(x: Tensor, K: int) -> dict[str, int]:
    """Launch options: a thread has four channels, or two, and of each up to 4 * K + 2 numbers in registers.

    Where Triton cannot read several at a time, addresses take registers too: of four channels 32 bytes spill on sm_90
    with Triton 3.6.
    """
    is_aligned = aligned(x.shape[1], x.stride(0), x.stride(2), byte_offset(x))
    return {"TOKENS": TOKENS, "BLOCK_D": 256 if K <= 4 and is_aligned else 128, "num_warps": 2}


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor | None, state: Tensor | None, activation: str
) -> tuple[Tensor, Tensor]:
    """Launch a forward kernel: the output and the final state."""
    (B, D, T), K = x.shape, weight.shape[1]
    y, final = empty_like_layout(x), empty((B, D, K - 1), x.dtype, x.device)
    args = (
        x, weight.contiguous(), contiguous(bias), contiguous(ids), contiguous(state), y, final, D, T,
        *x.stride(), *y.stride(),
    )  # fmt: skip
    if channels_last(x):
        walk = _walk(x, K)
        wrap_triton(causal_conv1d_walk_kernel)[(B * cdiv(T, TOKENS) * cdiv(D, walk["BLOCK_D"]),)](
            *args, ACTIVATION=activation, K=K, **walk
        )
    else:
        wrap_triton(causal_conv1d_tile_kernel)[(B * cdiv(T, 256) * cdiv(D, 4),)](
            *args, ACTIVATION=activation, K=K, BLOCK_T=256, BLOCK_D=4, num_warps=4
        )
    return y, final


def backward(
    dy: Tensor,
    dfinal: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor | None,
    state: Tensor | None,
    activation: str,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch a backward kernel: the gradients of input, weight, bias and initial state."""
    (B, D, T), K = x.shape, weight.shape[1]
    dx, dstate = empty_like_layout(x), None if state is None else empty(state.shape, state.dtype, x.device)
    blocks = B * cdiv(T if state is None else T + K - 1, TOKENS)
    dws = empty((blocks, D, K), torch.float32, x.device) if need_weight else None
    dbs = empty((blocks, D), torch.float32, x.device) if need_bias and bias is not None else None
    args = (
        dy, dfinal.contiguous(), x, weight.contiguous(), contiguous(bias), contiguous(ids), contiguous(state),
        dx, dstate, dws, dbs, D, T, *dy.stride(), *x.stride(), *dx.stride(),
    )  # fmt: skip
    if channels_last(x):
        walk = _walk(x, K)
        wrap_triton(causal_conv1d_backward_walk_kernel)[(blocks * cdiv(D, walk["BLOCK_D"]),)](
            *args, ACTIVATION=activation, K=K, **walk
        )
    else:
        wrap_triton(causal_conv1d_backward_tile_kernel)[(blocks * cdiv(D, 4),)](
            *args, ACTIVATION=activation, K=K, BLOCK_T=TOKENS, BLOCK_D=4, num_warps=4
        )
    dw = no_gradient(dy) if dws is None else sum_partials(dws, weight.dtype)
    db = no_gradient(dy) if dbs is None or bias is None else sum_partials(dbs, bias.dtype)
    return dx, dw, db, or_no_gradient(dstate, dy)
