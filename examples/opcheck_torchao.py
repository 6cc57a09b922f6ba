"""Check torchao's affine quantization: python -m llmk.opcheck examples/opcheck_torchao.py --path reference"""

# pyright: reportMissingImports=false
from functools import partial

import torch
import torchao.quantization.quant_primitives  # noqa: F401  registers torch.ops.torchao

from llmk.registry import Op, Sample


def dequantize(input, block_size, scale, zero_point, input_dtype, output_dtype=torch.float32):
    scale, zero_point = (t.repeat_interleave(block_size[1], 1) for t in (scale, zero_point))
    return (input - zero_point.to(scale.dtype)) * scale


def quantize(input, block_size, scale, zero_point, output_dtype):
    scale, zero_point = (t.repeat_interleave(block_size[1], 1) for t in (scale, zero_point))
    return ((input / scale).round() + zero_point).clamp(-128, 127).to(output_dtype)


def samples(device, dtype, quantized):
    for rows, columns, block, why in ((3, 36, 36, "a row each"), (4, 64, 16, "groups of 16"), (1, 7, 7, "one row")):
        groups = (rows, columns // block)
        x = torch.randn(rows, columns, device=device, dtype=dtype)
        scale = torch.rand(groups, device=device, dtype=dtype) / 50 + 0.02
        zero_point = torch.randint(-9, 9, groups, device=device, dtype=torch.int8)
        x = torch.randint(-128, 128, x.shape, device=device, dtype=torch.int8) if quantized else x
        options = {"output_dtype": dtype} if quantized else {}
        yield Sample((x, [1, block], scale, zero_point, torch.int8), options, why=why)


def record(name, reference, made):
    operator = getattr(torch.ops.torchao, name)
    return Op(name=name, overload=operator, reference=reference, samples=made, differentiable=())


DEQUANTIZE = record("dequantize_affine", dequantize, partial(samples, quantized=True))
QUANTIZE = record("quantize_affine", quantize, partial(samples, quantized=False))
