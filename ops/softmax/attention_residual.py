r"""Attention residual: what a layer reads is an attention of each token over the outputs of the layers before it.

Source: the Kimi team, "Attention Residuals", 2026, https://arxiv.org/abs/2603.15031.

Forward, for a token's N vectors v_i of H values, with the key's direction k = query * weight:

    ms_i = mean(v_i^2) + eps
    s_i  = sum(k * v_i) / sqrt(ms_i)
    a    = softmax of s over i
    y    = sum over i of a_i * v_i

Backward, given dy:

    da_i    = sum(dy * v_i)
    ds_i    = a_i * (da_i - sum over j of a_j * da_j)
    dv_i    = a_i * dy + ds_i / sqrt(ms_i) * k - ds_i * s_i / (ms_i * H) * v_i
    dk      = sum over tokens and i of ds_i / sqrt(ms_i) * v_i
    dquery  = dk * weight
    dweight = dk * query

From every da that of the largest s is taken away first: where one weight is nearly 1, the difference would cancel.

Of N * H values for each token 2 * N are kept, s and ms. Where a vector fits in registers the forward pass reads each
once, and takes the softmax as they come; the backward pass finds them in L2 when it reads them a second time, the last
one first. Of longer vectors each direction reads them twice: first a program walks each vector for its sums, then
another each block of columns for what follows from these. dk is summed in float32 by each program over its own tokens,
then over the programs in a fixed order: no atomics.
"""

from collections.abc import Iterator
from functools import partial

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.math import exp
from llmk.ops.common.rows import aligned, as_rows, byte_offset, row_shares
from llmk.ops.common.samples import normal_resized
from llmk.ops.common.sums import sum_affine, sum_pair
from llmk.registry import (
    REPLICATE,
    Cost,
    KernelOp,
    Sample,
    cdiv,
    check_dtype,
    check_not_negative,
    check_parameter,
    empty,
    grid_cap,
    jit,
    next_power_of_2,
    num_programs,
    or_no_gradient,
    public_op,
    wrap_triton,
)


