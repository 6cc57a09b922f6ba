r"""Root mean square layer normalization.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, https://arxiv.org/abs/1910.07467.
The offset is Gemma's, whose weight is stored minus one: https://arxiv.org/abs/2403.08295.

Forward, for each row x of N values, with w = weight + offset:

    y = x * rstd * w    with rstd = 1 / sqrt(ms) and ms = mean(x^2) + eps

Backward, given dy:

    dx = rstd * (dy * w - x * mean(dy * w * x) / ms)
    dw = sum over rows of dy * x * rstd

The kernels are those of `_rms_norm_kernels.py`, without a residual; ms is what is kept for the backward pass.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from llmk.ops.common.samples import normal_resized, normal_workloads
from llmk.ops.norm import _rms_norm_kernels as norm
from llmk.ops.norm._patterns import RMS_NORM
from llmk.registry import (
    Cost,
    KernelOp,
    Sample,
    check_finite,
    check_not_negative,
    check_parameter,
    check_rows,
    public_op,
    split_rows,
)


def rms_norm_reference(
    input: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, offset: float = 0.0
) -> Tensor:
    scale = weight + offset if weight is not None and offset else weight
    return torch.nn.functional.rms_norm(input, input.shape[-1:], scale, eps)


def _rms_norm_fwd(input: Tensor, weight: Tensor | None, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    y, _, ms = norm.forward(input, None, weight, eps, offset)
    return y, ms


def _rms_norm_bwd(
    grad: Tensor, input: Tensor, weight: Tensor | None, ms: Tensor, eps: float, offset: float, need_weight: bool
) -> tuple[Tensor, Tensor]:
    return norm.backward(grad, None, input, weight, ms, eps, offset, need_weight)


def norm_ops(name: str, *, launch_cached: bool) -> tuple[KernelOp, KernelOp]:
    """Return the kernel ops `_NAME_fwd`, which gives y and ms, and `_NAME_bwd` of a public op."""
    # In a graph it is PyTorch's own operations, which Inductor fuses with the sums around it and computes again for
    # the backward pass, so that y is not kept; the backward pass is the kernel. Longer rows Inductor reads from memory
    # twice.
    forward = KernelOp(
        _rms_norm_fwd, name=f"_{name}_fwd", launch_cached=launch_cached, decomposed=norm.inductor_reads_once
    )
    backward = KernelOp(_rms_norm_bwd, name=f"_{name}_bwd", launch_cached=launch_cached)

    @forward.register_kernel("cpu")
    def _(input: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        y, _, ms = norm.forward_plain(input, None, *rest)
        return y, ms

    @forward.register_fake
    def _(input):
        return input.new_empty(input.shape), input.new_empty(input.shape[:-1], dtype=torch.float32)

    backward.register_kernel("cpu")(lambda grad, *rest: norm.backward_plain(grad, None, *rest))
    forward.register_backward(backward, outputs=("output", "ms"))
    forward.register_sharding(split_rows(outputs=2, inputs=1, parameters=1))
    return forward, backward


rms_norm_fwd, rms_norm_bwd = norm_ops("rms_norm", launch_cached=True)


def rms_norm_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    randn = partial(torch.randn, device=device, dtype=dtype)
    yield Sample((randn(4, 16), randn(16)), why="powers of two")
    yield Sample((randn(2, 3, 37), randn(37), 1e-5), {"offset": 1.0}, why="three dimensions, odd width, Gemma's offset")
    yield Sample((randn(5, 40),), why="no weight")
    yield Sample((randn(5, 40), randn(40, dtype=torch.float32)), why="a float32 weight")
    yield Sample((randn(33), randn(33)), why="one dimension")
    yield Sample((randn(7, 1), randn(1)), why="one column")
    yield Sample((randn(0, 16), randn(16)), why="no rows")
    yield Sample((randn(24, 6).t(), randn(24)), why="columns strided")
    yield Sample((randn(6, 80)[:, 16:48], randn(32)), why="a slice of a wider row")
    yield Sample((randn(1, 16).expand(5, 16), randn(16)), why="one row expanded")
    yield Sample((randn(2, 3, 80)[..., 16:48].view(2, 3, 4, 8), randn(8)), why="heads of a packed projection")
    yield Sample((randn(300, 24), randn(24)), why="more rows than programs")
    yield Sample((1e4 * randn(3, 64), randn(64)), why="large values")
    yield Sample((randn(2, 100_003), randn(100_003)), why="100,003 columns")


@public_op(
    reference=rms_norm_reference,
    differentiable=("input", "weight"),
    kernel_ops=(rms_norm_fwd, rms_norm_bwd),
    samples=rms_norm_samples,
    resized=normal_resized(lambda rows: ((rows, 48), (48,))),
    workloads=normal_workloads(
        [(32768, 4096), (8192, 4096), (8192, 8192), (4096, 16384), (65536, 1024), (262144, 128)],
        lambda M, N: ((M, N), (N,)),
    ),
    cost=Cost.passes(2, 5),
    patterns=RMS_NORM,
    choices=norm.CHOICES,
)
def rms_norm(input: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, offset: float = 0.0) -> Tensor:
    """Root mean square normalization over the last axis: `input / rms(input) * (weight + offset)`.

    Like `torch.nn.functional.rms_norm` over the last axis, with statistics and products in float32 and one rounding.
    Kernels hold rows of up to 32 KiB, of half as much where they are not aligned to 16 elements; wider ones go through
    plain PyTorch.

    Args:
        input: `[..., N]`, float32, float16 or bfloat16, any strides.
        weight: `[N]`, any of these dtypes; None for no scale.
        eps: Added to the mean square, at least 0.
        offset: Added to the weight: 1.0 for Gemma's, which is stored minus one.

    Returns:
        `[..., N]`, contiguous, in the dtype of `input`.

    Raises:
        TypeError: A tensor is not float32, float16 or bfloat16.
        ValueError: `input` has no axis, its last one is empty, `weight` is not `[N]` on the same device, or a number is
            out of range.

    Source: Zhang and Sennrich, 2019, https://arxiv.org/abs/1910.07467.
    """
    check_rows("input", input, "N")
    check_parameter("weight", weight, input.shape[-1:], "the last axis of input", "input", input)
    check_not_negative("eps", eps)
    check_finite("offset", offset)
    y, _ = rms_norm_fwd(input, weight, eps, offset)
    return y
