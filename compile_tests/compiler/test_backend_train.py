"""The model of the main example in plain PyTorch, trained through the backend, beside itself and llmk's."""

import sys
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from compile_tests.helpers.backend_checks import require_right, rewritten
from llmk.accuracy.neighbours import Change, copy_with_layout
from llmk.compiler import Report

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

from llama import BLOCKS, Llama, LlamaConfig

CONFIG = LlamaConfig(64, 32, 48, 2, 4, 2)


def losses(blocks: str, change: Change, report: Report | None = None) -> Tensor:
    """The results of five steps, from parameters that are changed."""
    model = Llama(CONFIG, BLOCKS[blocks], 8, device=torch.device("cpu"), dtype=torch.float32)
    model.initialize(0)
    for parameter in model.parameters():
        parameter.data = change(parameter.data)
    run = model if report is None else rewritten(model, report)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.randint(0, 64, (5, 2, 9), generator=torch.Generator().manual_seed(0))
    found = []
    for each in tokens:
        loss = run(each[:, :-1].contiguous(), each[:, 1:].contiguous())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return torch.stack(found)


def test_the_same_losses() -> None:
    report = Report()
    found = losses("plain", copy_with_layout, report), losses("llmk", copy_with_layout)
    assert report.graphs == 1
    assert report.replaced == {"add_rms_norm": 4, "fused_linear_ce": 1, "rms_norm": 1, "rope": 2, "swiglu": 2}
    with mock.patch.object(Tensor, "float", at_least_float32):
        for one in found:
            require_right([one], lambda change: [losses("plain", change)])


def at_least_float32(x: Tensor) -> Tensor:
    """`float`, for a model whose reference result is its own in float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
