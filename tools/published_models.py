"""Two small models as people publish them in one file: a Llama like llama2.c's, a GPT like modded-nanoGPT's."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

V, H, HEADS, D = 31, 32, 2, 16


def angles(tokens: int) -> tuple[Tensor, Tensor]:
    phases = torch.outer(torch.arange(tokens).float(), 0.1 ** torch.arange(D // 2).float())
    return phases.cos(), phases.sin()


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(H))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


def apply_rotary_to_pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Neighbours are the parts of a complex number."""
    turned = []
    for x in (q, k):
        real, imaginary = x.float().reshape(*x.shape[:-1], -1, 2).unbind(-1)
        first, second = real * cos - imaginary * sin, real * sin + imaginary * cos
        turned.append(torch.stack([first, second], dim=-1).flatten(3).type_as(x))
    return turned[0], turned[1]


class LlamaLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(), Norm()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(H, H, bias=False) for _ in range(4))
        self.w1, self.w3, self.w2 = nn.Linear(H, 2 * H), nn.Linear(H, 2 * H), nn.Linear(2 * H, H)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (w(y).view(*x.shape[:2], HEADS, D) for w in (self.wq, self.wk, self.wv))
        q, k = apply_rotary_to_pairs(q, k, cos[None, :, None], sin[None, :, None])
        q, k, v = (z.transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous()
        x = x + self.wo(y.view(x.shape))
        y = self.norm2(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Llama2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm, self.output = nn.Embedding(V, H), Norm(), nn.Linear(H, V, bias=False)
        self.layers = nn.ModuleList(LlamaLayer() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x, (cos, sin) = self.tokens(ids), angles(ids.shape[1])
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.output(self.norm(x))
        return F.cross_entropy(logits.view(-1, V), ids.view(-1), ignore_index=-1)


class FunctionalNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],))


def apply_rotary_back(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Halves, the other way round."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos + second * sin, first * (-sin) + second * cos), 3).type_as(x)


class GPTLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = FunctionalNorm()
        self.qkv, self.out = nn.Linear(H, 3 * H, bias=False), nn.Linear(H, H, bias=False)
        self.up, self.down = nn.Linear(H, 4 * H, bias=False), nn.Linear(4 * H, H, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3 * HEADS, D).chunk(3, dim=-2)
        q, k = (apply_rotary_back(self.norm(y), cos[None, :, None], sin[None, :, None]) for y in (q, k))
        q, k, v = (z.transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(y)
        return x + self.down(F.relu(self.up(self.norm(x))).square())


class GPTWithRotation(nn.Module):
    """Norms of q and k, a squared ReLU, logits between bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm, self.head = nn.Embedding(V, H), FunctionalNorm(), nn.Linear(H, V, bias=False)
        self.layers = nn.ModuleList(GPTLayer() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x, (cos, sin) = self.norm(self.tokens(ids)), angles(ids.shape[1])
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = 15 * torch.tanh(self.head(self.norm(x)).float() / 15)
        return F.cross_entropy(logits.view(-1, V), ids.view(-1))
