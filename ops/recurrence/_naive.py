"""Both recurrences token by token, as the package's docstring writes them first: what tests hold the chunked form to.

In any dtype, and right by reading; nothing computes with it.
"""

import torch
from torch import Tensor

from llmk.ops.recurrence._chunks import l2_normalized


def token_by_token(
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
) -> tuple[Tensor, Tensor]:
    """`gated_delta_rule`, or without `beta` `gated_linear_attention`: the outputs and the last state."""
    (B, T, H, V), K = v.shape, q.shape[3]
    q, k = (l2_normalized(q), l2_normalized(k)) if l2_norm_qk else (q, k)
    q, k = (x.repeat_interleave(H // x.shape[2], 2) for x in (q, k))
    state = v.new_zeros(B, H, K, V) if initial_state is None else initial_state
    outputs = []
    for t in range(T):
        if sequence_ids is not None and t > 0:
            goes_on = sequence_ids[:, t] == sequence_ids[:, t - 1]
            state = torch.where(goes_on[:, None, None, None], state, 0.0)
        decay = g[:, t].exp()  # [B, H], or [B, H, K]
        state = state * (decay[..., None, None] if g.dim() == 3 else decay[..., None])
        u = v[:, t]
        if beta is not None:
            u = beta[:, t, :, None] * (u - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], u)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return (K**-0.5 if scale is None else scale) * torch.stack(outputs, 1), state
