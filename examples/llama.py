"""A Llama-style language model whose building blocks can be llmk's or plain PyTorch's.

Both choices have the same parameters under the same names and start from the same values, so that training one and the
other compares nothing but the blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import llmk


@dataclass(frozen=True)
class LlamaConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    tied_head: bool = True
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True)
class Blocks:
    """The parts of the model besides linear layers and an embedding."""

    norm: Callable[..., nn.Module]  # (size, eps, device, dtype); hidden -> hidden
    rotary: Callable[..., nn.Module]  # (head_dim, max_positions, base, device); (q, k) -> (q, k)
    mlp: Callable[..., nn.Module]  # (size, intermediate_size, device, dtype); hidden -> hidden
    loss: Callable[..., nn.Module]  # (); (hidden, head weight, target) -> loss
    attention: Callable[..., nn.Module]  # (config, layer, device, dtype); (hidden, rotary) -> hidden


class PlainRotary(nn.Module):
    """Rotary position embedding the way Hugging Face's Llama writes it."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, max_positions: int, base: float, *, device: torch.device) -> None:
        super().__init__()
        features = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
        angles = torch.arange(max_positions, device=device)[:, None] * base ** (-features / head_dim)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.cos[: q.shape[-2]].to(q.dtype), self.sin[: q.shape[-2]].to(q.dtype)
        return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class PlainMLP(nn.Module):
    def __init__(self, size: int, intermediate_size: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, intermediate_size, bias=False, device=device, dtype=dtype)
        self.up_proj = nn.Linear(size, intermediate_size, bias=False, device=device, dtype=dtype)
        self.down_proj = nn.Linear(intermediate_size, size, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class PlainLoss(nn.Module):
    def forward(self, hidden: Tensor, head_weight: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(hidden, head_weight).float()
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig, **factory) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.grouped = config.num_kv_heads != config.num_heads
        kv_size = config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False, **factory)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False, **factory)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False, **factory)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False, **factory)

    def forward(self, x: Tensor, rotary: nn.Module) -> Tensor:
        q, k, v = (self.split_heads(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotary(q, k)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, heads, S, head_dim]


def attention_in_every_layer(config: LlamaConfig, layer: int, **factory) -> Attention:
    return Attention(config, **factory)


BLOCKS = {
    "llmk": Blocks(
        llmk.nn.RMSNorm,
        llmk.nn.RotaryEmbedding,
        llmk.nn.SwiGLUMLP,
        llmk.nn.LinearCrossEntropyLoss,
        attention_in_every_layer,
    ),
    "plain": Blocks(nn.RMSNorm, PlainRotary, PlainMLP, PlainLoss, attention_in_every_layer),
}


class Layer(nn.Module):
    def __init__(self, config: LlamaConfig, blocks: Blocks, layer: int, **factory) -> None:
        super().__init__()
        self.attention_norm = blocks.norm(config.hidden_size, eps=config.norm_eps, **factory)
        self.attention = blocks.attention(config, layer, **factory)
        self.mlp_norm = blocks.norm(config.hidden_size, eps=config.norm_eps, **factory)
        self.mlp = blocks.mlp(config.hidden_size, config.intermediate_size, **factory)

    def forward(self, x: Tensor, rotary: nn.Module) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """Maps tokens and the tokens that follow them, `[B, S]` each, to the mean cross entropy."""

    def __init__(
        self,
        config: LlamaConfig,
        blocks: Blocks,
        max_positions: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size, **factory)
        self.rotary = blocks.rotary(config.head_dim, max_positions, config.rope_base, device=device)
        self.layers = nn.ModuleList(Layer(config, blocks, layer, **factory) for layer in range(config.num_layers))
        self.norm = blocks.norm(config.hidden_size, eps=config.norm_eps, **factory)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, **factory)
        self.loss = blocks.loss()
        if config.tied_head:
            self.head.weight = self.embedding.weight

    def initialize(self, seed: int) -> None:
        """Draw every matrix from a normal distribution; the order of the parameters is that of the modules."""
        torch.manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.rotary)
        return self.loss(self.norm(x), self.head.weight, target)
