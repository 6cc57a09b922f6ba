"""Spellings that the backend finds, by name: each against itself unrewritten, with gradients."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compile_tests.helpers.backend_checks import require_equal

S: dict[str, tuple[str, Callable[..., Any], tuple[Any, ...]]] = {}
"""The operator, the spelling and the shapes of its arguments, by name."""

V = 13
TARGET = "target"
ANGLES, COMPLEX = "angles", "complex"


def spelling(operator: str, *shapes: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        S[fn.__name__] = operator, fn, shapes
        return fn

    return add


@spelling("rms_norm", (3, 5, 16), (16,))
def hugging_face_norm(x: Tensor, w: Tensor) -> Tensor:
    y = x.to(torch.float32)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * y.to(x.dtype)


@spelling("rms_norm", (3, 5, 16), (16,))
def torch_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, (16,), w, 1e-5)


@spelling("rms_norm", (3, 5, 16), (16,))
def torch_norm_with_its_own_eps(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, (16,), w)


@spelling("rms_norm", (3, 5, 16), (16,))
def llama_norm(x: Tensor, w: Tensor) -> Tensor:
    y = x.float()
    return (y * torch.rsqrt((y * y).mean(-1, keepdim=True) + 1e-5)).type_as(x) * w


@spelling("rms_norm", (3, 5, 16), (16,))
def gemma_norm(x: Tensor, w: Tensor) -> Tensor:
    y = x.float()
    y = y * torch.pow(y.square().mean(dim=2, keepdim=True) + 1e-6, -0.5)
    return (y * (1.0 + w.float())).type_as(x)


@spelling("rms_norm", (3, 5, 16))
def norm_without_weight(x: Tensor) -> Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


@spelling("rms_norm", (2, 5, 32), (8,))
def norm_of_heads(x: Tensor, w: Tensor) -> Tensor:
    return hugging_face_norm(x.view(2, 5, 4, 8), w).transpose(1, 2)


@spelling("rms_norm", (2, 5, 4, 8), (8,))
def norm_of_transposed_heads(x: Tensor, w: Tensor) -> Tensor:
    return hugging_face_norm(x.transpose(1, 2), w)


@spelling("rms_norm", (3, 16), (16,))
def norm_into_another_dtype(x: Tensor, w: Tensor) -> Tensor:
    y = x.float()
    return w.float() * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6))


@spelling("add_rms_norm", (3, 5, 16), (3, 5, 16), (16,))
def residual_and_norm(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = r + x
    return hugging_face_norm(h, w), 2 * h


@spelling("rms_norm_gated", (5, 8, 16), (5, 8, 16), (16,))
def qwen3_next_norm(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    """The activation is a module that is made on the way."""
    return (hugging_face_norm(x, w) * torch.nn.SiLU()(g.to(torch.float32))).to(x.dtype)


@spelling("rms_norm_gated", (5, 8, 16), (5, 8, 16), (16,))
def kimi_norm(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    return (hugging_face_norm(x.float(), w.float()) * g.float().sigmoid()).to(x.dtype)


@spelling("rms_norm_gated", (5, 8, 16), (5, 8, 16), (16,))
def mamba_2_norm(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    y = x.to(torch.float32) * F.silu(g.to(torch.float32))
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
    return w * y.to(x.dtype)


@spelling("rms_norm_gated", (5, 8, 16), (5, 8, 16))
def gate_inside_without_weight(x: Tensor, g: Tensor) -> Tensor:
    return F.rms_norm(torch.sigmoid(g) * x, (16,), None, 1e-6)


@spelling("layer_norm", (3, 5, 16), (16,), (16,))
def torch_layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (16,), w, b, 1e-5)


@spelling("layer_norm", (3, 16))
def layer_norm_alone(x: Tensor) -> Tensor:
    return F.layer_norm(x, (16,))


@spelling("layer_norm", (3, 5, 16), (16,), (16,))
def layer_norm_by_hand(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = x.float()
    c = y - y.mean(-1, keepdim=True)
    return (c / torch.sqrt(c.pow(2).mean(-1, keepdim=True) + 1e-5) * w + b).to(x.dtype)


@spelling("layer_norm", (3, 16), (16,))
def layer_norm_by_variance(x: Tensor, w: Tensor) -> Tensor:
    y = x.float()
    y = (y - y.mean(-1, keepdim=True)) * torch.rsqrt(y.var(-1, keepdim=True, unbiased=False) + 1e-5)
    return y.to(x.dtype) * w


@spelling("swiglu", (3, 16), (3, 16))
def gate_and_up(g: Tensor, u: Tensor) -> Tensor:
    return F.silu(g) * u


@spelling("swiglu", (3, 16), (3, 16))
def sigmoid_by_hand(g: Tensor, u: Tensor) -> Tensor:
    return u * (torch.sigmoid(g) * g)


@spelling("swiglu", (3, 32))
def packed_by_chunk(x: Tensor) -> Tensor:
    g, u = x.chunk(2, dim=-1)
    return u * F.silu(g)


@spelling("swiglu", (3, 32))
def packed_by_split(x: Tensor) -> Tensor:
    g, u = torch.split(x, [16, 16], dim=1)
    return F.silu(g) * u


@spelling("swiglu", (3, 32))
def packed_by_slices(x: Tensor) -> Tensor:
    return F.silu(x[..., :16]) * x[..., 16:]


@spelling("swiglu", (3, 32))
def packed_the_other_way(x: Tensor) -> Tensor:
    u, g = x.chunk(2, dim=-1)
    return F.silu(g) * u


@spelling("geglu", (3, 16), (3, 16))
def exact_gelu(g: Tensor, u: Tensor) -> Tensor:
    return F.gelu(g) * u


@spelling("geglu", (3, 16), (3, 16))
def gelu_by_tanh(g: Tensor, u: Tensor) -> Tensor:
    return F.gelu(g, approximate="tanh") * u


@spelling("geglu", (3, 16), (3, 16))
def gelu_by_hand(g: Tensor, u: Tensor) -> Tensor:
    inner = math.sqrt(2.0 / math.pi) * (g + 0.044715 * torch.pow(g, 3.0))
    return 0.5 * g * (1.0 + torch.tanh(inner)) * u


@spelling("relu_squared", (3, 16))
def relu_and_square(x: Tensor) -> Tensor:
    return F.relu(x).square()


@spelling("relu_squared", (3, 16))
def relu_and_power(x: Tensor) -> Tensor:
    return torch.relu(x) ** 2


def rotate_half(x: Tensor) -> Tensor:
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-b, a), dim=-1)


def rotate_pairs(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def turn(x: Tensor, cos: Tensor, sin: Tensor, rotate: Callable[[Tensor], Tensor] = rotate_half) -> Tensor:
    return x * cos + rotate(x) * sin


@spelling("rope", (2, 5, 4, 8), (2, 5, 2, 8), ANGLES, ANGLES)
def hugging_face_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return turn(q.transpose(1, 2), cos, sin), turn(k.transpose(1, 2), cos, sin)


@spelling("rope", (2, 5, 4, 8), (2, 5, 2, 8), ANGLES, ANGLES)
def rope_before_heads_come_first(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    return turn(q, cos, sin), turn(k, cos, sin)


@spelling("rope", (2, 5, 4, 12), (2, 5, 2, 12), ANGLES, ANGLES)
def partial_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    heads = (x.transpose(1, 2) for x in (q, k))
    return tuple(torch.cat((turn(x[..., :8], cos, sin), x[..., 8:]), dim=-1) for x in heads)


@spelling("rope", (2, 5, 4, 8), (2, 5, 2, 8), ANGLES, ANGLES)
def rope_in_float32(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    cos, sin = cos.float().unsqueeze(1), sin.float().unsqueeze(1)
    return tuple(turn(x.transpose(1, 2).float(), cos, sin).to(x.dtype) for x in (q, k))


@spelling("rope", (2, 5, 4, 8), (2, 5, 2, 8), ANGLES, ANGLES)
def rope_of_pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return tuple(turn(x.transpose(1, 2), cos, sin, rotate_pairs) for x in (q, k))


@spelling("rope", (2, 5, 4, 16), (2, 5, 2, 16), ANGLES, ANGLES)
def rope_by_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    halves = (x.transpose(1, 2).chunk(2, dim=-1) for x in (q, k))
    return tuple(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1) for a, b in halves)


@spelling("rope", (2, 5, 4, 16), (2, 5, 2, 16), ANGLES, ANGLES)
def rope_of_pairs_into_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    pairs = ((x.transpose(1, 2)[..., ::2], x.transpose(1, 2)[..., 1::2]) for x in (q, k))
    return tuple(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1) for a, b in pairs)


@spelling("rope", (2, 5, 4, 16), (2, 5, 2, 16), ANGLES, ANGLES)
def rope_with_angles_brought_into_shape_twice(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    def turned(x: Tensor) -> Tensor:
        wide = (y[:, :, None, :].repeat_interleave(2, 3) for y in (cos, sin))
        return turn(x, *wide, rotate=rotate_pairs)

    return turned(q), turned(k)


@spelling("rope", (2, 5, 4, 8), (2, 5, 2, 8), COMPLEX)
def complex_rope(q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, ...]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    pairs = [torch.view_as_complex(x.to(wide).reshape(*x.shape[:-1], -1, 2)) for x in (q, k)]
    angles = angles.view(1, 5, 1, 4)
    return tuple(torch.view_as_real(x * angles).flatten(3).type_as(q) for x in pairs)


@spelling("cross_entropy", (6, V), TARGET)
def torch_cross_entropy(x: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(x.float(), t)


@spelling("cross_entropy", (6, V), TARGET)
def smoothed_sum(x: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(x, t, reduction="sum", label_smoothing=0.1)


@spelling("cross_entropy", (6, V), TARGET)
def log_softmax_and_nll(x: Tensor, t: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(x.float(), dim=-1), t, reduction="none")


@spelling("fused_linear_ce", (6, 16), (V, 16), TARGET)
def projection_and_loss(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w), t)


@spelling("fused_linear_ce", (2, 4, 16), (V, 16), (V,), TARGET)
def shifted_projection(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    logits = F.linear(x, w, b).float()[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, V), t, reduction="sum") / 5


@spelling("fused_linear_ce", (2, 3, 16), (V, 16), (1, V), TARGET)
def bias_added_later(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy((F.linear(x, w) + b).view(-1, V), t)


@spelling("fused_linear_ce", (2, 3, 16), (V, 16), TARGET)
def capped_projection(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    logits = (x @ w.t()) / 2
    logits = torch.tanh(logits / 5.0) * 5.0
    return F.nll_loss(F.log_softmax(logits.view(-1, V).float(), -1), t)


CLASSES = "classes"


@spelling("linear_logprobs", (6, 16), (V, 16), CLASSES)
def gathered_log_softmax(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return F.linear(x, w).float().log_softmax(-1).gather(-1, t.unsqueeze(-1)).squeeze(-1)


@spelling("linear_logprobs", (2, 4, 16), (V, 16), (V,), (2, 3, 2, CLASSES))
def gathered_candidates(x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    logits = F.linear(x, w, b)[:, :-1, :] / 0.7
    return torch.gather(F.log_softmax(logits, dim=-1, dtype=torch.float32), 2, t)


@spelling("linear_logprobs", (6, 16), (V, 16), CLASSES)
def gathered_logits_less_their_logsumexp(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    logits = (x @ w.t()).float()
    return logits.gather(-1, t[:, None]).squeeze(-1) - torch.logsumexp(logits, dim=-1)


@spelling("kl_div", (2, 3, V), (2, 3, V))
def divergence_by_hand(x: Tensor, y: Tensor) -> Tensor:
    student = F.log_softmax(x.float(), -1)
    y = y.float()
    return (F.softmax(y, -1) * (F.log_softmax(y, -1) - student)).sum(-1).mean()


@spelling("kl_div", (6, V), (6, V))
def divergence_of_logarithms(x: Tensor, y: Tensor) -> Tensor:
    student, teacher = F.log_softmax(x.float(), -1), F.log_softmax(y.float(), -1)
    return 0.25 * torch.sum(teacher.exp() * (teacher - student))


@spelling("kl_div", (6, V), (6, V))
def divergence(x: Tensor, y: Tensor) -> Tensor:
    return F.kl_div(F.log_softmax(x, -1), F.log_softmax(y, -1), reduction="batchmean", log_target=True)


def made(shape: Any, dtype: torch.dtype) -> Tensor:
    if shape == CLASSES:
        return torch.tensor([1, 0, 12, 3, 5, 7])
    if shape[-1] == CLASSES:
        return torch.randint(0, V, shape[:-1])
    if shape == TARGET:
        return torch.tensor([1, 0, 12, 3, -100, 7])
    if shape == COMPLEX:
        return torch.polar(torch.ones(5, 4), torch.randn(5, 4))
    if shape == ANGLES:
        return torch.rand(1, 5, 8).to(dtype)
    return torch.randn(shape).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", S)
def test_spelling(name: str, dtype: torch.dtype) -> None:
    operator, fn, shapes = S[name]
    torch.manual_seed(0)
    report = require_equal(fn, [made(shape, dtype) for shape in shapes])
    assert report.replaced == {operator: 1}, str(report)
