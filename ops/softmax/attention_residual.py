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

Of N * H values for each token 2 * N are kept, s and ms. The forward pass holds a vector in registers, reads each once,
and takes the softmax as they come; the backward pass finds them in L2 when it reads them a second time, the last one
first. dk is summed in float32 by each program over its own tokens, then over the programs in a fixed order: no atomics.
Wider vectors go through plain PyTorch: past 4,096 values where Triton cannot read 16 bytes at a time, else past 8,192.
"""

from collections.abc import Iterator
from functools import partial

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.math import exp
from llmk.ops.common.row_plan import RowKind, RowPlan
from llmk.ops.common.rows import aligned, as_rows, byte_offset
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
    jit,
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
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    eps = tl.cast(eps, tl.float32)
    cols = tl.arange(0, BLOCK_N)
    k = tl.load(q_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)
    k = (k * tl.load(w_ptr + cols, mask=cols < H, other=0.0).to(tl.float32))[None, :]
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask = (rows < M)[:, None] & (cols < H)[None, :]
    offsets = (rows * row_stride)[:, None] + cols[None, :]
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    y = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
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
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_N)
    k = tl.load(q_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)
    k = (k * tl.load(w_ptr + cols, mask=cols < H, other=0.0).to(tl.float32))[None, :]
    dk = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
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


VECTORS = RowKind({2048: (1, 4), 4096: (1, 8), 8192: (1, 16)})
"""Forward a program holds a vector, k and the sum, backward also dy and dk; two more vectors are under way."""


def _plan(v: Tensor, *others: Tensor) -> RowPlan | None:
    """Return the plan for vectors, all `[..., H]` with neighbouring columns side by side; None for wider ones.

    A tile has no fewer columns than 64: where each thread of one warp has one element of a vector, its product and the
    first sum are one instruction, which rounds once, so that each thread has another sum in its last place; and which
    of them is written as the vector's score is a race. Two warps add up in shared memory, where there is one sum.
    """
    _, M, H = v.shape

    def is_aligned() -> bool:
        return aligned(H, *(n for x in (v, *others) for n in (byte_offset(x), *x.stride()[:-1])))

    if not VECTORS.holds(H, v.dtype, is_aligned):
        return None
    return RowPlan.of(VECTORS, M, max(64, H), v.device, NUM_STAGES=3)


def _as_matrices(blocks: Tensor) -> Tensor:
    """`[N, ..., H]` as `[N, M, H]` with neighbouring columns side by side; copies only where strides leave no way."""
    rows = blocks.unsqueeze(1) if blocks.dim() == 2 else blocks.flatten(1, -2)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _attention_residual_fwd(blocks: Tensor, query: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    v = _as_matrices(blocks)
    plan = _plan(v)
    if plan is None:
        return _forward_plain(blocks, query, weight, eps)
    N, M, H = v.shape
    y = empty(blocks.shape[1:], blocks.dtype, blocks.device)
    scores, ms = (empty(blocks.shape[:-1], torch.float32, blocks.device) for _ in range(2))
    sizes = N, M, H, v.stride(0), v.stride(1)
    wrap_triton(attention_residual_kernel)[(cdiv(M, plan.tile["BLOCK_M"]),)](
        v, query.contiguous(), weight.contiguous(), y, scores, ms, *sizes, eps, **plan.tile
    )
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
    v, dy = _as_matrices(blocks), as_rows(grad)
    plan = _plan(v, dy)
    if plan is None:
        return _backward_plain(grad, blocks, query, weight, scores, ms, need_query, need_weight)
    N, M, H = v.shape
    dv = empty(blocks.shape, blocks.dtype, blocks.device)
    partials = empty((plan.programs, 2, H), torch.float32, v.device) if need_query or need_weight else None
    statistics = scores.contiguous(), ms.contiguous()
    sizes = N, M, H, dy.stride(0), v.stride(0), v.stride(1)
    wrap_triton(attention_residual_backward_kernel)[(plan.programs,)](
        dy, v, query.contiguous(), weight.contiguous(), *statistics, dv, partials, *sizes, **plan.tile
    )
    dquery = empty((H,), query.dtype, query.device) if need_query else None
    dweight = empty((H,), weight.dtype, weight.device) if need_weight else None
    if partials is not None:
        sum_affine(partials, dquery, dweight)
    return dv, or_no_gradient(dquery, grad), or_no_gradient(dweight, grad)


def _forward_plain(blocks: Tensor, query: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    v = blocks.float()
    ms = v.square().mean(-1) + eps
    scores = (v * (query.float() * weight.float())).sum(-1) * torch.rsqrt(ms)
    y = (scores.softmax(0).unsqueeze(-1) * v).sum(0)
    return y.to(blocks.dtype).contiguous(), scores.contiguous(), ms.contiguous()


def _backward_plain(
    grad: Tensor,
    blocks: Tensor,
    query: Tensor,
    weight: Tensor,
    scores: Tensor,
    ms: Tensor,
    need_query: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
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


attention_residual_fwd = KernelOp(_attention_residual_fwd, launch_cached=True)
attention_residual_bwd = KernelOp(_attention_residual_bwd, launch_cached=True)
attention_residual_fwd.register_kernel("cpu")(_forward_plain)
attention_residual_bwd.register_kernel("cpu")(_backward_plain)


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
    sum. In float32 with one rounding. Kernels hold vectors of up to 8,192 values, of half as many where they are not
    aligned to 16 values; wider ones go through plain PyTorch.

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
