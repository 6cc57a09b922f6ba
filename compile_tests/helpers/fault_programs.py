"""Programs that the backend once got wrong in silence, or did not compile where Inductor does, by what was done."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Program = tuple[Any, Sequence[Any]]
"""A function or module, and its arguments."""


def randn(*shape: int, scale: float = 1.0, plus: float = 0.0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * scale + plus).to(dtype).requires_grad_()


def fixed(*shape: int, **options: Any) -> Tensor:
    """Make a tensor without a gradient."""
    return randn(*shape, **options).detach()


def rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


CASES: dict[str, Callable[[], Program]] = {}


def case(make: Callable[[], Program]) -> Callable[[], Program]:
    CASES[make.__name__.removeprefix("_")] = make
    return make


# 53, 59: a cast, or a factor, moves to where it rounds or overflows.


@case
def _cast_moved_before_layer_norm() -> Program:
    return lambda x: F.layer_norm(x, (16,)).bfloat16(), [randn(4, 16, plus=1000.0)]


@case
def _cast_moved_before_layer_norm_with_weights() -> Program:
    return lambda x, w, b: F.layer_norm(x, (16,), w, b).bfloat16(), [randn(4, 16, plus=100.0), randn(16), randn(16)]


@case
def _cast_moved_before_rms_norm() -> Program:
    return lambda x, w: (rms(x) * w).half(), [randn(4, 16, scale=1e5), randn(16)]


@case
def _cast_moved_before_add_rms_norm() -> Program:
    def fn(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        total = x + y
        return total, (rms(total) * w).half()

    return fn, [randn(4, 16, scale=1e5), randn(4, 16), randn(16)]


@case
def _cast_moved_before_swiglu() -> Program:
    return lambda g, u: (F.silu(g) * u).half(), [randn(2, 4, scale=1e5), randn(2, 4, scale=1e-5)]


@case
def _cast_moved_before_geglu() -> Program:
    return lambda g, u: (F.gelu(g) * u).half(), [randn(2, 4, scale=1e5), randn(2, 4, scale=1e-5)]


@case
def _cast_moved_before_rope() -> Program:
    def fn(q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        return rotated(q, angles.cos(), angles.sin()).half(), rotated(k, angles.cos(), angles.sin()).half()

    return fn, [randn(2, 3, 5, 8, plus=7e4), randn(2, 2, 5, 8, plus=7e4), torch.full((5, 8), math.pi / 4)]


class T5LayerNorm(nn.Module):
    """The norm of T5 as transformers has it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(self.weight.dtype)


@case
def _cast_moved_before_t5_norm() -> Program:
    return T5LayerNorm(8), [randn(2, 8, scale=1e5)]


@case
def _factor_moved_into_float16() -> Program:
    x = (torch.rand(6, 8, generator=torch.Generator().manual_seed(0)) * 100 + 2000).half()
    loss = lambda x, w: F.cross_entropy(F.linear(x, w).float() * 64, torch.arange(6))  # noqa: E731
    return loss, [x, randn(11, 8, scale=1e-3, dtype=torch.float16)]


# 54: what has an effect is dropped.


