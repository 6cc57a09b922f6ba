r"""The router's choice: of each token's scores the K largest, and their weights.

Sources: the softmax router of Mixtral, https://arxiv.org/abs/2401.04088, and of Qwen3-MoE; the sigmoid router of
DeepSeek-V3 with groups and a bias that balances the load, https://arxiv.org/abs/2412.19437.

Forward, for logits x [T, E] and a bias b [E]:

    s = softmax(x) or sigmoid(x)
    c = s + b                                 decides, and is nowhere else
    a group's score is the sum of its two largest c; only experts of the best groups may be chosen
    e = the K largest c, or without a bias the K largest x, equal ones in the order of the experts
    w_k = scale * s[e_k] / (sum_j s[e_j] + 1e-20),  or  scale * s[e_k]  where not normalized

Backward, given dw, S the denominator and s computed again:

    ds[e_k] = scale / S * (dw_k - sum_j dw_j s[e_j] / S),  or  scale * dw_k;  0 for the others
    dx      = s * (ds - sum(s * ds))  of the softmax;  ds * s * (1 - s)  of the sigmoid

Where normalized, sum(s * ds) = scale / S * sum_j dw_j s[e_j] / S * 1e-20: next to nothing, unless a bias keeps out the
experts that have nearly all of the softmax, and S is as small. From every dw one of them is taken away first: that of
the expert with more than half of S, if one has it, where dw - sum(...) would cancel; else the one nearest to 0, so that
none loses more than its own rounding. Of equal dw nothing is left that would have to cancel.

Without a bias x has the order of s, and also where float32 has s as equal numbers: past a gap of 87 a GPU has 0.

The choice has no gradient, nor has the bias: what balances the load moves it.
"""

from collections.abc import Iterator
from functools import partial

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.math import exp
from llmk.ops.common.rows import as_rows, contiguous
from llmk.ops.common.samples import normal_resized
from llmk.registry import (
    LARGEST,
    Cost,
    KernelOp,
    Sample,
    check_dtype,
    check_number,
    check_option,
    check_same,
    check_shape,
    empty,
    jit,
    next_power_of_2,
    public_op,
    replicate_only,
    wrap_triton,
)
from llmk.registry.checks import TINY

SCORINGS = ("softmax", "sigmoid")
TINIEST_SUM = 1e-20


def router_topk_reference(
    input: Tensor,
    top_k: int,
    *,
    bias: Tensor | None = None,
    scoring: str = "softmax",
    num_groups: int = 1,
    topk_groups: int = 1,
    normalize: bool = True,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    logits = input.to(torch.promote_types(input.dtype, torch.float32))
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    indices = _choose(scores.detach(), logits.detach(), bias, top_k, num_groups, topk_groups)
    weights = scores.gather(-1, indices)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + TINIEST_SUM)
    return weights * scale, indices


