"""Functions of several operators or none, as records that `benchmarks.run` times like operators.

Most are modules of `llmk.nn` that are plain PyTorch, as functions of their inputs and parameters. What plain PyTorch is
timed as is the computation as one would write it, or as Hugging Face has it.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import llmk
from llmk.registry import Cost, Op, Sample

EPS = 1e-6


class Composition(Op):
    """The record of a function that is no operator."""

    def argument_names(self) -> list[str]:
        return list(inspect.signature(self.reference).parameters)


def _composition(name: str, module: nn.Module, reference: Callable[..., Tensor], why: str, **options: Any) -> Op:
    """An operator that calls a module; the reference takes the module's parameters after its arguments."""
    names = list(inspect.signature(reference).parameters)
    parameters = [key for key in names if key in dict(module.named_parameters())]
    inputs = len(names) - len(parameters)

    def call(*args: Tensor) -> Tensor:
        return functional_call(module, dict(zip(parameters, args[inputs:], strict=True)), args[:inputs])

    def samples(device: torch.device, dtype: torch.dtype) -> list[Sample]:
        shapes = {**options["shapes"], **{key: tuple(p.shape) for key, p in module.named_parameters()}}
        factors = options.get("factors", {})
        tensors = (factors.get(key, 1.0) * torch.randn(shapes[key], device=device, dtype=dtype) for key in names)
        return [Sample(tuple(tensors), why=why)]

    return Composition(
        name=name,
        overload=call,
        reference=reference,
        samples=samples,
        workloads=samples,
        differentiable=tuple(names),
        cost=lambda *args: options["cost"],
    )


def modulated_rms_norm(large: bool) -> Op:
    B, S, H = (8, 4096, 3072) if large else (2, 5, 16)

    def reference(input: Tensor, scale: Tensor, shift: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(input, (H,), weight, EPS) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)

    tensor = 2 * B * S * H
    return _composition(
        "modulated_rms_norm",
        llmk.nn.ModulatedRMSNorm(H, EPS, device="meta"),
        reference,
        f"{B}x{S}x{H}",
        shapes={"input": (B, S, H), "scale": (B, H), "shift": (B, H)},
        cost=Cost(2 * tensor, 5 * tensor),
    )


class _AroundSilu(llmk.nn.HyperConnection):
    """A hyper-connection around a layer that costs little, so that what is around it is timed."""

    def forward(self, input: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(input, F.silu)


def hyper_connection(large: bool) -> Op:
    """Plain PyTorch is what transformers has for DeepSeek-V4."""
    S, N, H = (8192, 4, 2560) if large else (5, 4, 16)

    def reference(input: Tensor, fn: Tensor, base: Tensor, scale: Tensor) -> Tensor:
        row = input.flatten(-2).float()
        numbers = F.linear(row * torch.rsqrt(row.square().mean(-1, keepdim=True) + EPS), fn.float())
        sizes = (N, N, N * N)
        read, write, mix = (
            part * factor + start
            for part, factor, start in zip(numbers.split(sizes, -1), scale.unbind(), base.split(sizes), strict=True)
        )
        matrix = mix.unflatten(-1, (N, N)).softmax(-1) + EPS
        matrix = matrix / (matrix.sum(-2, keepdim=True) + EPS)
        for _ in range(19):
            matrix = matrix / (matrix.sum(-1, keepdim=True) + EPS)
            matrix = matrix / (matrix.sum(-2, keepdim=True) + EPS)
        output = F.silu(((torch.sigmoid(read) + EPS).unsqueeze(-1) * input).sum(-2).to(input.dtype))
        written = (2 * torch.sigmoid(write)).to(input.dtype).unsqueeze(-1) * output.unsqueeze(-2)
        return written + torch.matmul(matrix.to(input.dtype).mT, input)

    tensor = 2 * S * N * H
    return _composition(
        "hyper_connection",
        _AroundSilu(H, N, device="meta"),
        reference,
        f"{S}x{N}x{H}",
        shapes={"input": (S, N, H)},
        factors={"fn": 0.02},
        cost=Cost(2 * tensor, 5 * tensor),
    )


def multi_token_attention(large: bool) -> Op:
    B, C, S, queries, keys = (2, 16, 2048, 5, 11) if large else (1, 2, 8, 3, 3)

    def reference(scores: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        future = torch.ones(S, S, dtype=torch.bool, device=scores.device).triu(1)
        weights = scores.masked_fill(future, -float("inf")).softmax(-1)
        mixed = F.conv2d(weights, weight, bias, padding=(queries // 2, keys // 2), groups=C)
        return mixed.masked_fill(future, 0.0)

    tensor = 2 * B * C * S * S
    return _composition(
        "multi_token_attention",
        llmk.nn.MultiTokenAttention(C, C, (queries, keys), C, causal=False, device="meta"),
        reference,
        f"{B}x{C}x{S}x{S}, kernels of {queries}x{keys}",
        shapes={"scores": (B, C, S, S)},
        factors={"weight": 0.1},
        cost=Cost(2 * tensor, 5 * tensor),
    )


def lora_linear_ce(large: bool) -> Op:
    """The loss of a frozen output projection and its LoRA; plain PyTorch is what PEFT and transformers compute."""
    from llmk.transformers.adapters import side_by_side  # it imports transformers

    N, H, V, rank = (8192, 2048, 128256, 16) if large else (7, 16, 40, 3)

    def reference(input: Tensor, weight: Tensor, down: Tensor, up: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(input, weight) + F.linear(F.linear(input, down), up) * 2.0
        return F.cross_entropy(logits.float(), target)

    def call(input: Tensor, weight: Tensor, down: Tensor, up: Tensor, target: Tensor) -> Tensor:
        x, weight = side_by_side(input, weight, [(F.linear(input, down) * 2.0, up)])
        return llmk.functional.fused_linear_ce(x, weight, target)

    def samples(device: torch.device, dtype: torch.dtype) -> list[Sample]:
        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=dtype) * shape[-1] ** -0.5

        target = torch.randint(V, (N,), device=device)
        tensors = randn(N, H) * H**0.5, randn(V, H), randn(rank, H), randn(V, rank), target
        return [Sample(tensors, why=f"{N}x{H}x{V}, rank {rank}")]

    size, product = 2 * (N * H + V * H), 2 * N * H * V
    return Composition(
        name="lora_linear_ce", overload=call, reference=reference, samples=samples, workloads=samples,
        differentiable=("input", "down", "up"), cost=lambda *args: Cost(size, size + 2 * N * H, product, 2 * product),
    )  # fmt: skip


COMPOSITIONS: dict[str, Callable[[bool], Op]] = {
    function.__name__: function
    for function in (modulated_rms_norm, hyper_connection, multi_token_attention, lora_linear_ce)
}
"""The functions that make a record, by name: of a large size, or of one that a CPU gets through at once."""
