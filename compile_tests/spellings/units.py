"""Gated units and squares of ReLU in plain PyTorch."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from compile_tests.spellings.registry import spelling


@spelling("swiglu", (3, 16), (3, 16))
def gate_and_up(g: Tensor, u: Tensor) -> Tensor:
    return F.silu(g) * u


@spelling("swiglu", (3, 16), (3, 16))
def sigmoid_by_hand(g: Tensor, u: Tensor) -> Tensor:
    return u * (torch.sigmoid(g) * g)


@spelling("swiglu", (3, 32))
def packed_by_chunk(x: Tensor) -> Tensor:
    g, u = x.chunk(2, dim=-1)
    return u * F.silu(g)


@spelling("swiglu", (3, 32))
def packed_by_split(x: Tensor) -> Tensor:
    g, u = torch.split(x, [16, 16], dim=1)
    return F.silu(g) * u


@spelling("swiglu", (3, 32))
def packed_by_slices(x: Tensor) -> Tensor:
    return F.silu(x[..., :16]) * x[..., 16:]


@spelling("swiglu", (3, 32))
def packed_the_other_way(x: Tensor) -> Tensor:
    u, g = x.chunk(2, dim=-1)
    return F.silu(g) * u


@spelling("geglu", (3, 16), (3, 16))
def exact_gelu(g: Tensor, u: Tensor) -> Tensor:
    return F.gelu(g) * u


@spelling("geglu", (3, 16), (3, 16))
def gelu_by_tanh(g: Tensor, u: Tensor) -> Tensor:
    return F.gelu(g, approximate="tanh") * u


@spelling("geglu", (3, 16), (3, 16))
def gelu_by_hand(g: Tensor, u: Tensor) -> Tensor:
    inner = math.sqrt(2.0 / math.pi) * (g + 0.044715 * torch.pow(g, 3.0))
    return 0.5 * g * (1.0 + torch.tanh(inner)) * u


@spelling("relu_squared", (3, 16))
def relu_and_square(x: Tensor) -> Tensor:
    return F.relu(x).square()


@spelling("relu_squared", (3, 16))
def relu_and_power(x: Tensor) -> Tensor:
    return torch.relu(x) ** 2


@spelling("swiglu", (2, 16, 5))
def channels_first(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, 1)
    return F.silu(gate) * up


@spelling("swiglu", (2, 8, 5, 3), (2, 8, 5, 3))
def images(g: Tensor, u: Tensor) -> Tensor:
    return F.silu(g.to(memory_format=torch.channels_last)) * u
