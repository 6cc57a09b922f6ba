"""The norms where numbers are so large that squares and sums of a row are past float32."""

import pytest
import torch
from torch import Tensor

from llmk.opcheck.calls import call
from llmk.registry import OPS, Sample
from llmk.registry.backends import INTERPRET

HUGE = {
    "both signs": lambda x: x,
    "one sign": lambda x: 0.9 + 0.1 * x,
    "equal": torch.ones_like,
    "one value": lambda x: torch.where(torch.arange(x.shape[-1], device=x.device) == 1, 1.0, torch.zeros_like(x)),
}


def sample(name: str, x: Tensor) -> Sample:
    if name == "group_norm":
        x = x.unflatten(1, (5, -1))
    weight, bias = torch.randn(2, x.shape[1], device=x.device).to(x.dtype)
    if name == "add_rms_norm":
        return Sample((x / 2, x / 2, weight))
    return Sample({"rms_norm": (x, weight), "layer_norm": (x, weight, bias), "group_norm": (x, 1, weight, bias)}[name])


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "layer_norm", "group_norm"])
@pytest.mark.parametrize(
    ("columns", "values"), [*[(columns, values) for columns in (5, 700) for values in HUGE], (20_000, "one sign")]
)
@pytest.mark.kernels
def test_finite_where_pytorchs_is(name: str, columns: int, values: str, device: torch.device) -> None:
    op = OPS[name]
    unit = HUGE[values](2 * torch.rand(columns, 5, device=device) - 1)
    for dtype in (torch.bfloat16,) if INTERPRET else (torch.bfloat16, torch.float32):
        x = torch.stack([size * unit[:, i] for i, size in enumerate((1.9e19, 1e20, 1e30, 1e36, 1.2e38))]).to(dtype)
        strided = x.t().contiguous().t()
        ours, theirs = (call(op, sample(name, strided), fn=fn) for fn in (op.overload, op.reference))
        pairs = [*zip(ours.outputs, theirs.outputs, strict=True)]
        # Gradients of the largest numbers overflow in a sum that PyTorch has too, where depends on its order.
        pairs += [(ours.gradients[key][:3], theirs.gradients[key][:3]) for key in theirs.gradients]  # type: ignore[index]
        assert not [i for i, (a, b) in enumerate(pairs) if (b.isfinite() & ~a.isfinite()).any()]


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "layer_norm", "group_norm"])
@pytest.mark.parametrize("columns", [5, 700, 20_000])
@pytest.mark.kernels
def test_nan_where_pytorchs_is(name: str, columns: int, device: torch.device) -> None:
    """A number that is not finite is not hidden from its row, forward or backward."""
    op = OPS[name]
    x = torch.randn(4, columns, device=device)
    x[1:, columns // 2] = torch.tensor([float("nan"), float("inf"), -float("inf")], device=device)
    ours, theirs = (call(op, sample(name, x), fn=fn) for fn in (op.overload, op.reference))
    for a, b in zip(ours.outputs, theirs.outputs, strict=True):
        assert torch.equal(a.isnan(), b.isnan())
    for key in theirs.gradients:
        a, b = ours.gradients[key], theirs.gradients[key]
        assert a is not None
        assert b is not None
        assert torch.equal(a.isfinite(), b.isfinite()), key
