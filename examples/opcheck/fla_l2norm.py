"""flash-linear-attention's l2norm, an autograd function: opcheck takes it as the plain function that it is."""

from collections.abc import Iterator

import torch
from fla.modules.l2norm import l2norm
from torch import Tensor

from llmk.registry import Op, Sample


def normalized(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + eps).rsqrt()


def function(x: Tensor, eps: float = 1e-6) -> Tensor:
    return l2norm(x, eps)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for shape in ((4, 16), (3, 37), (2, 3, 64)):
        yield Sample((torch.randn(shape, device=device, dtype=dtype),), why="x".join(map(str, shape)))


L2NORM = Op(name="l2norm", overload=function, reference=normalized, samples=samples, differentiable=("x",))
