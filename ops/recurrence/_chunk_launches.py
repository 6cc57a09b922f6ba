"""Launches the kernels of the recurrence: the forward pass, and the backward pass, which makes most of it anew."""

from dataclasses import dataclass

import torch
from torch import Tensor

from llmk.ops.common.rows import contiguous
from llmk.ops.common.sums import sum_partials
from llmk.ops.recurrence._channel_kernels import (
    channel_blocks_kernel,
    channel_decays_kernel,
    channel_keys_backward_kernel,
    channel_pairs_backward_kernel,
    channel_scores_backward_kernel,
    channel_scores_kernel,
)
from llmk.ops.recurrence._chunk_backward_kernels import (
    chunk_gates_backward_kernel,
    chunk_keys_backward_kernel,
    chunk_scores_backward_kernel,
    chunk_states_backward_kernel,
    sum_heads_kernel,
)
from llmk.ops.recurrence._chunk_kernels import (
    chunk_inverse_kernel,
    chunk_outputs_kernel,
    chunk_scores_kernel,
    chunk_states_kernel,
    l2_norm_kernel,
)
from llmk.ops.recurrence._chunks import L2_EPS, Call, chunk_size, sequence_indices
from llmk.registry import cdiv, empty, next_power_of_2, num_programs, shared_memory, wrap_triton


@dataclass(frozen=True)
class Inputs:
    """The inputs as all kernels read them: contiguous and padded; queries and keys normalized where they are to be, and
    then also as they were.
    """

    q: Tensor
    k: Tensor
    raw_q: Tensor | None
    raw_k: Tensor | None
    v: Tensor
    g: Tensor
    beta: Tensor | None
    initial: Tensor | None
    index: Tensor | None
    scale: float

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int]:
        """T, N, H, HK, K and V."""
        (_, T, H, V), (HK, K) = self.v.shape, self.q.shape[2:]
        return T, cdiv(T, self.chunk), H, HK, K, V

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        return chunk_size(self.q.dtype)

    @property
    def levels(self) -> int:
        """Return how often a chunk can be halved."""
        return self.chunk.bit_length() - 1

    @property
    def is_float32(self) -> bool:
        return self.q.dtype == torch.float32

    @property
    def per_channel(self) -> bool:
        """True if each channel of a head decays by itself."""
        return self.g.dim() == 4

    @property
    def rows(self) -> int:
        return self.v.shape[0] * self.v.shape[2]

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        return empty(shape, dtype or self.q.dtype, self.q.device)

    def columns(self, most: int, size: int) -> int:
        """A block of so many of an axis of `size`."""
        return min(most, max(16, next_power_of_2(size)))


ALIGNED = 16
"""Heads have a multiple of so many values, zeros added if need be: then Triton reads 16 bytes at a time, and needs an
address for each 16 bytes instead of each element, which would not fit in registers."""


def padded(x: Tensor, axes: int = 1) -> Tensor:
    """x, contiguous, with zeros up to a multiple of ALIGNED along its last axes."""
    missing = [-size % ALIGNED for size in x.shape[-axes:]]
    if not any(missing):
        return x.contiguous()
    return torch.nn.functional.pad(x, [n for end in reversed(missing) for n in (0, end)]).contiguous()


def cut(x: Tensor, *sizes: int) -> Tensor:
    """x without the zeros that `padded` added: its last axes have these sizes."""
    for axis, size in enumerate(sizes, -len(sizes)):
        x = x if x.shape[axis] == size else x.narrow(axis, 0, size)
    return x.contiguous()


def inputs(call: Call) -> Inputs:
    """A call's."""
    q, k, v = padded(call.q), padded(call.k), padded(call.v)
    g = padded(call.g) if call.g.dim() == 4 else call.g.contiguous()
    initial = None if call.initial_state is None else padded(call.initial_state, 2)
    index = None if call.sequence_ids is None else sequence_indices(call.sequence_ids)
    raw_q, raw_k = (q, k) if call.l2_norm_qk else (None, None)
    q, k = (_l2_normalized(q), _l2_normalized(k)) if call.l2_norm_qk else (q, k)
    return Inputs(q, k, raw_q, raw_k, v, g, contiguous(call.beta), initial, index, call.factor)