def _largest(values: Tensor, count: int) -> Tensor:
    """Return the indices of the largest values, equal ones in their order."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _choose(
    scores: Tensor, logits: Tensor, bias: Tensor | None, top_k: int, num_groups: int, topk_groups: int
) -> Tensor:
    """The chosen experts, in plain PyTorch."""
    choice = scores if bias is None else scores + bias
    order = torch.where(scores.isnan(), scores, logits) if bias is None else choice
    if topk_groups < num_groups:
        best = choice.unflatten(-1, (num_groups, -1)).sort(dim=-1, descending=True).values[..., :2].sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter(-1, _largest(best, topk_groups), True)
        order = order.unflatten(-1, (num_groups, -1)).masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
    return _largest(order, top_k)


_LARGEST = tl.constexpr(LARGEST)


@jit
def _scores(x, mask, SOFTMAX: tl.constexpr):
    if SOFTMAX:
        largest = tl.max(tl.where(mask, x, float("-inf")), axis=0)
        powers = tl.where(mask, exp(tl.where(mask, x - largest, 0.0)), 0.0)
        scores = tl.div_rn(powers, tl.zeros_like(powers) + tl.sum(powers, axis=0))
    else:
        scores = tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + exp(-x))
    return tl.where(mask, scores, 0.0)


@jit
def _ranked(choice, mask):
    """NaN as the largest, as in torch.topk; what is left out as smaller than any number."""
    choice = tl.where(choice != choice, _LARGEST, choice)
    return tl.where(mask, tl.minimum(tl.maximum(choice, -_LARGEST), _LARGEST), float("-inf"))


@jit
def _in_best_groups(choice, cols, G, SIZE, TOPK_G, BLOCK_G: tl.constexpr):
    """Return True if an expert is of one of the groups with the largest sums of two."""
    groups = tl.arange(0, BLOCK_G)
    best = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    for group in range(0, G):
        values = tl.where(cols // SIZE == group, choice, float("-inf"))
        score = tl.max(values, axis=0)
        if SIZE > 1:
            score += tl.max(tl.where(cols == tl.argmax(values, axis=0), float("-inf"), values), axis=0)
        best = tl.where(groups == group, tl.maximum(score, -_LARGEST), best)
    kept = cols < 0
    for _ in range(0, TOPK_G):
        group = tl.argmax(best, axis=0)
        kept = kept | (cols // SIZE == group)
        best = tl.where(groups == group, float("-inf"), best)
    return kept


@jit
def route(
    x, mask, bias_ptr, weights_ptr, indices_ptr, row, K, G, SIZE, TOPK_G, scale,
    SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, GROUPED: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Store a token's experts and weights; return the scores of all, and which were chosen."""
    cols, slots = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    scores = _scores(x, mask, SOFTMAX)
    choice = scores
    if bias_ptr is not None:
        choice += tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    choice = _ranked(choice, mask)
    kept = mask
    if GROUPED:
        kept = _in_best_groups(choice, cols, G, SIZE, TOPK_G, BLOCK_G)
    if bias_ptr is None:
        choice = _ranked(tl.where(scores != scores, scores, x), mask)
    choice = tl.where(kept, choice, float("-inf"))
    weights = tl.zeros((BLOCK_K,), dtype=tl.float32)
    chosen = cols < 0
    for k in range(0, K):
        expert = tl.argmax(choice, axis=0)
        here = cols == expert
        weights = tl.where(slots == k, tl.sum(tl.where(here, scores, 0.0), axis=0), weights)
        choice = tl.where(here, float("-inf"), choice)
        chosen = chosen | here
        tl.store(indices_ptr + row * K + k, expert.to(tl.int64))
    if NORMALIZE:
        weights = tl.div_rn(weights, tl.zeros_like(weights) + (tl.sum(weights, axis=0) + 1e-20))
    tl.store(weights_ptr + row * K + slots, weights * scale, mask=slots < K)
    return scores, chosen


@jit
def route_backward(
    x, mask, dw_ptr, indices_ptr, row, K, scale, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, BLOCK_E: tl.constexpr
):
    """The gradient of a token's logits by its weights, and its scores."""
    cols = tl.arange(0, BLOCK_E)
    scores = _scores(x, mask, SOFTMAX)
    dw = tl.zeros((BLOCK_E,), dtype=tl.float32)
    chosen = cols < 0
    origin = tl.cast(0.0, tl.float32)
    for k in range(0, K):
        here = cols == tl.load(indices_ptr + row * K + k)
        dw_k = tl.load(dw_ptr + row * K + k)
        dw = tl.where(here, dw_k, dw)
        chosen = chosen | here
        origin = tl.where((k == 0) | (tl.abs(dw_k) < tl.abs(origin)), dw_k, origin)
    ds = dw * scale
    if NORMALIZE:
        total = tl.sum(tl.where(chosen, scores, 0.0), axis=0)
        most = chosen & (scores > 0.5 * total)
        if tl.sum(most.to(tl.int32), axis=0) == 1:
            origin = tl.sum(tl.where(most, dw, 0.0), axis=0)
        dw = tl.where(chosen, dw - origin, 0.0)
        S = total + 1e-20
        mean = tl.sum(tl.where(chosen, dw * scores, 0.0), axis=0) / S
        ds = tl.where(chosen, scale / S * (dw - mean + origin * (1e-20 / S)), 0.0)
        inner = scale / S * (1e-20 * (mean + origin * (total / S)))
    else:
        inner = tl.sum(scores * ds, axis=0)
    dx = scores * (ds - inner) if SOFTMAX else tl.where(chosen, ds * scores * (1.0 - scores), 0.0)
    return dx, scores


