"""A hybrid language model in small: three layers of the gated delta rule to one of attention, as in Qwen3-Next.

    python examples/train.py --preset tiny-hybrid

Attention reads all tokens before the current one again, so that its work grows with the square of their number and its
cache with the text. A linear recurrence keeps a state of fixed size instead, for each head a matrix S `[K, V]` that
maps keys to values. For each token, the gated delta rule

    lets it fade:          S = exp(g) * S                           g <= 0, the logarithm of the decay
    corrects one value:    S = S + beta * outer(k, v - k @ S)       beta in (0, 1), how far
    and reads another:     o = q @ S / sqrt(K)

(Yang et al., 2024, https://arxiv.org/abs/2412.06464). Every fourth layer is attention, which finds single tokens of
long ago. A recurrence knows the order of its tokens, so that attention alone has rotary position embedding.

The model is that of llama.py with another layer in attention's place. Besides linear layers that layer consists of
three functions. They are written twice: with llmk's operators, and in plain PyTorch.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import llama
import torch
import torch.nn.functional as F
from llama import Attention, LlamaConfig
from torch import Tensor, nn

import llmk


@dataclass(frozen=True)
class HybridConfig(LlamaConfig):
    """Heads and sizes of Llama are those of its attention; queries and keys of a recurrence may have fewer heads."""

    attention_every: int = 4  # layers 4, 8, 12 and so on
    recurrent_heads: int = 4
    recurrent_qk_heads: int = 2
    recurrent_head_dim: int = 32
    conv_size: int = 4


@dataclass(frozen=True)
class Functions:
    """The parts of a recurrent layer besides linear layers."""

    conv: Callable[[Tensor, Tensor], Tensor]  # x [B, D, T], weight [D, 1, taps] -> [B, D, T]
    delta_rule: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # q, k, v, g, beta -> [B, T, heads, V]
    gated_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]  # x, gate, weight, eps -> x's shape


class GatedDeltaNet(nn.Module):
    """A layer of the gated delta rule in the place of attention."""

    def __init__(self, config: HybridConfig, functions: Functions, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        heads, self.head_dim = config.recurrent_heads, config.recurrent_head_dim
        qk_size, v_size = config.recurrent_qk_heads * self.head_dim, heads * self.head_dim
        self.sizes = [qk_size, qk_size, v_size]
        self.functions, self.norm_eps = functions, config.norm_eps
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.sizes), bias=False, **factory)
        self.gate_proj = nn.Linear(config.hidden_size, v_size, bias=False, **factory)
        self.beta_proj = nn.Linear(config.hidden_size, heads, bias=False, **factory)
        self.decay_proj = nn.Linear(config.hidden_size, heads, bias=False, **factory)
        self.out_proj = nn.Linear(v_size, config.hidden_size, bias=False, **factory)
        self.norm_weight = nn.Parameter(torch.ones(self.head_dim, **factory))
        # The convolution begins as the identity: a weight of 1 for the token itself, which is the last tap.
        self.conv_weight = nn.Parameter(torch.zeros(sum(self.sizes), 1, config.conv_size, **factory))
        nn.init.ones_(self.conv_weight[..., -1])
        # The heads begin with memories of 4 to 256 tokens. Decays over many tokens multiply, hence float32.
        rate = torch.logspace(-2, -8, heads, base=2, device=device, dtype=torch.float32)
        self.decay_bias = nn.Parameter(rate + torch.log(-torch.expm1(-rate)))  # softplus(decay_bias) = rate
        self.log_rate = nn.Parameter(torch.zeros(heads, device=device, dtype=torch.float32))

    def forward(self, x: Tensor, rotary: nn.Module) -> Tensor:
        """Map hidden states `[B, T, H]` to as many; `rotary` is attention's."""
        # Each channel of queries, keys and values is first mixed with that of the last few tokens.
        qkv = self.functions.conv(self.qkv_proj(x).transpose(1, 2), self.conv_weight).transpose(1, 2)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in qkv.split(self.sizes, dim=-1))
        beta = self.beta_proj(x).sigmoid()
        g = -self.log_rate.exp() * F.softplus(self.decay_proj(x).float() + self.decay_bias)
        out = self.functions.delta_rule(q, k, v, g, beta)
        gate = self.gate_proj(x).view_as(out)
        return self.out_proj(self.functions.gated_norm(out, gate, self.norm_weight, self.norm_eps).flatten(2))


