"""Small mixtures of transformers by `experts_implementation="llmk"` and by `patch`: the same as their own experts."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from compile_tests.helpers.families import assert_same_training, small_model, tokens
from llmk.transformers import patch
from llmk.transformers.experts import GATE, GateForm, gate_form

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


# ---- patch


class Changed(nn.Module):
    """Things that a model's experts may do besides; `forward` is that of a subclass of theirs."""

    def forward(self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return super().forward(x, indices, weights)


class Limited(Changed):
    """A limit that only large values meet, and that the module's gate does not have."""

    def forward(self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return super().forward(x, indices, weights).clamp(-1000, 1000)


class Dropping(Changed):
    def forward(self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x, indices, weights), 0.1, self.training)


class Unweighted(Changed):
    """A constant for the routing weights: the values of a router that gives all the same, and other gradients."""

    def forward(self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return super().forward(x, indices, weights.detach())


class Shifted(Changed):
    """Other values with the same gradients."""

    def forward(self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return super().forward(x, indices, weights) + 1


class More(Changed):
    """A third parameter."""


def with_experts(change: type[nn.Module]) -> Any:
    """A model whose experts also do what `change` does."""
    model = small_model("Qwen3Moe", use_cache=False, experts_implementation="eager")
    for experts in experts_of(model):
        experts.__class__ = type(change.__name__, (change, type(experts)), {})
        if change is More:
            experts.scale = nn.Parameter(torch.ones(1))
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_patch_adopts_experts(family: str) -> None:
    original = small_model(family, use_cache=False, experts_implementation="eager")
    model = copy.deepcopy(original)
    report = patch(model, norms=False, mlps=False, rope=False, residuals=False, loss=False, masks=False)
    assert report.replaced == {"experts": len(experts_of(model))}
    assert {entry.text for entry in report.entries} == {"moe_experts"}
    assert "experts_forward" in report.source(report.entries[0].name)
    assert model.config._experts_implementation == "eager"
    for patched in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(type(e).forward is not type(e).__bases__[0].forward for e in experts_of(patched))
        assert_same_training(patched, original, input_ids=tokens(2, 9))
    report.unpatch()
    assert [type(e) for e in experts_of(model)] == [type(e) for e in experts_of(original)]


@pytest.mark.parametrize("change", [Limited, Dropping, Unweighted, Shifted, More])
def test_experts_that_do_more_are_left(change: type[nn.Module]) -> None:
    report = patch(with_experts(change), mlps=False)
    assert "experts" not in report.replaced
    assert len(report.left) == 2, report


class OtherInEvaluation(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(x) if self.training else nn.functional.gelu(x)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(1)
        return nn.functional.silu(x)


def dropping() -> nn.Module:
    return nn.Sequential(nn.SiLU(), nn.Dropout(0.5))


def counting() -> nn.Module:
    return nn.Sequential(Counting())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("activation", [OtherInEvaluation, dropping, counting])
def test_an_activation_that_is_more_than_a_function(activation: Any, training: bool) -> None:
    """It computes what it did, in training and in evaluation, whichever the model is in when it is patched."""
    original = small_model("Qwen3Moe", use_cache=False).train(training)
    for experts in experts_of(original):
        experts.act_fn = activation().train(training)
    model, ids = copy.deepcopy(original), tokens(2, 9)
    patch(model)
    assert not any(module.calls for module in model.modules() if isinstance(module, Counting))  # the trials' are not
    for mode in (True, False):
        outputs = []
        for m in (model, original):
            torch.manual_seed(0)
            outputs.append(m.train(mode)(input_ids=ids).logits)
        torch.testing.assert_close(*outputs)
    pairs = zip(model.modules(), original.modules(), strict=True)
    assert all(a.calls == b.calls for a, b in pairs if isinstance(b, Counting))


def test_hooks_on_an_activation_see_nothing_of_a_trial() -> None:
    model, seen = small_model("Qwen3Moe"), []
    for experts in experts_of(model):
        experts.act_fn.register_forward_hook(lambda *_: seen.append("forward"))
        experts.act_fn.register_full_backward_hook(lambda *_: seen.append("backward"))
    patch(model)
    assert not seen


def test_experts_that_only_look_changed_are_adopted() -> None:
    assert patch(with_experts(Changed)).replaced["experts"] == 2


def test_a_users_own_implementation_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(experts: Any, *args: torch.Tensor) -> torch.Tensor:
        return 2 * ALL_EXPERTS_FUNCTIONS["grouped_mm"](experts, *args)

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "doubled", doubled)
    model = small_model("Mixtral")
    model.config._experts_implementation = "doubled"
    assert "experts" not in patch(model, mlps=False).replaced


def test_a_gate_of_the_models_own_is_adopted_between_grouped_linears(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("Qwen3Moe", use_cache=False, experts_implementation="grouped_mm")

    def gate(experts: Any, rows: torch.Tensor) -> torch.Tensor:
        gate, up = rows.chunk(2, dim=-1)
        return torch.tanh(gate) * up

    monkeypatch.setattr(type(experts_of(model)[0]), GATE, gate)
    original = copy.deepcopy(model)
    report = patch(model)
    assert {e.text for e in report.entries if e.kind == "experts"} == {"moe_permute, grouped_linear, moe_unpermute"}
    assert_same_training(model, original, input_ids=tokens(2, 9))


def test_float64_runs_the_models_own() -> None:
    model = small_model("Mixtral", use_cache=False, experts_implementation="eager").double()
    original = copy.deepcopy(model)
    patch(model, loss=False)
    assert_same_training(model, original, input_ids=tokens(2, 9))
