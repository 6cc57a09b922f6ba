"""Liger Kernel's gated unit behind `torch.library.custom_op`, which its package leaves an autograd function."""

from collections.abc import Iterator
from typing import Any

import torch
from liger_kernel.ops.swiglu import swiglu_backward, swiglu_forward
from torch import Tensor
from torch.nn.functional import silu

from llmk.registry import Op, Sample


@torch.library.custom_op("liger::swiglu", mutates_args=())
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return swiglu_forward(gate, up)[2]


@torch.library.custom_op("liger::swiglu_backward", mutates_args=())
def swiglu_bwd(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return swiglu_backward(gate.clone(), up.clone(), grad)  # it writes the gradients over the inputs


swiglu.register_fake(lambda gate, up: torch.empty_like(gate))
swiglu_bwd.register_fake(lambda gate, up, grad: (torch.empty_like(gate), torch.empty_like(up)))


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


swiglu.register_autograd(lambda ctx, grad: swiglu_bwd(*ctx.saved_tensors, grad), setup_context=setup_context)


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for shape in ((4, 16), (3, 37), (2, 3, 8)):
        yield Sample(tuple(torch.randn(2, *shape, device=device, dtype=dtype)), why="x".join(map(str, shape)))


SWIGLU = Op(
    name="swiglu",
    overload=torch.ops.liger.swiglu.default,
    reference=lambda gate, up: silu(gate) * up,
    samples=samples,
    differentiable=("gate", "up"),
)
