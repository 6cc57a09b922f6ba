"""A patched model under the flags that `Trainer` and accelerate are used with: the losses of the unpatched one."""

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

from torch._dynamo.utils import counters  # noqa: E402

from compile_tests.helpers.families import small_model, tokens  # noqa: E402
from llmk.transformers import PatchCallback, patch  # noqa: E402

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
        trainer = transformers.Trainer(small_model("Llama"), settings, train_dataset=rows, callbacks=list(callbacks))
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
    ids = tokens(4, 12)

    def losses(patched: bool) -> list[float]:
        torch._dynamo.reset()
        accelerator = accelerate.Accelerator(
            cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2, dynamo_backend="aot_eager"
        )
        model = small_model("Llama")
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
