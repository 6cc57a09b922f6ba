"""Check Liger's functions: TRITON_INTERPRET=1 python -m llmk.opcheck examples/opcheck_liger.py --path interpreter"""

from functools import partial

import torch
import torch.nn.functional as F
from liger_kernel.transformers import functional as liger  # pyright: ignore[reportMissingImports]

from llmk.registry import Op, Sample

SHAPES = {(3, 37): "odd width", (4, 2, 16): "three axes", (1, 1): "one element", (0, 8): "no rows"}


def rows(device, dtype, tensors=1):
    for shape, why in SHAPES.items():
        yield Sample(tuple(torch.randn(shape, device=device, dtype=dtype) for _ in range(tensors)), why=why)


def normed(device, dtype):
    for sample in rows(device, dtype):
        width = sample.args[0].shape[-1]
        weight, bias = (torch.randn(width, device=device, dtype=dtype) for _ in range(2))
        yield Sample((sample.args[0], weight, bias, 1e-5), why=sample.why)


def layer_norm(X, W, B, eps):
    return F.layer_norm(X, W.shape, W, B, eps)


def record(function, reference, samples, differentiable):
    name = function.__name__
    return Op(name=name, overload=function, reference=reference, samples=samples, differentiable=tuple(differentiable))


LAYER_NORM = record(liger.liger_layer_norm, layer_norm, normed, "XWB")
SOFTMAX = record(liger.liger_softmax, lambda x: x.softmax(-1), rows, "x")
RELU_SQUARED = record(liger.liger_relu_squared, lambda x: x.relu().square(), rows, "x")
GEGLU = record(liger.liger_geglu, lambda a, b: F.gelu(a, approximate="tanh") * b, partial(rows, tensors=2), "ab")
