"""Check Liger's functions: python -m llmk.opcheck examples/opcheck_liger.py --path interpreter"""

# pyright: reportMissingImports=false
from functools import partial

import torch
import torch.nn.functional as F
from liger_kernel.transformers import functional as liger

from llmk.registry import Op, Sample


def rows(device, dtype, tensors=1):
    for shape, why in (
        ((3, 37), "odd width"),
        ((4, 2, 16), "three axes"),
        ((1, 1), "one element"),
        ((0, 8), "no rows"),
    ):
        yield Sample(tuple(torch.randn(shape, device=device, dtype=dtype) for _ in range(tensors)), why=why)


def normed(device, dtype):
    for sample in rows(device, dtype):
        weight, bias = torch.randn(2, sample.args[0].shape[-1], device=device, dtype=dtype)
        yield Sample((sample.args[0], weight, bias, 1e-5), why=sample.why)


def record(fn, reference, samples, names):
    return Op(name=fn.__name__, overload=fn, reference=reference, samples=samples, differentiable=tuple(names))


LAYER_NORM = record(liger.liger_layer_norm, lambda X, W, B, eps: F.layer_norm(X, W.shape, W, B, eps), normed, "XWB")
SOFTMAX = record(liger.liger_softmax, lambda x: x.softmax(-1), rows, "x")
RELU_SQUARED = record(liger.liger_relu_squared, lambda x: x.relu().square(), rows, "x")
GEGLU = record(liger.liger_geglu, lambda a, b: F.gelu(a, approximate="tanh") * b, partial(rows, tensors=2), "ab")
