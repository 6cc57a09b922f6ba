r"""Group normalization.

Source: Wu and He, "Group Normalization", 2018, https://arxiv.org/abs/1803.08494.

The input is `[B, G * C, S]`: samples, groups of C channels, and S positions (all the spatial axes as one). A group of a
sample is a row of C * S neighbouring values.

Forward, for each row x of D = C * S values:

    mean = sum(x) / D, corrected by sum(x - mean) / D
    var  = sum((x - mean)^2) / D + eps
    rstd = 1 / sqrt(var)
    y    = (x - mean) * rstd * weight + bias        with the channel's weight and bias

Backward, given dy, with c = x - mean and g = dy * weight - mean(dy * weight):

    dx      = rstd * (g - c * mean(g * c) / var)
    dweight = sum over samples and positions of dy * c * rstd
            = sum over samples of rstd * (sum(dy * (x - near)) - (mean - near) * sum(dy))
    dbias   = sum over samples and positions of dy

near is the mean in fewer digits: x - mean rounds alike for all x of a binade, which thousands of positions add up, and
x - near does not round. So the sums for mean and var are about near too, where a row is read once. The corrected mean
is the float nearest to the mean, so that a row of equal values has variance zero. mean, var and near are kept for the
backward pass. In a row of one value the terms of dx cancel for good: dx = 0.

Rows that fit in registers are read once in either direction, longer ones twice. Sums are float32, in a fixed order: no
atomics. Only gradients that are wanted are computed.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from llmk.ops.common.rows import contiguous
from llmk.ops.common.samples import normal_resized
from llmk.ops.common.sums import sum_affine
from llmk.ops.norm import _group_norm_kernels as kernels
from llmk.ops.norm._moments import affine_gradient, centered
from llmk.registry import (
    REPLICATE,
    Cost,
    KernelOp,
    Sample,
    check_dtype,
    check_not_negative,
    check_parameter,
    empty,
    no_gradient,
    num_programs,
    or_no_gradient,
    public_op,
)


def group_norm_reference(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    # PyTorch asks for one dtype; its backward pass (2.13, CPU) fails on a bias without a weight, and crashes when only
    # one parameter of a channels last call wants a gradient. The functional form refuses one value per group.
    weight, bias = (None if t is None else t.to(input.dtype) for t in (weight, bias))
    if weight is None and bias is not None:
        weight = torch.ones_like(bias, requires_grad=False)
    input = input.contiguous()
    return torch.group_norm(input, num_groups, weight, bias, eps)


def _sizes(input: Tensor, num_groups: int) -> tuple[int, int, int]:
    """Samples, channels of a group, positions."""
    positions = 1
    for size in input.shape[2:]:
        positions *= size
    return input.shape[0], input.shape[1] // num_groups, positions


def _group_norm_fwd(
    input: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    x, weight, bias = input.contiguous(), contiguous(weight), contiguous(bias)
    G, (B, C, S) = num_groups, _sizes(input, num_groups)
    y = empty(x.shape, x.dtype, x.device)
    stats = empty((3, B, G), torch.float32, x.device)
    kernels.forward(x, weight, bias, y, stats, (B, G, C, S), eps)
    return y, stats


def _group_norm_bwd(
    grad: Tensor,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    stats: Tensor,
    need_input: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dy, x = grad.contiguous(), input.contiguous() if need_input or need_weight else None
    G, (B, C, S) = num_groups, _sizes(input, num_groups)
    w, stats = weight.contiguous() if need_input and weight is not None else None, stats.contiguous()
    dx = empty(input.shape, input.dtype, input.device) if need_input else None
    dw, db = affine_gradient(weight, need_weight, grad), affine_gradient(bias, need_bias, grad)
    partials = kernels.backward(dy, x, w, stats, dx, (B, G, C, S), need_weight, need_bias)
    if partials is not None and (need_weight or need_bias):
        sum_affine(partials, dw if need_weight else None, db if need_bias else None)
    return or_no_gradient(dx, grad), dw, db


group_norm_fwd = KernelOp(_group_norm_fwd, launch_cached=True)
group_norm_bwd = KernelOp(_group_norm_bwd, launch_cached=True)


@group_norm_fwd.register_kernel("cpu")
def _(input, num_groups, weight, bias, eps):
    B, C, S = _sizes(input, num_groups)
    x = input.float().reshape(B * num_groups, C * S)
    c, mean = centered(x)
    var = c.square().mean(-1, keepdim=True) + eps
    y = (c * torch.rsqrt(var)).view(B, num_groups * C, S)
    if weight is not None:
        y = y * weight.float()[:, None]
    if bias is not None:
        y = y + bias.float()[:, None]
    return y.to(input.dtype).reshape(input.shape), torch.stack([s.view(B, num_groups) for s in (mean, var, mean)])


@group_norm_bwd.register_kernel("cpu")
def _(grad, input, num_groups, weight, bias, stats, need_input, need_weight, need_bias):
    B, C, S = _sizes(input, num_groups)
    dy = grad.float().reshape(B, num_groups * C, S)
    mean, var, _ = stats.view(3, B * num_groups, 1).unbind()
    rstd = torch.rsqrt(var)
    dx, dw, db = (no_gradient(grad) for _ in range(3))
    if need_bias:
        db = dy.sum(2).sum(0).to(bias.dtype)
    if need_input or need_weight:
        c = input.float().reshape(B * num_groups, C * S) - mean
        if need_weight:
            dw = (dy * (c * rstd).view(dy.shape)).sum(2).sum(0).to(weight.dtype)
        if need_input:
            g = (dy if weight is None else dy * weight.float()[:, None]).reshape(c.shape)
            g, _ = centered(g)  # of equal values nothing is left
            dx = (g - c * ((g * c).mean(-1, keepdim=True) / var)) / var.sqrt()
            dx = dx.to(input.dtype).reshape(input.shape)
    return dx, dw, db


@group_norm_fwd.register_fake
def _(input, num_groups):
    stats = input.new_empty((3, input.shape[0], num_groups), dtype=torch.float32)
    return input.new_empty(input.shape), stats


group_norm_fwd.register_backward(group_norm_bwd, outputs=("output", "stats"))


@group_norm_fwd.register_sharding
def _():
    return [([0, 1], [0, REPLICATE, REPLICATE])]


def group_norm_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    randn = partial(torch.randn, device=device, dtype=dtype)
    yield Sample((randn(2, 8, 4, 4), 2, randn(8), randn(8)), why="powers of two")
    yield Sample((randn(3, 6, 5, 7), 2, randn(6), randn(6), 1e-3), why="odd sizes, another eps")
    yield Sample((randn(3, 10, 5), 5), why="neither weight nor bias")
    yield Sample((randn(5, 12), 4, None, randn(12)), why="one position, a bias alone")
    yield Sample((randn(3, 4, 1), 4, randn(4, dtype=torch.float32)), why="groups of one element, a float32 weight")
    yield Sample((randn(0, 8, 3), 2, randn(8), randn(8)), why="no samples")
    yield Sample((randn(2, 3, 3, 6).permute(0, 3, 1, 2), 3, randn(6), randn(6)), why="channels last, strided")
    yield Sample((randn(1, 6, 5).expand(3, 6, 5), 2, randn(6), randn(6)), why="one sample expanded")
    yield Sample((randn(300, 4), 2, randn(4), randn(4)), why="more samples than programs")
    yield Sample((1e4 * randn(2, 4, 9) + 1e4, 2, randn(4), randn(4)), why="large values about a large offset")
    yield Sample((randn(5, 24, 100), 6, randn(24), randn(24)), why="more groups than one program takes")
    yield Sample((randn(1, 6, 9000), 2, randn(6), randn(6)), why="groups of several pieces and channels")
    rows = num_programs(device, 1)
    yield Sample((randn(rows, 65, 65), 1, randn(65), randn(65)), why="a long group for each multiprocessor")
    yield Sample((randn(1, 1, 100_003), 1, randn(1), randn(1)), why="100,003 columns")


def group_norm_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    randn = partial(torch.randn, device=device, dtype=dtype)
    for shape in [(32, 512, 64, 64), (8, 320, 128, 128), (32, 1280, 16, 16)]:
        name = "x".join(map(str, shape))
        yield Sample((randn(*shape), 32, randn(shape[1]), randn(shape[1])), why=f"{name}, 32 groups")
    yield Sample((randn(16384, 4096), 64, randn(4096), randn(4096)), why="16384x4096, 64 groups")


@public_op(
    reference=group_norm_reference,
    differentiable=("input", "weight", "bias"),
    kernel_ops=(group_norm_fwd, group_norm_bwd),
    samples=group_norm_samples,
    resized=normal_resized(lambda rows: ((rows, 12, 5), 4, (12,), (12,))),
    workloads=group_norm_workloads,
    cost=Cost.passes(2, 5),
    choices=(
        "rows that do not fit in registers are read twice, 5 passes where the floor counts 3 in the backward pass: on "
        "an H200 1.8 to 2.1 times the floor, as far as L2 has the second reading. 30 configurations were timed; those "
        "of a row's length are beside the code",
    ),
)
def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Normalization of each sample's groups of channels, with a weight and a bias per channel.

    Like `torch.nn.functional.group_norm`, with statistics and products in float32 and one rounding.

    Args:
        input: `[N, C, *]`, float32, float16 or bfloat16, any strides; what is not contiguous, such as channels last,
            is copied first.
        num_groups: Into how many groups of neighbours the channels are divided; it divides C.
        weight: `[C]`, any of these dtypes; None for no scale.
        bias: `[C]`, any of these dtypes; None for no shift.
        eps: Added to the variance, at least 0.

    Returns:
        The shape and dtype of `input`, contiguous.

    Raises:
        TypeError: A tensor is not float32, float16 or bfloat16.
        ValueError: `input` has fewer than two axes or an empty one besides the first, `num_groups` does not divide C,
            `weight` or `bias` is not `[C]` on the same device, or `eps` is out of range.

    Source: Wu and He, 2018, https://arxiv.org/abs/1803.08494.
    """
    check_dtype("input", input)
    if input.dim() < 2 or any(size == 0 for size in input.shape[1:]):
        raise ValueError(f"input: expected shape [N, C, *] with no empty axis after N, got {tuple(input.shape)}")
    if num_groups < 1 or input.shape[1] % num_groups != 0:
        raise ValueError(f"num_groups: expected a divisor of the {input.shape[1]} channels of input, got {num_groups}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        check_parameter(name, tensor, input.shape[1:2], "the channels of input", "input", input)
    check_not_negative("eps", eps)
    y, _ = group_norm_fwd(input, num_groups, weight, bias, eps)
    return y
