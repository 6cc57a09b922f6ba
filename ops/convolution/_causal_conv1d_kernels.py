"""The kernels of the causal convolution: blocks of tokens `[BLOCK_T, 1]` and channels `[1, BLOCK_D]`, at any strides."""

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.activations import activate, activate_with_grad
from llmk.ops.common.rows import contiguous
from llmk.ops.common.sums import sum_partials
from llmk.registry import cdiv, empty, jit, no_gradient, or_no_gradient, wrap_triton

TOKENS = 128
"""Tokens of a program backward. Each makes a row of partial sums, `[D, K + 1]` float32."""


@jit
def _tokens(x_ptr, state_ptr, t, d, there, T, x_t, x_d, K: tl.constexpr):
    """The inputs at tokens t; before the first token those of the initial state, and zero before and after these."""
    x = tl.load(x_ptr + t * x_t + d * x_d, mask=there & (t >= 0) & (t < T), other=0.0).to(tl.float32)
    if state_ptr is not None:
        before = there & (t < 0) & (t > -K)
        state = tl.load(state_ptr + d * (K - 1) + (t + K - 1), mask=before, other=0.0)
        x = tl.where(t < 0, state.to(tl.float32), x)
    return x


@jit
def _sequence(ids_ptr, t, T):
    """The sequences of tokens t: what is before the first token or after the last belongs to that token's."""
    return tl.load(ids_ptr + tl.minimum(tl.maximum(t, 0), T - 1))


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
def causal_conv1d_kernel(
    x_ptr, w_ptr, b_ptr, ids_ptr, state_ptr, y_ptr, final_ptr, D, T,
    x_b, x_d, x_t, y_b, y_d, y_t,
    ACTIVATION: tl.constexpr, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
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
        x = _tokens(x_ptr, state_ptr, s, d, there & (t < T), T, x_t, x_d, K)
        if ids_ptr is not None:
            x = tl.where(_sequence(ids_ptr, s, T) == _sequence(ids_ptr, t, T), x, 0.0)
        y += x * _parameter(w_ptr + k, d, K, D, 0.0)
    y = activate(y, ACTIVATION).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + t * y_t + d * y_d, y, mask=there & (t < T))
    if tile == tiles - 1:
        for k in tl.static_range(K - 1):
            s = tl.full((1, 1), k + 1 - K, tl.int64) + T
            x = _tokens(x_ptr, state_ptr, s, d, there, T, x_t, x_d, K)
            if ids_ptr is not None:
                last = tl.full((1, 1), -1, tl.int64) + T
                x = tl.where(_sequence(ids_ptr, s, T) == _sequence(ids_ptr, last, T), x, 0.0)
            tl.store(final_ptr + d * (K - 1) + k, x.to(final_ptr.dtype.element_ty), mask=there)


@jit
def _gradient(dy_ptr, z, t, d, there, T, dy_t, dy_d, ACTIVATION: tl.constexpr):
    """The gradient of the convolution at tokens t from that of its activation; 0 where there is no token."""
    mask = there & (t >= 0) & (t < T)
    dy = tl.load(dy_ptr + t * dy_t + d * dy_d, mask=mask, other=0.0).to(tl.float32)
    _, slope = activate_with_grad(z, ACTIVATION)
    return tl.where(mask, dy * slope, 0.0)


@jit
def _convolve(xs, sequences, w, z, FIRST: tl.constexpr, K: tl.constexpr, PACKED: tl.constexpr):
    """z plus the convolution at the token whose taps are xs[FIRST] to xs[FIRST + K - 1]."""
    for k in tl.static_range(K):
        z += _same(sequences, FIRST + k, FIRST + K - 1, xs[FIRST + k], PACKED) * w[k]
    return z


@jit
def _same(sequences, I: tl.constexpr, J: tl.constexpr, value, PACKED: tl.constexpr):
    """The value, or 0 where two tokens are of different sequences."""
    if PACKED:
        value = tl.where(sequences[I] == sequences[J], value, 0.0)
    return value


@jit
def _store_gradient(
    dx, dx_ptr, dstate_ptr, dfinal_ptr, ids_ptr, s, d, there, T, dx_d, dx_t, K: tl.constexpr
):  # fmt: skip
    """Store the gradient of tokens s, or of the initial state, with what comes through the final state."""
    last = T - 1 + tl.zeros_like(s)
    final = s - last + K - 2
    through = tl.load(dfinal_ptr + d * (K - 1) + final, mask=there & (final >= 0) & (s <= last), other=0.0)
    through = through.to(tl.float32)
    if ids_ptr is not None:
        through = tl.where(_sequence(ids_ptr, s, T) == _sequence(ids_ptr, last, T), through, 0.0)
    dx += through
    tl.store(dx_ptr + s * dx_t + d * dx_d, dx.to(dx_ptr.dtype.element_ty), mask=there & (s >= 0) & (s < T))
    if dstate_ptr is not None:
        dstate = dx.to(dstate_ptr.dtype.element_ty)
        tl.store(dstate_ptr + d * (K - 1) + (s + K - 1), dstate, mask=there & (s < 0) & (s > -K))


