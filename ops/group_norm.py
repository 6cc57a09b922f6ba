r"""Group normalization.

Source: Wu and He, "Group Normalization", 2018, https://arxiv.org/abs/1803.08494.

The input is `[B, G * C, S]`: samples, groups of C channels, and S places (all the spatial axes as one). A group of a
sample is a row of C * S neighbouring values.

Forward, for each row x of D = C * S values:

    mean = sum(x) / D, corrected by sum(x - mean) / D
    var  = sum((x - mean)^2) / D + eps
    rstd = 1 / sqrt(var)
    y    = (x - mean) * rstd * weight + bias        with the channel's weight and bias

Backward, given dy, with c = x - mean and g = dy * weight - mean(dy * weight):

    dx      = rstd * (g - c * mean(g * c) / var)
    dweight = sum over samples and places of dy * c * rstd
            = sum over samples of rstd * (sum(dy * (x - near)) - (mean - near) * sum(dy))
    dbias   = sum over samples and places of dy

near is the mean in fewer digits: x - mean rounds alike for all x of a binade, which thousands of places add up, and
x - near does not round. So the sums for mean and var are about near too, where a row is read once. The corrected mean
is the float nearest to the mean, so that a row of equal values has variance zero. mean, var and near are kept for the
backward pass. In a row of one value the terms of dx cancel for good: dx = 0.

Rows that fit in registers are read once in either direction, several by one program if they are short: first those of
neighbouring groups, which memory has side by side. _group_norm_long.py has the longer ones. Sums are float32, in a
fixed order: no atomics. Only gradients that are wanted are computed.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmk.ops._group_norm_long import long_backward, long_forward
from llmk.ops._norm import affine_gradient, coarse_mean, sum_affine, sum_pair
from llmk.registry import (
    PARTIAL,
    WHOLE,
    Cost,
    KernelOp,
    Sample,
    at_most,
    cdiv,
    check_dtype,
    check_same,
    check_shape,
    empty,
    next_power_of_2,
    num_programs,
    public_op,
    wrap_triton,
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


@triton.jit
def _flat(x):
    """A row's channels and places as one axis, so that its threads wait for each other once in a sum and not twice."""
    return tl.reshape(x, (x.shape[0], x.shape[1] * x.shape[2]))


@triton.jit
def _channels(block, ROWS: tl.constexpr, G, C, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr):
    """Groups of a block's rows, sample after sample; their channels, and which of them exist."""
    groups = block * BLOCK_G + tl.arange(0, ROWS) % BLOCK_G
    channels = tl.arange(0, BLOCK_C)
    mask = (groups < G)[:, None] & (channels < C)[None, :]
    return groups, groups[:, None] * C + channels[None, :], mask


@triton.jit
def _tile(start, groups, mask, B, G, C, S, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr):
    """The rows of these groups in the samples from start on, and which exist; the tile's offsets and mask."""
    samples = start + tl.arange(0, groups.shape[0]) // BLOCK_G
    rows = samples * G + groups
    places = tl.arange(0, BLOCK_S)
    offsets = (rows * C * S)[:, None, None] + (tl.arange(0, BLOCK_C) * S)[None, :, None] + places[None, None, :]
    mask = (mask & (samples < B)[:, None])[:, :, None] & (places < S)[None, None, :]
    return rows, (samples < B) & (groups < G), offsets, mask


