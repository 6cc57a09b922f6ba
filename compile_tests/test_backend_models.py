"""Whole models through the backend: what it finds in each, and every gradient by the accuracy rule."""

import copy

import pytest
import torch
from backend_checks import rewritten
from plain_models import MODELS
from torch import Tensor, nn

from llmk.compiler import Report
from llmk.opcheck.accuracy import accuracy_violation


def trained(model: nn.Module, run: nn.Module, inputs: tuple[Tensor, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    """The loss and every gradient."""
    loss = run(*(x.to(dtype) if x.is_floating_point() else x for x in inputs))
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


@pytest.mark.parametrize("name", MODELS)
def test_found_and_equal(name: str) -> None:
    torch.manual_seed(0)
    example, report = MODELS[name], Report()
    model, inputs = example.model(), example.inputs()
    plain, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    got = trained(model, rewritten(model, report), inputs, torch.float32)
    want, truth = trained(plain, plain, inputs, torch.float32), trained(exact, exact, inputs, torch.float64)
    assert report.replaced == example.found, str(report)
    assert report.graphs == 1
    for key in truth:
        violation = accuracy_violation(got[key], want[key], truth[key])
        assert violation is None, f"{key}: {violation}"
