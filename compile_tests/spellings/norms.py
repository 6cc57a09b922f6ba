"""Norms in plain PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from compile_tests.spellings.registry import spelling

N, H = 4, 8
EPS = 1e-6


@spelling("rms_norm", (3, 5, 16), (16,))
def hugging_face_norm(x: Tensor, w: Tensor) -> Tensor:
    y = x.to(torch.float32)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * y.to(x.dtype)


@spelling("rms_norm", (3, 5, 16), (16,))
def torch_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, (16,), w, 1e-5)


@spelling("rms_norm", (3, 5, 16), (16,))
def torch_norm_with_its_own_eps(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, (16,), w)


@spelling("rms_norm", (3, 5, 16), (16,))
def llama_norm(x: Tensor, w: Tensor) -> Tensor:
    y = x.float()
    return (y * torch.rsqrt((y * y).mean(-1, keepdim=True) + 1e-5)).type_as(x) * w


@spelling("rms_norm", (3, 5, 16), (16,))
def gemma_norm(x: Tensor, w: Tensor) -> Tensor:
    y = x.float()
    y = y * torch.pow(y.square().mean(dim=2, keepdim=True) + 1e-6, -0.5)
    return (y * (1.0 + w.float())).type_as(x)


@spelling("rms_norm", (3, 5, 16))
def norm_without_weight(x: Tensor) -> Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


@spelling("rms_norm", (2, 5, 32), (8,))
def norm_of_heads(x: Tensor, w: Tensor) -> Tensor:
    return hugging_face_norm(x.view(2, 5, 4, 8), w).transpose(1, 2)


@spelling("rms_norm", (2, 5, 4, 8), (8,))
def norm_of_transposed_heads(x: Tensor, w: Tensor) -> Tensor:
    return hugging_face_norm(x.transpose(1, 2), w)


@spelling("rms_norm", (3, 16), (16,))
def norm_into_another_dtype(x: Tensor, w: Tensor) -> Tensor:
    y = x.float()
    return w.float() * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6))


@spelling("add_rms_norm", (3, 5, 16), (3, 5, 16), (16,))
def residual_and_norm(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = r + x
    return hugging_face_norm(h, w), 2 * h


@spelling("rms_norm_gated", (5, 8, 16), (5, 8, 16), (16,))
def qwen3_next_norm(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    """The activation is a module that is made on the way."""
    return (hugging_face_norm(x, w) * torch.nn.SiLU()(g.to(torch.float32))).to(x.dtype)


@spelling("rms_norm_gated", (5, 8, 16), (5, 8, 16), (16,))
def kimi_norm(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    return (hugging_face_norm(x.float(), w.float()) * g.float().sigmoid()).to(x.dtype)


@spelling("rms_norm_gated", (5, 8, 16), (5, 8, 16), (16,))
def mamba_2_norm(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    y = x.to(torch.float32) * F.silu(g.to(torch.float32))
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
    return w * y.to(x.dtype)


@spelling("rms_norm_gated", (5, 8, 16), (5, 8, 16))
def gate_inside_without_weight(x: Tensor, g: Tensor) -> Tensor:
    return F.rms_norm(torch.sigmoid(g) * x, (16,), None, 1e-6)


@spelling("layer_norm", (3, 5, 16), (16,), (16,))
def torch_layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (16,), w, b, 1e-5)


@spelling("layer_norm", (3, 16))
def layer_norm_alone(x: Tensor) -> Tensor:
    return F.layer_norm(x, (16,))


@spelling("layer_norm", (3, 5, 16), (16,), (16,))
def layer_norm_by_hand(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = x.float()
    c = y - y.mean(-1, keepdim=True)
    return (c / torch.sqrt(c.pow(2).mean(-1, keepdim=True) + 1e-5) * w + b).to(x.dtype)


@spelling("layer_norm", (3, 16), (16,))
def layer_norm_by_variance(x: Tensor, w: Tensor) -> Tensor:
    y = x.float()
    y = (y - y.mean(-1, keepdim=True)) * torch.rsqrt(y.var(-1, keepdim=True, unbiased=False) + 1e-5)
    return y.to(x.dtype) * w


def mean_square(x: Tensor) -> Tensor:
    return x.pow(2).mean(-1, keepdim=True)


@spelling("rms_norm", (N, H), (H,))
def one_over_the_root(x: Tensor, w: Tensor) -> Tensor:
    return x * (1 / torch.sqrt(mean_square(x) + EPS)) * w


@spelling("rms_norm", (N, H), (H,))
def one_over_the_root_by_div(x: Tensor, w: Tensor) -> Tensor:
    return w * torch.multiply(torch.true_divide(1.0, mean_square(x).add(EPS) ** 0.5), x)


@spelling("rms_norm", (N, H), (H,))
def divided_by_the_root(x: Tensor, w: Tensor) -> Tensor:
    return torch.divide(x, mean_square(x).add(EPS).sqrt()) * w


@spelling("rms_norm", (N, H), (H,))
def divided_by_one_over_the_root(x: Tensor, w: Tensor) -> Tensor:
    return x / (1 / torch.rsqrt(mean_square(x) + EPS)) * w


@spelling("rms_norm", (N, H), (H,))
def mean_in_float32(x: Tensor, w: Tensor) -> Tensor:
    return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True, dtype=torch.float32) + EPS)).to(x) * w


@spelling("rms_norm", (N, H), (H,))
def sum_over_their_number(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + EPS) * w


@spelling("rms_norm", (N, 96), (96,))
def sum_times_one_over_a_large_number(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) * (1 / 96) + EPS) * w


@spelling("rms_norm", (N, 96), (96,))
def sum_over_a_large_number(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True).div(96.0) + EPS) * w


@spelling("rms_norm", (N, H), (H,))
def mean_with_its_axis_put_back(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1).unsqueeze(-1) + EPS) * w


@spelling("rms_norm", (N, H), (H,))
def root_with_its_axis_put_back(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1) + EPS)[..., None] * w


@spelling("rms_norm", (N, H), (H,))
def root_in_place(x: Tensor, w: Tensor) -> Tensor:
    return x.square().mean(-1, keepdim=True).add_(EPS).rsqrt_().mul(x).mul_(w)


@spelling("layer_norm", (N, H), (H,), (H,))
def var_mean(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    var, mean = torch.var_mean(x, -1, keepdim=True, correction=0)
    return (x - mean) * torch.rsqrt(var + EPS) * w + b


@spelling("layer_norm", (N, 96), (96,), (96,))
def sums_for_mean_and_variance(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    c = x - x.sum(-1, keepdim=True) / 96
    return c * (1 / (c.square().sum(-1, keepdim=True) / 96 + EPS).sqrt()) * w + b


def grouped(x: Tensor, groups: int = 2) -> Tensor:
    y = x.view(*x.shape[:-1], groups, x.shape[-1] // groups)
    return (y * torch.rsqrt(mean_square(y) + EPS)).view(*x.shape)


@spelling("rms_norm_gated", (2, 5, 16), (2, 5, 16), (16,))
def mamba_2(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    return w * grouped(x.float() * F.silu(g.float())).to(x.dtype)


@spelling("rms_norm_gated", (2, 5, 16), (2, 5, 16), (16,))
def mamba_2_of_one_group(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    return w * grouped(x.float() * F.silu(g.float()), 1).to(x.dtype)


@spelling("rms_norm_gated", (2, 5, 16), (2, 5, 16), (16,))
def groups_before_the_gate(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    return (w * grouped(x.float()) * F.silu(g.float())).to(x.dtype)


@spelling("rms_norm_gated", (2, 5, 16), (2, 5, 16))
def groups_by_flatten(x: Tensor, g: Tensor) -> Tensor:
    return F.rms_norm((x * torch.sigmoid(g)).unflatten(-1, (4, 4)), (4,), None, EPS).flatten(-2)