@triton.jit
def group_norm_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, stats_ptr, B, G, C, S, eps,
    BLOCK_B: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """BLOCK_B samples of BLOCK_G groups."""
    eps = tl.cast(eps, tl.float32)
    blocks = tl.cdiv(G, BLOCK_G)
    block, start = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_B
    groups, affine, affine_mask = _channels(block, BLOCK_B * BLOCK_G, G, C, BLOCK_G, BLOCK_C)  # type: ignore[misc]
    rows, row_mask, offsets, mask = _tile(  # type: ignore[misc]
        start, groups, affine_mask, B, G, C, S, BLOCK_G, BLOCK_C, BLOCK_S
    )
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(_flat(x), axis=1) / (C * S)
    c = tl.where(mask, x - mean[:, None, None], 0.0)
    near = coarse_mean(mean, tl.sum(_flat(c * c), axis=1) / (C * S))
    c = tl.where(mask, x - near[:, None, None], 0.0)
    rest, squares = sum_pair(_flat(c), _flat(c * c), 1)  # type: ignore[misc]
    rest /= C * S
    mean = near + rest
    # rest is so small beside a deviation that its square takes no digits from the variance.
    spread = tl.maximum(squares / (C * S) - rest * rest, 0.0)
    var = spread + eps
    y = (x - mean[:, None, None]) * tl.div_rn(1.0, tl.sqrt_rn(var))[:, None, None]
    if w_ptr is not None:
        y *= tl.load(w_ptr + affine, mask=affine_mask, other=0.0).to(tl.float32)[:, :, None]
    if b_ptr is not None:
        y += tl.load(b_ptr + affine, mask=affine_mask, other=0.0).to(tl.float32)[:, :, None]
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(stats_ptr + rows, mean, mask=row_mask)
    tl.store(stats_ptr + B * G + rows, var, mask=row_mask)
    tl.store(stats_ptr + 2 * B * G + rows, coarse_mean(mean, spread), mask=row_mask)


