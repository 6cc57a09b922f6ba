"""A kernel of which the ptxas of Triton 3.6 and 3.7.1 makes wrong code for sm_90, with one stage of 32 x 64 tiles.

It is the form that the recurrence's gradients of keys had: a loop over blocks of channels around one over blocks of
values, with products after the inner loop.
"""

import torch
import triton.language as tl

from llmk.ops.recurrence._chunk_kernels import _load, _load_transposed, _product, _store
from llmk.registry import jit
from llmk.registry.launch import Launch


@jit
def _states_products(
    do_ptr, u_ptr, state_ptr, dstate_ptr, values, rows, keys, T, H, K, V,
    C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """dO S^T and U dS'^T of a block of keys, of states in float32."""
    from_out = tl.zeros((C, BLOCK_K), dtype=tl.float32)
    from_end = tl.zeros((C, BLOCK_K), dtype=tl.float32)
    for first in range(0, V, BLOCK_V):
        cols = first + tl.arange(0, BLOCK_V)
        begin = _load_transposed(state_ptr, keys, cols, K, V, V).to(u_ptr.dtype.element_ty)
        end = _load_transposed(dstate_ptr, keys, cols, K, V, V)
        from_out += _product(_load(do_ptr + values, rows, cols, T, V, H * V), begin)
        from_end += _product(_load(u_ptr + values, rows, cols, T, V, H * V), end)
    return from_out, from_end


@jit
def keys_gradients_kernel(
    do_ptr, q_ptr, k_ptr, u_ptr, start_ptr, states_ptr, dstates_ptr, dscores_ptr, dq_ptr, dk_ptr, T, N, H, HK, K, V,
    C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The gradients of q and k of one chunk, for one value head."""
    chunk, row = tl.program_id(0).to(tl.int64) % N, tl.program_id(0).to(tl.int64) // N
    b, h = row // H, row % H
    q_ptr += (b * T * HK + h // (H // HK)) * K
    k_ptr += (b * T * HK + h // (H // HK)) * K
    values, matrix, state = (b * T * H + h) * V, (row * N + chunk) * C * C, (row * N + chunk) * K * V
    t = tl.arange(0, C)
    rows = chunk * C + t
    d = tl.load(start_ptr + (row * N + chunk) * C + t)
    for start in range(0, K, BLOCK_K):
        keys = start + tl.arange(0, BLOCK_K)
        from_out, from_end = _states_products(
            do_ptr, u_ptr, states_ptr + state, dstates_ptr + state, values, rows, keys, T, H, K, V, C, BLOCK_K, BLOCK_V
        )
        q, k = _load(q_ptr, rows, keys, T, K, HK * K), _load(k_ptr, rows, keys, T, K, HK * K)
        dq = d[:, None] * from_out + _product(_load(dscores_ptr + matrix, t, t, C, C, C), k)
        _store(dq_ptr + (b * T * H + h) * K, dq, rows, keys, T, K, H * K)
        dk = d[:, None] * from_end + _product(_load_transposed(dscores_ptr + matrix, t, t, C, C, C), q)
        _store(dk_ptr + (b * T * H + h) * K, dk, rows, keys, T, K, H * K)


def keys_gradients_launch(**tile: int) -> Launch:
    """A launch on empty tensors, or in a `FakeTensorMode` on fake ones."""
    B, T, H, HK, K, V, C = 4, 4096, 80, 1, 128, 64, 64
    N = T // C

    def half(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="cpu")

    def single(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device="cpu")

    keys, values, state = (B, T, HK, K), (B, T, H, V), (B * H, N, K, V)
    args = half(*values), half(*keys), half(*keys), half(*values), single(B * H, N, C), single(*state), half(*state)
    outputs = half(B * H, N, C, C), single(B, T, H, K), single(B, T, H, K)
    return Launch(keys_gradients_kernel, (B * H * N,), (*args, *outputs, T, N, H, HK, K, V), {"C": C, **tile})
