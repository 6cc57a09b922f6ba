"""One token of a linear recurrence, as a sampler goes on from a state: both operators of this family.

Source: the formulas and their sources are in `ops/recurrence/__init__.py`; a step is the recurrence as it stands there
first, before it is written in chunks.

The forward pass is plain PyTorch in float32 on every device, which Inductor makes one or two kernels of; the backward
pass is autograd's derivative of the same function. A step reads and writes the state once and does little beside: no
measurement asks for a kernel of its own yet. Products of a state and a vector are sums of float32 products, not
matrix products: TF32 would round the state at each of thousands of tokens.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from llmk.ops.recurrence._call import check_call
from llmk.ops.recurrence._chunks import Call, chunked_reference, l2_normalized
from llmk.registry import Cost, KernelOp, Sample, differentiating, gradient_of, or_no_gradient, public_op


def _step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, state: Tensor, scale: float, l2_norm_qk: bool
) -> tuple[Tensor, Tensor]:
    """The output `[B, H, V]`, float32, and the next state."""
    q, k = q.float(), k.float()
    q, k = (l2_normalized(q), l2_normalized(k)) if l2_norm_qk else (q, k)
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1).unsqueeze(-1) for x in (q, k))  # [B, H, K, 1]
    decay = g.float().exp()
    state = (decay[..., None, None] if g.dim() == 2 else decay.unsqueeze(-1)) * state
    u = v.float().unsqueeze(-2)  # [B, H, 1, V]
    if beta is not None:
        u = beta.float()[..., None, None] * (u - (k * state).sum(-2, keepdim=True))
    state = state + k * u
    return scale * (q * state).sum(-2), state


def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, state: Tensor, scale: float, l2_norm_qk: bool
) -> tuple[Tensor, Tensor]:
    out, state = _step(q, k, v, g, beta, state, scale, l2_norm_qk)
    return out.to(v.dtype).contiguous(), state.contiguous()


@differentiating
def _backward(
    grad: Tensor,
    grad_state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    state: Tensor,
    scale: float,
    l2_norm_qk: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    def value(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, beta: Tensor | None = None) -> Tensor:
        out, final = _step(q, k, v, g, beta, state, scale, l2_norm_qk)
        return (out * grad).sum() + (final * grad_state).sum()

    _, found = gradient_of(value, q, k, v, g, state, *([] if beta is None else [beta]))
    dq, dk, dv, dg, dstate, dbeta = (or_no_gradient(x, grad) for x in (*found, *[None] * (6 - len(found))))
    return dq, dk, dv, dg, dbeta, dstate


DIFFERENTIABLE = ("q", "k", "v", "g", "beta", "state")


def _kernel_ops(name: str) -> tuple[KernelOp, KernelOp]:
    """Register those of the public operator `name`: without a correction `beta` is None."""
    forward = KernelOp(_forward, name=f"_{name}_fwd")
    backward = KernelOp(_backward, name=f"_{name}_bwd", opaque=True)
    for op in (forward, backward):
        op.register_kernel("cpu")(op.fn)
    forward.register_fake(lambda v, state: (v.new_empty(v.shape), state.new_empty(state.shape)))
    forward.register_backward(backward, outputs=("out", "final_state"), depends_on=[DIFFERENTIABLE, DIFFERENTIABLE[1:]])
    forward.register_sharding(lambda: [([0, 0], [0] * 6)])  # along the batch
    return forward, backward


gated_delta_rule_step_fwd, gated_delta_rule_step_bwd = _kernel_ops("gated_delta_rule_step")
gated_linear_attention_step_fwd, gated_linear_attention_step_bwd = _kernel_ops("gated_linear_attention_step")


def _run(forward: KernelOp, call: Call) -> tuple[Tensor, Tensor]:
    """Check a call, whose tensors have no axis of tokens, and compute it."""
    check_call(call, "B", "state")
    return forward(call.q, call.k, call.v, call.g, call.beta, call.initial_state, call.factor, call.l2_norm_qk)


def gated_delta_rule_step_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    scale: float | None = None,
    l2_norm_qk: bool = False,
) -> tuple[Tensor, Tensor]:
    q, k, v, g, beta = (x.unsqueeze(1) for x in (q, k, v, g, beta))
    out, state = chunked_reference(Call(q, k, v, g, beta, state, None, scale, l2_norm_qk))
    return out.squeeze(1), state


def gated_linear_attention_step_reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, *, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    q, k, v, g = (x.unsqueeze(1) for x in (q, k, v, g))
    out, state = chunked_reference(Call(q, k, v, g, None, state, None, scale))
    return out.squeeze(1), state


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[list[Tensor], Tensor, Tensor, dict, str]]:
    """Calls: q, k, v and g; beta; the state; the keywords that both operators have; why."""
    randn = partial(torch.randn, device=device, dtype=dtype)
    floats = partial(torch.rand, device=device, dtype=torch.float32)
    for (B, HK, H, K, V), per_channel, options, why in (
        ((2, 1, 1, 16, 16), False, {}, "powers of two"),
        ((2, 2, 4, 12, 9), False, {"scale": 0.5}, "odd sizes, shared keys, a scale"),
        ((0, 1, 2, 8, 8), False, {}, "no rows"),
        ((2, 1, 2, 12, 20), True, {}, "a decay for each channel, more values than keys"),
        ((1, 2, 2, 8, 5), True, {"scale": 2.0}, "a decay for each channel, a scale"),
    ):
        g = -floats(B, H, *((K,) if per_channel else ()))
        state = torch.randn(B, H, K, V, device=device, dtype=torch.float32)
        tensors = [randn(B, HK, K), randn(B, HK, K) / K**0.5, randn(B, H, V), g]
        yield tensors, floats(B, H).to(dtype), state, options, why
    q, k, v = (randn(2, 5, 4).mT for _ in range(3))
    state = torch.linspace(-1, 1, 200, device=device, dtype=torch.float32).view(2, 4, 5, 5).mT
    yield [q, k / 2, v, -69 * floats(2, 4)], floats(2, 4).to(dtype), state, {}, "strided, decays down to 1e-30"


def gated_delta_rule_step_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    calls = list(_samples(device, dtype))
    for tensors, beta, state, options, why in calls:
        yield Sample((*tensors, beta, state), options, why=why)
    tensors, beta, state, options, why = calls[1]
    yield Sample((*tensors, beta, state), options | {"l2_norm_qk": True}, why=f"{why}, normalized")


def gated_linear_attention_step_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for tensors, _, state, options, why in _samples(device, dtype):
        yield Sample((*tensors, state), options, why=why)


def _call(
    B: int, HK: int, H: int, K: int, V: int, device: torch.device, dtype: torch.dtype
) -> tuple[list[Tensor], Tensor, Tensor]:
    q, k = (torch.randn(B, HK, K, device=device, dtype=dtype) / K**0.25 for _ in range(2))
    g, beta = (torch.rand(B, H, device=device, dtype=torch.float32) for _ in range(2))
    state = torch.randn(B, H, K, V, device=device, dtype=torch.float32)
    return [q, k, torch.randn(B, H, V, device=device, dtype=dtype), -g], beta.to(dtype), state


def gated_delta_rule_step_resized(rows: int, device: torch.device, dtype: torch.dtype) -> Sample:
    tensors, beta, state = _call(rows, 2, 2, 8, 8, device, dtype)
    return Sample((*tensors, beta, state), why="resized")


def gated_linear_attention_step_resized(rows: int, device: torch.device, dtype: torch.dtype) -> Sample:
    tensors, _, state = _call(rows, 2, 2, 8, 8, device, dtype)
    return Sample((*tensors, state), why="resized")


def gated_delta_rule_step_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for B, HK, H, D in [(32, 16, 32, 128)]:
        tensors, beta, state = _call(B, HK, H, D, D, device, dtype)
        yield Sample((*tensors, beta, state), {"l2_norm_qk": True}, why=f"{B} rows, {HK} and {H} heads of {D}")


def gated_linear_attention_step_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for B, HK, H, K, V in [(32, 1, 48, 128, 64)]:
        tensors, _, state = _call(B, HK, H, K, V, device, dtype)
        yield Sample((*tensors, state), why=f"{B} rows, {HK} and {H} heads of {K} and {V}")


def _cost(products: int, state: Tensor, *rest: Tensor | None) -> Cost:
    """The least to read and write, and the products: backward has twice as many."""
    inputs = sum(x.numel() * x.element_size() for x in (state, *rest) if x is not None)
    written = state.numel() * state.element_size()
    flops = 2 * products * state.numel()
    return Cost(inputs + written, 3 * inputs + 2 * written, flops, 3 * flops)


def gated_delta_rule_step_cost(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, **options: object
) -> Cost:
    return _cost(3, state, q, k, v, g, beta)


def gated_linear_attention_step_cost(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, **options: object
) -> Cost:
    return _cost(2, state, q, k, v, g)


PLAIN = "plain PyTorch in place of a kernel: no figure has been taken that asks for one"


@public_op(
    reference=gated_delta_rule_step_reference,
    differentiable=DIFFERENTIABLE,
    kernel_ops=(gated_delta_rule_step_fwd, gated_delta_rule_step_bwd),
    samples=gated_delta_rule_step_samples,
    resized=gated_delta_rule_step_resized,
    workloads=gated_delta_rule_step_workloads,
    cost=gated_delta_rule_step_cost,
    choices=(PLAIN,),
)
def gated_delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    scale: float | None = None,
    l2_norm_qk: bool = False,
) -> tuple[Tensor, Tensor]:
    """One token of the gated delta rule, by which a model generates: `gated_delta_rule` of one token, without chunks.

    For each value head, with its state S `[K, V]`:

        S = exp(g) * S                  # with a decay for each channel: exp(g)[:, None] * S
        S = S + beta * outer(k, v - k @ S)
        o = scale * q @ S

    All of it in float32, with one rounding of the output: nothing is rounded between tokens. It is plain PyTorch on
    every device, which `torch.compile` fuses. With a decay for each channel this is a step of Kimi Delta Attention.

    Args:
        q: Queries `[B, HK, K]`, float32, float16 or bfloat16, any strides, K up to 256.
        k: Keys, shape and dtype of `q`.
        v: Values `[B, H, V]` in the dtype of `q`, H a multiple of HK, V up to 512: key head i serves the H / HK value
            heads from i * H / HK on.
        g: Logarithms of the decays, at most 0, any of these dtypes: `[B, H]`, one for each value head, or
            `[B, H, K]`, one for each channel of its keys.
        beta: How far each value is corrected `[B, H]`, any of these dtypes.
        state: The state after the token before `[B, H, K, V]`, float32, which is not changed.
        scale: None for `K ** -0.5`.
        l2_norm_qk: Divide each query and each key by the root of its sum of squares and 1e-6 first.

    Returns:
        `[B, H, V]`, contiguous, in the dtype of `q`, and the state after the token, `[B, H, K, V]` in float32.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape or a device does not fit, H is no multiple of HK, or `scale` is not finite. The numbers of
            `g` are not looked at: with positive ones the state grows.

    Source: Yang et al., 2024, https://arxiv.org/abs/2412.06464; Kimi Team, 2025, https://arxiv.org/abs/2510.26692.
    """
    return _run(gated_delta_rule_step_fwd, Call(q, k, v, g, beta, state, None, scale, l2_norm_qk))


@public_op(
    reference=gated_linear_attention_step_reference,
    differentiable=("q", "k", "v", "g", "state"),
    kernel_ops=(gated_linear_attention_step_fwd, gated_linear_attention_step_bwd),
    samples=gated_linear_attention_step_samples,
    resized=gated_linear_attention_step_resized,
    workloads=gated_linear_attention_step_workloads,
    cost=gated_linear_attention_step_cost,
    choices=(PLAIN,),
)
def gated_linear_attention_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, *, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """One token of linear attention whose state decays: `gated_linear_attention` of one token, without chunks.

    For each value head, with its state S `[K, V]`:

        S = exp(g) * S + outer(k, v)    # with a decay for each channel: exp(g)[:, None] * S
        o = scale * q @ S

    In Mamba-2's words q is C, k is B, v is x times dt, and g is dt times A. All of it in float32, with one rounding of
    the output. It is plain PyTorch on every device, which `torch.compile` fuses.

    Args:
        q: Queries `[B, HK, K]`, float32, float16 or bfloat16, any strides, K up to 256.
        k: Keys, shape and dtype of `q`.
        v: Values `[B, H, V]` in the dtype of `q`, H a multiple of HK, V up to 512: key head i serves the H / HK value
            heads from i * H / HK on.
        g: Logarithms of the decays, at most 0, any of these dtypes: `[B, H]`, one for each value head, or
            `[B, H, K]`, one for each channel of its keys.
        state: The state after the token before `[B, H, K, V]`, float32, which is not changed.
        scale: None for `K ** -0.5`.

    Returns:
        `[B, H, V]`, contiguous, in the dtype of `q`, and the state after the token, `[B, H, K, V]` in float32.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape or a device does not fit, H is no multiple of HK, or `scale` is not finite. The numbers of
            `g` are not looked at: with positive ones the state grows.

    Source: Dao and Gu, 2024, https://arxiv.org/abs/2405.21060; Yang et al., 2023, https://arxiv.org/abs/2312.06635.
    """
    return _run(gated_linear_attention_step_fwd, Call(q, k, v, g, None, state, None, scale))
