"""The linear recurrences token by token, in any dtype, and inputs for them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from llmk.ops.recurrence.gated_delta_rule import gated_delta_rule_reference
from llmk.ops.recurrence.gated_linear_attention import gated_linear_attention_reference

Results = tuple[Tensor, Tensor]
REFERENCES: dict[str, Callable[..., Results]] = {
    "gated_delta_rule": gated_delta_rule_reference,
    "gated_linear_attention": gated_linear_attention_reference,
}

per_channel_or_head = pytest.mark.parametrize("per_channel", [False, True], ids=["head", "channel"])


def token_by_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    *,
    scale: float,
    initial_state: Tensor,
    l2_norm_qk: bool = False,
    sequence_ids: Tensor | None = None,
) -> Results:
    if l2_norm_qk:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    state, outs = initial_state, []
    for t in range(v.shape[1]):
        if sequence_ids is not None and t > 0:
            same = sequence_ids[:, t] == sequence_ids[:, t - 1]
            state = torch.where(same[:, None, None, None], state, 0.0)
        decay = g[:, t].exp()  # [B, H], or [B, H, K]
        state = state * (decay[..., None, None] if g.dim() == 3 else decay[..., None])
        u = v[:, t]
        if beta is not None:
            u = beta[:, t, :, None] * (u - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], u)
        outs.append(scale * torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outs, 1), state


def inputs(
    B: int,
    T: int,
    HK: int,
    H: int,
    K: int,
    V: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    per_channel: bool = False,
) -> list[Tensor]:
    """q, k, v, decays of four strengths, and beta."""
    generator = torch.Generator().manual_seed(T)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")

    strengths = torch.tensor([0.0, 0.01, 1.0, 30.0], dtype=torch.float64, device="cpu")
    sizes, strengths = ((H, K), strengths.repeat(K)[:K]) if per_channel else ((H,), strengths[-H:])
    g, beta = -randn(B, T, *sizes).abs() * strengths, randn(B, T, H).sigmoid()
    found = [randn(B, T, HK, K), randn(B, T, HK, K) / K**0.5, randn(B, T, H, V), g, beta]
    return [x.to(device, dtype) for x in found]
