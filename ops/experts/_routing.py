"""What `router_topk` and `router_topk_sums` share: a token's choice and its gradient, in Triton and in plain PyTorch.

The formulas are those of `router_topk.py`.
"""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.math import exp
from llmk.registry import (
    LARGEST,
    check_dtype,
    check_number,
    check_option,
    check_positive,
    check_same,
    check_shape,
    jit,
    next_power_of_2,
)

SCORINGS = ("softmax", "sigmoid")
TINIEST_SUM = 1e-20


class Routing(NamedTuple):
    """The options of a router's choice."""

    top_k: int
    scoring: str
    num_groups: int
    topk_groups: int
    normalize: bool
    scale: float

    def sizes(self, E: int) -> tuple[int, int, int, int, int]:
        """Return the sizes as kernels take them: experts, those of a token, groups, experts of a group, best groups."""
        return E, self.top_k, self.num_groups, E // self.num_groups, self.topk_groups

    def launch(self, E: int) -> dict[str, int]:
        """Return the constants of the kernels of the forward pass."""
        grouped = self.topk_groups < self.num_groups
        blocks = {"BLOCK_K": next_power_of_2(self.top_k), "BLOCK_G": next_power_of_2(self.num_groups)}
        return {"GROUPED": grouped, **blocks, **backward_launch(E, self.scoring, self.normalize)}


def backward_launch(E: int, scoring: str, normalize: bool) -> dict[str, int]:
    """Return the constants of the backward kernels, and a warp for up to 256 experts: its reductions wait for none."""
    block = next_power_of_2(E)
    constants = {"SOFTMAX": scoring == "softmax", "NORMALIZE": normalize}
    return {**constants, "BLOCK_E": block, "num_warps": max(1, min(8, block // 256))}


def check_routing(input: Tensor, bias: Tensor | None, routing: Routing) -> None:
    E, (top_k, scoring, num_groups, topk_groups, _, scale) = input.shape[-1], routing
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
    check_positive("scale", scale)


def _largest(values: Tensor, count: int) -> Tensor:
    """Return the indices of the largest values, equal ones in their order."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def choose(
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
def log_sum_exp(x, mask):
    """The logarithm of the sum of the exponentials, and the softmax."""
    largest = tl.max(tl.where(mask, x, float("-inf")), axis=0)
    powers = tl.where(mask, exp(tl.where(mask, x - largest, 0.0)), 0.0)
    total = tl.sum(powers, axis=0)
    return largest + tl.log(total), tl.div_rn(powers, tl.zeros_like(powers) + total)


@jit
def _scores(x, mask, SOFTMAX: tl.constexpr):
    if SOFTMAX:
        _, scores = log_sum_exp(x, mask)
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


def _scores_cpu(input: Tensor, scoring: str) -> Tensor:
    return input.float().softmax(-1) if scoring == "softmax" else input.float().sigmoid()


def route_cpu(input: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    scores, bias = _scores_cpu(input, routing.scoring), bias if bias is None else bias.float()
    indices = choose(scores, input.float(), bias, routing.top_k, routing.num_groups, routing.topk_groups)
    weights = scores.gather(-1, indices)
    if routing.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + TINIEST_SUM)
    return (weights * routing.scale).contiguous(), indices.contiguous()


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
