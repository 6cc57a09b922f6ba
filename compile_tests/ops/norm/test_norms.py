"""The norms of rows of equal values, and of rows so large that their squares are past float32."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from llmk.accuracy.rule import accuracy_violation
from llmk.opcheck.calls import call, tolerance_of
from llmk.opcheck.inputs import Outcome
from llmk.registry import OPS, Sample

# Several rows of a program; one; backward plain PyTorch and pieces of a row, and forward too.
COLUMNS = (5, 700, 9001, 20_000)


def sample(name: str, x: Tensor) -> Sample:
    """Make a sample with a weight and a bias: for group_norm two groups of channels, whose rows are those of x."""
    generator = torch.Generator().manual_seed(2)
    if name == "group_norm":
        columns = x.shape[-1]
        channels = next(c for c in (5, 4, 1) if columns % c == 0)
        x = x.reshape(x.shape[0] // 2, 2 * channels, columns // channels)
        size = x.shape[1]
    else:
        size = x.shape[-1]
    weight, bias = torch.randn(2, size, generator=generator, device="cpu").to(x.device, x.dtype).unbind()
    return Sample((x, 2, weight, bias) if name == "group_norm" else (x, weight, bias))


def run(name: str, x: Tensor, fn: Callable[..., Any] | None = None) -> Outcome:
    return call(OPS[name], sample(name, x), fn=fn)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("name", ["layer_norm", "group_norm"])
@pytest.mark.kernels
def test_rows_of_equal_values_have_no_deviation(name: str, columns: int, device: torch.device) -> None:
    """They are as exact as rows of zeros: what their mean rounds away would be divided by sqrt(eps)."""
    torch.manual_seed(0)
    x = torch.randn(4, columns, device=device)
    zeros = x.clone()
    for row, value in ((1, 3e18), (2, -0.1)):
        x[row], zeros[row] = value, 0.0
    ours = run(name, x.t().contiguous().t())
    own, exact = (run(name, t, fn=OPS[name].reference) for t in (zeros, zeros.double()))
    factor = tolerance_of(OPS[name], x.dtype).factor
    for actual, composition, right in zip(ours.results(), own.results(), exact.results(), strict=True):
        assert actual is not None
        assert composition is not None
        assert right is not None
        violation = accuracy_violation(actual, composition, right, factor)
        assert violation is None, str(violation)


def root_mean_squares(name: str, x: Tensor) -> Sample:
    weight = torch.linspace(-2, 2, x.shape[-1], device=x.device).to(x.dtype)
    if name == "qk_norm_rope":
        heads = x[None, None]
        cos, sin = torch.randn(2, 1, x.shape[0], x.shape[-1], device=x.device).to(x.dtype).unbind()
        return Sample((heads, heads.clone(), weight, weight, cos, sin))
    return Sample((x / 2, x / 2, weight) if name == "add_rms_norm" else (x, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "qk_norm_rope"])
@pytest.mark.kernels
def test_root_mean_squares_that_overflow_are_finite_where_pytorchs_are(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    """There it is infinite, and PyTorch's composition, which a graph may hold instead, gives 0."""
    torch.manual_seed(0)
    unit = 2 * torch.rand(5, 16, device=device) - 1
    x = torch.stack([size * row for size, row in zip((1.9e19, 1e20, 1e30, 1e36, 1e38), unit, strict=True)]).to(dtype)
    ours, theirs = (call(OPS[name], root_mean_squares(name, x), fn=fn) for fn in (None, OPS[name].reference))
    for actual, composition in zip(ours.results(), theirs.results(), strict=True):
        assert actual is not None
        assert composition is not None
        assert not (composition.isfinite() & ~actual.isfinite()).any()
