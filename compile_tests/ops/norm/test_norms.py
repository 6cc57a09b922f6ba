"""The norms of rows so large that their squares, or their sums, are past float32: they are right all the same."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from llmk.accuracy.rule import accuracy_violation
from llmk.opcheck.calls import call, incoming_gradients, tolerance_of
from llmk.opcheck.inputs import Outcome
from llmk.registry import OPS, Sample

SIZES = (0, 63, 64, 65, 100, 127)
"""Powers of two of the rows' largest values: squares overflow past 2^64, sums of a few near 2^128."""
# Several rows of a program; one; longer than a program holds, backward, and forward too.
COLUMNS = (5, 700, 9001, 20_000)
SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "both signs": lambda unit: unit,
    "one sign": lambda unit: 0.95 + 0.05 * unit,
    "one value": lambda unit: torch.where(torch.arange(unit.shape[-1], device=unit.device) == 1, 1.0, 0.0 * unit),
}


def sample(name: str, x: Tensor, eps: float) -> Sample:
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
    return Sample((x, 2, weight, bias, eps) if name == "group_norm" else (x, weight, bias, eps))


def large_gradients(outputs: Sequence[Tensor]) -> list[Tensor]:
    """So that what is left of them after division by a row's deviation is no subnormal number."""
    return [2.0**30 * grad for grad in incoming_gradients(outputs)]


def run(name: str, x: Tensor, eps: float, fn: Callable[..., Any] | None = None) -> Outcome:
    return call(OPS[name], sample(name, x, eps), fn=fn, grads=large_gradients)


def require_right(name: str, x: Tensor, small: Tensor, scale: Tensor, eps: float) -> None:
    """Require what PyTorch's composition, and float64, give of `small`, the same rows divided by `scale`."""
    rows, factor = scale[:, None], tolerance_of(OPS[name], x.dtype).factor
    ours = run(name, x.t().contiguous().t(), eps)
    own, exact = (run(name, t, eps, fn=OPS[name].reference) for t in (small, small.double()))
    found = {"output": accuracy_violation(ours.outputs[0], own.outputs[0], exact.outputs[0], factor)}
    for key in ours.gradients:
        gradient, composition, right = (outcome.gradients[key] for outcome in (ours, own, exact))
        assert gradient is not None
        assert composition is not None
        assert right is not None
        if key == "input":
            gradient = (gradient.double().reshape(x.shape) * rows).reshape(gradient.shape).to(x.dtype)
        found[key] = accuracy_violation(gradient, composition, right, factor)
    assert not {key: str(violation) for key, violation in found.items() if violation}


@pytest.mark.parametrize(
    ("columns", "shape", "dtype"),
    [
        *[(5, shape, dtype) for shape in SHAPES for dtype in (torch.bfloat16, torch.float32)],
        (700, "one sign", torch.float32),
        (9001, "one sign", torch.bfloat16),
        (20_000, "one sign", torch.float32),
    ],
)
@pytest.mark.parametrize("name", ["layer_norm", "group_norm"])
@pytest.mark.kernels
def test_rows_whose_squares_overflow_are_right(
    name: str, columns: int, shape: str, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    unit = SHAPES[shape](2 * torch.rand(len(SIZES), columns, device=device) - 1).to(dtype)
    scale = 2 ** torch.tensor(SIZES, device=device, dtype=torch.float64)
    require_right(name, (unit.double() * scale[:, None]).to(dtype), unit, scale, 0.0)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("name", ["layer_norm", "group_norm"])
@pytest.mark.kernels
def test_rows_of_equal_values_have_no_deviation_at_any_size(name: str, columns: int, device: torch.device) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, columns, device=device)
    zeros = x.clone()
    for row, value in ((1, 3e38), (2, -1e25)):
        x[row], zeros[row] = value, 0.0
    require_right(name, x, zeros, torch.ones(4, device=device), 1e-5)


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
