"""Other ways to write what the backend finds: each against itself unrewritten, with gradients.

A quotient, a mean, a product with a matrix and the choice of a class have many names in PyTorch; a pattern has one.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compile_tests.helpers.backend_checks import require_equal

S: dict[str, tuple[dict[str, int], Callable[..., Any], tuple[Any, ...]]] = {}
"""The operators, the spelling and the shapes of its arguments, by name: a list is of indices below V."""

N, H, V = 4, 8, 11
EPS = 1e-6


def spelling(operators: str | dict[str, int], *shapes: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        S[fn.__name__] = {operators: 1} if isinstance(operators, str) else operators, fn, shapes
        return fn

    return add


def mean_square(x: Tensor) -> Tensor:
    return x.pow(2).mean(-1, keepdim=True)


# Quotients and means.


@spelling("rms_norm", (N, H), (H,))
def one_over_the_root(x: Tensor, w: Tensor) -> Tensor:
    return x * (1 / torch.sqrt(mean_square(x) + EPS)) * w


@spelling("rms_norm", (N, H), (H,))
def one_over_the_root_by_div(x: Tensor, w: Tensor) -> Tensor:
    return w * torch.multiply(torch.true_divide(1.0, mean_square(x).add(EPS) ** 0.5), x)


@spelling("rms_norm", (N, H), (H,))
def divided_by_the_root(x: Tensor, w: Tensor) -> Tensor:
    return torch.divide(x, mean_square(x).add(EPS).sqrt()) * w


@spelling("rms_norm", (N, H), (H,))
def divided_by_one_over_the_root(x: Tensor, w: Tensor) -> Tensor:
    return x / (1 / torch.rsqrt(mean_square(x) + EPS)) * w


@spelling("rms_norm", (N, H), (H,))
def mean_in_float32(x: Tensor, w: Tensor) -> Tensor:
    return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True, dtype=torch.float32) + EPS)).to(x) * w


@spelling("rms_norm", (N, H), (H,))
def sum_over_their_number(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + EPS) * w


@spelling("rms_norm", (N, 96), (96,))
def sum_times_one_over_a_large_number(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) * (1 / 96) + EPS) * w


@spelling("rms_norm", (N, 96), (96,))
def sum_over_a_large_number(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True).div(96.0) + EPS) * w


@spelling("rms_norm", (N, H), (H,))
def mean_with_its_axis_put_back(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1).unsqueeze(-1) + EPS) * w


@spelling("rms_norm", (N, H), (H,))
def root_with_its_axis_put_back(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1) + EPS)[..., None] * w


@spelling("rms_norm", (N, H), (H,))
def root_in_place(x: Tensor, w: Tensor) -> Tensor:
    return x.square().mean(-1, keepdim=True).add_(EPS).rsqrt_().mul(x).mul_(w)


@spelling("layer_norm", (N, H), (H,), (H,))
def var_mean(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    var, mean = torch.var_mean(x, -1, keepdim=True, correction=0)
    return (x - mean) * torch.rsqrt(var + EPS) * w + b


@spelling("layer_norm", (N, 96), (96,), (96,))
def sums_for_mean_and_variance(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    c = x - x.sum(-1, keepdim=True) / 96
    return c * (1 / (c.square().sum(-1, keepdim=True) / 96 + EPS).sqrt()) * w + b


# Gated norms of groups.


def grouped(x: Tensor, groups: int = 2) -> Tensor:
    y = x.view(*x.shape[:-1], groups, x.shape[-1] // groups)
    return (y * torch.rsqrt(mean_square(y) + EPS)).view(*x.shape)


@spelling("rms_norm_gated", (2, 5, 16), (2, 5, 16), (16,))
def mamba_2(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    return w * grouped(x.float() * F.silu(g.float())).to(x.dtype)


@spelling("rms_norm_gated", (2, 5, 16), (2, 5, 16), (16,))
def mamba_2_of_one_group(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    return w * grouped(x.float() * F.silu(g.float()), 1).to(x.dtype)


@spelling("rms_norm_gated", (2, 5, 16), (2, 5, 16), (16,))
def groups_before_the_gate(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    return (w * grouped(x.float()) * F.silu(g.float())).to(x.dtype)


@spelling("rms_norm_gated", (2, 5, 16), (2, 5, 16))
def groups_by_flatten(x: Tensor, g: Tensor) -> Tensor:
    return F.rms_norm((x * torch.sigmoid(g)).unflatten(-1, (4, 4)), (4,), None, EPS).flatten(-2)


# Products with a matrix, before a loss.


@spelling("fused_linear_ce", (N, H), (V, H), [N])
def mm(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(torch.mm(x, v.t()), t)


@spelling("fused_linear_ce", (N, H), (V, H), (V,), [N])
def addmm(x: Tensor, v: Tensor, b: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(torch.addmm(b, x, v.t()), t)


@spelling("fused_linear_ce", (N, H), (V, H), [N])
def einsum(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(torch.einsum("nd,vd->nv", x, v), t)


@spelling("fused_linear_ce", (2, 2, H), (V, H), [N])
def einsum_the_other_way_round(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(torch.einsum("v d, ... d -> ... v", v, x).view(-1, V), t)


@spelling("fused_linear_ce", (N, H), (H, V), [N])
def a_matrix_of_columns(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(x @ v, t)


@spelling("fused_linear_ce", (N, H), (H, V), [N])
def einsum_with_columns(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(torch.einsum("nd,dv->nv", x, v), t)


@spelling("fused_linear_ce", (N, H), (V, H), [N])
def a_matrix_permuted(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(x.matmul(v.permute(1, 0)), t)


@spelling("fused_linear_ce", (N, H), (V, H), [N])
def scaled_in_place(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, v).mul_(0.5).div_(3.0), t)


@spelling("fused_linear_ce", (N, H), (V, H), [N])
def capped_in_place(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, v).div_(5.0).tanh_() * 5.0, t)


@spelling("fused_linear_ce", (2, 4, H), (V, H), [2])
def the_last_token(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, v)[:, -1], t)


# The choice of a class of each row.


@spelling("linear_logprobs", (2, 3, H), (V, H), [2, 3])
def trl(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    """`selective_log_softmax` of float32 logits."""
    z = F.linear(x, v) / 0.7
    chosen = torch.gather(z, dim=-1, index=t.unsqueeze(-1))
    sums = torch.stack([torch.logsumexp(row, dim=-1) for row in z])
    return (chosen - sums.unsqueeze(-1)).squeeze(-1)


@spelling("linear_logprobs", (2, 3, H), (V, H), [2, 3, 2])
def trl_of_several(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    z = F.linear(x, v)
    return z.gather(-1, t) - torch.stack([torch.logsumexp(row, dim=-1) for row in z]).unsqueeze(-1)


@spelling("linear_logprobs", (2, 3, H), (V, H), [2, 3])
def trl_row_by_row(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    """`selective_log_softmax` of logits in 16 bits."""
    z, found = F.linear(x, v), []
    for row, index in zip(z, t.unsqueeze(-1), strict=True):
        found.append(F.log_softmax(row, dim=-1).gather(dim=-1, index=index))
    return torch.stack(found).squeeze(-1)


@spelling("linear_logprobs", (N, H), (V, H), [N])
def less_the_sum(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    z = F.linear(x, v)
    return z.gather(-1, t[:, None])[:, 0] - z.logsumexp(-1)


@spelling("linear_logprobs", (N, H), (V, H), [N])
def the_sum_less_the_chosen(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    z = F.linear(x, v)
    return (z.logsumexp(-1) - z.gather(-1, t[:, None]).squeeze(-1)).mean()


@spelling("linear_logprobs", (N, H), (V, H), [N])
def the_sum_less_the_chosen_at_their_places(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    z = F.linear(x, v)
    return (torch.logsumexp(z, -1) - z[torch.arange(N), t]).mean()


@spelling("linear_logprobs", (N, H), (V, H), [N])
def at_their_places(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return F.linear(x, v).log_softmax(-1)[torch.arange(N), t]


@spelling("linear_logprobs", (2, 3, H), (V, H), [2, 3])
def at_their_places_in_a_batch(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return F.linear(x, v).log_softmax(-1)[torch.arange(2)[:, None], torch.arange(3)[None], t]


@spelling("linear_logprobs", (N, H), (V, H), [N])
def along_an_axis(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return torch.take_along_dim(F.linear(x, v).log_softmax(-1), t[:, None], -1)


@spelling("linear_logprobs", (N, H), (V, H), [N])
def along_an_axis_and_squeezed(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return -torch.take_along_dim(torch.log_softmax(x @ v.T, dim=1), t.view(-1, 1), dim=1).squeeze(1)


# Rotations.


def rotated(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def turned(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    return x * c + rotated(x) * s


def neighbours(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    a, b = x.unflatten(2, (-1, 2)).unbind(-1)
    return (x.float() * c + torch.stack([-b, a], dim=-1).flatten(2).float() * s).to(x.dtype)


HEADS = (1, 2, 6, 8), (1, 2, 6, 8)


@spelling("rope", *HEADS, {5: 8}, {5: 8})
def eva_02(q: Tensor, k: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """A prefix that stays."""
    q = torch.cat([q[:, :, :1], turned(q[:, :, 1:], c, s)], 2)
    k = torch.cat([k[:, :, :1], turned(k[:, :, 1:], c, s)], 2)
    return q @ k.mT


@spelling("rope", *HEADS, {(1, 5): 16})
def timm(q: Tensor, k: Tensor, angles: Tensor) -> Tensor:
    """The same, with angles that are taken apart and expanded for each."""

    def turned_by_pairs(x: Tensor) -> Tensor:
        sin, cos = (part.unsqueeze(1).expand_as(x) for part in angles.tensor_split(2, -1))
        return x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape) * sin

    q = torch.cat([q[:, :, :1], turned_by_pairs(q[:, :, 1:])], 2).type_as(k)
    return q @ torch.cat([k[:, :, :1], turned_by_pairs(k[:, :, 1:])], 2).mT


@spelling("rope", *HEADS, {6: 8}, {6: 8})
def keys_made_after_queries_are_read(q: Tensor, k: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    q = turned(q, c, s) * 2
    return q, turned(k.tanh(), c, s)


@spelling("rope", (3, 5, 8), (3, 5, 8), {5: 8}, {5: 8})
def fair_esm(q: Tensor, k: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Heads in the batch."""
    return turned(q, c[None], s[None]), turned(k, c[None], s[None])


