"""Tests of operators with export, autocast, FLOP counts, memory; checkpointing is opcheck's promise `checkpointed`."""

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from compile_tests.helpers.observers import LargestTensor
from llmk.opcheck.calls import as_list, call, prepare
from llmk.opcheck.foreign.adapters import adapted
from llmk.registry import OPS


@pytest.mark.parametrize("name", OPS)
def test_export_keeps_the_op(name: str, device: torch.device, tmp_path: Path) -> None:
    op = OPS[name]
    assert op.resized is not None
    args, kwargs, _ = prepare(op, op.resized(8, device, torch.float32), ())

    class Module(torch.nn.Module):
        def forward(self, *args):
            return op.overload(*args, **kwargs)

    program = torch.export.export(Module(), tuple(args))
    assert op.overload in [node.target for node in program.graph.nodes]
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    for a, b in zip(as_list(loaded(*args)), as_list(op.overload(*args, **kwargs)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", OPS)
def test_meta_device(name: str) -> None:
    """Shapes without numbers, forward and backward, as for a model that is only being planned."""
    cpu = torch.device("cpu")
    op = adapted(OPS[name], cpu, [torch.float32])  # tensors of a list are arguments of their own
    assert op.resized is not None
    outcome = call(op, op.resized(8, cpu, torch.float32), change=lambda t: t.detach().to("meta"))
    assert all(output.is_meta for output in outcome.outputs)
    for wanted, gradient in outcome.gradients.items():
        assert gradient is not None
        assert gradient.shape == outcome.inputs[wanted].shape


def test_autocast(device: torch.device) -> None:
    """The projection runs in autocast's dtype, as torch's would; its gradients come back in the parameters' dtype."""
    x = torch.randn(6, 8, device=device, requires_grad=True)
    weight, target = torch.randn(10, 8, device=device, requires_grad=True), torch.arange(6, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        loss = torch.ops.llmk.fused_linear_ce(x, weight, target)
        normed = torch.ops.llmk.rms_norm(x.bfloat16(), weight[0])
    expected = torch.ops.llmk.fused_linear_ce(x.bfloat16(), weight.bfloat16(), target)
    assert torch.equal(loss, expected)
    assert normed.dtype == torch.bfloat16
    dx, dw = torch.autograd.grad(loss, (x, weight))
    assert dx.dtype == dw.dtype == torch.float32


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_flop_counter(reduction: str, device: torch.device) -> None:
    """Three products, and a fourth where the backward pass makes the logits again."""
    x, weight = (
        torch.randn(6, 8, device=device, requires_grad=True),
        torch.randn(10, 8, device=device, requires_grad=True),
    )
    with FlopCounterMode(display=False) as counter:
        torch.ops.llmk.fused_linear_ce(x, weight, torch.arange(6, device=device), reduction=reduction).sum().backward()
    assert counter.get_total_flops() == 2 * 6 * 8 * 10 * (3 if reduction == "mean" else 4)


def test_gradients_nobody_wants_are_not_made(device: torch.device) -> None:
    x, weight = torch.randn(6, 8, device=device, requires_grad=True), torch.randn(10, 8, device=device)
    target = torch.arange(6, device=device)
    with FlopCounterMode(display=False) as counter:
        torch.ops.llmk.fused_linear_ce(x, weight, target)
    assert counter.get_total_flops() == 2 * 6 * 8 * 10 * 2
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        torch.ops.llmk.fused_linear_ce(x, weight, target)
    assert counter.get_total_flops() == 2 * 6 * 8 * 10


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_logits_never_exist_whole(reduction: str, device: torch.device) -> None:
    """No tensor of the forward and the backward pass is as large; of a GPU the memory says so."""
    N, V = 1024, 4096
    x, weight = (torch.randn(n, 16, device=device, requires_grad=True) for n in (N, V))
    target = torch.randint(0, V, (N,), device=device)
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    with LargestTensor() as seen:
        torch.ops.llmk.fused_linear_ce(x, weight, target, reduction=reduction).sum().backward()
    assert seen.most < N * V / 2
    if device.type == "cuda":
        assert torch.cuda.max_memory_allocated() - before < 4 * N * V
