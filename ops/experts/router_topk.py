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

from llmk.ops.common.rows import as_rows, contiguous
from llmk.ops.common.samples import normal_resized
from llmk.ops.experts._routing import (
    TINIEST_SUM,
    Routing,
    backward_launch,
    check_routing,
    choose,
    route,
    route_backward,
    route_backward_cpu,
    route_cpu,
)
from llmk.registry import (
    Cost,
    KernelOp,
    Sample,
    check_dtype,
    empty,
    jit,
    public_op,
    replicate_only,
    wrap_triton,
)


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
    indices = choose(scores.detach(), logits.detach(), bias, top_k, num_groups, topk_groups)
    weights = scores.gather(-1, indices)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + TINIEST_SUM)
    return weights * scale, indices


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


def _router_topk_fwd(
    input: Tensor, bias: Tensor | None, top_k: int, scoring: str, num_groups: int,
    topk_groups: int, normalize: bool, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    routing = Routing(top_k, scoring, num_groups, topk_groups, normalize, scale)
    x = as_rows(input)
    T, E = x.shape
    weights = empty((*input.shape[:-1], top_k), torch.float32, x.device)
    indices = empty((*input.shape[:-1], top_k), torch.int64, x.device)
    wrap_triton(router_topk_kernel)[(T,)](
        x, contiguous(bias), weights, indices, *routing.sizes(E), x.stride(0), scale, **routing.launch(E)
    )
    return weights, indices


def _router_topk_bwd(
    grad: Tensor, input: Tensor, indices: Tensor, scoring: str, normalize: bool, scale: float
) -> Tensor:
    x = as_rows(input)
    T, E = x.shape
    dx = empty(tuple(input.shape), input.dtype, x.device)
    sizes = E, indices.shape[-1], x.stride(0)
    wrap_triton(router_topk_backward_kernel)[(T,)](
        grad.contiguous(), x, indices.contiguous(), dx, *sizes, scale, **backward_launch(E, scoring, normalize)
    )
    return dx


router_topk_fwd = KernelOp(_router_topk_fwd, launch_cached=True)
router_topk_bwd = KernelOp(_router_topk_bwd, launch_cached=True)


@router_topk_fwd.register_kernel("cpu")
def _(input: Tensor, bias: Tensor | None, *options) -> tuple[Tensor, Tensor]:
    return route_cpu(input, bias, Routing(*options))


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
    routing = Routing(top_k, scoring, num_groups, topk_groups, normalize, scale)
    check_routing(input, bias, routing)
    return router_topk_fwd(input, bias, *routing)
