"""TRL's trainers with `llmk.trl.patch` and without: three steps of each are the same, or the trainer is refused."""

import ast
import importlib
import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("datasets", reason="TRL's trainers need datasets")
pytest.importorskip("peft")
pytest.importorskip("transformers")

import llmk.trl
from compile_tests.helpers.families import small_model
from compile_tests.helpers.trl_trainers import KINDS, STEPS, make_trainer, run_on_a_cpu, train
from llmk.trl.trainers import INSTEAD

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "PEFT": {"peft": True},
    "checkpointed": {"gradient_checkpointing": True},
    "accumulated": {"gradient_accumulation_steps": 2},
}
IN_EVERY_RUN = {
    ("sft_packing", "accumulated"), ("sft_padding_free", "checkpointed"), ("dpo_padding_free", "PEFT"),
    ("dpo_ref_model", "plain"), ("kto", "PEFT"), ("grpo", "checkpointed"), ("rloo", "plain"),
    ("async_grpo", "accumulated"), ("distillation_forward", "PEFT"),
}  # fmt: skip
"""Each way in which a trainer calls the head, in one setting; `--breadth` runs the others."""

CANCELLED = 4 * torch.finfo(torch.float32).eps * 5 * math.log(101)
"""The error that a difference of losses may have: advantages add up to zero, and each multiplies the exponential of a
difference between sums of 5 log-probabilities of about log(101), with a rounding of such a sum in four places."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model from which all trainers start."""
    return tmp_path_factory.mktemp("model")


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        pytest.param(kind, way, marks=() if (kind, way) in IN_EVERY_RUN else pytest.mark.breadth)
        for kind in KINDS
        for way in WAYS
    ],
)
def test_three_steps(kind: str, way: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Losses, metrics and parameters."""
    run_on_a_cpu(monkeypatch)
    options = {"gradient_checkpointing": False, **WAYS[way]}
    original, trainer = (make_trainer(kind, folder, **options) for _ in range(2))
    report = llmk.trl.patch(trainer)
    reference = getattr(trainer, "ref_model", None) is not None
    assert set(report.heads) == ({"model", "ref_model"} if reference else {"model"})
    want, got = train(original), train(trainer)
    assert trainer.model.is_gradient_checkpointing == (way == "checkpointed")
    assert report.calls["model"][1] >= STEPS
    assert sum("loss" in step for step in want) == STEPS
    assert any(step["loss"] for step in want if "loss" in step)
    for a, b in zip(got, want, strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=CANCELLED)
    for p, q in zip(trainer.model.parameters(), original.model.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def trainers_in_trl() -> set[str]:
    """The names of all trainers that TRL defines, without importing what an extra of TRL's is needed for."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    names = set()
    for path in Path(spec.origin).parent.rglob("*.py"):
        text = path.read_text()
        if "Trainer(" in text:
            names |= {node.name for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
    return {name for name in names if name.endswith("Trainer") and not name.startswith("_")}


REFUSED = {
    "trl.RewardTrainer": "trains a head of scores, .* llmk.transformers.PatchCallback replaces",
    **{
        f"trl.experimental.{package}.{name}": f"does not call .*override it with {INSTEAD[name]}, from hidden"
        for package, name in {
            "a2po": "A2POTrainer",
            "async_distillation": "AsyncDistillationTrainer",
            "cpo": "CPOTrainer",
            "gkd": "GKDTrainer",
            "gold": "GOLDTrainer",
            "iw_opd": "IWOPDTrainer",
            "online_dpo": "OnlineDPOTrainer",
            "orpo": "ORPOTrainer",
            "sdft": "SDFTTrainer",
            "sdpo": "SDPOTrainer",
            "server_distillation": "ServerDistillationTrainer",
            "tpo": "TPOTrainer",
        }.items()
    },
}


@pytest.mark.parametrize("path", REFUSED)
def test_trainers_that_do_not_ask_for_the_head(path: str):
    """They are refused by name, also where the class they come from puts a fused head into the model."""
    module, _, name = path.rpartition(".")
    trainer = object.__new__(getattr(importlib.import_module(module), name))
    trainer.model = small_model("Llama")
    with pytest.raises(TypeError, match=f"trainer: .*{name} {REFUSED[path]}"):
        llmk.trl.patch(trainer)


def test_every_refused_trainer_is_tried():
    names = {path.rpartition(".")[2] for path in REFUSED}
    assert names == trainers_in_trl() - {given.found()[0].__name__ for given in KINDS.values()}
