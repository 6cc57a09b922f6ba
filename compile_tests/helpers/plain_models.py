"""Models in plain PyTorch that are nobody's, one layer or two each: a GPT, a Llama, a T5, a diffusion block, a ViT."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

V, H, HEADS, S = 31, 16, 2, 6


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Attention over heads [B, S, N, D], which gives [B, S, N * D]."""
    heads = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads, is_causal=causal).transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.qkv, self.out = nn.Linear(H, 3 * H), nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)) for y in self.qkv(x).split(H, dim=2))
        return self.out(attention(q, k, v, self.causal))


class LayerNorm(nn.Module):
    """A layer norm without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(H))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, None, 1e-5)


class Transformer(nn.Module):
    """Norm, attention, norm, feed-forward."""

    def __init__(self, norm: Callable[[], nn.Module], causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = norm(), norm(), SelfAttention(causal)
        self.up, self.down = nn.Linear(H, 2 * H), nn.Linear(2 * H, H)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Learned positions, a tied head, logits that end in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, H), nn.Embedding(S, H)
        self.blocks = nn.ModuleList(Transformer(LayerNorm, causal=True) for _ in range(2))
        self.norm, self.head = LayerNorm(), nn.Linear(H, V, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].reshape(-1, V), ids[:, 1:].reshape(-1), ignore_index=-1)


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(H))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float() if x.dtype == torch.bfloat16 else x
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
        return y.type_as(x) * self.weight


class LlamaLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(), RMSNorm()
        self.wq, self.wo = (nn.Linear(H, H, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(H, H // 2, bias=False) for _ in range(2))
        self.w1, self.w3 = (nn.Linear(H, 2 * H, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * H, H, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        y = self.attention_norm(x)
        q, k, v = (w(y).unflatten(-1, (-1, H // HEADS)) for w in (self.wq, self.wk, self.wv))
        q, k = turned(q, k, angles)
        k, v = (z.repeat_interleave(2, dim=2) for z in (k, v))
        h = x + self.wo(attention(q, k, v, causal=True))
        y = self.ffn_norm(h)
        return h + self.w2(F.silu(self.w1(y)) * self.w3(y))


def turned(q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate by complex numbers."""
    pairs = [torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) for x in (q, k)]
    angles = angles.view(1, q.shape[1], 1, -1)
    a, b = (torch.view_as_real(x * angles).flatten(3).type_as(q) for x in pairs)
    return a, b


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm, self.output = nn.Embedding(V, H), RMSNorm(), nn.Linear(H, V, bias=False)
        self.layers = nn.ModuleList(LlamaLayer() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        phases = torch.outer(torch.arange(S, dtype=x.dtype), 0.1 ** torch.arange(4, dtype=x.dtype))
        angles = torch.polar(torch.ones_like(phases), phases)
        for layer in self.layers:
            x = layer(x, angles)
        return F.cross_entropy(self.output(self.norm(x)).flatten(0, 1), ids.flatten())


class T5Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(H))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class T5(nn.Module):
    """One layer of an encoder with biases by distance, and a gated unit with GELU written out."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.bias = nn.Embedding(V, H), nn.Embedding(2 * S, HEADS)
        self.norm1, self.norm2, self.norm3 = (T5Norm() for _ in range(3))
        self.qkv, self.out = nn.Linear(H, 3 * H, bias=False), nn.Linear(H, H, bias=False)
        self.gate, self.up = (nn.Linear(H, 2 * H, bias=False) for _ in range(2))
        self.down, self.head = nn.Linear(2 * H, H, bias=False), nn.Linear(H, V, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x, at = self.tokens(ids), torch.arange(S)
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        scores = q @ k.mT + self.bias(at[:, None] - at + S).permute(2, 0, 1)
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        y = self.norm2(x)
        gate = self.gate(y)
        gate = 0.5 * gate * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (gate + 0.044715 * torch.pow(gate, 3.0))))
        x = x + self.down(gate * self.up(y))
        logits = self.head(self.norm3(x) * H**-0.5)
        return F.cross_entropy(logits.view(-1, V), ids.view(-1))


class DiffusionBlock(nn.Module):
    """Norms without weights, shifted and scaled by a condition; a gated unit of one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(H, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.attention, self.condition = SelfAttention(causal=False), nn.Linear(H, 6 * H)
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(2 * H, H)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        a, b, c, d, e, f = self.condition(F.silu(time)).unsqueeze(1).chunk(6, dim=-1)
        x = x + c * self.attention(self.norm1(x) * (1 + a) + b)
        hidden, gate = self.up(self.norm2(x) * (1 + d) + e).chunk(2, dim=-1)
        return (x + f * self.down(hidden * F.gelu(gate))).square().mean()


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm, self.head = nn.Conv2d(3, H, 4, 4), nn.LayerNorm(H), nn.Linear(H, V)
        self.blocks = nn.ModuleList(Transformer(lambda: nn.LayerNorm(H), causal=False) for _ in range(2))

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)[:, 0]), classes, label_smoothing=0.1)


@dataclass(frozen=True)
class Example:
    """A model, what it is called with, and what of it the backend should put in, by operator."""

    model: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    found: dict[str, int]


def ids() -> tuple[Tensor, ...]:
    return (torch.randint(0, V, (2, S)),)


MODELS = {
    "a GPT": Example(GPT, ids, {"fused_linear_ce": 1, "layer_norm": 5}),
    "a Llama, complex rotation": Example(
        Llama, ids, {"add_rms_norm": 4, "attention": 2, "fused_linear_ce": 1, "rms_norm": 1, "rope": 2, "swiglu": 2}
    ),
    "a T5 encoder": Example(T5, ids, {"add_rms_norm": 2, "fused_linear_ce": 1, "geglu": 1, "rms_norm": 1}),
    "a diffusion block": Example(
        DiffusionBlock, lambda: (torch.randn(2, S, H), torch.randn(2, H)), {"geglu": 1, "layer_norm": 2}
    ),
    "a ViT": Example(
        ViT, lambda: (torch.randn(2, 3, 8, 8), torch.randint(0, V, (2,))), {"fused_linear_ce": 1, "layer_norm": 5}
    ),
}
