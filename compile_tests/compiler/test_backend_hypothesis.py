"""Small models made of pieces in any order, some of which only look like what the backend knows."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compile_tests.helpers.backend_checks import THROUGH_AUTOGRAD, require_same, rewritten
from llmk.compiler import Report

pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

B, S, H, V = 2, 3, 8, 13
KINDS = {
    "norm": ("rms_norm", "add_rms_norm", "layer_norm"),
    "unit": ("swiglu", "geglu", "relu_squared"),
    "rotation": ("rope",),
    "loss": ("fused_linear_ce", "cross_entropy"),
}
Take = Callable[..., Tensor]
"""Gives the next parameter, of this shape."""

PIECES: dict[Callable[[Tensor, Take], Tensor], str] = {}
"""A layer from hidden states [B, S, H] to others, and which of the kinds it has one of, if any."""


def piece(kind: str = "") -> Callable[[Any], Any]:
    def add(fn: Callable[[Tensor, Take], Tensor]) -> Callable[[Tensor, Take], Tensor]:
        PIECES[fn] = kind
        return fn

    return add


def linear(x: Tensor, take: Take, size: int = H) -> Tensor:
    return F.linear(x, take(size, x.shape[-1]))


@piece("norm")
def rms_norm(x: Tensor, take: Take) -> Tensor:
    return take(H) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3))


@piece("norm")
def layer_norm(x: Tensor, take: Take) -> Tensor:
    return F.layer_norm(x, (H,), take(H), take(H))


@piece()
def sum_for_mean(x: Tensor, take: Take) -> Tensor:
    return take(H) * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-3))


@piece()
def eps_outside(x: Tensor, take: Take) -> Tensor:
    return take(H) * (x * (torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3) + 1e-3))


@piece()
def residual(x: Tensor, take: Take) -> Tensor:
    return x + linear(x, take)


@piece("unit")
def gated(x: Tensor, take: Take) -> Tensor:
    return linear(F.silu(linear(x, take)) * linear(x, take), take)


@piece("unit")
def packed(x: Tensor, take: Take) -> Tensor:
    gate, up = linear(x, take, 2 * H).chunk(2, dim=-1)
    return x + linear(up * F.gelu(gate), take)


@piece("unit")
def squared(x: Tensor, take: Take) -> Tensor:
    return linear(F.relu(linear(x, take)).square(), take)


@piece()
def gate_read_elsewhere(x: Tensor, take: Take) -> Tensor:
    activated = F.silu(linear(x, take))
    return activated * linear(x, take) - activated


@piece()
def gate_of_rows(x: Tensor, take: Take) -> Tensor:
    return F.silu(linear(x, take)) * linear(x, take, 1)


def halves_turned(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((b, -a) if back else (-b, a), dim=-1) * sin


def attended(x: Tensor, take: Take, back: bool) -> Tensor:
    phases = torch.arange(S, dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.1, 1.0, 0.1], dtype=x.dtype)
    q, k, v = (linear(x, take).view(B, S, 2, 4).transpose(1, 2) for _ in range(3))
    q, k = (halves_turned(y, phases.cos(), phases.sin(), back) for y in (q, k))
    return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@piece("rotation")
def attention(x: Tensor, take: Take) -> Tensor:
    return attended(x, take, back=False)


@piece("rotation")
def turned_backwards(x: Tensor, take: Take) -> Tensor:
    return attended(x, take, back=True)


def loss(x: Tensor, take: Take, target: Tensor) -> Tensor:
    return F.cross_entropy(linear(x, take, V).view(-1, V), target)


class Model:
    """The pieces in a row, with parameters made for them, and the hidden states or a loss of them."""

    def __init__(self, pieces: Sequence[Callable[..., Tensor]], with_loss: bool) -> None:
        self.pieces, self.with_loss, self.target = pieces, with_loss, torch.arange(B * S) % V
        generator = torch.Generator().manual_seed(0)
        self.arguments = [torch.randn(B, S, H, generator=generator).requires_grad_()]

        def make(*shape: int) -> Tensor:
            scale = 1.0 if len(shape) == 1 else shape[-1] ** -0.5
            self.arguments.append((scale * torch.randn(shape, generator=generator)).requires_grad_())
            return self.arguments[-1].detach()

        self.run(self.arguments[0].detach(), make)

    def run(self, x: Tensor, take: Take) -> Tensor:
        for fn in self.pieces:
            x = fn(x, take)
        return loss(x, take, self.target) if self.with_loss else x

    def __call__(self, x: Tensor, *parameters: Tensor) -> Tensor:
        left: Iterator[Tensor] = iter(parameters)
        return self.run(x, lambda *shape: next(left))

    @property
    def kinds(self) -> Counter[str]:
        return Counter(kind for fn in self.pieces if (kind := PIECES[fn])) + Counter({"loss": int(self.with_loss)})


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(pieces=st.lists(st.sampled_from(list(PIECES)), min_size=2, max_size=6), with_loss=st.booleans())
def test_pieces_in_any_order(pieces: list[Callable[..., Tensor]], with_loss: bool) -> None:
    """Each is found where it is one, and nothing else is; through AOTAutograd too."""
    model, report = Model(pieces, with_loss), Report()
    run = rewritten(model, report, then=THROUGH_AUTOGRAD)
    require_same(run, model, model.arguments)
    found = Counter({kind: sum(report.replaced.get(name, 0) for name in names) for kind, names in KINDS.items()})
    assert +found == model.kinds, str(report)
