"""torchao's dequantization, registered as `torch.ops.torchao.dequantize_affine`; it has no gradient."""

from collections.abc import Iterator

import torch
import torchao.quantization.quant_primitives  # noqa: F401  (registers the operator)
from torch import Tensor

from llmk.registry import Op, Sample

BLOCK = 32


def dequantized(
    input: Tensor, block_size: list[int], scale: Tensor, zero_point: Tensor | None, input_dtype: torch.dtype,
    quant_min: int | None = None, quant_max: int | None = None, output_dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    scale, shift = (0 if x is None else x.to(scale.dtype).repeat_interleave(BLOCK, 1) for x in (scale, zero_point))
    return (input.to(scale.dtype) - shift) * scale


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for rows, blocks in ((4, 2), (3, 1), (1, 5)):
        integers = torch.randint(-128, 128, (rows, blocks * BLOCK), device=device).to(torch.int8)
        scale = 0.01 + torch.rand(rows, blocks, device=device, dtype=dtype)
        zeros = torch.randint(-9, 9, (rows, blocks), device=device).to(torch.int8)
        options = {"output_dtype": dtype}
        yield Sample((integers, [1, BLOCK], scale, zeros, torch.int8), options, why=f"{rows}x{blocks} blocks")


DEQUANTIZE = Op(
    name="dequantize_affine",
    overload=torch.ops.torchao.dequantize_affine.default,
    reference=dequantized,
    samples=samples,
    differentiable=(),
)