@spelling("rope", (3, 5, 16), (3, 5, 16), {(3, 5): 16}, {(3, 5): 16})
def ltx(q: Tensor, k: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys before heads are told apart."""
    return neighbours(q, c, s), neighbours(k, c, s)


# Gated units.


@spelling("swiglu", (2, 16, 5))
def channels_first(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, 1)
    return F.silu(gate) * up


@spelling("swiglu", (2, 8, 5, 3), (2, 8, 5, 3))
def images(g: Tensor, u: Tensor) -> Tensor:
    return F.silu(g.to(memory_format=torch.channels_last)) * u


def arguments(shapes: tuple[Any, ...], dtype: torch.dtype) -> list[Tensor]:
    """Tensors that want gradients; indices for a list, and angles for a dictionary."""
    generator, found = torch.Generator().manual_seed(0), []
    for shape in shapes:
        if isinstance(shape, list):
            found.append(torch.randint(0, V, shape, generator=generator))
        elif isinstance(shape, dict):
            ((rows, width),) = shape.items()
            rows = rows if isinstance(rows, tuple) else (rows,)
            found.append(torch.rand(*rows, width, generator=generator).to(dtype))
        else:
            found.append(torch.randn(shape, generator=generator).to(dtype).requires_grad_())
    return found


@pytest.mark.parametrize("name", S)
def test_found(name: str) -> None:
    operators, fn, shapes = S[name]
    report = require_equal(fn, arguments(shapes, torch.float32))
    assert report.replaced == operators, str(report)
    assert not report.left, str(report)


@pytest.mark.parametrize("negative", [False, True])
def test_classes_at_their_places_count_from_the_end(negative: bool) -> None:
    """Indices count from the end, and targets of an operator do not."""
    x, v, t = arguments(((N, H), (V, H), [N]), torch.float32)
    report = require_equal(at_their_places, [x, v, t - V * negative])
    assert report.replaced == {"linear_logprobs": 1}


LEFT: dict[str, tuple[str, Callable[..., Any], tuple[Any, ...]]] = {}
"""Words of the report, what is no such spelling, and the shapes of its arguments, by name."""


def left(words: str, *shapes: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        LEFT[fn.__name__] = words, fn, shapes
        return fn

    return add


@left("rms_norm: rsqrt: what is computed around it is no norm", (N, H))
def sum_over_another_number(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) / (H - 1) + EPS)


@left("rms_norm: sqrt: what is computed around it is no norm", (N, H))
def two_over_the_root(x: Tensor) -> Tensor:
    return x * (2 / (mean_square(x) + EPS).sqrt())


@left("", (H, H))
def no_axis_put_back(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1) + EPS)


@left("rms_norm: pow: what is computed around it is no norm", (N, H))
def variance_of_a_sample(x: Tensor) -> Tensor:
    var, mean = torch.var_mean(x, -1, keepdim=True)
    return (x - mean) * (var + EPS) ** -0.5


@left("rms_norm_gated: llmk::rms_norm: it has a gate", (N, H), (N, H), (4,))
def one_weight_for_all_groups(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm((x * F.silu(g)).view(N, 2, 4), (4,), w, EPS).view(N, H)


@left("rms_norm_gated: llmk::rms_norm: rms_norm on the way is read elsewhere too", (N, H), (N, H), (H,))
def read_between_the_norm_and_the_gate(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    y = F.rms_norm(x, (H,), w, EPS)
    return y * F.silu(g) + y


@left("fused_linear_ce", (N, 2, 4), (V, 2, 4), [N])
def einsum_over_two_axes(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(torch.einsum("nad,vad->nv", x, v), t)


@left("fused_linear_ce", (N, H), (V, H), (V,), [N])
def addmm_of_twice_the_bias(x: Tensor, v: Tensor, b: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(torch.addmm(b, x, v.t(), beta=2), t)


@left("fused_linear_ce", (2, N, H), (2, V, H), [2, N])
def a_matrix_for_each_batch(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy((x @ v.mT).view(-1, V), t.view(-1))


@left("something that it reads is written in place", (N, H), (N, H))
def activated_in_place(x: Tensor, y: Tensor) -> Tensor:
    """Into memory that stays as it was, where a unit takes the activation in."""
    return F.silu(x * 2, inplace=True) * y


@left("mul_ on the way is read elsewhere too", (N, H), (V, H), [N])
def read_and_scaled_in_place(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    z = F.linear(x, v)
    return F.cross_entropy(z.mul_(0.5), t) + z.sum()


@left("linear_logprobs: index: its logits are not", (N, H), (V, H), [N])
def other_places(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return F.linear(x, v).log_softmax(-1)[torch.arange(N).flip(0), t]


@left("linear_logprobs: index: its logits are not", (N, H), (V, H), [N])
def places_of_fewer_rows(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return F.linear(x, v).log_softmax(-1)[torch.arange(N - 1), t[1:]]


@left("is not over the last axis", (V, H), (V, H), [V])
def along_another_axis(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return torch.take_along_dim(F.linear(x, v).log_softmax(-1), t[None], 0)


@left("linear_logprobs: logsumexp: its logits are not", (2, 3, H), (V, H), [2, 3])
def rows_in_another_order(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    z = F.linear(x, v)
    return z.gather(-1, t[..., None]).squeeze(-1) - torch.stack([z[1].logsumexp(-1), z[0].logsumexp(-1)])


@left("linear_logprobs: gather: linear on the way is read elsewhere too", (3, 3, H), (V, H), [3, 3])
def rows_over_another_axis(x: Tensor, v: Tensor, t: Tensor) -> Tensor:
    z = F.linear(x, v)
    return torch.stack([row.log_softmax(0).gather(-1, i) for row, i in zip(z, t.unsqueeze(-1), strict=True)])


@left("linear_logprobs: logsumexp: its logits are not", (N, H), [N])
def of_no_layer(x: Tensor, t: Tensor) -> Tensor:
    return (x.logsumexp(-1) - x.gather(-1, (t % H)[:, None]).squeeze(-1)).mean()


@left("one of its results is read before all that it takes is there", (1, 2, 6, 8), (1, 2, 6, 8), {6: 8}, {6: 8})
def keys_made_of_turned_queries(q: Tensor, k: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    q = turned(q, c, s)
    return q, turned(k + q, c, s)


@left("one of its results is read before all that it takes is there", (1, 2, 6, 8), (1, 2, 6, 8), {6: 8}, {6: 8})
def keys_written_after_queries_are_read(q: Tensor, k: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    keys = k * 2
    q = turned(q, c, s) * 2
    keys.add_(q)
    return q, turned(keys * 2, c, s)


@left("one of its results is read before all that it takes is there", (1, 2, 6, 8), (1, 2, 6, 8), {6: 8}, {6: 8})
def keys_drawn_after_queries_are_read(q: Tensor, k: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    q = turned(q, c, s) * 2
    return q, turned(torch.dropout(k, 0.0, True), c, s)


@pytest.mark.parametrize("name", LEFT)
def test_left(name: str) -> None:
    """A function that is almost such a spelling is left, with a word in the report."""
    words, fn, shapes = LEFT[name]
    report = require_equal(fn, arguments(shapes, torch.float32))
    wanted = {"rms_norm", "layer_norm", "rms_norm_gated", "fused_linear_ce", "linear_logprobs", "rope"}
    allowed = {"rms_norm"} if words.startswith("rms_norm_gated") else set()
    assert not (wanted - allowed) & set(report.replaced), str(report)
    assert any(words in f"{note.operator}: {note.reason}" for note in report.left) or not words, str(report)
