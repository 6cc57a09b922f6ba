"""`llmk.losses.sampling_ratio` against the papers' formulas in float64, one sequence at a time."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from llmk import losses

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

LEVELS = ("token", "sequence", "geometric")
BOUNDS: list[tuple[str, float | None, float | None]] = [
    ("truncate", None, 3.0),
    ("truncate", 0.5, None),
    ("truncate", 0.8, 1.2),
    ("mask", None, 1.5),
    ("mask", 0.9, None),
    ("mask", None, None),
    ("icepop", 0.5, 5.0),
    ("icepop", 1.0, 1.0),
]


def bounded(ratio: float, mode: str, low: float | None, high: float | None) -> float:
    low, high = (-math.inf if low is None else low), (math.inf if high is None else high)
    if mode == "truncate":
        return min(max(ratio, low), high)
    return ratio if low <= ratio <= high else 0.0


def reference(rows: Sequence[tuple[Tensor, Tensor, Tensor]], level: str, *bounds: Any) -> list[list[float]]:
    """Compute each sequence's ratios, or the one that it has, from its log-probabilities, the sampler's and mask."""
    found = []
    for policy, sampler, mask in rows:
        difference = [
            0.0 if not counts or math.isnan(s) else p - s
            for p, s, counts in zip(policy.double().tolist(), sampler.double().tolist(), mask.tolist(), strict=True)
        ]
        count = max(sum(mask.tolist()), 1)
        logs = {"token": difference, "sequence": [sum(difference)], "geometric": [sum(difference) / count]}[level]
        found.append([bounded(math.exp(x), *bounds) for x in logs])
    return found


def drawn(rows: int, columns: int, seed: int = 0, scale: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    policy = -torch.rand(rows, columns, generator=generator) * 4
    sampler = policy + scale * torch.randn(rows, columns, generator=generator)
    sampler = torch.where(torch.rand(rows, columns, generator=generator) < 0.1, float("nan"), sampler)
    return policy, sampler, torch.rand(rows, columns, generator=generator) < 0.7


def assert_near(ratio: Tensor, right: Tensor) -> None:
    """The ratio is as near as float32's exponential of a rounded float32 logarithm, and no nearer than at a bound."""
    assert ratio.dtype == torch.float32
    torch.testing.assert_close(ratio.double(), right, rtol=2**-20, atol=0.0)


@pytest.mark.parametrize(
    ("level", "mode", "low", "high"),
    [(level, *bounds) for level in LEVELS for bounds in BOUNDS if level == "token" or bounds[0] != "icepop"],
)
def test_ratios(level: str, mode: str, low: float | None, high: float | None, device: torch.device) -> None:
    policy, sampler, mask = drawn(5, 9)
    mask[3] = False
    given = (policy.to(device), sampler.to(device), mask.to(device))
    ratio, metrics = losses.sampling_ratio(*given, level=level, mode=mode, low=low, high=high)
    right = torch.tensor(reference(list(zip(policy, sampler, mask, strict=True)), level, mode, low, high))
    right = right.double() if level == "token" else right[:, 0].double()
    assert_near(ratio.cpu(), right)
    counted = right[mask] if level == "token" else right
    name = "sampling/importance_sampling_ratio"
    for what, value in (("min", counted.min()), ("mean", counted.mean()), ("max", counted.max())):
        assert metrics[f"{name}/{what}"].item() == pytest.approx(value.item(), rel=1e-5)
    exact = reference(list(zip(policy, sampler, mask, strict=True)), level, "mask", None, None)
    flat = torch.tensor(exact)[mask] if level == "token" else torch.tensor(exact)
    assert metrics[f"{name}/below"].item() == pytest.approx((flat < (low or 0.0)).float().mean().item())
    assert metrics[f"{name}/above"].item() == pytest.approx((flat > (high or math.inf)).float().mean().item())
    r = torch.where(sampler.isnan() | ~mask, 0.0, policy - sampler).double()
    assert metrics["sampling/kl"].item() == pytest.approx(((r.exp() - 1 - r).sum() / mask.sum()).item(), rel=1e-5)


@given(
    st.integers(0, 1000),
    st.lists(st.integers(0, 6), min_size=1, max_size=5),
    st.sampled_from(["sequence", "geometric"]),
)
@settings(max_examples=40, deadline=None)
def test_a_packed_batch_is_its_sequences(seed: int, lengths: list[int], level: str) -> None:
    total = sum(lengths)
    policy, sampler, mask = drawn(1, total, seed)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).unsqueeze(0)
    options: dict[str, Any] = {"level": level, "mode": "mask", "high": 1.3}
    ratio, _ = losses.sampling_ratio(policy, sampler, mask, sequence_ids=ids, num_sequences=len(lengths), **options)
    rows = list(zip(*(x[0].split(lengths) for x in (policy, sampler, mask)), strict=True))
    assert_near(ratio, torch.tensor(reference(rows, level, "mask", None, 1.3)).double().flatten())


def test_grpo_takes_it(device: torch.device) -> None:
    """The ratio is a factor of each token's loss, and without a gradient."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, 5, 8, generator=generator).to(device), torch.randn(11, 8, generator=generator).to(device)
    target, advantages = torch.randint(11, (3, 5), generator=generator).to(device), torch.tensor([1.0, -0.5, 2.0])
    policy, sampler, _ = (value.to(device) for value in drawn(3, 5, 1))
    for level in LEVELS:
        ratio, _ = losses.sampling_ratio(policy.requires_grad_(), sampler, target >= 0, level=level)
        assert not ratio.requires_grad
        loss, metrics = losses.grpo(x, weight, target, advantages.to(device), importance_sampling_ratio=ratio)
        assert loss.isfinite()
        assert metrics["sampling/importance_sampling_ratio/max"].item() == pytest.approx(ratio.max().item())


def test_compiled_with_any_number_of_rows(device: torch.device) -> None:
    def fn(policy: Tensor, sampler: Tensor, mask: Tensor) -> Tensor:
        return losses.sampling_ratio(policy, sampler, mask, level="geometric", mode="mask", high=1.1)[0]

    compiled = torch.compile(fn, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 4, 7):
        given = [value.to(device) for value in drawn(rows, 6, rows)]
        torch.testing.assert_close(compiled(*given), fn(*given), rtol=0, atol=0)


OK = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((OK, OK, OK == 0), {"low": 2.0, "high": 1.0}, r"low: expected at most high \(1\), got 2"),
        ((OK, OK, OK == 0), {"high": None}, "high: expected a number with mode 'truncate'"),
        ((OK, OK, OK == 0), {"mode": "icepop"}, "low: expected a number with mode 'icepop'"),
        (
            (OK, OK, OK == 0),
            {"mode": "icepop", "low": 0.5, "high": 5.0, "level": "sequence"},
            "level: expected 'token' with mode 'icepop'",
        ),
        ((OK, OK, OK == 0), {"sequence_ids": OK.long()}, r"sequence_ids: expected logps of shape \[1, T\]"),
    ],
)
def test_a_wrong_call_names_the_argument(args: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        losses.sampling_ratio(*args, **options)
