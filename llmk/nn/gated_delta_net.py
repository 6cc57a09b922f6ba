"""A layer of linear attention by the gated delta rule."""

import torch
from torch import Tensor, nn

from llmk import functional
from llmk.nn.convolution import CausalConv1d
from llmk.nn.norms import RMSNormGated
from llmk.ops.convolution.causal_conv1d import MOST_TAPS
from llmk.ops.recurrence import LARGEST_KEY, LARGEST_VALUE
from llmk.registry import check_size

State = tuple[Tensor, Tensor]


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet as Qwen3.5 has it, in the place of attention: Hugging Face's `Qwen3_5GatedDeltaNet`.

    A call takes `[B, T, hidden_size]` and returns as much, and for the next chunk of a long sequence the final states
    of convolution and recurrence: `[B, C, conv_kernel_size - 1]`, and `[B, num_v_heads, head_k_dim, head_v_dim]` in
    float32, where C is `2 * num_k_heads * head_k_dim + num_v_heads * head_v_dim`. Packed sequences have
    `sequence_ids [B, T]`, integers that differ between all sequences of a row. Where tokens are padding the input must
    be zero.

    Parameters: `in_proj_qkv.weight [C, hidden_size]`, `in_proj_z.weight [num_v_heads * head_v_dim, hidden_size]`,
    `in_proj_a.weight` and `in_proj_b.weight [num_v_heads, hidden_size]`, `conv1d.weight [C, 1, conv_kernel_size]`,
    `A_log` and `dt_bias [num_v_heads]`, `norm.weight [head_v_dim]`,
    `out_proj.weight [hidden_size, num_v_heads * head_v_dim]`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_v_heads: int,
        num_k_heads: int,
        head_v_dim: int,
        head_k_dim: int,
        conv_kernel_size: int = 4,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_size("hidden_size", hidden_size)
        check_size("num_v_heads", num_v_heads)
        check_size("num_k_heads", num_k_heads)
        check_size("head_v_dim", head_v_dim, most=LARGEST_VALUE)
        check_size("head_k_dim", head_k_dim, most=LARGEST_KEY)
        check_size("conv_kernel_size", conv_kernel_size, 2, MOST_TAPS)
        if num_v_heads % num_k_heads:
            raise ValueError(f"num_v_heads: expected a multiple of {num_k_heads} key heads, got {num_v_heads}")
        self.hidden_size = hidden_size
        self.num_v_heads, self.num_k_heads = num_v_heads, num_k_heads
        self.key_dim, self.value_dim = num_k_heads * head_k_dim, num_v_heads * head_v_dim
        conv_dim = 2 * self.key_dim + self.value_dim
        self.in_proj_qkv = nn.Linear(hidden_size, conv_dim, bias=False, device=device, dtype=dtype)
        self.in_proj_z = nn.Linear(hidden_size, self.value_dim, bias=False, device=device, dtype=dtype)
        self.in_proj_a = nn.Linear(hidden_size, num_v_heads, bias=False, device=device, dtype=dtype)
        self.in_proj_b = nn.Linear(hidden_size, num_v_heads, bias=False, device=device, dtype=dtype)
        self.conv1d = CausalConv1d(conv_dim, conv_kernel_size, False, device, dtype, activation="silu")
        self.A_log = nn.Parameter(torch.empty((num_v_heads,), device=device, dtype=dtype))
        self.dt_bias = nn.Parameter(torch.empty((num_v_heads,), device=device, dtype=dtype))
        self.norm = RMSNormGated(head_v_dim, eps, device, dtype)
        self.out_proj = nn.Linear(self.value_dim, hidden_size, bias=False, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Those of its own: decays between those of A = 0.01 and 16, and time steps that begin at softplus(1)."""
        nn.init.uniform_(self.A_log, 0.01, 16)
        with torch.no_grad():
            self.A_log.log_()
        nn.init.ones_(self.dt_bias)

    def forward(
        self, input: Tensor, sequence_ids: Tensor | None = None, initial_state: State | None = None
    ) -> tuple[Tensor, State]:
        if input.dim() != 3 or input.shape[1] == 0 or input.shape[2] != self.hidden_size:
            expected = f"[B, T, {self.hidden_size}] with T at least 1"
            raise ValueError(f"input: expected shape {expected}, got {tuple(input.shape)}")
        conv_state, state = (None, None) if initial_state is None else initial_state
        mixed, conv_state = self.conv1d(self.in_proj_qkv(input).transpose(1, 2), sequence_ids, conv_state)
        q, k, v = mixed.transpose(1, 2).split([self.key_dim, self.key_dim, self.value_dim], -1)
        g = -self.A_log.float().exp() * nn.functional.softplus(self.in_proj_a(input).float() + self.dt_bias)
        out, state = functional.gated_delta_rule(
            q.unflatten(-1, (self.num_k_heads, -1)),
            k.unflatten(-1, (self.num_k_heads, -1)),
            v.unflatten(-1, (self.num_v_heads, -1)),
            g,
            self.in_proj_b(input).sigmoid(),
            initial_state=state,
            l2_norm_qk=True,
            sequence_ids=sequence_ids,
        )
        z = self.in_proj_z(input).unflatten(-1, (self.num_v_heads, -1))
        return self.out_proj(self.norm(out, z).flatten(2)), (conv_state, state)

    def extra_repr(self) -> str:
        return f"num_v_heads={self.num_v_heads}, num_k_heads={self.num_k_heads}"
