r"""The router's choice as `router_topk` makes it, and what losses that balance the load need of it, in one pass.

Sources: the auxiliary loss of Switch Transformer, https://arxiv.org/abs/2101.03961; the z-loss of ST-MoE,
https://arxiv.org/abs/2202.08906; the loss of each sequence of DeepSeek-V3, https://arxiv.org/abs/2412.19437.

Forward, for logits x [T, E] of a sequence, with s and the experts of `router_topk`, and m_t whether token t counts:

    c_e = sum over t of m_t * (1 if e is chosen for t)
    P_e = sum over t of m_t * p_te,            p = s of the softmax, s / max(sum(s), 1e-12) of the sigmoid
    Z   = sum over t of m_t * log(sum_e exp(x_te))^2

Backward, given dw, dP and dZ, added to what dw gives in `router_topk`:

    dx = m * p * (dP - sum(p * dP))            of the softmax
    dx = m * p * (dP - sum(p * dP)) * (1 - s)  of the sigmoid, without sum(p * dP) where sum(s) < 1e-12
    dx = m * 2 * dZ * log(sum(exp(x))) * softmax(x)

A program routes a share of a sequence's tokens and adds up in registers; the sums of the programs are added in a fixed
order: no atomics. The counts have no gradient, nor has the choice.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.math import logsumexp_cpu
from llmk.ops.common.rows import as_rows, contiguous
from llmk.ops.common.samples import normal_resized
from llmk.ops.common.sums import sum_partials, sum_two_partials
from llmk.ops.experts._routing import (
    Routing,
    backward_launch,
    check_routing,
    log_sum_exp,
    route,
    route_backward,
    route_backward_cpu,
    route_cpu,
)
from llmk.ops.experts.router_topk import router_topk_cost, router_topk_reference
from llmk.registry import (
    KernelOp,
    Sample,
    cdiv,
    check_dtype,
    check_same,
    check_shape,
    empty,
    grid_cap,
    jit,
    num_programs,
    public_op,
    replicate_only,
    size_hint,
    wrap_triton,
)

Result = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def router_topk_sums_reference(input: Tensor, top_k: int, *, counted: Tensor | None = None, **options: Any) -> Result:
    weights, indices = router_topk_reference(input, top_k, **options)
    x = input.to(torch.promote_types(input.dtype, torch.float32))
    m = x.new_ones(x.shape[:-1]) if counted is None else counted.to(x.dtype)
    softmax = options.get("scoring", "softmax") == "softmax"
    probabilities = x.softmax(-1) if softmax else torch.nn.functional.normalize(x.sigmoid(), p=1, dim=-1)
    sums, squares = (m.unsqueeze(-1) * probabilities).sum(-2), (m * x.logsumexp(-1).square()).sum(-1)
    chosen = torch.zeros_like(x, dtype=torch.int64).scatter(-1, indices, 1)
    return weights, sums, squares, indices, (m.long().unsqueeze(-1) * chosen).sum(-2)


SMALLEST_SUM = 1e-12
"""The least that a token's scores are divided by, as in `torch.nn.functional.normalize`."""
_SMALLEST_SUM = tl.constexpr(SMALLEST_SUM)


@jit
def divided_by_sum(scores):
    """The probabilities of a sigmoid's scores, and whether their sum is less than what they are divided by."""
    total = tl.sum(scores, axis=0)
    is_small = total < _SMALLEST_SUM
    return tl.div_rn(scores, tl.zeros_like(scores) + tl.where(is_small, _SMALLEST_SUM, total)), is_small


