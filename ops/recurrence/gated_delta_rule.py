"""The gated delta rule of Qwen3-Next, Qwen3.5, OLMo hybrid, Gated DeltaNet and, by channels, of Kimi Linear.

Source: Yang et al., "Gated Delta Networks", 2024, https://arxiv.org/abs/2412.06464; a decay for each channel: Kimi
Team, "Kimi Linear", 2025, https://arxiv.org/abs/2510.26692. The formulas, forward and backward, are in
`ops/recurrence/__init__.py`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from llmk.ops.recurrence._call import recurrence_cost, samples
from llmk.ops.recurrence._chunks import Call, chunked_reference
from llmk.ops.recurrence._operators import kernel_ops, run
from llmk.registry import Sample, public_op


def recurrence_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    l2_norm_qk: bool = False,
    sequence_ids: Tensor | None = None,
    context_group: str = "",
) -> tuple[Tensor, Tensor]:
    """The reference of both operators: without a correction `beta` is None."""
    return chunked_reference(Call(q, k, v, g, beta, initial_state, sequence_ids, scale, l2_norm_qk))


gated_delta_rule_fwd, gated_delta_rule_bwd = kernel_ops("gated_delta_rule")


def gated_delta_rule_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    calls = list(samples(device, dtype))
    for args, beta, options, why in calls:
        yield Sample((*args, beta), options, why=why)
    args, beta, _, why = calls[-1]
    yield Sample((*args, beta), {"l2_norm_qk": True}, why=f"{why}, normalized")


def gated_delta_rule_resized(rows: int, device: torch.device, dtype: torch.dtype) -> Sample:
    q, k, v = (torch.randn(rows, 5, 2, 8, device=device, dtype=dtype) for _ in range(3))
    g, beta = (torch.rand(rows, 5, 2, device=device, dtype=torch.float32) for _ in range(2))
    return Sample((q, k / 3, v, -g, beta.to(dtype)), why="resized")


def gated_delta_rule_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for B, T, HK, H, D in [(4, 4096, 16, 32, 128)]:
        q, k = (torch.randn(B, T, HK, D, device=device, dtype=dtype) for _ in range(2))
        v = torch.randn(B, T, H, D, device=device, dtype=dtype)
        g, beta = (torch.rand(B, T, H, device=device, dtype=torch.float32) for _ in range(2))
        options = {"l2_norm_qk": True}
        yield Sample((q, k, v, -g, beta.to(dtype)), options, why=f"{B}x{T}, {HK} and {H} heads of {D}")
    for B, T, H, D in [(4, 4096, 32, 128)]:
        q, k, v = (torch.randn(B, T, H, D, device=device, dtype=dtype) for _ in range(3))
        g = -torch.rand(B, T, H, D, device=device, dtype=torch.float32)
        beta = torch.rand(B, T, H, device=device, dtype=torch.float32).to(dtype)
        why = f"Kimi Linear, {B}x{T}, {H} heads of {D}, a decay for each channel"
        yield Sample((q, k, v, g, beta), {"l2_norm_qk": True}, why=why)


@public_op(
    reference=recurrence_reference,
    differentiable=("q", "k", "v", "g", "beta", "initial_state"),
    kernel_ops=(gated_delta_rule_fwd, gated_delta_rule_bwd),
    samples=gated_delta_rule_samples,
    resized=gated_delta_rule_resized,
    workloads=gated_delta_rule_workloads,
    cost=recurrence_cost,
)
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    l2_norm_qk: bool = False,
    sequence_ids: Tensor | None = None,
    context_group: str = "",
) -> tuple[Tensor, Tensor]:
    """The gated delta rule: a linear recurrence whose state decays and is corrected towards each token's value.

    For each value head, with a state S `[K, V]` that begins as `initial_state`:

        S   = exp(g_t) * S                  # with a decay for each channel: exp(g_t)[:, None] * S
        S   = S + beta_t * outer(k_t, v_t - k_t @ S)
        o_t = scale * q_t @ S

    With a decay for each channel this is Kimi Delta Attention. It is computed in chunks of 64 tokens by products of
    matrices. Their operands are rounded once to the dtype of `q`; states, decays and the inverse of each chunk's
    triangular matrix are float32. The backward pass makes the states again: of the forward pass it keeps the inputs
    and, on a GPU, for each token and value head a row of its chunk's inverse, which is 64 numbers in the dtype of `q`
    (32 of float32), and with a decay for each channel two rows more, one of them in float32.

    Args:
        q: Queries `[B, T, HK, K]`, float32, float16 or bfloat16, any strides, K up to 256.
        k: Keys, shape and dtype of `q`.
        v: Values `[B, T, H, V]` in the dtype of `q`, H a multiple of HK, V up to 512: key head i serves the H / HK
            value heads from i * H / HK on.
        g: Logarithms of the decays, at most 0, any of these dtypes, float32 best: `[B, T, H]`, one for each value head,
            or `[B, T, H, K]`, one for each channel of its keys.
        beta: How far each value is corrected `[B, T, H]`, any of these dtypes.
        scale: None for `K ** -0.5`.
        initial_state: `[B, H, K, V]`, float32; None for zeros.
        l2_norm_qk: Divide each query and each key by the root of its sum of squares and 1e-6 first.
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

    Source: Yang et al., 2024, https://arxiv.org/abs/2412.06464; Kimi Team, 2025, https://arxiv.org/abs/2510.26692.
    """
    call = Call(q, k, v, g, beta, initial_state, sequence_ids, scale, l2_norm_qk)
    return run(gated_delta_rule_fwd, call, context_group)
