"""Hyper-connections in plain PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from compile_tests.spellings.registry import spelling

T, N, H, ITERATIONS, EPS = 3, 4, 8, 3, 1e-6


@spelling("sinkhorn", (T, N, N))
def columns_and_rows_in_turn(x: Tensor) -> Tensor:
    """As transformers has them."""
    matrix = torch.softmax(x, dim=-1) + EPS
    matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + EPS)
    for _ in range(ITERATIONS - 1):
        matrix = matrix / (matrix.sum(dim=-1, keepdim=True) + EPS)
        matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + EPS)
    return matrix


@spelling("sinkhorn", (2, T, N, N))
def one_division_of_columns(x: Tensor) -> Tensor:
    matrix = torch.softmax(x.float(), 3) + EPS
    return (matrix / (matrix.sum(2, keepdim=True) + EPS)).to(x.dtype)


@spelling("write_streams", (T, N, H), (T, H), (T, N), (T, N, N))
def mixed_streams(x: Tensor, f: Tensor, q: Tensor, mix: Tensor) -> Tensor:
    """As transformers has them."""
    return q.unsqueeze(-1) * f.unsqueeze(-2) + torch.matmul(mix.transpose(-1, -2), x)


@spelling("write_streams", (2, T, N, H), (2, T, H), (2, T, N), (2, T, N, N))
def mixed_in_float32(x: Tensor, f: Tensor, q: Tensor, mix: Tensor) -> Tensor:
    return (mix.float().mT @ x.float() + f.float()[..., None, :] * q[..., None]).to(x.dtype)


def over_root_mean_square(x: Tensor) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


@spelling("rms_linear", (T, 16), (5, 16))
def normalized_first(x: Tensor, weight: Tensor) -> Tensor:
    """As DeepSeek-V4 has it, of streams in 16 bits."""
    row = x.to(torch.bfloat16).float()
    return F.linear(row * over_root_mean_square(row), weight.float())


@spelling("rms_linear", (T, 16), (5, 16))
def normalized_later(x: Tensor, weight: Tensor) -> Tensor:
    """As HY-V4 has it."""
    row = x.to(torch.bfloat16).float()
    return F.linear(row, weight.float()) * over_root_mean_square(row)
