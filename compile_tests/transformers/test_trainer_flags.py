"""A patched model in `Trainer` and accelerate, under the flags that they are used with: the losses of the unpatched."""

import gc
from collections.abc import Iterator
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


SETTINGS: dict[str, Any] = {
    **dict(max_steps=2, per_device_train_batch_size=2, logging_steps=1, save_strategy="no", report_to=[]),
    **dict(disable_tqdm=True, use_cpu=True),
}
FLAGS: dict[str, dict[str, Any]] = {
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "torch_compile": {"torch_compile": True, "torch_compile_backend": "eager"},
    "bf16": {"bf16": True},
}
WITHIN = {"bf16": torch.finfo(torch.bfloat16).eps}
"""The difference allowed between two losses: one unit in bfloat16's last place, or what float32 steps lose."""


@pytest.fixture(autouse=True)
def _nothing_was_set() -> Iterator[None]:
    """accelerate keeps one process' first settings."""
    torch._dynamo.reset()
    counters.clear()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def on_the_cpu(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("flags are the same on every device")


def trainer_of(folder: Path, model: Any, *callbacks: Any, model_init: Any = None, **flags: Any) -> Any:
    settings = transformers.TrainingArguments(str(folder), gradient_accumulation_steps=2, **SETTINGS | flags)
    rows = [{"input_ids": row, "labels": row} for row in tokens(8, 12).tolist()]
    callbacks = list(callbacks)  # type: ignore[assignment]
    return transformers.Trainer(model, settings, train_dataset=rows, callbacks=callbacks, model_init=model_init)


def losses_of(trainer: Any) -> list[float]:
    trainer.state.log_history.clear()
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_trainers(tmp_path: Path, device: torch.device) -> None:
    """One after another with the same model, and one that makes its models itself, each time it trains."""

    def losses(model: Any, *callbacks: Any, trainings: int = 1, **options: Any) -> Any:
        torch.manual_seed(0)
        trainer = trainer_of(tmp_path, model, *callbacks, use_cpu=device.type == "cpu", **options)
        return [losses_of(trainer) for _ in range(trainings)], trainer

    ours, theirs = small_llama(), small_llama()
    for _ in range(2):
        callback = PatchCallback()
        (want,), _ = losses(theirs)
        (got,), _ = losses(ours, callback)
        assert len(want) == 2
        assert got == pytest.approx(want, rel=1e-4)
        assert callback.report is not None
        assert callback.report.replaced["loss"] == 1
    callback = PatchCallback()
    (want,), _ = losses(None, model_init=small_llama)
    got, maker = losses(None, callback, trainings=2, model_init=small_llama)
    assert got == [pytest.approx(want, rel=1e-4)] * 2
    assert callback.report is not None
    assert callback.report.model is maker.model
    ids = maker.model.dummy_inputs["input_ids"]
    assert maker.model.train()(input_ids=ids, labels=ids).logits is None


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("flag", FLAGS)
def test_trainer(flag: str, tmp_path: Path) -> None:
    def losses(*callbacks: Any) -> list[float]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        trainer = trainer_of(tmp_path, small_llama(), *callbacks, **FLAGS[flag])
        found = losses_of(trainer)
        assert trainer.model.is_gradient_checkpointing == (flag == "gradient_checkpointing")
        return found

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


def losses_in_a_loop(model: Any, accelerator: Any, batches: Any, lr: float) -> list[float]:
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=lr))
    found = []
    for rows in batches:
        with accelerator.accumulate(model):
            loss = model(input_ids=rows, labels=rows).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.usefixtures("on_the_cpu")
def test_accelerate() -> None:
    """Mixed precision, accumulation and compilation at once, in a loop of one's own."""
    gc.collect()  # accelerate asks a trainer's loader, as long as that lives, where accumulation ends
    ids, found = tokens(4, 12), []
    settings: dict[str, Any] = {"mixed_precision": "bf16", "gradient_accumulation_steps": 2, "dynamo_backend": "eager"}
    for patched in (False, True):
        torch._dynamo.reset()
        model = small_llama()
        if patched:
            assert patch(model).replaced["loss"] == 1
        batches = (ids[:2], ids[2:], ids[:2], ids[2:])
        found.append(losses_in_a_loop(model, accelerate.Accelerator(cpu=True, **settings), batches, 1e-3))
    assert found[1] == pytest.approx(found[0], rel=WITHIN["bf16"])
    assert counters["stats"]["unique_graphs"] > 0


def by_trainer(model: Any, folder: Path) -> list[float]:
    return losses_of(trainer_of(folder, model))


def by_sft(model: Any, folder: Path) -> list[float]:
    """TRL computes the loss in chunks of its own, of which the backend sees none: `llmk.trl.patch` replaces it."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "<eos>": 1}, unk_token="<unk>"))
    text = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<unk>")
    rows = datasets.Dataset.from_list([{"input_ids": row} for row in tokens(8, 12).tolist()])
    settings = trl.SFTConfig(str(folder), bf16=False, gradient_checkpointing=False, **SETTINGS)
    return losses_of(trl.SFTTrainer(model, settings, train_dataset=rows, processing_class=text))


def by_accelerate(model: Any, folder: Path) -> list[float]:
    return losses_in_a_loop(model, accelerate.Accelerator(cpu=True), tokens(8, 12).split(4), 5e-5)


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("train", [by_trainer, by_sft, by_accelerate])
def test_a_model_that_is_compiled_in_place(train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of the docs compiles it. Without Inductor, so that what is put in runs as it is."""
    monkeypatch.setattr(compilers, "compile_fx", lambda gm, inputs, **settings: gm.forward)
    report = Report()
    monkeypatch.setattr(backend, "EVERYTHING", report)
    found = []
    for compiled in (True, False):
        model = small_llama()
        if compiled:
            model.compile(backend="llmk", options={"drop_logits": True})
        torch.manual_seed(1)
        found.append(train(model, tmp_path))
    assert len(found[0]) == 2
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert report.replaced["swiglu"] == 1
    assert report.replaced.get("fused_linear_ce", 0) == (train is not by_sft)
