"""`experts_implementation="llmk"` in small mixtures of transformers: the same as the model's own loop over experts."""

import copy
from typing import Any

import pytest
import torch
from families import assert_same_training, small_model, tokens
from torch import nn

from llmk.transformers.experts import GateForm, gate_form

SILU = GateForm("silu", interleaved=False, limit=0.0, alpha=1.0, up_offset=0.0)
FAMILIES = ["Mixtral", "Qwen3Moe", "GptOss", "DeepseekV3", "Glm4Moe", "Olmoe"]


def pair(family: str) -> tuple[Any, Any]:
    """A model with llmk's experts and the same one with transformers' plain loop."""
    original = small_model(family, use_cache=False, experts_implementation="eager")
    model = copy.deepcopy(original)
    model.set_experts_implementation("llmk")
    return model, original


def experts_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(type(module), "_apply_gate")]


@pytest.mark.parametrize("family", FAMILIES)
def test_training_is_that_of_the_models_own_loop(family: str) -> None:
    model, original = pair(family)
    expected = SILU
    if family == "GptOss":
        expected = GateForm("silu", interleaved=True, limit=7.0, alpha=1.702, up_offset=1.0)
    assert [gate_form(experts) for experts in experts_of(model)] == [expected] * len(experts_of(model))
    assert experts_of(model)
    assert_same_training(model, original, input_ids=tokens(2, 9))


@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss"])
def test_compiled_in_one_graph(family: str) -> None:
    model, original = pair(family)
    torch.compiler.reset()
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same_training(model, original, run, input_ids=tokens(2, 9))


def test_a_gate_that_the_operator_does_not_know_keeps_its_code() -> None:
    model, original = pair("Qwen3Moe")

    def gate(experts: Any, rows: torch.Tensor) -> torch.Tensor:
        gate, up = rows.chunk(2, dim=-1)
        return torch.tanh(gate) * up

    cls = type(experts_of(model)[0])
    before = cls._apply_gate
    try:
        cls._apply_gate = gate
        assert gate_form(experts_of(copy.deepcopy(model))[0]) is None
        original.set_experts_implementation("batched_mm")  # which calls the gate, as the plain loop does not
        assert_same_training(model, original, input_ids=tokens(2, 9))
    finally:
        cls._apply_gate = before


def test_experts_of_another_process_are_left_out() -> None:
    model, _ = pair("Mixtral")
    experts = experts_of(model)[0]
    x, weights = torch.randn(6, 32), torch.rand(6, 2)
    indices = torch.tensor([[0, 4], [4, 4], [1, 2], [3, 4], [4, 0], [2, 3]])  # 4 is none of the four experts
    got = experts(x, indices, weights)
    kept = (indices < 4).float()
    want = experts(x, indices.clamp(max=3), weights * kept)
    torch.testing.assert_close(got, want)
