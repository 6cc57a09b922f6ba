"""Gradients of logits in float16, whose range is short, of the losses that are fused with a projection."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from compile_tests.helpers.right_calls import require_call
from llmk.opcheck.calls import call
from llmk.opcheck.search.cases import Cases
from llmk.opcheck.search.judge import judge
from llmk.ops.linear_loss.rows import products
from llmk.ops.linear_loss.rows.logits import float16_scale
from llmk.registry import OPS, Sample
from llmk.registry.devices import INTERPRET

N, H, V = 16, 16, 200


def half(*shape: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape)).half()


def sample_of(name: str, size: float = 3.0, **options: Any) -> Sample:
    """A call with logits of so many standard deviations, some classes of which are as rare as 1e-8."""
    x, weight, target = half(N, H), half(V, H, scale=size / H**0.5), torch.randint(V, (N,))
    bias = torch.linspace(0, -14, V).half()
    kwargs: dict[str, Any] = {"chunk_size": 9, "linear_bias": bias, **options}
    if name == "fused_linear_preference":
        return Sample((x.view(2, 2, 4, H), weight, target.view(2, 2, 4)), kwargs)
    if name.startswith("fused_linear_jsd"):
        teacher = half(N, H + 8), half(V, H + 8, scale=size / H**0.5)
        kwargs["teacher_linear_bias"] = bias
        return Sample((x, weight, *teacher, *((target,) if name.endswith("ce") else ())), kwargs)
    return Sample((x, weight, target), kwargs)


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("fused_linear_ce", {}),
    ("fused_linear_ce", {"reduction": "none"}),
    ("fused_linear_ce", {"reduction": "sum", "z_loss": 1.0, "softcap": 30.0}),
    ("fused_linear_ce", {"label_smoothing": 0.1, "z_loss": 1e-3}),
    ("fused_linear_ce", {"reduction": "none", "z_loss": 1.0}),
    ("fused_linear_ce_metrics", {"z_loss": 1.0}),
    ("fused_linear_jsd", {"beta": 0.0}),
    ("fused_linear_jsd", {"beta": 0.3, "temperature": 2.0}),
    ("fused_linear_jsd", {"beta": 1.0}),
    ("fused_linear_jsd", {"beta": 1.0, "logits_dtype": torch.float16}),
    ("fused_linear_jsd_ce", {"temperature": 1e-3, "softcap": 0.5}),
    ("fused_linear_jsd_ce", {"beta": 1.0, "ce_weight": 0.5}),
    ("fused_linear_policy", {"entropy_weight": torch.ones(N).half()}),
    ("fused_linear_preference", {}),
    ("linear_logprobs", {"temperature": 0.5}),
    ("vocab_parallel_linear_ce", {"z_loss": 1e-3}),
]
NAMES = [f"{name}-{'-'.join(options)}" for name, options in CALLS]


def as_a_scaler(outputs: Sequence[Tensor]) -> list[Tensor]:
    return [torch.full_like(output, 2.0**12) for output in outputs]


@pytest.mark.kernels
@pytest.mark.parametrize(("name", "options"), CALLS, ids=NAMES)
def test_a_loss_scale_keeps_small_probabilities(name: str, options: dict[str, Any]) -> None:
    """PyTorch's composition has the factor before it rounds the logits' gradient to float16; these know it later."""
    op, sample = OPS[name], sample_of(name, **options)
    require_call(op, sample, grads=as_a_scaler)


@pytest.mark.kernels
@pytest.mark.parametrize("size", [1.0, 30.0])
@pytest.mark.parametrize(("name", "options"), CALLS, ids=NAMES)
def test_the_range_is_used_and_not_left(
    name: str, options: dict[str, Any], size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the logits, also where a z-loss or the mean of a student's log-ratios makes large gradients."""
    found: list[float] = []
    note_gradients_of_logits(monkeypatch, found)
    gradients = call(OPS[name], sample_of(name, size, **options)).gradients
    assert all(gradient is not None and bool(gradient.isfinite().all()) for gradient in gradients.values())
    if not INTERPRET:
        assert not found  # plain PyTorch has these in float32
        return
    assert max(found) <= 2**15
    if options.get("beta") != 0.3:  # which is far below its bound where nearly all classes are rare
        assert max(found) >= 2**7


def note_gradients_of_logits(monkeypatch: pytest.MonkeyPatch, found: list[float]) -> None:
    """Note the largest number of each float16 matrix of gradients that is multiplied."""
    weight_gradient = products.weight_gradient

    def noted_by_kernels(p: Tensor, scaled: Tensor, total: Tensor, count: Tensor, **options: Any) -> None:
        found.append(float(p[: int(count)].abs().max()))
        assert scaled[: int(count)].isfinite().all()
        weight_gradient(p, scaled, total, count, **options)

    monkeypatch.setattr(products, "weight_gradient", noted_by_kernels)


@pytest.mark.parametrize("bound", [0.0, 1e-42, 1e-5, 0.75, 1.0, 7.0, 3e38, float("inf"), float("nan")])
def test_the_scale_is_a_power_of_two(bound: float) -> None:
    scale = float16_scale(torch.float16, (True, False, False), lambda: torch.tensor(bound, dtype=torch.float32))
    assert scale is not None
    assert torch.frexp(scale).mantissa == 0.5
    if 1e-20 < bound < 1e30:
        assert 2**14 <= scale * bound < 2**15
    if not bound < float("inf"):
        assert scale == 1


def test_other_dtypes_are_not_scaled() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        assert float16_scale(dtype, (True, True, True), lambda: pytest.fail("a bound was asked for")) is None


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("fused_linear_ce", 30023),
        ("fused_linear_ce", 30192),
        ("fused_linear_ce_metrics", 30025),
        ("fused_linear_ce_metrics", 31159),
        ("fused_linear_jsd", 30017),
        ("fused_linear_jsd", 30114),
        ("fused_linear_jsd_ce", 30399),
        ("fused_linear_jsd_ce", 30633),
        ("fused_linear_jsd_ce", 30731),
        ("fused_linear_policy", 30074),
        ("fused_linear_policy", 30098),
        ("fused_linear_preference", 30229),
    ],
)
def test_calls_that_a_search_found(name: str, seed: int) -> None:
    assert judge(OPS[name], Cases(OPS[name], torch.device("cpu"), torch.float16)[seed]) is None