@jit
def router_topk_kernel(
    x_ptr, bias_ptr, weights_ptr, indices_ptr, E, K, G, SIZE, TOPK_G, x_stride, scale,
    SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, GROUPED: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    scale = tl.cast(scale, tl.float32)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_E)
    x = tl.load(x_ptr + row * x_stride + cols, mask=cols < E, other=0.0).to(tl.float32)
    route(
        x, cols < E, bias_ptr, weights_ptr, indices_ptr, row, K, G, SIZE, TOPK_G, scale,
        SOFTMAX, NORMALIZE, GROUPED, BLOCK_E, BLOCK_K, BLOCK_G,
    )  # fmt: skip


@jit
def router_topk_backward_kernel(
    dw_ptr, x_ptr, indices_ptr, dx_ptr, E, K, x_stride, scale,
    SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    scale = tl.cast(scale, tl.float32)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_E)
    x = tl.load(x_ptr + row * x_stride + cols, mask=cols < E, other=0.0).to(tl.float32)
    dx, _ = route_backward(x, cols < E, dw_ptr, indices_ptr, row, K, scale, SOFTMAX, NORMALIZE, BLOCK_E)
    tl.store(dx_ptr + row * E + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < E)


def experts_block(E: int) -> dict[str, int]:
    """A warp for up to 256 experts: its reductions wait for no other."""
    block = next_power_of_2(E)
    return {"BLOCK_E": block, "num_warps": max(1, min(8, block // 256))}


def _router_topk_fwd(
    input: Tensor,
    bias: Tensor | None,
    top_k: int,
    scoring: str,
    num_groups: int,
    topk_groups: int,
    normalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    x = as_rows(input)
    T, E = x.shape
    weights = empty((*input.shape[:-1], top_k), torch.float32, x.device)
    indices = empty((*input.shape[:-1], top_k), torch.int64, x.device)
    sizes = E, top_k, num_groups, E // num_groups, topk_groups, x.stride(0)
    options = {"SOFTMAX": scoring == "softmax", "NORMALIZE": normalize, "GROUPED": topk_groups < num_groups}
    blocks = {"BLOCK_K": next_power_of_2(top_k), "BLOCK_G": next_power_of_2(num_groups), **experts_block(E)}
    wrap_triton(router_topk_kernel)[(T,)](x, contiguous(bias), weights, indices, *sizes, scale, **options, **blocks)
    return weights, indices


def _router_topk_bwd(
    grad: Tensor, input: Tensor, indices: Tensor, scoring: str, normalize: bool, scale: float
) -> Tensor:
    x = as_rows(input)
    T, E = x.shape
    dx = empty(tuple(input.shape), input.dtype, x.device)
    options = {"SOFTMAX": scoring == "softmax", "NORMALIZE": normalize}
    wrap_triton(router_topk_backward_kernel)[(T,)](
        grad.contiguous(),
        x,
        indices.contiguous(),
        dx,
        E,
        indices.shape[-1],
        x.stride(0),
        scale,
        **options,
        **experts_block(E),
    )
    return dx


router_topk_fwd = KernelOp(_router_topk_fwd, launch_cached=True)
router_topk_bwd = KernelOp(_router_topk_bwd, launch_cached=True)


def _scores_cpu(input: Tensor, scoring: str) -> Tensor:
    return input.float().softmax(-1) if scoring == "softmax" else input.float().sigmoid()


def route_cpu(
    input: Tensor,
    bias: Tensor | None,
    top_k: int,
    scoring: str,
    num_groups: int,
    topk_groups: int,
    normalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    scores, bias = _scores_cpu(input, scoring), bias if bias is None else bias.float()
    indices = _choose(scores, input.float(), bias, top_k, num_groups, topk_groups)
    weights = scores.gather(-1, indices)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + TINIEST_SUM)
    return (weights * scale).contiguous(), indices.contiguous()


def route_backward_cpu(
    grad: Tensor, input: Tensor, indices: Tensor, scoring: str, normalize: bool, scale: float
) -> Tensor:
    """The gradient of the logits by the weights, in float32."""
    scores = _scores_cpu(input, scoring)
    chosen = scores.gather(-1, indices)
    of_chosen = grad * scale
    inner = (of_chosen * chosen).sum(-1, keepdim=True)
    if normalize:
        total = chosen.sum(-1, keepdim=True)
        S = total + TINIEST_SUM
        origin = grad.gather(-1, grad.abs().argmin(-1, keepdim=True))
        most, index = chosen.max(-1, keepdim=True)
        origin = torch.where(most > 0.5 * total, grad.gather(-1, index), origin)
        rest = grad - origin
        mean = (rest * chosen).sum(-1, keepdim=True) / S
        of_chosen = scale / S * (rest - mean + origin * (TINIEST_SUM / S))
        inner = scale / S * (TINIEST_SUM * (mean + origin * (total / S)))
    ds = torch.zeros_like(scores).scatter(-1, indices, of_chosen)
    if scoring == "sigmoid":
        return ds * scores * (1 - scores)
    return scores * (ds - inner)


router_topk_fwd.register_kernel("cpu")(route_cpu)


@router_topk_bwd.register_kernel("cpu")
def _(grad, input, indices, scoring, normalize, scale) -> Tensor:
    return route_backward_cpu(grad, input, indices, scoring, normalize, scale).to(input.dtype).contiguous()


@router_topk_fwd.register_fake
def _(input: Tensor, bias: Tensor | None, top_k: int, *options) -> tuple[Tensor, Tensor]:
    shape = (*input.shape[:-1], top_k)
    return input.new_empty(shape, dtype=torch.float32), input.new_empty(shape, dtype=torch.int64)


router_topk_fwd.register_sharding(replicate_only)
router_topk_fwd.register_backward(router_topk_bwd, outputs=("weights", "indices"), depends_on=[["input"]])


def router_topk_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    randn = partial(torch.randn, device=device, dtype=dtype)
    as_deepseek = {"scoring": "sigmoid", "num_groups": 4, "topk_groups": 2, "scale": 2.5}
    yield Sample((randn(8, 16), 2), why="powers of two")
    yield Sample((randn(5, 37), 3), {"normalize": False, "scale": 0.5}, why="odd, not normalized")
    bias = torch.randn(24, device=device, dtype=torch.float32)
    yield Sample((randn(2, 7, 24), 5), {"bias": bias, **as_deepseek}, why="as DeepSeek-V3, three dimensions")
    yield Sample((randn(6, 12), 2), {"scoring": "sigmoid", "normalize": False}, why="as Llama 4, of two")
    yield Sample((randn(6, 12), 3), {"num_groups": 12, "topk_groups": 6}, why="groups of one")
    yield Sample((torch.zeros(3, 10, device=device, dtype=dtype), 4), why="ties: the first experts")
    yield Sample((randn(4, 6), 6), why="all experts")
    yield Sample((randn(0, 16), 2), why="no tokens")
    yield Sample((randn(16, 9).t(), 2), why="strided")
    yield Sample((randn(2, 300), 8), {"scoring": "sigmoid", "bias": randn(300)}, why="more than a warp, bias in dtype")


def router_topk_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample((torch.randn(16384, 128, device=device, dtype=dtype), 8), why="16384, 8 of 128 experts")
    x, bias = torch.randn(16384, 256, device=device, dtype=dtype), torch.zeros(256, device=device, dtype=torch.float32)
    options = {"bias": bias, "scoring": "sigmoid", "num_groups": 8, "topk_groups": 4, "scale": 2.5}
    yield Sample((x, 8), options, why="16384, 8 of 256 experts, 4 of 8 groups")


def router_topk_cost(input: Tensor, top_k: int, **options: object) -> Cost:
    logits, chosen = input.numel() * input.element_size(), 12 * input.numel() // input.shape[-1] * top_k
    return Cost(logits + chosen, 3 * logits + 2 * chosen)


def check_routing(
    input: Tensor, top_k: int, bias: Tensor | None, scoring: str, num_groups: int, topk_groups: int, scale: float
) -> None:
    E = input.shape[-1]
    if num_groups < 1 or E % num_groups:
        raise ValueError(f"num_groups: expected a number that divides the {E} experts, got {num_groups}")
    check_number("topk_groups", topk_groups, 1, num_groups, f"1 to {num_groups}, the number of groups")
    most = E // num_groups * topk_groups
    check_number("top_k", top_k, 1, most, f"1 to {most}, the experts that may be chosen")
    if bias is not None:
        check_dtype("bias", bias, (torch.float32, input.dtype))
        check_shape("bias", bias, (E,), "one for each expert")
        check_same("bias", bias, "input", input)
    check_option("scoring", scoring, SCORINGS)
    check_number("scale", scale, TINY, LARGEST, "a finite positive number")


@public_op(
    reference=router_topk_reference,
    differentiable=("input",),
    kernel_ops=(router_topk_fwd, router_topk_bwd),
    samples=router_topk_samples,
    resized=normal_resized(lambda rows: ((rows, 24), 4)),
    workloads=router_topk_workloads,
    cost=router_topk_cost,
)
def router_topk(
    input: Tensor,
    top_k: int,
    *,
    bias: Tensor | None = None,
    scoring: str = "softmax",
    num_groups: int = 1,
    topk_groups: int = 1,
    normalize: bool = True,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Each token's experts and their weights, from the router's logits, in float32.

    Args:
        input: Logits `[..., E]`, float32, float16 or bfloat16, any strides.
        top_k: How many experts a token gets.
        bias: `[E]`, float32 or the dtype of `input`: added to the scores for the choice, and not in the weights. It has
            no gradient.
        scoring: "softmax" or "sigmoid". A softmax of the chosen logits alone, as in GPT-OSS, is "softmax" normalized.
        num_groups: Into how many groups of neighbours the experts are divided.
        topk_groups: Of how many groups, those with the largest sums of two, experts may be chosen.
        normalize: Whether a token's weights are divided by their sum.
        scale: What the weights are multiplied by at the end.

    Returns:
        The weights `[..., top_k]`, float32, largest score first, and the experts `[..., top_k]`, int64. Of equal scores
        the first expert's comes first, and without a bias of equal logits, which may differ where scores do not.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape, a device or an option does not fit, or fewer experts than `top_k` may be chosen.

    Sources: Mixtral, https://arxiv.org/abs/2401.04088; DeepSeek-V3, https://arxiv.org/abs/2412.19437.
    """
    check_dtype("input", input)
    if input.dim() == 0 or input.shape[-1] == 0:
        raise ValueError(f"input: expected shape [..., E] with at least one expert, got {tuple(input.shape)}")
    check_routing(input, top_k, bias, scoring, num_groups, topk_groups, scale)
    return router_topk_fwd(input, bias, top_k, scoring, num_groups, topk_groups, normalize, scale)
