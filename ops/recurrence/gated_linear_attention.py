"""Gated linear attention, with a decay for each head: Mamba-2's state space duality, RetNet; or for each channel.

Source: Dao and Gu, "Transformers are SSMs", 2024, https://arxiv.org/abs/2405.21060; a decay for each channel: Yang et
al., "Gated Linear Attention Transformers with Hardware-Efficient Training", 2023, https://arxiv.org/abs/2312.06635. The
formulas, forward and backward, are in `ops/recurrence/__init__.py`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from llmk.ops.recurrence._call import check_call, kept_shape, or_not_kept, recurrence_cost, samples
from llmk.ops.recurrence._chunk_launches import Kept, launch_backward, launch_forward
from llmk.ops.recurrence._chunks import Call, backward_cpu, chunked_reference, forward_cpu
from llmk.ops.recurrence._context import check_context, decay_of_part, start_of_part, state_before
from llmk.registry import Cost, KernelOp, Sample, or_no_gradient, public_op

DIFFERENTIABLE = ("q", "k", "v", "g", "initial_state")


def gated_linear_attention_reference(
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
    return chunked_reference(Call(q, k, v, g, None, initial_state, sequence_ids, scale))


def _gated_linear_attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    initial_state: Tensor | None,
    sequence_ids: Tensor | None,
    scale: float,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The last output is kept for the backward pass: with a decay for each channel a matrix of each chunk, P."""
    made = launch_forward(Call(q, k, v, g, None, initial_state, sequence_ids, scale), keep=keep)
    return made.out, made.final, or_not_kept(made.kept.scores, v)


def _gated_linear_attention_bwd(
    grad: Tensor,
    grad_state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    initial_state: Tensor | None,
    sequence_ids: Tensor | None,
    scores: Tensor,
    scale: float,
    need_initial_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    call = Call(q, k, v, g, None, initial_state, sequence_ids, scale)
    found = launch_backward(call, grad, grad_state, Kept(None, scores, None), need_initial_state)
    dq, dk, dv, dg, dinitial = (or_no_gradient(found[name], grad) for name in DIFFERENTIABLE)
    return dq, dk, dv, dg, dinitial


# A graph keeps each as one node: on a CPU it is a loop over the chunks.
gated_linear_attention_fwd = KernelOp(_gated_linear_attention_fwd, opaque=True)
gated_linear_attention_bwd = KernelOp(_gated_linear_attention_bwd, opaque=True)


@gated_linear_attention_fwd.register_kernel("cpu")
def _(q, k, v, g, initial_state, sequence_ids, scale, keep):
    return *forward_cpu(Call(q, k, v, g, None, initial_state, sequence_ids, scale)), or_not_kept(None, v)


@gated_linear_attention_bwd.register_kernel("cpu")
def _(grad, grad_state, q, k, v, g, initial_state, sequence_ids, scores, scale, need_initial_state):
    call = Call(q, k, v, g, None, initial_state, sequence_ids, scale)
    found = backward_cpu(call, grad, grad_state)
    found["initial_state"] = found["initial_state"] if need_initial_state else None
    dq, dk, dv, dg, dinitial = (or_no_gradient(found[name], grad) for name in DIFFERENTIABLE)
    return dq, dk, dv, dg, dinitial


@gated_linear_attention_fwd.register_fake
def _(q, v, g, keep):
    (B, _, H, V), K = v.shape, q.shape[3]
    scores = v.new_empty(kept_shape(v, keep and g.dim() == 4))
    return v.new_empty(v.shape), v.new_empty((B, H, K, V), dtype=torch.float32), scores


gated_linear_attention_fwd.register_backward(
    gated_linear_attention_bwd,
    outputs=("out", "final_state", "scores"),
    depends_on=[["q", "k", "v", "g", "initial_state"], ["k", "v", "g", "initial_state"]],
    keeps=lambda needs_input_grad, args: (any(needs_input_grad),),
)


@gated_linear_attention_fwd.register_sharding
def _(q):
    """Along the batch."""
    return [([0, 0, 0], [0] * 6)]


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


def gated_linear_attention_cost(q: Tensor, k: Tensor, v: Tensor, g: Tensor, **options: object) -> Cost:
    return recurrence_cost(q, v, g, None, products=2)


@public_op(
    reference=gated_linear_attention_reference,
    differentiable=DIFFERENTIABLE,
    kernel_ops=(gated_linear_attention_fwd, gated_linear_attention_bwd),
    samples=gated_linear_attention_samples,
    resized=gated_linear_attention_resized,
    workloads=gated_linear_attention_workloads,
    cost=gated_linear_attention_cost,
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
    check_call(q, k, v, g, None, scale, initial_state, sequence_ids)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if context_group:
        check_context(context_group, q, v)
        start = start_of_part(initial_state, context_group)
        _, last, _ = gated_linear_attention_fwd(q, k, v, g, start, sequence_ids, scale)
        pair = torch.cat([last, decay_of_part(g, sequence_ids, q.shape[3])], -1)
        initial_state = state_before(pair, v.shape[3], initial_state, sequence_ids, context_group)
    out, final_state, _ = gated_linear_attention_fwd(q, k, v, g, initial_state, sequence_ids, scale)
    return out, final_state
