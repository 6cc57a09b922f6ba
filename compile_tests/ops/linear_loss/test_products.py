"""The three products of a loss over a vocabulary: rows far below, numbers that are none, equal bits."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from compile_tests.helpers.right_calls import require_call
from llmk.accuracy.rule import unit_in_last_place
from llmk.opcheck.calls import call, require_accurate
from llmk.ops.linear_loss.chunked import CompactedTokens
from llmk.ops.linear_loss.chunked.plan import Plan
from llmk.ops.linear_loss.kernels.transform import Transform
from llmk.ops.linear_loss.rows import products
from llmk.ops.linear_loss.rows.classes import Numbering
from llmk.ops.linear_loss.rows.engine import SoftmaxRows
from llmk.ops.linear_loss.rows.products import Rows, Weights
from llmk.ops.linear_loss.rows.projection import projection_of
from llmk.registry import OPS, Sample
from llmk.registry.devices import INTERPRET

pytestmark = pytest.mark.kernels

H, V = 24, 45
"""Two tiles of classes in the interpreter, and no multiple of a block."""
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
NAMES = pytest.mark.parametrize("name", ["fused_linear_ce", "linear_logprobs"])
interpreted = pytest.mark.skipif(not INTERPRET, reason="what kernels do is planted; on a GPU their programs are built")


def head(tokens: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(shape, generator=generator) for shape in ((tokens, H), (V, H)))
    return x.to(dtype), (weight / H**0.5).to(dtype), torch.randint(0, V, (tokens,), generator=generator)


def sample_of(name: str, x: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Sample:
    kwargs = {"reduction": "none"} if name == "fused_linear_ce" else {}
    return Sample((x, weight, target), kwargs | options, why="products")


NATS = [20, 59, 61, 80, 87, 89, 104, 300, 3000]


@DTYPES
@NAMES
def test_rows_whose_loss_is_so_many_nats(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Exponentials relative to the target's logit leave float32's and bfloat16's range at 88; 2**-126 is at 87."""
    x, weight, _ = head(len(NATS), dtype)
    bias = torch.zeros(V)
    bias[: len(NATS)] = -torch.tensor(NATS, dtype=torch.float32)
    args = tuple(each.to(device) for each in (x, weight, torch.arange(len(NATS))))
    # Sums with entropies are relative to a logit of each tile, those without to the target's.
    for options in ({}, {"entropy": False}) if name == "linear_logprobs" else ({},):
        sample = sample_of(name, *args, linear_bias=bias.to(device, dtype), chunk_size=4, **options)
        found = call(OPS[name], sample)
        require_accurate(OPS[name], sample, found)
        loss = found.outputs[0].detach().abs().cpu()
        assert (loss >= torch.tensor(NATS, dtype=torch.float32) - 1).all()