class Discarded(nn.Module):
    """The norm is there for its running statistics alone."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        self.norm(x)
        return F.silu(x) * x


@case
def _batch_norm_whose_result_nobody_reads() -> Program:
    return Discarded(nn.BatchNorm1d(4)), [randn(8, 4, plus=3.0)]


@case
def _instance_norm_whose_result_nobody_reads() -> Program:
    return Discarded(nn.InstanceNorm1d(4, track_running_stats=True)), [randn(2, 4, 8, plus=3.0)]


class ReadTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert self.norm.running_mean is not None
        before = self.norm.running_mean.double() + 0
        y = self.norm(x)
        return before, self.norm.running_mean.double() + 0, F.silu(y) * x


@case
def _statistics_before_and_after_batch_norm() -> Program:
    return ReadTwice(), [randn(8, 4, plus=3.0)]


class WeightedByVariance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(x)
        assert self.norm.running_var is not None
        return y, rms(x) * self.norm.running_var


@case
def _norm_weighted_by_running_statistics() -> Program:
    x = (torch.arange(8.0).view(2, 4) * 3).requires_grad_()
    return WeightedByVariance(), [x]


class WeightedBeforeACheckpoint(WeightedByVariance):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        assert self.norm.running_var is not None
        y = rms(x) * self.norm.running_var
        return checkpoint(self.norm, x, use_reentrant=False), y


@case
def _norm_weighted_by_statistics_that_a_checkpointed_region_writes() -> Program:
    return WeightedBeforeACheckpoint(), [randn(2, 4, plus=3.0)]


# 55: equal computations become one memory.


@case
def _equal_casts_that_are_returned() -> Program:
    def fn(p: Tensor, g: Tensor, u: Tensor) -> Any:
        return p.to(torch.float64).unsqueeze(0), p.to(torch.float64).unsqueeze(0), F.silu(g) * u

    return fn, [torch.ones(2), fixed(2, 4), fixed(2, 4)]


@case
def _equal_results_whose_views_are_returned() -> Program:
    def fn(p: Tensor, g: Tensor, u: Tensor) -> Any:
        return p.sin().unsqueeze(0), p.sin().unsqueeze(0), F.silu(g) * u

    return fn, [torch.ones(2), fixed(2, 4), fixed(2, 4)]


@case
def _equal_copies_whose_views_are_returned() -> Program:
    def fn(p: Tensor, g: Tensor, u: Tensor) -> Any:
        a, b = p.t().contiguous(), p.t().contiguous()
        return a[0], b[0], F.silu(g) * u

    return fn, [fixed(2, 3), fixed(2, 4), fixed(2, 4)]


@case
def _equal_results_written_in_another_segment() -> Program:
    def fn(x: Tensor, g: Tensor, u: Tensor) -> Any:
        a, b = x.sin()[0], x.sin()[0]
        h = F.silu(g) * u
        with torch.no_grad():
            a.mul_(0.0)
        return b * 1, h

    return fn, [torch.ones(2, 2), fixed(2, 4), fixed(2, 4)]


# 56: an argument is not read.


@case
def _floored_logits() -> Program:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(torch.div(F.linear(x, w), 0.5, rounding_mode="floor"), torch.arange(6))

    return fn, [randn(6, 8), fixed(11, 8)]


@case
def _truncated_logits_of_log_probabilities() -> Program:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        logits = torch.div(F.linear(x, w), 0.6, rounding_mode="trunc")
        return logits.log_softmax(-1).gather(-1, torch.arange(6)[:, None])

    return fn, [randn(6, 8), fixed(11, 8)]


@case
def _transpose_of_equal_axes() -> Program:
    return lambda x, w: F.cross_entropy(x @ w.transpose(-1, 1), torch.arange(6)), [randn(6, 8), randn(8, 8)]


@case
def _transpose_of_one_axis() -> Program:
    return lambda x, w: F.cross_entropy(x @ w.transpose(0, 0), torch.arange(6)), [randn(6, 8), randn(8, 8)]


@case
def _cap_of_zero() -> Program:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(0.0 * torch.tanh(F.linear(x, w) / 0.0), torch.arange(6))

    return fn, [randn(6, 8), randn(11, 8)]


def attention(make_mask: Callable[[int], Tensor]) -> Program:
    """Make a program whose attention has a mask for so many tokens."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, make_mask(q.shape[2]))

    return fn, [randn(1, 1, 6, 4), randn(1, 2, 6, 4)[:, :1].detach(), randn(1, 3, 6, 4)[:, :1].detach()]


@case
def _mask_from_a_slice_longer_than_the_positions() -> Program:
    return attention(lambda n: torch.arange(n)[:, None] >= torch.arange(n)[-16:][None, :])


@case
def _mask_from_whole_numbers_that_wrap() -> Program:
    start = 2**31 - 2

    def mask(n: int) -> Tensor:
        queries = torch.arange(n, dtype=torch.int32) + start
        return queries[:, None] >= torch.arange(n, dtype=torch.int32) + start

    return attention(mask)


@case
def _mask_whose_bits_are_read_in_another_dtype() -> Program:
    def mask(n: int) -> Tensor:
        bits = torch.ones(n, n, dtype=torch.int32).view(torch.float32).tril()  # 1.4e-45
        return torch.where(bits == 1, 0.0, -float("inf"))

    return attention(mask)


# 57: random numbers are drawn in another order.


@case
def _dropout_before_attention_with_dropout() -> Program:
    def fn(q: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.ones(5, 5, dtype=torch.bool).tril()
        before = F.dropout(q, 0.5)
        return F.scaled_dot_product_attention(q, q, q, mask, dropout_p=0.5), before

    return fn, [fixed(1, 2, 5, 4)]