@jit
def causal_conv1d_backward_tile_kernel(
    dy_ptr, dfinal_ptr, x_ptr, w_ptr, b_ptr, ids_ptr, state_ptr, dx_ptr, dstate_ptr, dw_ptr, db_ptr, D, T,
    dy_b, dy_d, dy_t, x_b, x_d, x_t, dx_b, dx_d, dx_t,
    ACTIVATION: tl.constexpr, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A block of tokens at once: the convolution is computed again at each token and the K - 1 after it."""
    PACKED: tl.constexpr = ids_ptr is not None
    FIRST: tl.constexpr = 0 if state_ptr is None else 1 - K
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
        xs = xs + (_tokens(x_ptr, state_ptr, s + (j + 1 - K), d, there, T, x_t, x_d, K),)
        if PACKED:
            sequences = sequences + (_sequence(ids_ptr, s + (j + 1 - K), T),)
    dx = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for after in tl.static_range(K):
        z = _convolve(xs, sequences, w, bias, after, K, PACKED)
        g = _gradient(dy_ptr, z, s + after, d, there, T, dy_t, dy_d, ACTIVATION)
        dx += _same(sequences, K - 1, K - 1 + after, g * w[K - 1 - after], PACKED)
        if after == 0:
            if db_ptr is not None:
                tl.store(db_ptr + block * D + d, tl.sum(g, axis=0)[None, :], mask=there)
            if dw_ptr is not None:
                for k in tl.static_range(K):
                    dw = tl.sum(g * _same(sequences, k, K - 1, xs[k], PACKED), axis=0)[None, :]
                    tl.store(dw_ptr + (block * D + d) * K + k, dw, mask=there)
    _store_gradient(dx, dx_ptr, dstate_ptr, dfinal_ptr, ids_ptr, s, d, there, T, dx_d, dx_t, K)


@jit
def causal_conv1d_backward_walk_kernel(
    dy_ptr, dfinal_ptr, x_ptr, w_ptr, b_ptr, ids_ptr, state_ptr, dx_ptr, dstate_ptr, dw_ptr, db_ptr, D, T,
    dy_b, dy_d, dy_t, x_b, x_d, x_t, dx_b, dx_d, dx_t,
    ACTIVATION: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, BLOCK_D: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """A token after the other: the K inputs and the K gradients that it has a part in stay in registers."""
    PACKED: tl.constexpr = ids_ptr is not None
    FIRST: tl.constexpr = 0 if state_ptr is None else 1 - K
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
    tokens = tl.minimum(T - chunk * TOKENS - FIRST, TOKENS)
    bias = _parameter(b_ptr, d, 1, D, 0.0)
    zero = tl.zeros((1, BLOCK_D), tl.float32)
    db = zero
    w, xs, sequences, dxs, dws = (), (), (), (), ()
    for k in tl.static_range(K):
        w = w + (_parameter(w_ptr + k, d, K, D, 0.0),)
        xs = xs + (_tokens(x_ptr, state_ptr, begin + (k - K), d, there, T, x_t, x_d, K),)
        dxs, dws = dxs + (zero,), dws + (zero,)
        if PACKED:
            sequences = sequences + (_sequence(ids_ptr, begin + (k - K), T),)
    for i in tl.range(0, tokens + K - 1, num_stages=NUM_STAGES):
        t = begin + i
        xs = xs[1:] + (_tokens(x_ptr, state_ptr, t, d, there, T, x_t, x_d, K),)
        if PACKED:
            sequences = sequences[1:] + (_sequence(ids_ptr, t, T),)
        z = _convolve(xs, sequences, w, bias, 0, K, PACKED)
        g = _gradient(dy_ptr, z, t, d, there, T, dy_t, dy_d, ACTIVATION)
        own = tl.where(t < begin + tokens, g, 0.0)  # the K - 1 tokens after them are another program's too
        db += own
        new_dxs, new_dws = (), ()
        for k in tl.static_range(K):
            new_dxs = new_dxs + (dxs[k] + _same(sequences, k, K - 1, g * w[k], PACKED),)
            new_dws = new_dws + (dws[k] + own * _same(sequences, k, K - 1, xs[k], PACKED),)
        s = t - (K - 1)
        _store_gradient(
            new_dxs[0], dx_ptr, dstate_ptr, dfinal_ptr, ids_ptr, s, d, there & (s >= begin), T, dx_d, dx_t, K
        )
        dxs, dws = new_dxs[1:] + (zero,), new_dws
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
    B, D, T = x.shape
    return empty((B, T, D), x.dtype, x.device).transpose(1, 2) if channels_last(x) else empty(x.shape, x.dtype, x.device)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor | None, state: Tensor | None, activation: str
) -> tuple[Tensor, Tensor]:
    """Launch the forward kernel: the output and the final state."""
    (B, D, T), K = x.shape, weight.shape[1]
    y, final = empty_like_layout(x), empty((B, D, K - 1), x.dtype, x.device)
    # 128 bytes of neighbours and more to a program, in 16 elements a thread.
    block_t, block_d = (32, 64) if channels_last(x) else (256, 8)
    wrap_triton(causal_conv1d_kernel)[(B * cdiv(T, block_t) * cdiv(D, block_d),)](
        x, weight.contiguous(), contiguous(bias), contiguous(ids), contiguous(state), y, final, D, T,
        *x.stride(), *y.stride(), ACTIVATION=activation, K=K, BLOCK_T=block_t, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip
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
        block_d = 256 if K <= 4 else 128  # of each channel a thread keeps 4 * K + 2 numbers in registers
        wrap_triton(causal_conv1d_backward_walk_kernel)[(blocks * cdiv(D, block_d),)](
            *args, ACTIVATION=activation, K=K, TOKENS=TOKENS, BLOCK_D=block_d, NUM_STAGES=4, num_warps=2
        )
    else:
        wrap_triton(causal_conv1d_backward_tile_kernel)[(blocks * cdiv(D, 4),)](
            *args, ACTIVATION=activation, K=K, BLOCK_T=TOKENS, BLOCK_D=4, num_warps=4
        )
    dw = no_gradient(dy) if dws is None else sum_partials(dws, weight.dtype)
    db = no_gradient(dy) if dbs is None or bias is None else sum_partials(dbs, bias.dtype)
    return dx, dw, db, or_no_gradient(dstate, dy)
