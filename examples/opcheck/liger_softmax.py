"""Liger Kernel's softmax behind `torch.library.custom_op`; its package has it as an autograd function."""

from typing import Any

import torch
from liger_kernel.ops.softmax import _softmax_backward, _softmax_forward
from torch import Tensor

from llmk.registry import Op, Sample


@torch.library.custom_op("liger::softmax", mutates_args=())
def softmax(x: Tensor) -> Tensor:
    return _softmax_forward(x)[0]


@torch.library.custom_op("liger::softmax_backward", mutates_args=())
def softmax_backward(grad: Tensor, y: Tensor) -> Tensor:
    return _softmax_backward(grad, y, *_softmax_forward(y)[1:])


def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)


softmax.register_fake(lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device))
softmax_backward.register_fake(lambda grad, y: torch.empty(y.shape, dtype=y.dtype, device=y.device))
softmax.register_autograd(lambda ctx, grad: softmax_backward(grad, *ctx.saved_tensors), setup_context=save)
SHAPES = ((4, 16), (3, 37), (2, 3, 300))

SOFTMAX = Op(
    name="softmax",
    overload=torch.ops.liger.softmax.default,
    reference=lambda x: x.softmax(-1),
    samples=lambda device, dtype: [Sample((torch.randn(shape, device=device, dtype=dtype),)) for shape in SHAPES],
    differentiable=("x",),
)
