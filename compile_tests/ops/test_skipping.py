"""Products that stop at a number of tokens that the device alone knows; here the interpreter is the device."""

from typing import Any

import pytest
import torch
from torch import Tensor

from llmk.opcheck.calls import call, require_accurate
from llmk.ops.linear_loss.chunked import _dynamic_rows, _linear, kept_rows
from llmk.ops.loss.cross_entropy_kernels import LONGEST_SHORT
from llmk.registry import OPS, Sample
from llmk.registry.devices import INTERPRET

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(
        not INTERPRET, reason="on a CPU the host knows how many tokens count; interpreted it asks nobody"
    ),
]

N, H, V = 11, 16, LONGEST_SHORT + 13  # rows of fewer classes have kernels that leave nothing


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fill what a product leaves unwritten past the count with NaN; give the counts of the chunks."""
    seen: list[int] = []

    def nan_filled(name: str) -> Any:
        product = getattr(_dynamic_rows, name)

        def run(a: Tensor, b: Tensor, end: Tensor) -> Tensor:
            result = product(a, b, end)
            result[int(end) :] = float("nan")
            seen.append(int(end))
            return result

        return run

    for name in ("outputs", "input_gradient"):
        monkeypatch.setattr(_linear, name, nan_filled(name))

    def float32_outputs(x: Tensor, weight: Tensor, end: Tensor, logits: Tensor) -> None:
        _dynamic_rows.float32_outputs(x, weight, end, logits)
        logits[int(end) :] = float("nan")
        seen.append(int(end))

    monkeypatch.setattr(_linear, "float32_outputs", float32_outputs)
    return seen


def inputs(features: int) -> tuple[Tensor, Tensor]:
    return torch.randn(N, features, dtype=torch.bfloat16), torch.randn(V, features, dtype=torch.bfloat16)


@pytest.mark.parametrize("counted", [0, 1, 7, N])
@pytest.mark.parametrize("chunk_size", [0, 4, 6])
@pytest.mark.parametrize("logits_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", ["fused_linear_ce", "linear_logprobs", "fused_linear_jsd"])
def test_nothing_past_the_count_is_read(
    name: str, logits_dtype: torch.dtype | None, chunk_size: int, counted: int, ends: list[int]
) -> None:
    target = torch.randint(0, V, (N,))
    target[torch.randperm(N)[counted:]] = -100
    kwargs: dict[str, Any] = {"skip_ignored": True, "chunk_size": chunk_size, "logits_dtype": logits_dtype}
    args: tuple[Tensor, ...] = (*inputs(H), target)
    if name == "fused_linear_jsd":
        args, kwargs = (*inputs(H), *inputs(24)), kwargs | {"labels": target}
    sample = Sample(args, kwargs, why=f"{counted} tokens count")
    require_accurate(OPS[name], sample, call(OPS[name], sample))
    kept = kept_rows(N, H, V, 4, chunk_size) if name == "linear_logprobs" and logits_dtype is None else 0
    first = min(chunk_size or N, kept or N)  # a block ends where the rows do whose logits are kept
    assert ends[0] == min(counted, first)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_bias_sums_no_row_past_the_count(reduction: str, ends: list[int]) -> None:
    target = torch.randint(0, V, (N,)).masked_fill(torch.arange(N) % 3 == 0, -100)
    bias = torch.randn(V, dtype=torch.bfloat16)
    kwargs = {"linear_bias": bias, "skip_ignored": True, "reduction": reduction, "chunk_size": 4}
    sample = Sample((*inputs(H), target), kwargs, why="a bias")
    require_accurate(OPS["fused_linear_ce"], sample, call(OPS["fused_linear_ce"], sample))
    assert ends


def test_rows_that_do_not_fit_take_all_tokens(ends: list[int]) -> None:
    target = torch.randint(0, V, (N,)).masked_fill(torch.arange(N) % 3 == 0, -100)
    sample = Sample((*inputs(H - 4), target), {"skip_ignored": True}, why="rows of 24 bytes")
    require_accurate(OPS["fused_linear_ce"], sample, call(OPS["fused_linear_ce"], sample))
    assert not ends


def test_a_weight_that_begins_between_aligned_addresses_takes_all_tokens(ends: list[int]) -> None:
    target = torch.randint(0, V, (N,)).masked_fill(torch.arange(N) % 3 == 0, -100)
    x, weight = inputs(H)
    wide = torch.zeros(V, H + 8, dtype=torch.bfloat16)
    wide[:, 1 : H + 1] = weight
    skipped = torch.ops.llmk.fused_linear_ce(x, wide[:, 1 : H + 1], target, skip_ignored=True)
    assert not ends
    torch.ops.llmk.fused_linear_ce(x, weight, target, skip_ignored=True)
    assert ends
    assert skipped.isfinite()