@jit
def router_topk_sums_kernel(
    x_ptr, counted_ptr, bias_ptr, weights_ptr, indices_ptr, counts_ptr, sums_ptr, squares_ptr,
    T, E, K, G, SIZE, TOPK_G, x_stride, scale,
    SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, GROUPED: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    scale = tl.cast(scale, tl.float32)
    sequence, share = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = tl.arange(0, BLOCK_E)
    mask = cols < E
    counts = tl.zeros((BLOCK_E,), dtype=tl.float32)
    sums = tl.zeros((BLOCK_E,), dtype=tl.float32)
    squares = tl.cast(0.0, tl.float32)
    for t in range(share, T, tl.num_programs(1)):
        row = sequence * T + t
        x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
        scores, chosen = route(
            x, mask, bias_ptr, weights_ptr, indices_ptr, row, K, G, SIZE, TOPK_G, scale,
            SOFTMAX, NORMALIZE, GROUPED, BLOCK_E, BLOCK_K, BLOCK_G,
        )  # fmt: skip
        counts_here = True
        if counted_ptr is not None:
            counts_here = tl.load(counted_ptr + row) != 0
        z, probabilities = log_sum_exp(x, mask)
        if not SOFTMAX:
            probabilities, _ = divided_by_sum(scores)
        counts += tl.where(counts_here & chosen, 1.0, 0.0)
        sums += tl.where(counts_here, probabilities, 0.0)
        squares += tl.where(counts_here, z * z, 0.0)
    place = share.to(tl.int64) * tl.num_programs(0) + sequence
    tl.store(counts_ptr + place * E + cols, counts, mask=mask)
    tl.store(sums_ptr + place * E + cols, sums, mask=mask)
    tl.store(squares_ptr + place, squares)


@jit
def router_topk_sums_backward_kernel(
    dw_ptr, dp_ptr, dz_ptr, x_ptr, counted_ptr, indices_ptr, dx_ptr, T, E, K, x_stride, scale,
    SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    scale = tl.cast(scale, tl.float32)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_E)
    mask = cols < E
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    dx, scores = route_backward(x, mask, dw_ptr, indices_ptr, row, K, scale, SOFTMAX, NORMALIZE, BLOCK_E)
    dp = tl.load(dp_ptr + row // T * E + cols, mask=mask, other=0.0)
    z, softmax = log_sum_exp(x, mask)
    of_sums = 2.0 * tl.load(dz_ptr + row // T) * z * softmax
    if SOFTMAX:
        of_sums += softmax * (dp - tl.sum(softmax * dp, axis=0))
    else:
        probabilities, is_small = divided_by_sum(scores)
        mean = tl.where(is_small, 0.0, tl.sum(probabilities * dp, axis=0))
        of_sums += probabilities * (dp - mean) * (1.0 - scores)
    if counted_ptr is not None:
        of_sums = tl.where(tl.load(counted_ptr + row) != 0, of_sums, 0.0)
    tl.store(dx_ptr + row * E + cols, (dx + of_sums).to(dx_ptr.dtype.element_ty), mask=mask)


TOKENS = 8
"""The least tokens that a program adds up, so that its sums are little beside their logits."""


def _router_topk_sums_fwd(
    input: Tensor, counted: Tensor | None, bias: Tensor | None, top_k: int, scoring: str, num_groups: int,
    topk_groups: int, normalize: bool, scale: float,
) -> Result:  # fmt: skip
    routing = Routing(top_k, scoring, num_groups, topk_groups, normalize, scale)
    *sequences, T, E = input.shape
    x, S = as_rows(input), math.prod(sequences)
    weights = empty((*sequences, T, top_k), torch.float32, x.device)
    indices = empty((*sequences, T, top_k), torch.int64, x.device)
    shares = grid_cap(cdiv(T, TOKENS), max(1, num_programs(x.device, 16) // max(1, size_hint(S))))
    counts, sums = (empty((shares, *sequences, E), torch.float32, x.device) for _ in range(2))
    squares = empty((shares, *sequences), torch.float32, x.device)
    wrap_triton(router_topk_sums_kernel)[(S, shares)](
        x, contiguous(counted), contiguous(bias), weights, indices, counts, sums, squares,
        T, *routing.sizes(E), x.stride(0), scale, **routing.launch(E),
    )  # fmt: skip
    total_counts, total_sums = (empty((*sequences, E), dtype, x.device) for dtype in (torch.int64, torch.float32))
    sum_two_partials(counts.flatten(1), sums.flatten(1), total_counts, total_sums)
    return weights, total_sums, sum_partials(squares, torch.float32), indices, total_counts


def _router_topk_sums_bwd(
    grad_weights: Tensor, grad_sums: Tensor, grad_squares: Tensor, input: Tensor, counted: Tensor | None,
    indices: Tensor, scoring: str, normalize: bool, scale: float,
) -> Tensor:  # fmt: skip
    x, (T, E) = as_rows(input), input.shape[-2:]
    dx = empty(input.shape, input.dtype, x.device)
    grads = (grad.contiguous() for grad in (grad_weights, grad_sums, grad_squares))
    sizes = T, E, indices.shape[-1], x.stride(0)
    constants = backward_launch(E, scoring, normalize)
    wrap_triton(router_topk_sums_backward_kernel)[(x.shape[0],)](
        *grads, x, contiguous(counted), indices.contiguous(), dx, *sizes, scale, **constants
    )
    return dx


router_topk_sums_fwd = KernelOp(_router_topk_sums_fwd, launch_cached=True)
router_topk_sums_bwd = KernelOp(_router_topk_sums_bwd, launch_cached=True)


def _probabilities_cpu(x: Tensor, scoring: str) -> Tensor:
    if scoring == "softmax":
        return x.softmax(-1)
    return x.sigmoid() / x.sigmoid().sum(-1, keepdim=True).clamp_min(SMALLEST_SUM)


@router_topk_sums_fwd.register_kernel("cpu")
def _(input, counted, bias, *options) -> Result:
    routing = Routing(*options)
    weights, indices = route_cpu(input, bias, routing)
    x = input.float()
    m = torch.ones_like(x[..., :1]) if counted is None else (counted != 0).float().unsqueeze(-1)
    sums = (m * _probabilities_cpu(x, routing.scoring)).sum(-2)
    squares = (m * logsumexp_cpu(x).square()).sum((-1, -2))
    counts = (m * torch.zeros_like(x).scatter(-1, indices, 1.0)).sum(-2).long()
    return weights, sums.contiguous(), squares.contiguous(), indices, counts.contiguous()


@router_topk_sums_bwd.register_kernel("cpu")
def _(grad_weights, grad_sums, grad_squares, input, counted, indices, scoring, normalize, scale) -> Tensor:
    x, dp, dz = input.float(), grad_sums.unsqueeze(-2), grad_squares[..., None, None]
    p = _probabilities_cpu(x, scoring)
    mean = (p * dp).sum(-1, keepdim=True)
    if scoring == "softmax":
        of_sums = p * (dp - mean)
    else:
        s = x.sigmoid()
        of_sums = p * (dp - mean.masked_fill(s.sum(-1, keepdim=True) < SMALLEST_SUM, 0.0)) * (1 - s)
    of_sums = of_sums + 2 * dz * logsumexp_cpu(x) * x.softmax(-1)
    if counted is not None:
        of_sums = of_sums.masked_fill(counted.unsqueeze(-1) == 0, 0.0)
    dx = route_backward_cpu(grad_weights, input, indices, scoring, normalize, scale) + of_sums
    return dx.to(input.dtype).contiguous()


@router_topk_sums_fwd.register_fake
def _(input: Tensor, counted: Tensor | None, bias: Tensor | None, top_k: int, *options) -> Result:
    *sequences, T, E = input.shape
    chosen, of_experts = (*sequences, T, top_k), (*sequences, E)
    weights, sums, squares = (input.new_empty(s, dtype=torch.float32) for s in (chosen, of_experts, sequences))
    indices, counts = (input.new_empty(shape, dtype=torch.int64) for shape in (chosen, of_experts))
    return weights, sums, squares, indices, counts


router_topk_sums_fwd.register_sharding(replicate_only)
router_topk_sums_fwd.register_backward(
    router_topk_sums_bwd,
    outputs=("weights", "sums", "squares", "indices", "counts"),
    depends_on=[["input"]] * 3,
)


def router_topk_sums_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    randn = partial(torch.randn, device=device, dtype=dtype)
    as_deepseek = {"scoring": "sigmoid", "num_groups": 4, "topk_groups": 2, "scale": 2.5}
    counted = torch.arange(14, device=device, dtype=torch.int64).view(2, 7) % 3 != 0
    yield Sample((randn(8, 16), 2), why="powers of two")
    yield Sample((randn(5, 37), 3), {"normalize": False, "scale": 0.5}, why="odd, not normalized")
    bias = torch.randn(24, device=device, dtype=torch.float32)
    yield Sample((randn(2, 7, 24), 5), {"bias": bias, "counted": counted, **as_deepseek}, why="as DeepSeek-V3, padded")
    yield Sample((randn(2, 7, 12), 2), {"counted": counted.long()}, why="padding in whole numbers")
    yield Sample((randn(2, 7, 12), 2), {"counted": torch.zeros_like(counted)}, why="no token that counts")
    yield Sample((randn(2, 2, 30, 6), 6), why="all experts, two axes of sequences, several programs")
    yield Sample((randn(0, 16), 2), why="no tokens")
    yield Sample((randn(0, 4, 16), 2), why="no sequences")
    yield Sample((randn(16, 9).t(), 2), why="strided")
    yield Sample((randn(2, 300), 8), {"scoring": "sigmoid", "bias": randn(300)}, why="more than a warp, bias in dtype")
    low = randn(4, 12) - torch.tensor([0, 30, 60, 120], device=device, dtype=dtype).unsqueeze(-1)
    yield Sample((low, 3), {"scoring": "sigmoid"}, why="scores whose sum is less than 1e-12, or 0")


def router_topk_sums_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample((torch.randn(4, 4096, 128, device=device, dtype=dtype), 8), why="4x4096, 8 of 128 experts")


@public_op(
    reference=router_topk_sums_reference,
    differentiable=("input",),
    kernel_ops=(router_topk_sums_fwd, router_topk_sums_bwd),
    samples=router_topk_sums_samples,
    resized=normal_resized(lambda rows: ((rows, 24), 4)),
    workloads=router_topk_sums_workloads,
    cost=router_topk_cost,
)
def router_topk_sums(
    input: Tensor,
    top_k: int,
    *,
    counted: Tensor | None = None,
    bias: Tensor | None = None,
    scoring: str = "softmax",
    num_groups: int = 1,
    topk_groups: int = 1,
    normalize: bool = True,
    scale: float = 1.0,
) -> Result:
    """Each token's experts and weights as of `router_topk`, and the sums that losses of a router are made of.

    `llmk.losses.router_balance` and `router_z` are such losses.

    Args:
        input: Logits `[..., T, E]` of T tokens of each sequence, float32, float16 or bfloat16, any strides.
        top_k: How many experts a token gets.
        counted: `[..., T]`, bool or a whole number: which tokens are in the sums, all but padding. None: all.
        bias: As in `router_topk`, which also has the other options.
        scoring: "softmax" or "sigmoid"; the probabilities of the second are its scores divided by their sum, or by
            1e-12 where that is less.
        num_groups: Into how many groups of neighbours the experts are divided.
        topk_groups: Of how many groups experts may be chosen.
        normalize: Whether a token's weights are divided by their sum.
        scale: What the weights are multiplied by at the end.

    Returns:
        The weights `[..., T, top_k]`; the sum over tokens of the probability of each expert `[..., E]`, and that of the
        square of the logits' log-sum-exp `[...]`, all float32 and with gradients; the experts `[..., T, top_k]` and how
        many tokens chose each `[..., E]`, int64.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape, a device or an option does not fit, or fewer experts than `top_k` may be chosen.

    Sources: Switch Transformer, https://arxiv.org/abs/2101.03961; ST-MoE, https://arxiv.org/abs/2202.08906;
    DeepSeek-V3, https://arxiv.org/abs/2412.19437.
    """
    check_dtype("input", input)
    if input.dim() < 2 or input.shape[-1] == 0:
        raise ValueError(f"input: expected shape [..., T, E] with at least one expert, got {tuple(input.shape)}")
    routing = Routing(top_k, scoring, num_groups, topk_groups, normalize, scale)
    check_routing(input, bias, routing)
    if counted is not None:
        check_dtype("counted", counted, (torch.bool, torch.int64, torch.int32, torch.uint8))
        check_shape("counted", counted, input.shape[:-1], "one for each token")
        check_same("counted", counted, "input", input)
    return router_topk_sums_fwd(input, counted, bias, *routing)