def _rows_tile(K: int) -> dict[str, int]:
    block_k = next_power_of_2(K)
    return {"BLOCK_M": max(1, 2048 // block_k), "BLOCK_K": block_k, "num_warps": 4}


def _l2_normalized(x: Tensor) -> Tensor:
    K, tile = x.shape[-1], _rows_tile(x.shape[-1])
    M, y = x.numel() // K, empty(x.shape, x.dtype, x.device)
    wrap_triton(l2_norm_kernel)[(cdiv(M, tile["BLOCK_M"]),)](x, y, M, K, L2_EPS, **tile)
    return y


def _heads_at_once(x: Inputs) -> int:
    """Return for how many value heads of one key head a program makes what they share, and sums gradients: up to 16.

    The heads alone decide it, as the order of sums depends on it: a sequence has the same bits in any batch. With a
    correction, where they share two matrices, a program would hold too much in registers.
    """
    _, _, H, HK, *_ = x.sizes
    most = 1 if x.beta is not None else min(16, H // HK)
    return next((heads for heads in range(most, 1, -1) if H // HK % heads == 0), 1)


def _keys_gradient_dtype(x: Inputs, heads: int = 1) -> torch.dtype:
    """Float32 for gradients of so many value heads each that are still to be summed, or to go through the norm."""
    _, _, H, HK, *_ = x.sizes
    return x.q.dtype if heads * HK == H and x.raw_q is None else torch.float32


def _sum_heads(x: Inputs, grad: Tensor, raw: Tensor | None) -> Tensor:
    """The gradient of queries or keys from those `[B, T, H, K]` of their value heads, through the norm of `raw`."""
    if raw is None and grad.shape == x.q.shape:
        return grad
    K, tile = x.q.shape[-1], _rows_tile(x.q.shape[-1])
    M, dx = x.q.numel() // K, x.buffer(x.q.shape)
    group = grad.shape[2] // x.q.shape[2]
    wrap_triton(sum_heads_kernel)[(cdiv(M, tile["BLOCK_M"]),)](grad, raw, dx, M, K, group, L2_EPS, **tile)
    return dx


@dataclass(frozen=True)
class Matrices:
    """The values that depend on one chunk alone: P, T with a correction, and the decays.

    With a decay for each head these are d and e, and queries and keys are those of the call. With one for each channel
    they are d Q, d K and e K of each value head, and d_C.
    """

    queries: Tensor
    keys: Tensor
    ends: Tensor | None
    start: Tensor | None
    end: Tensor | None
    whole: Tensor | None
    scores: Tensor
    inverse: Tensor | None
    kk: Tensor | None

    @property
    def heads(self) -> int:
        """The queries' and keys'."""
        return self.keys.shape[2]


@dataclass(frozen=True)
class Kept:
    """The tensors kept for the backward pass: T with a correction, and with a decay for each channel P and K K^T."""

    inverse: Tensor | None
    scores: Tensor | None
    kk: Tensor | None


def _matrices(x: Inputs, kept: Kept | None, *, keep: bool) -> Matrices:
    """All of them: in the backward pass with what was kept."""
    if x.per_channel:
        return _channel_matrices(x, kept, keep=keep)
    T, N, H, HK, K, _ = x.sizes
    start, end = (x.buffer((x.rows, N, x.chunk), torch.float32) for _ in range(2))
    scores, a = _matrix(x), None if x.beta is None or kept is not None else _matrix(x, torch.float32)
    tile = {"BLOCK_K": x.columns(128 // x.q.element_size(), K), "num_warps": 4}
    heads = _heads_at_once(x)
    wrap_triton(chunk_scores_kernel)[(x.rows // heads * N,)](
        x.q, x.k, x.g, x.beta, x.index, start, end, scores, a, x.scale, T, N, H, HK, K, heads, C=x.chunk, **tile
    )
    inverse = _inverse(x, a) if kept is None else kept.inverse
    return Matrices(x.q, x.k, None, start, end, None, scores, inverse, None)


def _matrix(x: Inputs, dtype: torch.dtype | None = None, heads: int = 1) -> Tensor:
    """A buffer for a matrix of each chunk and so many value heads."""
    B, H, (_, N, *_) = x.v.shape[0], x.v.shape[2], x.sizes
    return x.buffer((B, H // heads, N, x.chunk, x.chunk), dtype)


def _inverse(x: Inputs, a: Tensor | None) -> Tensor | None:
    """T of A."""
    if a is None:
        return None
    inverse = _matrix(x)
    wrap_triton(chunk_inverse_kernel)[(x.rows * x.sizes[1],)](a, inverse, C=x.chunk, num_warps=2)
    return inverse


def _channel_matrices(x: Inputs, kept: Kept | None, *, keep: bool) -> Matrices:
    T, N, H, HK, K, _ = x.sizes
    queries, ends = x.buffer(x.g.shape), x.buffer(x.g.shape)
    keys = None if x.beta is None else x.buffer(x.g.shape)
    whole = x.buffer((x.rows, N, K), torch.float32)
    tile = {"BLOCK_K": x.columns(32, K), "num_warps": 4}
    wrap_triton(channel_decays_kernel)[(x.rows * N * cdiv(K, tile["BLOCK_K"]),)](
        x.q, x.k, x.g, x.index, queries, keys, ends, whole, T, N, H, HK, K, C=x.chunk, **tile
    )
    keys = ends if keys is None else keys
    kept = _channel_pairs(x, keep=keep) if kept is None else kept
    assert kept.scores is not None
    return Matrices(queries, keys, ends, None, None, whole, kept.scores, kept.inverse, kept.kk)


def _channel_pairs(x: Inputs, *, keep: bool) -> Kept:
    """P, and T with a correction; where the backward pass is to have it K K^T too."""
    T, N, H, HK, K, _ = x.sizes
    scores, a = _matrix(x), None if x.beta is None else _matrix(x, torch.float32)
    kk = _matrix(x, torch.float32) if keep and x.beta is not None else None
    tile = {"BLOCK_K": x.columns(16 if x.is_float32 else 32, K), "num_warps": 4}
    wrap_triton(channel_blocks_kernel)[(x.rows * N,)](
        x.q, x.k, x.g, x.beta, x.index, scores, kk, a, x.scale, T, N, H, HK, K, C=x.chunk, **tile
    )
    wrap_triton(channel_scores_kernel)[(x.rows * N * (x.levels - 4),)](  # on an H200 two stages take a quarter longer
        x.q, x.k, x.g, x.beta, x.index, scores, kk, a, x.scale, T, N, H, HK, K,
        C=x.chunk, LEVELS=x.levels, num_stages=1, **tile,
    )  # fmt: skip
    return Kept(_inverse(x, a), scores, kk)


def _stages(x: Inputs, most: int = 2) -> int:
    """Tiles of how many steps are in shared memory: AMD's 64 KiB hold those of one, three take up to 100."""
    room = shared_memory(x.q.device) // 1024
    return min(most, 1 if room <= 64 else 2 if room < 100 else 3)


def _state_tile(x: Inputs, *, outputs: bool = False, backward: bool = False) -> dict[str, int]:
    """A state's block of columns, with all keys: of the walk that makes outputs besides, or of the one back."""
    block_k = x.columns(256, x.q.shape[-1])
    if x.is_float32:
        return {"BLOCK_K": block_k, "BLOCK_V": 16, "PART": min(block_k, 32), "num_warps": 8, "num_stages": 1}
    if block_k > 128:
        # Beside an initial state's block some bytes spill on sm_90; 8 warps spill none and take 1.8 times as long.
        return {"BLOCK_K": block_k, "BLOCK_V": 16, "PART": 64, "num_warps": 4, "num_stages": 1}
    most, room = 64, _stages(x, 3)
    stages = max(1, room - 1) if outputs or x.per_channel else room  # outputs and channels have operands besides
    if backward:  # more in registers; with a correction by channels, in shared memory too, which two steps fill
        most, stages = 32, 1 if x.per_channel and x.beta is not None else _stages(x)
    elif x.beta is not None and (x.per_channel or outputs):  # 64 columns spill
        most = 32
    elif not outputs:
        is_few = x.rows * cdiv(x.v.shape[-1], 64) < num_programs(x.q.device, 1)
        most, stages = (32, room) if is_few else (64, room if x.beta is None else _stages(x))
    elif x.per_channel and block_k <= 64:  # three steps leave room for two programs
        most, stages = 32, room
    elif not x.per_channel and room > 2:
        stages = room
    block_v = x.columns(most, x.v.shape[-1])
    return {"BLOCK_K": block_k, "BLOCK_V": block_v, "PART": 0, "num_warps": 4, "num_stages": stages}


def _programs(x: Inputs, tile: dict[str, int]) -> int:
    """The programs of a walk."""
    return x.rows * cdiv(x.v.shape[-1], tile["BLOCK_V"])


def _walk(x: Inputs, m: Matrices, tile: dict[str, int], **results: Tensor | None) -> None:
    """Go from chunk to chunk, and write those of the results that are given, by their names in the kernel."""
    T, N, H, _, K, V = x.sizes
    wrap_triton(chunk_states_kernel)[(_programs(x, tile),)](
        m.queries, m.keys, m.ends, x.v, x.beta, m.start, m.end, m.whole, m.scores, m.inverse, x.initial,
        *(results.get(name) for name in ("states", "u", "out", "final")), x.scale,
        T, N, H, m.heads, K, V, C=x.chunk, **tile,
    )  # fmt: skip


@dataclass(frozen=True)
class Forward:
    """The results of the forward pass, and the matrices of chunks that are kept."""

    out: Tensor
    final: Tensor
    kept: Kept


def _makes_outputs(x: Inputs) -> bool:
    """Return True if the walk makes the outputs too, which reads neither states nor U again.

    A walk of few programs waits longer for each chunk than programs for all chunks at once take. With a correction,
    where the blocks of columns have to be half as wide for it, few are less than three on each multiprocessor, and
    without one less than one on each second. Nor does a walk with a correction and a tile of one step in shared memory:
    of that with 64 keys the ptxas of Triton 3.6 and 3.7.1 makes wrong code for sm_90, reading what nothing wrote.
    """
    tile = _state_tile(x, outputs=True)
    programs, each = _programs(x, tile), num_programs(x.q.device, 1)
    if x.beta is None:
        return 2 * programs >= each
    return programs >= 3 * each and tile["num_stages"] > 1


def launch_forward(call: Call, *, keep: bool) -> Forward:
    x = inputs(call)
    _, N, H, _, K, V = x.sizes
    out, final = x.buffer(x.v.shape), x.buffer((x.v.shape[0], H, K, V), torch.float32)
    m, outputs = _matrices(x, None, keep=keep), _makes_outputs(x)
    tile = _state_tile(x, outputs=outputs)
    if outputs:  # a product in parts reads the states that it has stored
        _walk(x, m, tile, states=x.buffer((x.rows, N, K, V)) if tile["PART"] > 0 else None, out=out, final=final)
    else:
        states, u = x.buffer((x.rows, N, K, V)), None if x.beta is None else x.buffer(x.v.shape)
        _walk(x, m, tile, states=states, u=u, final=final)
        _outputs(x, m, states, x.v if u is None else u, out)
    kept = Kept(m.inverse, m.scores if x.per_channel else None, m.kk) if keep else Kept(None, None, None)
    width, values = call.q.shape[3], call.v.shape[3]
    return Forward(cut(out, values), cut(final, width, values), kept)


def _outputs(x: Inputs, m: Matrices, states: Tensor, u: Tensor, out: Tensor) -> None:
    """Write the outputs of all chunks at once."""
    T, N, H, _, K, V = x.sizes
    size = x.q.element_size()
    tile = {"BLOCK_K": x.columns(128 // size, K), "BLOCK_V": x.columns(256 // size, V), "num_warps": 4}
    wrap_triton(chunk_outputs_kernel)[(x.rows * N * cdiv(V, tile["BLOCK_V"]),)](
        m.queries, u, m.start, m.scores, states, out, x.scale, T, N, H, m.heads, K, V,
        C=x.chunk, num_stages=_stages(x), **tile,
    )  # fmt: skip


@dataclass(frozen=True)
class Backward:
    """The inputs and results of the pass back from chunk to chunk."""

    do: Tensor
    states: Tensor
    dstates: Tensor
    dwhole: Tensor
    u: Tensor
    dr: Tensor | None


def launch_backward(
    call: Call, grad_out: Tensor, grad_final: Tensor, kept: Kept, need_initial_state: bool
) -> dict[str, Tensor | None]:
    """The gradients of the operands by name."""
    x = inputs(call)
    T, N, H, _, K, V = x.sizes
    do, dfinal = padded(grad_out), padded(grad_final, 2)
    m = _matrices(x, kept, keep=False)
    states, u = x.buffer((x.rows, N, K, V)), x.v if x.beta is None else x.buffer(x.v.shape)
    _walk(x, m, _state_tile(x), states=states, u=None if x.beta is None else u)
    dstates, dv = x.buffer(tuple(states.shape)), x.buffer(x.v.shape)
    dr = None if x.beta is None else x.buffer(x.v.shape)
    dinitial = x.buffer(dfinal.shape, torch.float32) if need_initial_state else None
    tile = _state_tile(x, backward=True)
    blocks = cdiv(V, tile["BLOCK_V"])
    dwhole = x.buffer((x.rows, N, blocks, K), torch.float32)
    if N > 0:  # it loads a chunk ahead
        wrap_triton(chunk_states_backward_kernel)[(x.rows * blocks,)](
            do, dfinal, m.queries, m.keys, m.ends, x.beta, m.start, m.end, m.whole, m.scores, m.inverse,
            x.initial, states, dstates, dwhole, dr, dv, dinitial, x.scale, T, N, H, m.heads, K, V, C=x.chunk, **tile,
        )  # fmt: skip
    elif dinitial is not None:
        dinitial.copy_(dfinal)
    made = Backward(do, states, dstates, dwhole, u, dr)
    dq, dk, dg, dbeta = (_channel_gradients if x.per_channel else _gradients)(x, m, made)
    width, values = call.q.shape[3], call.v.shape[3]
    return {
        "q": cut(_sum_heads(x, dq, x.raw_q), width),
        "k": cut(_sum_heads(x, dk, x.raw_k), width),
        "v": cut(dv, values),
        "g": cut(dg, width) if x.per_channel else dg,
        "beta": dbeta,
        "initial_state": None if dinitial is None else cut(dinitial, width, values),
    }


def _correction_gradients(x: Inputs, dscores: Tensor, blocks: int) -> tuple[Tensor | None, Tensor | None]:
    """Allocate the gradients of K K^T and of beta in parts, one by pairs and one by each block of channels; None
    without a correction.
    """
    if x.beta is None:
        return None, None
    return x.buffer(tuple(dscores.shape)), x.buffer((1 + blocks, *x.beta.shape), torch.float32)


def _gradients(x: Inputs, m: Matrices, made: Backward) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of q, k, g and beta, each chunk's by itself."""
    T, N, H, HK, K, V = x.sizes
    size, keys_tile = x.q.element_size(), _keys_tile(x)
    blocks = cdiv(K, keys_tile["BLOCK_K"])
    heads = _heads_at_once(x)
    dscores, between = _matrix(x, heads=heads), x.buffer(x.g.shape, torch.float32)
    dkk, from_a = (None, None) if x.beta is None else (_matrix(x, heads=heads), x.buffer(x.g.shape, torch.float32))
    tile = {"BLOCK_K": x.columns(128 // size, K), "BLOCK_V": x.columns(128 // size, V), "num_warps": 4}
    wrap_triton(chunk_scores_backward_kernel)[(x.rows // heads * N,)](
        made.do, x.q, x.k, x.v, made.u, made.dr, x.g, x.beta, x.index, dscores, dkk, between, from_a, x.scale,
        T, N, H, HK, K, V, heads, C=x.chunk, **tile,
    )  # fmt: skip
    dq, dk = (x.buffer((*x.v.shape[:2], H // heads, K), _keys_gradient_dtype(x, heads)) for _ in range(2))
    from_start, to_end = (x.buffer((blocks, x.rows, N, x.chunk), torch.float32) for _ in range(2))
    predicted = None if x.beta is None else x.buffer(tuple(to_end.shape), torch.float32)
    wrap_triton(chunk_keys_backward_kernel)[(x.rows // heads * N * blocks,)](
        made.do, x.q, x.k, made.u, made.dr, x.beta, m.start, m.end, made.states, made.dstates, dscores, dkk, dq, dk,
        from_start, to_end, predicted, x.scale,
        T, N, H, HK, K, V, to_end[0].numel(), heads, C=x.chunk, **keys_tile,
    )  # fmt: skip
    dg, dbeta = x.buffer(x.g.shape, x.g.dtype), None if x.beta is None else x.buffer(x.beta.shape, x.beta.dtype)
    wrap_triton(chunk_gates_backward_kernel)[(x.rows * N,)](
        from_start, to_end, predicted, m.start, made.dwhole, x.beta, between, from_a, dg, dbeta,
        T, N, H, K, to_end[0].numel(), blocks, made.dwhole.shape[2],
        C=x.chunk, BLOCK_K=next_power_of_2(K), num_warps=2,
    )  # fmt: skip
    return dq, dk, dg, dbeta


def _summed(x: Inputs, dbeta: Tensor | None) -> Tensor | None:
    return None if dbeta is None or x.beta is None else sum_partials(dbeta, x.beta.dtype)


def _keys_tile(x: Inputs) -> dict[str, int]:
    """Blocks of channels and values, at least two of these, so that one's products hide the loads of the next.

    Larger ones spill on sm_90, and of some in one stage ptxas makes wrong code.
    """
    K, V = x.sizes[-2:]
    if x.is_float32:
        warps = 8 if x.beta is None or x.per_channel else 4  # with 8, of 138 registers, one program fits sm_90
        return {"BLOCK_K": x.columns(16, K), "BLOCK_V": x.columns(16, V), "num_warps": warps, "num_stages": 1}
    stages, block_k = _stages(x, 3), x.columns(64, K)
    if x.beta is None and not x.per_channel:
        block_v = x.columns(32, V)
    elif x.per_channel or stages < 3:
        block_k, block_v = x.columns(32, K), x.columns(64, cdiv(V, 2))
    else:
        block_v = x.columns(64, cdiv(V, 2))
        stages = 3 if block_v < 64 else 2  # as many bytes, but for fewer and larger products
    return {"BLOCK_K": block_k, "BLOCK_V": block_v, "num_warps": 4, "num_stages": stages}


def _channel_gradients(x: Inputs, m: Matrices, made: Backward) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of `_gradients` with a decay for each channel."""
    T, N, H, HK, K, V = x.sizes
    keys_tile = _keys_tile(x)
    blocks = cdiv(K, keys_tile["BLOCK_K"])
    dscores = x.buffer(tuple(m.scores.shape))
    dkk, dbeta = _correction_gradients(x, dscores, blocks)
    tile = {"BLOCK_V": x.columns(128 // x.q.element_size(), V), "num_warps": 4}
    wrap_triton(channel_scores_backward_kernel)[(x.rows * N,)](
        made.do, x.v, made.u, made.dr, x.beta, x.index, m.kk, dscores, dkk, dbeta, x.scale, T, N, H, V,
        C=x.chunk, **tile,
    )  # fmt: skip
    dq, dk, dg_part = (x.buffer(x.g.shape, torch.float32) for _ in range(3))
    tile = {"BLOCK_K": x.columns(16 if x.is_float32 else 32, K), "num_warps": 4, "num_stages": 1}
    wrap_triton(channel_pairs_backward_kernel)[(x.rows * N * cdiv(K, tile["BLOCK_K"]),)](
        x.q, x.k, x.g, dscores, dkk, dq, dk, dg_part, T, N, H, HK, K, C=x.chunk, LEVELS=x.levels, **tile
    )
    dg, dtype = x.buffer(x.g.shape, x.g.dtype), _keys_gradient_dtype(x)
    dq_part, dk_part = dq, dk
    if dtype != torch.float32:
        dq, dk = (x.buffer(x.g.shape, dtype) for _ in range(2))
    wrap_triton(channel_keys_backward_kernel)[(x.rows * N * blocks,)](
        made.do, x.q, x.k, x.g, made.u, made.dr, x.beta, x.index, made.states, made.dstates, m.whole, made.dwhole,
        dg_part, dq_part, dk_part, dq, dk, dg, None if dbeta is None else dbeta[1:], x.scale,
        T, N, H, HK, K, V, x.v.shape[:3].numel(), made.dwhole.shape[2], C=x.chunk, **keys_tile,
    )  # fmt: skip
    return dq, dk, dg, _summed(x, dbeta)
