"""Parts of these operators' records: the tensors of samples and workloads, and the cost of products."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from llmk.ops.common.math import cap_reference
from llmk.ops.linear_loss.chunked import product_flops
from llmk.ops.linear_loss.chunked.plan import described, kept_rows
from llmk.registry import Cost, Sample


class Make:
    """Make a sample's tensors on a device, with a dtype for floats."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def rand(self, *shape: int) -> Tensor:
        return torch.rand(shape, device=self.device, dtype=self.dtype)

    def classes(self, V: int, *shape: int, ignore_index: int = -100) -> Tensor:
        """Return class indices, every fourth of which is ignored."""
        target = torch.randint(0, V, shape, device=self.device)
        positions = torch.arange(target.numel(), device=self.device, dtype=torch.int64).view(shape)
        return target.masked_fill(positions % 4 == 3, ignore_index)

    def tokens(self, V: int, *shape: int, H: int = 12) -> tuple[Tensor, Tensor, Tensor]:
        """Return hidden states of tokens, a weight of V classes, and targets, every fourth of which is ignored."""
        return self.randn(*shape, H), self.randn(V, H), self.classes(V, *shape)

    def support(self, candidates: Tensor, V: int, L: int) -> Tensor:
        """Return supports `[..., L]` with the candidates `[..., K]`, one of them twice, and padding between others.

        The third token has none.
        """
        K = candidates.shape[-1]
        ids = torch.randint(0, V, (*candidates.shape[:-1], L), device=self.device)
        ids[..., :K] = candidates.clamp(min=0)
        ids[..., K] = ids[..., 0]
        ids[..., K + 1 :: 3] = -1
        ids.view(-1, L)[2] = -1
        return ids.flip(-1)

    def ignored(self, *shape: int) -> Tensor:
        return torch.full(shape, -100, device=self.device, dtype=torch.int64)


Sized: TypeAlias = Callable[[Sequence[int], torch.device, torch.dtype], Sample]
"""Makes a workload of some sizes, the number of rows first."""


def workloads(sized: Sized, *sizes: Sequence[int]) -> Callable[[torch.device, torch.dtype], Iterator[Sample]]:
    """Return a record's workloads: one of each sizes."""
    return lambda device, dtype: (sized(each, device, dtype) for each in sizes)


def resized(sized: Sized, *sizes: int) -> Callable[[int, torch.device, torch.dtype], Sample]:
    """Return a record's sample of any number of rows, in chunks of 32: a workload with these other sizes."""

    def sample(rows: int, device: torch.device, dtype: torch.dtype) -> Sample:
        made = sized((rows, *sizes), device, dtype)
        return Sample(made.args, made.kwargs | {"chunk_size": 32}, why="resized")

    return sample


def token_workload(sizes: Sequence[int], device: torch.device, dtype: torch.dtype) -> Sample:
    """Return a workload of N tokens, H features and V classes, the sizes."""
    make, (N, H, V) = Make(device, dtype), sizes
    x, linear_weight = make.randn(N, H), make.randn(V, H) / H**0.5
    return Sample((x, linear_weight, torch.randint(0, V, (N,), device=device)), why=f"{N}x{H}x{V}")


def token_resized(rows: int, device: torch.device, dtype: torch.dtype) -> Sample:
    """Return `resized` of `token_workload` with a larger weight: some tokens are sure of a class."""
    made = resized(token_workload, 16, 40)(rows, device, dtype)
    x, linear_weight, target = made.args
    return Sample((x, 4 * linear_weight, target), made.kwargs, made.why)


def keeps_exponentials(input: Tensor, linear_weight: Tensor) -> bool:
    """Return True if the exponentials of the forward pass are kept for the backward pass."""
    return keeps(input, linear_weight, 4 if input.is_cpu else input.element_size())


def keeps(input: Tensor, linear_weight: Tensor, element: int) -> bool:
    """Return True if a number of so many bytes for each token and class is kept for the backward pass."""
    N, V = input.shape[:-1].numel(), linear_weight.shape[0]
    return N > 0 and kept_rows(N, V, element) > 0


def rows_plan(
    input: Tensor,
    linear_weight: Tensor,
    *args: Any,
    chunk_size: int = 0,
    matrices: int = 0,
    free: int = 0,
    **options: Any,
) -> str:
    """Say in how many tokens at a time a layer over classes is computed, and how many `matrices` of logits exist."""
    N, (V, H) = input.shape[:-1].numel(), linear_weight.shape
    chosen = {"chunk_size": chunk_size, "matrices": matrices, "free": free}
    return described((N, H, V), input.dtype, on_host=input.is_cpu, **chosen)


class Float32Linear(torch.autograd.Function):
    """A linear layer of 16-bit tensors with float32 outputs, whose gradient is rounded to 16 bits, as in operators."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        logits = torch.mm(x, weight.t(), out_dtype=torch.float32) if x.is_cuda else x.float() @ weight.float().t()
        return logits if bias is None else logits + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        grad = grad.to(x.dtype)
        db = grad.sum(0, dtype=torch.float32).to(x.dtype) if ctx.has_bias else None
        return grad @ weight, grad.t() @ x, db


def linear_reference(
    input: Tensor, weight: Tensor, bias: Tensor | None, logits_dtype: torch.dtype | None = None
) -> Tensor:
    """Return `linear(input, weight, bias)` for a loss: in float32 or float64, unless another dtype is asked for."""
    if input.dtype in (torch.float32, torch.float64) or logits_dtype == input.dtype:
        return torch.nn.functional.linear(input, weight, bias)
    logits = Float32Linear.apply(input.reshape(-1, input.shape[-1]), weight, bias)
    return logits.view(*input.shape[:-1], weight.shape[0])


def logits_reference(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None = None, logits_dtype: torch.dtype | None = None,
    *, logit_scale: float = 1.0, softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    """Return the same as `linear_reference`, scaled and capped, in float32 or float64."""
    logits = linear_reference(input, linear_weight, linear_bias, logits_dtype)
    return cap_reference(logit_scale * logits.to(torch.promote_types(logits.dtype, torch.float32)), softcap)


def one_rank(reference: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reference that takes the arguments of a sharded vocabulary, for one rank that has all classes."""

    @functools.wraps(reference)
    def call(*args: Any, vocab_start: int = 0, num_classes: int = 0, group_name: str = "", **kwargs: Any) -> Any:
        if group_name:
            raise ValueError(f"group_name: expected '', one rank with all classes, got {group_name!r}")
        return reference(*args, **kwargs)

    return call


def linear_cost(
    input: Tensor, linear_weight: Tensor, *args: Any, reads: int = 2, products: float = 3, **options: Any
) -> Cost:  # fmt: skip
    """Return the cost of `products` products and `reads` reads of input and weight, one of each in the forward pass."""
    tensors = (input.numel() + linear_weight.numel()) * input.element_size()
    product = product_flops(input, linear_weight)
    return Cost(tensors, reads * tensors, product, round(products * product))