# ---- the functions by llmk


def conv(x: Tensor, weight: Tensor) -> Tensor:
    out, _ = llmk.functional.causal_conv1d(x, weight.squeeze(1), activation="silu")
    return out


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    out, _ = llmk.functional.gated_delta_rule(q, k, v, g, beta, l2_norm_qk=True)
    return out


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return llmk.functional.rms_norm_gated(x, gate, weight, eps)


# ---- the same in plain PyTorch


def plain_conv(x: Tensor, weight: Tensor) -> Tensor:
    """A token's own channel and those of the tokens before it: padded on both sides, the end cut off."""
    channels, _, taps = weight.shape
    return F.silu(F.conv1d(x, weight, padding=taps - 1, groups=channels)[..., : x.shape[-1]])


def plain_gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps) * F.silu(gate)


def plain_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int = 64) -> Tensor:
    """The gated delta rule, `chunk` tokens at a time.

    Let d(i, j) be the decay between two tokens of a chunk, d(i) the one since its start, and S the state at its start.
    What token i adds to the state is its key times u_i, a value less what the state holds for the key:

        u_i = beta_i * (v_i - d(i) * k_i @ S - sum over j < i of d(i, j) * (k_i @ k_j) * u_j)

    For all tokens of a chunk this is a system of linear equations with a triangular matrix, whose right side has a part
    with S and a part without. Both are solved for all chunks at once; the loop from state to state is two products.
    """
    (B, T, H, V), K = v.shape, k.shape[-1]
    dtype, wide = v.dtype, torch.promote_types(v.dtype, torch.float32)
    q, k = (x.to(wide).repeat_interleave(H // x.shape[2], dim=2) for x in (q, k))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q * K**-0.5

    def cut(x: Tensor) -> Tensor:
        """`[B, T, H, ...]` as `[B, H, chunks, chunk, ...]`; tokens of zeros fill the last chunk and change nothing."""
        x = F.pad(x.to(wide), (0, 0) * (x.dim() - 2) + (0, -T % chunk))
        return x.unflatten(1, (-1, chunk)).movedim(3, 1)

    q, k, v, g, beta = cut(q), cut(k), cut(v), cut(g).cumsum(-1), cut(beta)[..., None]
    future = torch.ones(chunk, chunk, dtype=torch.bool, device=v.device).triu(1)
    between = (g[..., :, None] - g[..., None, :]).masked_fill(future, -torch.inf).exp()
    since_start, until_end, whole = g.exp()[..., None], (g[..., -1:] - g).exp()[..., None], g[..., -1].exp()

    # With ones on the diagonal, which solve_triangular takes as given.
    system = beta * between * (k @ k.transpose(-1, -2))
    right = torch.cat([beta * v, beta * since_start * k], dim=-1)
    values, keys = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split([V, K], dim=-1)

    scores = between * (q @ k.transpose(-1, -2))
    q, k = q * since_start, k * until_end
    state = v.new_zeros(B, H, K, V)
    out = []
    for n in range(g.shape[2]):
        u = values[:, :, n] - keys[:, :, n] @ state
        out.append(q[:, :, n] @ state + scores[:, :, n] @ u)
        state = whole[:, :, n, None, None] * state + k[:, :, n].transpose(-1, -2) @ u
    return torch.cat(out, dim=2)[:, :, :T].transpose(1, 2).to(dtype)


# ---- the model: three recurrent layers, one of attention, and so on


def mixer(functions: Functions, config: HybridConfig, layer: int, **factory) -> nn.Module:
    if (layer + 1) % config.attention_every == 0:
        return Attention(config, **factory)
    return GatedDeltaNet(config, functions, **factory)


FUNCTIONS = {
    "llmk": Functions(conv, delta_rule, gated_norm),
    "plain": Functions(plain_conv, plain_delta_rule, plain_gated_norm),
}
BLOCKS = {name: replace(llama.BLOCKS[name], attention=partial(mixer, FUNCTIONS[name])) for name in FUNCTIONS}
