"""The model of the main example in plain PyTorch, trained through the backend, beside itself and llmk's."""

import sys
from pathlib import Path

import pytest
import torch
from backend_checks import rewritten

from llmk.compiler import Report

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

from llama import BLOCKS, Llama, LlamaConfig

CONFIG = LlamaConfig(64, 32, 48, 2, 4, 2)


def losses(blocks: str, report: Report | None = None) -> list[float]:
    model = Llama(CONFIG, BLOCKS[blocks], 8, device=torch.device("cpu"), dtype=torch.float32)
    model.initialize(0)
    run = model if report is None else rewritten(model, report)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.randint(0, 64, (5, 2, 9), generator=torch.Generator().manual_seed(0))
    found = []
    for each in tokens:
        loss = run(each[:, :-1].contiguous(), each[:, 1:].contiguous())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_the_same_losses() -> None:
    report = Report()
    found = losses("plain", report)
    assert report.graphs == 1
    assert report.replaced == {"add_rms_norm": 4, "fused_linear_ce": 1, "rms_norm": 1, "rope": 2, "swiglu": 2}
    assert found == pytest.approx(losses("plain"), rel=1e-5)
    assert found == pytest.approx(losses("llmk"), rel=1e-5)
