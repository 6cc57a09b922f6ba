"""Tests of operators with export, autocast, FLOP counts, memory; checkpointing is opcheck's promise `checkpointed`."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from compile_tests.helpers.rank_processes import server
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


@pytest.mark.parametrize(
    ("options", "kept_budget", "products"),
    [
        ({"chunk_size": 8}, 0, 3),
        ({"chunk_size": 4}, 0, 4),
        ({"chunk_size": 4}, 24 * 16 * 4, 3),
        ({"chunk_size": 4, "loss_type": "kto"}, 0, 3),
        ({}, 0, 3),
    ],
    ids=["a pair to a chunk", "half a pair", "exponentials kept", "a sequence to a chunk", "all in one"],
)
def test_flop_counter_of_pairs(
    options: dict[str, Any], kept_budget: int, products: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three products where a chunk holds whole groups or exponentials are kept, else a fourth: the logits again.

    The formula knows sizes alone: it counts tokens that are skipped too.
    """
    monkeypatch.setattr("llmk.ops.linear_loss.chunked.plan.KEPT_BUDGET", kept_budget)
    sequences = 1 if options.get("loss_type") == "kto" else 2
    x = torch.randn(3, sequences, 4, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(10, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    target = torch.arange(x.shape[:3].numel(), device=device).view(x.shape[:3]) % 10
    with FlopCounterMode(display=False) as counter:
        loss, *_ = torch.ops.llmk.fused_linear_preference(x, weight, target, **options)
        loss.backward()
    assert counter.get_total_flops() == products * 2 * x.numel() * 10


def test_gradients_nobody_wants_are_not_made(device: torch.device) -> None:
    x, weight = torch.randn(6, 8, device=device, requires_grad=True), torch.randn(10, 8, device=device)
    target = torch.arange(6, device=device)
    with FlopCounterMode(display=False) as counter:
        torch.ops.llmk.fused_linear_ce(x, weight, target)
    assert counter.get_total_flops() == 2 * 6 * 8 * 10 * 2
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        torch.ops.llmk.fused_linear_ce(x, weight, target)
    assert counter.get_total_flops() == 2 * 6 * 8 * 10


def peaks_of_the_logits(device: torch.device) -> list[float]:
    """The peak memory of forward and backward, of a mean and of a loss each, as a part of what the logits take."""
    N, V = 2048, 16384
    x, weight = (torch.randn(n, 16, device=device, requires_grad=True) for n in (N, V))
    target = torch.randint(0, V, (N,), device=device)

    def status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])

    def peak(n: int, reduction: str) -> int:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")
            before = status("VmRSS")
        torch.ops.llmk.fused_linear_ce(x[:n], weight, target[:n], reduction=reduction).sum().backward()
        return (torch.cuda.max_memory_allocated() if device.type == "cuda" else status("VmHWM")) - before

    return [max(peak(n, reduction) for n in (64, N)) / (4 * N * V) for reduction in ("mean", "none")]


def write_peaks(file: Path) -> None:
    file.write_text(json.dumps(peaks_of_the_logits(torch.device("cpu"))))


def test_the_logits_never_exist_whole(device: torch.device, tmp_path: Path) -> None:
    """In a process of its own, which holds nothing else."""
    if device.type == "cuda":
        peaks = peaks_of_the_logits(device)
    elif os.access("/proc/self/clear_refs", os.W_OK):
        process = server().Process(target=write_peaks, args=(tmp_path / "peaks.json",))
        process.start()
        process.join()
        peaks = json.loads((tmp_path / "peaks.json").read_text())
    else:
        pytest.skip("this system does not tell a process's peak memory over a stretch of its run")
    assert len(peaks) == 2
    assert max(peaks) < 1
