"""Gated linear attention, with a decay for each head: Mamba-2's state space duality, RetNet; or for each channel.

Source: Dao and Gu, "Transformers are SSMs", 2024, https://arxiv.org/abs/2405.21060; a decay for each channel: Yang et
al., "Gated Linear Attention Transformers with Hardware-Efficient Training", 2023, https://arxiv.org/abs/2312.06635. The
formulas, forward and backward, are in `ops/recurrence/__init__.py`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from llmk.ops.recurrence._call import recurrence_cost, samples
from llmk.ops.recurrence._chunks import Call
from llmk.ops.recurrence._operators import kernel_ops, run
from llmk.ops.recurrence.gated_delta_rule import recurrence_reference
from llmk.registry import Sample, public_op

gated_linear_attention_fwd, gated_linear_attention_bwd = kernel_ops("gated_linear_attention")


def gated_linear_attention_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for args, _, options, why in samples(device, dtype):
        yield Sample(args, options, why=why)


def gated_linear_attention_resized(rows: int, device: torch.device, dtype: torch.dtype) -> Sample:
    q, k, v = (torch.randn(rows, 5, 2, 8, device=device, dtype=dtype) for _ in range(3))
    g = -torch.rand(rows, 5, 2, device=device, dtype=torch.float32)
    return Sample((q, k / 3, v, g), why="resized")


def gated_linear_attention_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for B, T, HK, H, K, V in [(4, 4096, 1, 80, 128, 64)]:
        q, k = (torch.randn(B, T, HK, K, device=device, dtype=dtype) / K**0.25 for _ in range(2))
        v = torch.randn(B, T, H, V, device=device, dtype=dtype)
        g = -torch.rand(B, T, H, device=device, dtype=torch.float32)
        yield Sample((q, k, v, g), why=f"{B}x{T}, {HK} and {H} heads of {K} and {V}")
    for B, T, H, K, V in [(4, 4096, 16, 64, 128)]:
        q, k = (torch.randn(B, T, H, K, device=device, dtype=dtype) / K**0.25 for _ in range(2))
        v = torch.randn(B, T, H, V, device=device, dtype=dtype)
        g = -torch.rand(B, T, H, K, device=device, dtype=torch.float32)
        yield Sample((q, k, v, g), why=f"{B}x{T}, {H} heads of {K} and {V}, a decay for each channel")


@public_op(
    reference=recurrence_reference,
    differentiable=("q", "k", "v", "g", "initial_state"),
    kernel_ops=(gated_linear_attention_fwd, gated_linear_attention_bwd),
    samples=gated_linear_attention_samples,
    resized=gated_linear_attention_resized,
    workloads=gated_linear_attention_workloads,
    cost=recurrence_cost,
)
def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    context_group: str = "",
) -> tuple[Tensor, Tensor]:
    """Linear attention whose state decays by a factor of each token and head, Mamba-2 and RetNet, or channel, GLA.

    For each value head, with a state S `[K, V]` that begins as `initial_state`:

        S   = exp(g_t) * S + outer(k_t, v_t)     # with a decay for each channel: exp(g_t)[:, None] * S
        o_t = scale * q_t @ S

    In Mamba-2's words q is C, k is B, v is x times dt, and g is dt times A. It is computed in chunks of 64 tokens by
    products of matrices. Their operands are rounded once to the dtype of `q`; states and decays are float32. The
    backward pass makes the states again: of the forward pass it keeps the inputs and, on a GPU with a decay for each
    channel, 64 numbers in the dtype of `q` (32 of float32) for each token and value head.

    Args:
        q: Queries `[B, T, HK, K]`, float32, float16 or bfloat16, any strides, K up to 256.
        k: Keys, shape and dtype of `q`.
        v: Values `[B, T, H, V]` in the dtype of `q`, H a multiple of HK, V up to 512: key head i serves the H / HK
            value heads from i * H / HK on.
        g: Logarithms of the decays, at most 0, any of these dtypes, float32 best: `[B, T, H]`, one for each value head,
            or `[B, T, H, K]`, one for each channel of its keys.
        scale: None for `K ** -0.5`.
        initial_state: `[B, H, K, V]`, float32; None for zeros.
        sequence_ids: Which sequence each token of a row belongs to `[B, T]`, int32 or int64; None where a row is one.
            The state is zeros at the first token of a sequence, except that of the first one, which has the
            `initial_state`. A sequence begins where the number changes. A NaN or an infinity in one sequence may
            reach another that shares a chunk of 64 tokens with it.
        context_group: The `group_name` of a `torch.distributed.ProcessGroup` whose ranks have consecutive parts of the
            sequences, each a call's tokens, at least one, and as many on each rank as it likes; "" for whole sequences.
            A sequence that crosses ranks has one number on both sides. The initial state is the first rank's, others'
            are not read; the final state is that after the rank's own last token. All ranks of the group have to run
            the backward pass.

    Returns:
        `[B, T, H, V]`, contiguous, in the dtype of `q`, and the state after the last token, `[B, H, K, V]` in float32.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape or a device does not fit, H is no multiple of HK, `scale` is not finite, `context_group` is
            no group's name or this rank of it has no token, or on the CPU a number of `g` is positive. On a GPU the
            numbers are not looked at, and such a state grows.

    Source: Dao and Gu, 2024, https://arxiv.org/abs/2405.21060; Yang et al., 2023, https://arxiv.org/abs/2312.06635.
    """
    return run(gated_linear_attention_fwd, Call(q, k, v, g, None, initial_state, sequence_ids, scale), context_group)
