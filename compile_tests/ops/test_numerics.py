"""Outputs and gradients of every operator against float64, by the accuracy rule.

The samples in bfloat16, and compiled, are opcheck's to compare: its promises `values_and_gradients`,
`compiled_samples` and `compiled`.
"""

import sys

import pytest
import torch

from compile_tests.helpers.right_calls import require_call
from llmk.opcheck import path_taken
from llmk.opcheck.calls import representatives
from llmk.ops.loss.cross_entropy_kernels import LONGEST_SHORT
from llmk.registry import OPS
from llmk.registry.devices import INTERPRET

DTYPES = [torch.float32] if INTERPRET else [torch.float32, torch.float16, torch.bfloat16]
"""Interpreted, a kernel takes a second where PyTorch takes a millisecond; opcheck asks for the other dtypes."""
ROWS = 7 if INTERPRET else 257


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPS)
@pytest.mark.kernels
def test_many_rows(name: str, dtype: torch.dtype, device: torch.device) -> None:
    op = OPS[name]
    assert op.resized is not None
    sample = op.resized(ROWS, device, dtype)
    require_call(op, sample)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPS)
@pytest.mark.kernels
def test_samples(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """In float16, whose formulas are those of float32, one of each choice and layout; a GPU's kernels get all."""
    op = OPS[name]
    samples = list(op.samples(device, dtype))
    if dtype == torch.float16 and device.type == "cpu":
        samples = representatives(op, samples, layouts=True)
    for sample in samples:
        require_call(op, sample)


@pytest.mark.parametrize("path", ["separate", "fused", "epilogue"])
@pytest.mark.kernels
def test_each_path_of_linear_act(path: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results are right on every path that can do a call, whichever the sizes and the device choose."""
    op = OPS["linear_act"]
    monkeypatch.setattr(sys.modules[op.module], "choose_path", lambda *_: path)
    for sample in op.samples(device, torch.bfloat16):
        if sample.args[0].numel() and (path != "epilogue" or sample.kwargs["activation"] == "relu"):
            require_call(op, sample)


@pytest.mark.parametrize("name", OPS)
def test_samples_cover_the_edges(name: str, device: torch.device) -> None:
    """No rows, one element somewhere, a size that is no power of two, and strides that are not the plain ones."""
    samples = list(OPS[name].samples(device, torch.float32))
    tensors = [[a for a in (*s.args, *s.kwargs.values()) if isinstance(a, torch.Tensor)] for s in samples]
    flat = [t for group in tensors for t in group]
    assert any(t.numel() == 0 for t in flat)
    assert any(size & (size - 1) for t in flat for size in t.shape)
    assert any(not t.is_contiguous() for t in flat)
    assert all(s.why for s in samples)


@pytest.mark.parametrize("V", [10, LONGEST_SHORT + 1])
@pytest.mark.parametrize("target", ["V", -1, 2**40 + 1])
@pytest.mark.kernels
def test_a_target_out_of_range(target: int | str, V: int, device: torch.device) -> None:
    """The CPU raises; kernels, which cannot without waiting, touch nothing outside and give NaN."""
    logits, linear_weight = torch.randn(4, V, device=device, requires_grad=True), torch.randn(V, V, device=device)
    targets = torch.tensor([1, V if target == "V" else target, 2, 3], device=device)
    for loss in (
        lambda: torch.ops.llmk.cross_entropy(logits, targets),
        lambda: torch.ops.llmk.fused_linear_ce(logits, linear_weight, targets),
        lambda: torch.ops.llmk.vocab_parallel_linear_ce(logits, linear_weight, targets),
    ):
        if path_taken(device) == "reference":
            with pytest.raises(IndexError, match="target: expected class indices"):
                loss()
        else:
            assert loss().isnan()
    if path_taken(device) != "reference":
        losses = torch.ops.llmk.cross_entropy(logits, targets, reduction="none")
        assert losses.isnan().tolist() == [False, True, False, False]
        (gradient,) = torch.autograd.grad(losses.sum(), logits)
        assert gradient.isnan().all(dim=1).tolist() == gradient.isnan().any(dim=1).tolist() == losses.isnan().tolist()
