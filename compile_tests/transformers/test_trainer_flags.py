"""A patched model under the flags that `Trainer` and accelerate are used with: the losses of the unpatched one."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

from torch._dynamo.utils import counters  # noqa: E402

from compile_tests.helpers.families import small_model, tokens  # noqa: E402
from llmk.compiler import Report, backend  # noqa: E402
from llmk.registry.private import compilers  # noqa: E402
from llmk.transformers import PatchCallback, patch  # noqa: E402


def small_llama() -> Any:
    """One layer: flags are the same for any number of them."""
    return small_model("Llama", num_hidden_layers=1)


FLAGS: dict[str, dict[str, Any]] = {
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "torch_compile": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    "bf16": {"bf16": True},
}
WITHIN = {"bf16": torch.finfo(torch.bfloat16).eps}
"""The difference allowed between two losses: one unit in bfloat16's last place, or what float32 steps lose."""


@pytest.fixture(autouse=True)
def _on_the_cpu(device: torch.device):
    if device.type != "cpu":
        pytest.skip("flags are the same on every device")
    torch._dynamo.reset()
    counters.clear()
    # accelerate keeps one process' first settings
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("flag", FLAGS)
def test_trainer(flag: str, tmp_path: Path):
    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **FLAGS[flag],
    )
    rows = [{"input_ids": row, "labels": row} for row in tokens(8, 12).tolist()]

    def losses(*callbacks: Any) -> list[float]:
        torch._dynamo.reset()
        trainer = transformers.Trainer(small_llama(), settings, train_dataset=rows, callbacks=list(callbacks))
        trainer.train()
        assert trainer.model.is_gradient_checkpointing == (flag == "gradient_checkpointing")
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    want = losses()
    counters.clear()
    callback = PatchCallback()
    got = losses(callback)
    assert callback.report is not None
    assert callback.report.replaced["loss"] == 1
    assert len(want) == 2
    assert got == pytest.approx(want, rel=WITHIN.get(flag, 1e-4))
    assert (counters["stats"]["unique_graphs"] > 0) == (flag == "torch_compile")
    assert not counters["graph_break"]


def test_accelerate():
    """Mixed precision, accumulation and compilation at once, in a loop of one's own."""
    gc.collect()  # accelerate asks a trainer's loader, as long as that lives, where accumulation ends
    ids = tokens(4, 12)

    def losses(patched: bool) -> list[float]:
        torch._dynamo.reset()
        accelerator = accelerate.Accelerator(
            cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2, dynamo_backend="aot_eager"
        )
        model = small_llama()
        if patched:
            assert patch(model).replaced["loss"] == 1
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        found = []
        for rows in (ids[:2], ids[2:], ids[:2], ids[2:]):
            with accelerator.accumulate(model):
                loss = model(input_ids=rows, labels=rows).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            found.append(loss.item())
        return found

    want = losses(False)
    assert losses(True) == pytest.approx(want, rel=WITHIN["bf16"])
    assert counters["stats"]["unique_graphs"] > 0


class Steps:
    """Two steps of a model in a trainer, and their losses."""

    def __init__(self, folder: Path) -> None:
        self.settings: dict[str, Any] = {
            **dict(output_dir=str(folder), max_steps=2, per_device_train_batch_size=2, logging_steps=1),
            **dict(save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True),
        }

    def trainer(self, model: Any) -> list[float]:
        rows = [{"input_ids": row, "labels": row} for row in tokens(8, 12).tolist()]
        settings = transformers.TrainingArguments(**self.settings)
        return self._logged(transformers.Trainer(model, settings, train_dataset=rows))

    def sft(self, model: Any) -> list[float]:
        """TRL computes the loss in chunks of its own, of which the backend sees none: `llmk.trl.patch` replaces it."""
        trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
        tokenizers = pytest.importorskip("tokenizers")
        words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "<eos>": 1}, unk_token="<unk>"))
        text = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<unk>")
        rows = datasets.Dataset.from_list([{"input_ids": row} for row in tokens(8, 12).tolist()])
        settings = trl.SFTConfig(**self.settings, bf16=False, gradient_checkpointing=False)
        return self._logged(trl.SFTTrainer(model, settings, train_dataset=rows, processing_class=text))

    def accelerate(self, model: Any) -> list[float]:
        accelerator = accelerate.Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=5e-5))
        found = []
        for rows in tokens(8, 12).split(4):
            loss = model(input_ids=rows, labels=rows).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    def _logged(self, trainer: Any) -> list[float]:
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("kind", ["trainer", "sft", "accelerate"])
def test_a_model_that_is_compiled_in_place(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The line of the docs compiles it. Without Inductor, so that what is put in runs as it is."""
    monkeypatch.setattr(compilers, "compile_fx", lambda gm, inputs, **settings: gm.forward)
    report = Report()
    monkeypatch.setattr(backend, "EVERYTHING", report)
    model = small_llama()
    model.compile(backend="llmk", options={"drop_logits": True})
    got = getattr(Steps(tmp_path), kind)(model)
    assert len(got) == 2
    assert got == pytest.approx(getattr(Steps(tmp_path), kind)(small_llama()), rel=1e-4)
    assert report.replaced["swiglu"] == 1
    assert report.replaced.get("fused_linear_ce", 0) == (kind != "sft")