@triton.jit
def group_norm_backward_kernel(
    dy_ptr, x_ptr, w_ptr, stats_ptr, dx_ptr, partial_ptr, B, G, C, S, HAS_DW: tl.constexpr, HAS_DB: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """BLOCK_G groups of a share of the samples."""
    blocks = tl.cdiv(G, BLOCK_G)
    block, share = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    shares = tl.num_programs(0) // blocks
    groups, affine, affine_mask = _channels(block, BLOCK_B * BLOCK_G, G, C, BLOCK_G, BLOCK_C)  # type: ignore[misc]
    if w_ptr is not None:
        w = tl.load(w_ptr + affine, mask=affine_mask, other=0.0).to(tl.float32)[:, :, None]
    dw = tl.zeros((BLOCK_B * BLOCK_G, BLOCK_C), dtype=tl.float32)
    db = tl.zeros((BLOCK_B * BLOCK_G, BLOCK_C), dtype=tl.float32)
    # Persistent: the next samples are prefetched while these are computed, and dw and db stay in registers.
    for start in tl.range(share * BLOCK_B, B, shares * BLOCK_B, num_stages=NUM_STAGES):
        rows, row_mask, offsets, mask = _tile(  # type: ignore[misc]
            start, groups, affine_mask, B, G, C, S, BLOCK_G, BLOCK_C, BLOCK_S
        )
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if HAS_DB:
            db += tl.sum(dy, axis=2)
        if x_ptr is not None:
            x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
            mean = tl.load(stats_ptr + rows, mask=row_mask, other=0.0)
            var = tl.load(stats_ptr + B * G + rows, mask=row_mask, other=1.0)
            near = tl.load(stats_ptr + 2 * B * G + rows, mask=row_mask, other=0.0)
            rstd = tl.div_rn(1.0, tl.sqrt_rn(var))
            c = x - mean[:, None, None]
            if HAS_DW:
                dw += tl.sum(dy * ((x - near[:, None, None]) * rstd[:, None, None]), axis=2)
                dw -= ((mean - near) * rstd)[:, None] * tl.sum(dy, axis=2)
            if dx_ptr is not None:
                if w_ptr is not None:
                    dy *= w
                if BLOCK_C * BLOCK_S == 1:
                    dx = dy * c  # zero, and NaN where PyTorch's is
                else:
                    total = tl.sum(_flat(dy), axis=1) / (C * S)
                    g = tl.where(mask, dy - total[:, None, None], 0.0)  # so that g * c is zero there too
                    rest, dot = sum_pair(_flat(g), _flat(g * c), 1)  # type: ignore[misc]
                    g -= (rest / (C * S))[:, None, None]  # corrected like mean
                    dot = tl.div_rn(dot / (C * S), var)
                    dx = rstd[:, None, None] * (g - c * dot[:, None, None])
                tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    _, affine, affine_mask = _channels(block, BLOCK_G, G, C, BLOCK_G, BLOCK_C)  # type: ignore[misc]
    if HAS_DW or HAS_DB:
        partial_ptr += share * (HAS_DW + HAS_DB) * G * C + affine
    if HAS_DW:
        dw_sum = tl.sum(tl.reshape(dw, (BLOCK_B, BLOCK_G, BLOCK_C)), axis=0)
        tl.store(partial_ptr, dw_sum, mask=affine_mask)
    if HAS_DB:
        db_sum = tl.sum(tl.reshape(db, (BLOCK_B, BLOCK_G, BLOCK_C)), axis=0)
        tl.store(partial_ptr + HAS_DW * G * C, db_sum, mask=affine_mask)


# Largest tile of a row (a group of a sample) that one program holds in registers.
MAX_FORWARD_TILE = 8192
MAX_BACKWARD_TILE = 8192


def _aligned(C: int, S: int) -> bool:
    """Whether Triton knows that a tile can be read 16 bytes at a time; else addresses take registers too."""
    return S % 16 == 0 or (S == 1 and C % 16 == 0)


def _widest_backward(C: int, S: int) -> int:
    # What this leaves out spills on sm_90.
    if not _aligned(C, S):
        return MAX_BACKWARD_TILE // 4
    return MAX_BACKWARD_TILE if S > 1 else MAX_BACKWARD_TILE // 2


def _row_tile(C: int, S: int) -> int:
    return next_power_of_2(C) * next_power_of_2(S)


def _short_tile(G: int, C: int, S: int, elements: int) -> dict[str, int]:
    """Whole rows, to make up so many elements: neighbouring groups first, then samples."""
    block_c, block_s = next_power_of_2(C), next_power_of_2(S)
    rows = max(1, elements // (block_c * block_s))
    block_g = min(rows, next_power_of_2(G))
    return {"BLOCK_B": rows // block_g, "BLOCK_G": block_g, "BLOCK_C": block_c, "BLOCK_S": block_s}


def _forward_tile(G: int, C: int, S: int) -> dict[str, int]:
    """16 elements a thread."""
    return _short_tile(G, C, S, 2048) | {"num_warps": min(16, max(4, _row_tile(C, S) // 512))}


def _backward_tile(G: int, C: int, S: int, element_size: int) -> dict[str, int]:
    """8 elements a thread, 16 of longer rows; up to two tiles are on their way: what 8 KiB of each tensor hold."""
    row = _row_tile(C, S)
    ahead = min(2, 8192 // (max(row, 2048) * element_size))
    return _short_tile(G, C, S, 2048) | {"num_warps": min(16, max(8, row // 512)), "NUM_STAGES": 1 + ahead}


def _shares(B: int, G: int, tile: dict[str, int], device: torch.device) -> int:
    """Into how many the samples are divided: the programs fill each multiprocessor with 24 warps of 80 registers."""
    programs = num_programs(device, max(1, 24 // tile["num_warps"]))
    return at_most(cdiv(B, tile["BLOCK_B"]), cdiv(programs, cdiv(G, tile["BLOCK_G"])))


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return tensor.contiguous() if tensor is not None else None


def _sizes(input: Tensor, num_groups: int) -> tuple[int, int, int]:
    """Samples, channels of a group, places."""
    places = 1
    for size in input.shape[2:]:
        places *= size
    return input.shape[0], input.shape[1] // num_groups, places


def _group_norm_fwd(
    input: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    x, weight, bias = input.contiguous(), _contiguous(weight), _contiguous(bias)
    G, (B, C, S) = num_groups, _sizes(input, num_groups)
    y = empty(x.shape, x.dtype, x.device)
    stats = empty((3, B, G), torch.float32, x.device)
    if _row_tile(C, S) <= MAX_FORWARD_TILE:
        tile = _forward_tile(G, C, S)
        wrap_triton(group_norm_kernel)[(cdiv(G, tile["BLOCK_G"]) * cdiv(B, tile["BLOCK_B"]),)](
            x, weight, bias, y, stats, B, G, C, S, eps, **tile
        )
        return y, stats
    long_forward(x, weight, bias, y, stats, (B, G, C, S), eps)
    return y, stats


def _group_norm_bwd(
    grad: Tensor, input: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, stats: Tensor,
    need_dx: bool, need_dw: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`bias` is given where it wants its gradient; nothing but its dtype is used."""
    device, need_db = input.device, bias is not None
    dy, x = grad.contiguous(), input.contiguous() if need_dx or need_dw else None
    G, (B, C, S) = num_groups, _sizes(input, num_groups)
    scale, stats = weight.contiguous() if need_dx and weight is not None else None, stats.contiguous()
    dx = empty(input.shape, input.dtype, device) if need_dx else None
    dw, db = affine_gradient(weight if need_dw else None, device), affine_gradient(bias, device)
    partials = None
    if _row_tile(C, S) <= _widest_backward(C, S):
        tile = _backward_tile(G, C, S, dy.element_size())
        shares = _shares(B, G, tile, device)
        if need_dw or need_db:
            partials = empty((shares, need_dw + need_db, G * C), torch.float32, device)
        wrap_triton(group_norm_backward_kernel)[(cdiv(G, tile["BLOCK_G"]) * shares,)](
            dy, x, scale, stats, dx, partials, B, G, C, S, HAS_DW=need_dw, HAS_DB=need_db, **tile
        )
    else:
        partials = long_backward(dy, x, scale, stats, dx, (B, G, C, S))
    if partials is not None and (need_dw or need_db):
        sum_affine(partials, dw if need_dw else None, db if need_db else None)
    return dx if dx is not None else affine_gradient(None, device), dw, db


group_norm_fwd = KernelOp(_group_norm_fwd, planned=True)
group_norm_bwd = KernelOp(_group_norm_bwd, planned=True)


@group_norm_fwd.register_kernel("cpu")
def _(input: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    B, C, S = _sizes(input, num_groups)
    x = input.float().reshape(B * num_groups, C * S)
    mean = x.mean(-1, keepdim=True)
    mean = mean + (x - mean).mean(-1, keepdim=True)
    c = x - mean
    var = c.square().mean(-1, keepdim=True) + eps
    y = (c * torch.rsqrt(var)).view(B, num_groups * C, S)
    if weight is not None:
        y = y * weight.float()[:, None]
    if bias is not None:
        y = y + bias.float()[:, None]
    return y.to(input.dtype).reshape(input.shape), torch.stack([s.view(B, num_groups) for s in (mean, var, mean)])


@group_norm_bwd.register_kernel("cpu")
def _(
    grad: Tensor, input: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, stats: Tensor,
    need_dx: bool, need_dw: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    B, C, S = _sizes(input, num_groups)
    dy = grad.float().reshape(B, num_groups * C, S)
    mean, var, _ = stats.view(3, B * num_groups, 1).unbind()
    rstd = torch.rsqrt(var)
    dx, dw, db = (affine_gradient(None, input.device) for _ in range(3))
    if bias is not None:
        db = dy.sum(2).sum(0).to(bias.dtype)
    if need_dx or need_dw:
        c = input.float().reshape(B * num_groups, C * S) - mean
        if need_dw and weight is not None:
            dw = (dy * (c * rstd).view(dy.shape)).sum(2).sum(0).to(weight.dtype)
        if need_dx:
            g = (dy if weight is None else dy * weight.float()[:, None]).reshape(c.shape)
            g = g - g.mean(-1, keepdim=True)
            g = g - g.mean(-1, keepdim=True)  # what rounding has left: of equal values nothing
            dx = ((g - c * ((g * c).mean(-1, keepdim=True) / var)) / var.sqrt()).to(input.dtype).reshape(input.shape)
    return dx, dw, db


@group_norm_fwd.register_fake
def _(input: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    stats = input.new_empty((3, input.shape[0], num_groups), dtype=torch.float32)
    return input.new_empty(input.shape), stats


@group_norm_bwd.register_fake
def _(
    grad: Tensor, input: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, stats: Tensor,
    need_dx: bool, need_dw: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dx = input.new_empty(input.shape) if need_dx else affine_gradient(None, input.device)
    return dx, affine_gradient(weight if need_dw else None, input.device), affine_gradient(bias, input.device)


@group_norm_fwd.register_sharding
def _(*_):
    return [([0, 1], [0, WHOLE, WHOLE])]


@group_norm_bwd.register_sharding
def _(grad, input, num_groups, weight, bias, stats, need_dx, need_dw):
    return [([0 if need_dx else WHOLE, PARTIAL, PARTIAL], [0, 0, WHOLE, WHOLE, 1])]


def _setup_context(ctx, inputs, output) -> None:
    input, ctx.num_groups, weight, bias, _ = inputs
    _, stats = output
    ctx.mark_non_differentiable(stats)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(input, weight, bias, stats)


def _backward(ctx, grad, _grad_stats):
    input, weight, bias, stats = ctx.saved_tensors
    need_dx, _, need_dw, need_db, _ = ctx.needs_input_grad
    bias = bias if need_db else None
    dx, dw, db = group_norm_bwd(grad, input, ctx.num_groups, weight, bias, stats, need_dx, need_dw)
    return dx if need_dx else None, None, dw if need_dw else None, db if need_db else None, None


group_norm_fwd.register_autograd(_backward, setup_context=_setup_context)


def group_norm_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    def randn(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    yield Sample((randn(2, 8, 4, 4), 2, randn(8), randn(8)), why="powers of two")
    yield Sample((randn(3, 6, 5, 7), 2, randn(6), randn(6), 1e-3), why="odd sizes, another eps")
    yield Sample((randn(3, 10, 5), 5), why="neither weight nor bias")
    yield Sample((randn(5, 12), 4, None, randn(12)), why="no places but one, a bias alone")
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


def group_norm_resized(rows: int, device: torch.device, dtype: torch.dtype) -> Sample:
    x, weight, bias = (torch.randn(shape, device=device, dtype=dtype) for shape in ((rows, 12, 5), (12,), (12,)))
    return Sample((x, 4, weight, bias), why="resized")


def group_norm_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    for shape in [(32, 512, 64, 64), (8, 320, 128, 128), (32, 1280, 16, 16)]:
        name = "x".join(map(str, shape))
        yield Sample((randn(*shape), 32, randn(shape[1]), randn(shape[1])), why=f"{name}, 32 groups")
    yield Sample((randn(16384, 4096), 64, randn(4096), randn(4096)), why="16384x4096, 64 groups")


def group_norm_cost(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Cost:
    tensor = input.numel() * input.element_size()
    return Cost(bytes_forward=2 * tensor, bytes_full=5 * tensor)


@public_op(
    "group_norm(Tensor input, int num_groups, Tensor? weight=None, Tensor? bias=None, float eps=1e-5) -> Tensor",
    reference=group_norm_reference,
    differentiable=("input", "weight", "bias"),
    kernel_ops=(group_norm_fwd, group_norm_bwd),
    samples=group_norm_samples,
    resized=group_norm_resized,
    workloads=group_norm_workloads,
    cost=group_norm_cost,
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
        eps: Added to the variance.

    Returns:
        The shape and dtype of `input`, contiguous.

    Raises:
        TypeError: A tensor is not float32, float16 or bfloat16.
        ValueError: `input` has fewer than two axes or an empty one besides the first, `num_groups` does not divide C,
            or `weight` or `bias` is not `[C]` on the same device.

    Source: Wu and He, 2018, https://arxiv.org/abs/1803.08494.
    """
    check_dtype("input", input)
    if input.dim() < 2 or any(size == 0 for size in input.shape[1:]):
        raise ValueError(f"input: expected shape [N, C, *] with no empty axis after N, got {tuple(input.shape)}")
    if num_groups < 1 or input.shape[1] % num_groups != 0:
        raise ValueError(f"num_groups: expected a divisor of the {input.shape[1]} channels of input, got {num_groups}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            check_dtype(name, tensor)
            check_shape(name, tensor, input.shape[1:2], "the channels of input")
            check_same(name, tensor, "input", input)
    y, _ = group_norm_fwd(input, num_groups, weight, bias, eps)
    return y