SPECIAL: dict[str, tuple[str, Any, float]] = {
    "a hidden state of NaN": ("hidden states", (1, 5), math.nan),
    "a hidden state of infinity": ("hidden states", (1, 5), math.inf),
    "a target's logit of -infinity": ("bias", 3, -math.inf),
    "a target's logit of infinity": ("bias", 3, math.inf),
    "another logit of infinity": ("bias", 40, math.inf),
    "other logits of -infinity": ("bias", slice(4, 36), -math.inf),
    "all logits of -infinity": ("bias", slice(0, V), -math.inf),
    "a logit of NaN": ("bias", 40, math.nan),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", SPECIAL)
@NAMES
def test_numbers_that_are_none_are_where_pytorch_has_them(
    name: str, case: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Values and gradients, whose other numbers are accurate."""
    (x, weight, _), bias, target = head(3, dtype), torch.zeros(V), torch.tensor([3, 3, 41])
    where, place, number = SPECIAL[case]
    {"hidden states": x, "bias": bias}[where][place] = number
    sample = sample_of(name, x.to(device), weight.to(device), target.to(device), linear_bias=bias.to(device, dtype))
    fn = None if name == "fused_linear_ce" else log_probabilities
    found, wanted = call(OPS[name], sample, fn=fn), call(OPS[name], sample, fn=composition(name))
    torch.testing.assert_close(found.outputs[0], wanted.outputs[0], equal_nan=True, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(found.gradients, wanted.gradients, equal_nan=True, rtol=2e-2, atol=2e-2)


def log_probabilities(*args: Tensor, **options: Any) -> Tensor:
    return torch.ops.llmk.linear_logprobs(*args, **options)[0]


def composition(name: str) -> Any:
    def loss(x: Tensor, weight: Tensor, target: Tensor, *, linear_bias: Tensor, **_: Any) -> Tensor:
        logits = x.float() @ weight.float().t() + linear_bias.float()
        losses = torch.nn.functional.cross_entropy(logits, target, reduction="none")
        return losses if name == "fused_linear_ce" else -losses

    return loss


@pytest.fixture
def nan_where_nothing_is_written() -> Iterator[None]:
    """PyTorch fills uninitialized tensors with NaN then."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def exponentials(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Make P by the kernel, and the same in float64, with a column of 0 for each target."""
    weights, device = Weights(weight, None, None, Transform()), x.device
    layer, tokens = projection_of(x, weights, None, by_kernels=True), CompactedTokens((len(x),))
    rows = SoftmaxRows(layer, tokens, Plan(len(x), True), target.unsqueeze(1), -100)
    chunk, _ = rows.chunk(slice(0, len(x)))
    p = torch.full((len(x), V), float("nan"), dtype=x.dtype, device=device)
    numbers = chunk.y_own.unsqueeze(0)
    products.launch_logits(Rows(x, numbers, chunk.own, chunk.end), weights, p, None)
    logits = x.double() @ weight.double().t()
    exact = (logits - chunk.y_own.double().unsqueeze(-1)).exp()
    return p, exact.scatter(1, target.unsqueeze(1), 0.0)


def is_rounded_once(p: Tensor, exact: Tensor) -> bool:
    """True within half a unit, and what float32 logits and their exponentials are off by."""
    error = (p.double() - exact).abs()
    return bool((error <= 0.505 * unit_in_last_place(exact, p.dtype)).all())


@interpreted
def test_ids_in_another_order_of_memory(device: torch.device) -> None:
    """A sort returns such ids of a transposed support."""
    x, weight, _ = (each.to(device) for each in head(5, torch.bfloat16))
    ids = torch.arange(35, device=device).view(7, 5).t()
    weights, numbering = Weights(weight, None, None, Transform()), Numbering(-100, 0, V)
    found = products.located_classes(x, weights, ids, numbering, Transform())
    assert torch.equal(found.columns, ids.int())
    exact = (x.double().unsqueeze(1) * weight.double()[ids]).sum(-1)
    sizes = (x.double().unsqueeze(1) * weight.double()[ids]).abs().sum(-1)
    assert ((found.y - exact).abs() <= H * 2**-24 * sizes).all()  # each of H terms may be rounded once


@interpreted
def test_exponentials_are_rounded_once() -> None:
    p, exact = exponentials(*head(9, torch.bfloat16))
    assert is_rounded_once(p, exact)


def require(name: str, sample: Sample) -> None:
    require_call(OPS[name], sample)


@interpreted
@pytest.mark.parametrize("programs", [1, 3, 5, 7])
def test_programs_without_a_tile_of_dx_make_more_of_dw(
    programs: int, monkeypatch: pytest.MonkeyPatch, nan_where_nothing_is_written: None
) -> None:
    """Each tile once: of three and six tiles of dx, whose sums are twice as long as those of 24 tiles of dW."""
    monkeypatch.setattr(products, "num_programs", lambda device, per_multiprocessor: programs)
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn((size, 72), generator=generator).bfloat16() for size in (25, 700))
    target = torch.randint(0, 700, (25,), generator=generator)
    require("fused_linear_ce", sample_of("fused_linear_ce", x, weight / 8, target, chunk_size=17))


@interpreted
@NAMES
def test_a_row_has_the_same_bits_beside_others(name: str) -> None:
    """Its results and its gradient, in other numbers of rows and in other chunks."""
    x, weight, target = head(19, torch.bfloat16)
    target[4] = -100
    bias = torch.linspace(-70, 1, V).bfloat16()  # some rows are far below

    def results(rows: slice, **options: Any) -> tuple[Tensor, ...]:
        sample = sample_of(name, x[rows], weight, target[rows], linear_bias=bias, **options)
        found = call(OPS[name], sample, ["input"], grads=lambda outputs: [torch.ones_like(each) for each in outputs])
        gradient = found.gradients["input"]
        assert gradient is not None
        return (*(each.detach() for each in found.outputs), gradient)

    whole = results(slice(0, 19))
    for rows, options in ((slice(0, 19), {"chunk_size": 7}), (slice(3, 6), {}), (slice(17, 19), {"chunk_size": 1})):
        for found, wanted in zip(results(rows, **options), whole, strict=True):
            assert torch.equal(found, wanted[rows])