def attention_residual_reference(blocks: Tensor, query: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    keys = torch.nn.functional.rms_norm(blocks, blocks.shape[-1:], None, eps) * weight
    weights = (keys * query).sum(-1, keepdim=True).softmax(0)
    return (weights * blocks).sum(0).to(blocks.dtype)


@jit
def _weigh(s, da, largest, total, origin, sum_da):
    """Take one more weight exp(s) into a sum of them and into the weighted sum of da - origin.

    Both are relative to exp(largest), and the origin is the da of the largest s.
    """
    larger, before, origin_before = s > largest, largest, origin
    largest, origin = tl.where(larger, s, largest), tl.where(larger, da, origin)
    shrink, share = exp(before - largest), exp(s - largest)
    sum_da = (sum_da + total * (origin_before - origin)) * shrink + share * (da - origin)
    return largest, total * shrink + share, origin, sum_da


@jit
def attention_residual_kernel(
    v_ptr, q_ptr, w_ptr, y_ptr, s_ptr, ms_ptr, N, M, H, block_stride, row_stride, eps,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    eps = tl.cast(eps, tl.float32)
    cols = tl.arange(0, BLOCK_H)
    k = tl.load(q_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)
    k = (k * tl.load(w_ptr + cols, mask=cols < H, other=0.0).to(tl.float32))[None, :]
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask = (rows < M)[:, None] & (cols < H)[None, :]
    offsets = (rows * row_stride)[:, None] + cols[None, :]
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    y = tl.zeros((BLOCK_M, BLOCK_H), dtype=tl.float32)
    for i in tl.range(0, N, num_stages=NUM_STAGES):
        v = tl.load(v_ptr + tl.cast(i, tl.int64) * block_stride + offsets, mask=mask, other=0.0).to(tl.float32)
        square, dot = sum_pair(v * v, v * k, 1)
        ms = square / H + eps
        s = tl.div_rn(dot, tl.sqrt_rn(ms))
        tl.store(s_ptr + tl.cast(i, tl.int64) * M + rows, s, mask=rows < M)
        tl.store(ms_ptr + tl.cast(i, tl.int64) * M + rows, ms, mask=rows < M)
        before, largest = largest, tl.maximum(largest, s)
        shrink, share = exp(before - largest), exp(s - largest)
        total = total * shrink + share
        y = y * shrink[:, None] + v * share[:, None]
    y *= tl.div_rn(1.0, total)[:, None]
    tl.store(y_ptr + rows[:, None] * H + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@jit
def attention_residual_backward_kernel(
    dy_ptr, v_ptr, q_ptr, w_ptr, s_ptr, ms_ptr, dv_ptr, partial_ptr, N, M, H, dy_stride, block_stride, row_stride,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_H)
    k = tl.load(q_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)
    k = (k * tl.load(w_ptr + cols, mask=cols < H, other=0.0).to(tl.float32))[None, :]
    dk = tl.zeros((BLOCK_M, BLOCK_H), dtype=tl.float32)
    for start in range(program * BLOCK_M, M, tl.num_programs(0) * BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        mask = (rows < M)[:, None] & (cols < H)[None, :]
        offsets = (rows * row_stride)[:, None] + cols[None, :]
        dy = tl.load(dy_ptr + (rows * dy_stride)[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        largest_at = tl.zeros((BLOCK_M,), dtype=tl.int32)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)
        origin = tl.zeros((BLOCK_M,), dtype=tl.float32)
        sum_da = tl.zeros((BLOCK_M,), dtype=tl.float32)
        for i in tl.range(0, N, num_stages=NUM_STAGES):
            v = tl.load(v_ptr + tl.cast(i, tl.int64) * block_stride + offsets, mask=mask, other=0.0).to(tl.float32)
            s = tl.load(s_ptr + tl.cast(i, tl.int64) * M + rows, mask=rows < M, other=0.0)
            largest_at = tl.where(s > largest, i, largest_at)
            largest, total, origin, sum_da = _weigh(s, tl.sum(dy * v, axis=1), largest, total, origin, sum_da)
        mean = tl.div_rn(sum_da, total)
        for j in tl.range(0, N, num_stages=NUM_STAGES):
            last = tl.cast(N - 1 - j, tl.int64)  # what was read last is likeliest to be in L2
            v = tl.load(v_ptr + last * block_stride + offsets, mask=mask, other=0.0).to(tl.float32)
            s = tl.load(s_ptr + last * M + rows, mask=rows < M, other=0.0)
            ms = tl.load(ms_ptr + last * M + rows, mask=rows < M, other=1.0)
            a = tl.div_rn(exp(s - largest), total)
            da = tl.where(largest_at == N - 1 - j, 0.0, tl.sum(dy * v, axis=1) - origin)
            ds = a * (da - mean)
            ds_rstd = tl.div_rn(ds, tl.sqrt_rn(ms))
            dk += v * ds_rstd[:, None]
            dv = dy * a[:, None] + (k * ds_rstd[:, None] - v * tl.div_rn(ds * s, ms * H)[:, None])
            dv_offsets = ((last * M + rows) * H)[:, None] + cols[None, :]
            tl.store(dv_ptr + dv_offsets, dv.to(dv_ptr.dtype.element_ty), mask=mask)
    if partial_ptr is not None:
        total_dk = tl.sum(dk, axis=0)
        w = tl.load(w_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)
        tl.store(partial_ptr + program * 2 * H + cols, total_dk * w, mask=cols < H)
        q = tl.load(q_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)
        tl.store(partial_ptr + (program * 2 + 1) * H + cols, total_dk * q, mask=cols < H)


MAX_FORWARD_BLOCK = 16384
"""The widest vector that one program holds forward beside k and the sum."""

MAX_BACKWARD_BLOCK = 8192
"""The widest that one holds backward beside dy, k and dk."""

MAX_UNALIGNED = 4096
"""The widest in either direction where Triton cannot read 16 bytes at a time: a thread's addresses take registers."""


def _held(most: int, v: Tensor, *others: Tensor) -> bool:
    """Return True if vectors fit; all are `[..., N]` with neighbouring columns side by side."""
    N = v.shape[-1]
    begins = (n for x in (v, *others) for n in (byte_offset(x), *x.stride()[:-1]))
    return N <= MAX_UNALIGNED or (most >= N and aligned(N, *begins))


def _tile(H: int) -> dict[str, int]:
    """Sixteen elements a thread, and two more vectors under way.

    Not below 64: where each thread of one warp has one element of a vector, its product and the first sum are one
    instruction, which rounds once, so that each thread has another sum in its last place; and which of them is written
    as the vector's score is a race. Two warps add up in shared memory, where there is one sum.
    """
    block_h = max(64, next_power_of_2(H))
    block_m = max(1, 2048 // block_h)
    return {"BLOCK_M": block_m, "BLOCK_H": block_h, "NUM_STAGES": 3, "num_warps": min(16, block_m * block_h // 512)}


def _programs(M: int, tile: dict[str, int], device: torch.device) -> int:
    """Programs of the backward pass: as many as find registers, 16 warps a multiprocessor; each leaves partials."""
    return grid_cap(cdiv(M, tile["BLOCK_M"]), num_programs(device, 16 // tile["num_warps"]))


@jit
def attention_residual_scores_kernel(
    v_ptr, q_ptr, w_ptr, s_ptr, ms_ptr, M, H, block_stride, row_stride, eps, BLOCK_H: tl.constexpr
):
    eps = tl.cast(eps, tl.float32)
    vector = tl.program_id(0).to(tl.int64)
    v_ptr += vector // M * block_stride + vector % M * row_stride
    squares = tl.zeros((BLOCK_H,), dtype=tl.float32)
    dots = tl.zeros((BLOCK_H,), dtype=tl.float32)
    for start in range(0, H, BLOCK_H):
        cols = start + tl.arange(0, BLOCK_H)
        v = tl.load(v_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)
        q = tl.load(q_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)
        squares += v * v
        dots += v * (q * tl.load(w_ptr + cols, mask=cols < H, other=0.0).to(tl.float32))
    square, dot = sum_pair(squares, dots, 0)
    ms = square / H + eps
    tl.store(s_ptr + vector, tl.div_rn(dot, tl.sqrt_rn(ms)))
    tl.store(ms_ptr + vector, ms)


@jit
def attention_residual_mix_kernel(v_ptr, s_ptr, y_ptr, N, M, H, block_stride, row_stride, BLOCK_H: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    largest, total = _softmax_over_depth(s_ptr + row, N, M)
    y = tl.zeros((BLOCK_H,), dtype=tl.float32)
    for i in range(0, N):
        start = tl.cast(i, tl.int64) * block_stride + row * row_stride
        v = tl.load(v_ptr + start + cols, mask=cols < H, other=0.0).to(tl.float32)
        y += v * exp(tl.load(s_ptr + tl.cast(i, tl.int64) * M + row) - largest)
    tl.store(y_ptr + row * H + cols, (y * tl.div_rn(1.0, total)).to(y_ptr.dtype.element_ty), mask=cols < H)


@jit
def _softmax_over_depth(s_ptr, N, M):
    """The largest of a token's scores, and the sum of the exponentials."""
    largest = tl.load(s_ptr)
    total = tl.cast(1.0, tl.float32)
    for i in range(1, N):
        s = tl.load(s_ptr + tl.cast(i, tl.int64) * M)
        before, largest = largest, tl.maximum(largest, s)
        total = total * exp(before - largest) + exp(s - largest)
    return largest, total


@jit
def attention_residual_dots_kernel(
    dy_ptr, v_ptr, da_ptr, M, H, dy_stride, block_stride, row_stride, BLOCK_H: tl.constexpr
):
    """The gradient of each weight of the softmax, sum(dy * v_i)."""
    vector = tl.program_id(0).to(tl.int64)
    v_ptr += vector // M * block_stride + vector % M * row_stride
    dy_ptr += vector % M * dy_stride
    dots = tl.zeros((BLOCK_H,), dtype=tl.float32)
    for start in range(0, H, BLOCK_H):
        cols = start + tl.arange(0, BLOCK_H)
        v = tl.load(v_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)
        dots += v * tl.load(dy_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)
    tl.store(da_ptr + vector, tl.sum(dots, axis=0))


@jit
def attention_residual_long_backward_kernel(
    dy_ptr, v_ptr, q_ptr, w_ptr, s_ptr, ms_ptr, da_ptr, dv_ptr, partial_ptr, N, M, H,
    dy_stride, block_stride, row_stride, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One block of columns, a share of the tokens."""
    program = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    q = tl.load(q_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)
    dk = tl.zeros((BLOCK_H,), dtype=tl.float32)
    for row in range(program, M, tl.num_programs(0)):
        largest = tl.load(s_ptr + row)
        origin = tl.load(da_ptr + row)
        total = tl.cast(1.0, tl.float32)
        sum_da = tl.cast(0.0, tl.float32)
        for i in range(1, N):
            vector = tl.cast(i, tl.int64) * M + row
            s, da = tl.load(s_ptr + vector), tl.load(da_ptr + vector)
            largest, total, origin, sum_da = _weigh(s, da, largest, total, origin, sum_da)
        mean = tl.div_rn(sum_da, total)
        dy = tl.load(dy_ptr + row * dy_stride + cols, mask=cols < H, other=0.0).to(tl.float32)
        for i in range(0, N):
            vector = tl.cast(i, tl.int64) * M + row
            s, ms = tl.load(s_ptr + vector), tl.load(ms_ptr + vector)
            a = tl.div_rn(exp(s - largest), total)
            ds = a * (tl.load(da_ptr + vector) - origin - mean)
            ds_rstd = tl.div_rn(ds, tl.sqrt_rn(ms))
            start = tl.cast(i, tl.int64) * block_stride + row * row_stride
            v = tl.load(v_ptr + start + cols, mask=cols < H, other=0.0).to(tl.float32)
            dk += v * ds_rstd
            dv = dy * a + ((q * w) * ds_rstd - v * tl.div_rn(ds * s, ms * H))
            tl.store(dv_ptr + vector * H + cols, dv.to(dv_ptr.dtype.element_ty), mask=cols < H)
    if partial_ptr is not None:
        tl.store(partial_ptr + program * 2 * H + cols, dk * w, mask=cols < H)
        tl.store(partial_ptr + (program * 2 + 1) * H + cols, dk * q, mask=cols < H)


WALK = {"BLOCK_H": 4096, "num_warps": 8}
"""The block and warps that walk a vector."""

PART = {"BLOCK_H": 1024, "num_warps": 4}
"""The columns of a token's vectors that one program holds."""


def _as_matrices(blocks: Tensor) -> Tensor:
    """`[N, ..., H]` as `[N, M, H]` with neighbouring columns side by side; copies only where strides leave no way."""
    rows = blocks.unsqueeze(1) if blocks.dim() == 2 else blocks.flatten(1, -2)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _attention_residual_fwd(blocks: Tensor, query: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    v, query, weight = _as_matrices(blocks), query.contiguous(), weight.contiguous()
    N, M, H = v.shape
    y = empty(blocks.shape[1:], blocks.dtype, blocks.device)
    scores, ms = (empty(blocks.shape[:-1], torch.float32, blocks.device) for _ in range(2))
    rows, strides = (v, query, weight), (v.stride(0), v.stride(1))
    if _held(MAX_FORWARD_BLOCK, v):
        tile = _tile(H)
        grid = (cdiv(M, tile["BLOCK_M"]),)
        wrap_triton(attention_residual_kernel)[grid](*rows, y, scores, ms, N, M, H, *strides, eps, **tile)
    else:
        wrap_triton(attention_residual_scores_kernel)[(N * M,)](*rows, scores, ms, M, H, *strides, eps, **WALK)
        grid = (M, cdiv(H, PART["BLOCK_H"]))
        wrap_triton(attention_residual_mix_kernel)[grid](v, scores, y, N, M, H, *strides, **PART)
    return y, scores, ms


def _attention_residual_bwd(
    grad: Tensor,
    blocks: Tensor,
    query: Tensor,
    weight: Tensor,
    scores: Tensor,
    ms: Tensor,
    need_query: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    v, dy, query, weight = _as_matrices(blocks), as_rows(grad), query.contiguous(), weight.contiguous()
    scores, ms = scores.contiguous(), ms.contiguous()
    N, M, H = v.shape
    held, tile, blocks_of_columns = _held(MAX_BACKWARD_BLOCK, v, dy), _tile(H), cdiv(H, PART["BLOCK_H"])
    programs = _programs(M, tile, v.device) if held else grid_cap(M, row_shares(blocks_of_columns, v.device))
    dv = empty(blocks.shape, blocks.dtype, blocks.device)
    partials = empty((programs, 2, H), torch.float32, v.device) if need_query or need_weight else None
    strides = dy.stride(0), v.stride(0), v.stride(1)
    if held:
        wrap_triton(attention_residual_backward_kernel)[(programs,)](
            dy, v, query, weight, scores, ms, dv, partials, N, M, H, *strides, **tile
        )
    else:
        da = empty((N, M), torch.float32, v.device)
        wrap_triton(attention_residual_dots_kernel)[(N * M,)](dy, v, da, M, H, *strides, **WALK)
        wrap_triton(attention_residual_long_backward_kernel)[(programs, blocks_of_columns)](
            dy, v, query, weight, scores, ms, da, dv, partials, N, M, H, *strides, **PART
        )
    dquery = empty((H,), query.dtype, query.device) if need_query else None
    dweight = empty((H,), weight.dtype, weight.device) if need_weight else None
    if partials is not None:
        sum_affine(partials, dquery, dweight)
    return dv, or_no_gradient(dquery, grad), or_no_gradient(dweight, grad)


attention_residual_fwd = KernelOp(_attention_residual_fwd, launch_cached=True)
attention_residual_bwd = KernelOp(_attention_residual_bwd, launch_cached=True)


@attention_residual_fwd.register_kernel("cpu")
def _(blocks, query, weight, eps):
    v = blocks.float()
    ms = v.square().mean(-1) + eps
    scores = (v * (query.float() * weight.float())).sum(-1) * torch.rsqrt(ms)
    y = (scores.softmax(0).unsqueeze(-1) * v).sum(0)
    return y.to(blocks.dtype).contiguous(), scores.contiguous(), ms.contiguous()


@attention_residual_bwd.register_kernel("cpu")
def _(grad, blocks, query, weight, scores, ms, need_query, need_weight):
    v, dy, q, w = blocks.float(), grad.float(), query.float(), weight.float()
    a, da = scores.softmax(0), (dy * v).sum(-1)
    da = da - da.gather(0, scores.argmax(0, keepdim=True))
    ds = a * (da - (a * da).sum(0))
    ds_rstd = (ds * torch.rsqrt(ms)).unsqueeze(-1)
    dv = a.unsqueeze(-1) * dy + (ds_rstd * (q * w) - (ds * scores / (ms * v.shape[-1])).unsqueeze(-1) * v)
    dk = (ds_rstd * v).flatten(0, -2).sum(0) if need_query or need_weight else None
    dquery = (dk * w).to(query.dtype) if dk is not None and need_query else None
    dweight = (dk * q).to(weight.dtype) if dk is not None and need_weight else None
    return dv.to(blocks.dtype).contiguous(), or_no_gradient(dquery, grad), or_no_gradient(dweight, grad)


@attention_residual_fwd.register_fake
def _(blocks):
    scores, ms = (blocks.new_empty(blocks.shape[:-1], dtype=torch.float32) for _ in range(2))
    return blocks.new_empty(blocks.shape[1:]), scores, ms


attention_residual_fwd.register_backward(attention_residual_bwd, outputs=("output", "scores", "ms"))


@attention_residual_fwd.register_sharding
def _(blocks):
    """Along the axes of the tokens."""
    return [([axis - 1, axis, axis], [axis, REPLICATE, REPLICATE]) for axis in range(1, blocks.ndim - 1)]


def attention_residual_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    randn = partial(torch.randn, device=device, dtype=dtype)

    def of(blocks: Tensor, factor: float = 0.5) -> tuple[Tensor, Tensor, Tensor]:
        H = blocks.shape[-1]
        return blocks, factor * randn(H), randn(H)

    yield Sample(of(randn(4, 6, 16)), why="powers of two")
    yield Sample((*of(randn(3, 2, 5, 37)), 1e-5), why="odd sizes, two axes of tokens")
    yield Sample((randn(5, 24), randn(24, dtype=torch.float32), randn(24)), why="one token, a float32 query")
    yield Sample(of(randn(1, 5, 16)), why="one block")
    yield Sample(of(randn(3, 0, 16)), why="no tokens")
    yield Sample(of(randn(3, 6, 48), 1.5), why="large scores")
    yield Sample((randn(2, 6, 48), torch.zeros_like(randn(48)), randn(48)), why="a new query")
    yield Sample(of(randn(24, 7, 3).permute(2, 1, 0)), why="columns strided")
    yield Sample(of(randn(5, 3, 80).transpose(0, 1)[..., 16:48]), why="blocks between tokens, slices of wider ones")
    yield Sample(of(randn(2, 300, 8)), why="more tokens than a program has")
    yield Sample(of(randn(3, 1, 4100), 0.1), why="unaligned and too wide to hold")
    yield Sample(of(randn(2, 1, 8208), 0.1), why="too wide for the backward pass to hold")


def attention_residual_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for N, rows, H in [(8, 8192, 4096), (32, 8192, 2048)]:
        blocks, weight = (torch.randn(shape, device=device, dtype=dtype) for shape in ((N, rows, H), (H,)))
        query = 0.02 * torch.randn(H, device=device, dtype=dtype)
        yield Sample((blocks, query, weight), why=f"{N} blocks of {rows}x{H}")


def attention_residual_cost(blocks: Tensor, query: Tensor, weight: Tensor, eps: float = 1e-6) -> Cost:
    all_blocks = blocks.numel() * blocks.element_size()
    one = all_blocks // blocks.shape[0]
    return Cost(bytes_forward=all_blocks + one, bytes_full=3 * all_blocks + 2 * one)


@public_op(
    reference=attention_residual_reference,
    differentiable=("blocks", "query", "weight"),
    kernel_ops=(attention_residual_fwd, attention_residual_bwd),
    samples=attention_residual_samples,
    resized=normal_resized(lambda rows: ((3, rows, 48), (48,), (48,))),
    workloads=attention_residual_workloads,
    cost=attention_residual_cost,
)
def attention_residual(blocks: Tensor, query: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """An attention of each token over the layers or blocks before it, in the place of a residual connection.

    The softmax over the first axis of a query's products with the blocks, each normalized as RMSNorm does, weighs their
    sum. In float32 with one rounding.

    Args:
        blocks: The outputs of N layers, the embedding among them, `[N, ..., H]`, float32, float16 or bfloat16, any
            strides.
        query: `[H]`, any of these dtypes.
        weight: The norm's, `[H]`, any of these dtypes.
        eps: Added to each mean square, at least 0.

    Returns:
        `[..., H]`, contiguous, in the dtype of `blocks`.

    Raises:
        TypeError: A tensor is not float32, float16 or bfloat16.
        ValueError: `blocks` has less than two axes, no block or an empty last axis, another's shape or device does not
            fit, or `eps` is out of range.

    Source: the Kimi team, 2026, https://arxiv.org/abs/2603.15031.
    """
    check_dtype("blocks", blocks)
    if blocks.dim() < 2 or blocks.shape[0] == 0 or blocks.shape[-1] == 0:
        raise ValueError(f"blocks: expected shape [N, ..., H] with N and H at least 1, got {tuple(blocks.shape)}")
    for name, tensor in (("query", query), ("weight", weight)):
        check_parameter(name, tensor, blocks.shape[-1:], "the last axis of blocks", "blocks", blocks)
    check_not_negative("eps", eps)
    y, _, _ = attention_residual_fwd(blocks, query, weight, eps)
    return y
