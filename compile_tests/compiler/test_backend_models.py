"""Whole models through the backend: what it finds in each, and every gradient by the accuracy rule."""

import pytest
import torch

from compile_tests.helpers.backend_checks import require_same_step, rewritten
from compile_tests.helpers.plain_models import MODELS
from llmk.compiler import Report


@pytest.mark.parametrize("name", MODELS)
def test_found_and_equal(name: str) -> None:
    torch.manual_seed(0)
    example, report = MODELS[name], Report()
    model = example.model()
    require_same_step(model, rewritten(model, report), example.inputs())
    assert report.replaced == example.found, str(report)
    assert report.graphs == 1
