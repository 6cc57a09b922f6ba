"""Checks what docs/frameworks.md says of each framework, where it is installed: losses and gradients stay as they were.

No framework is a part of the `test` extra, as each wants its own releases of the others' packages: `tools.frameworks`
installs them.
"""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import llmk
from compile_tests.helpers.pages import ROOT, blocks
from tools.frameworks import FRAMEWORKS, RESULT

PAGE = ROOT / "docs" / "frameworks.md"
TOKENS = torch.randint(0, 250, (2, 16))


def module_of_page(name: str, holding: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The page's block that holds a word, as a module of this name that can be imported."""
    (code,) = [code for _, code in blocks(PAGE, "py") if holding in code]
    (folder / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)


def step(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> list[Tensor]:
    model.zero_grad()
    value = loss(model)
    value.backward()
    return [value.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def require_same(found: list[Tensor], right: list[Tensor]) -> None:
    assert len(found) == len(right)
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-6)


def test_the_page_has_the_releases_that_ran() -> None:
    results = json.loads(RESULT.read_text())
    assert results.keys() == FRAMEWORKS.keys()
    for name, (release, *_) in FRAMEWORKS.items():
        assert results[name]["passed"], name
        assert release.endswith(f"=={results[name]['version']}")
        assert f"| {results[name]['version']}: " in PAGE.read_text()


HIDDEN = torch.randn(2, 16, 256)


def titan_config() -> Any:
    """The configuration of torchtitan's smallest Llama."""
    pytest.importorskip("torchtitan")
    from torchtitan.models.llama3 import model_registry

    return model_registry("debugmodel").model


class FeedForward(nn.Module):
    """Norm and feed-forward layer of the model's first block: its attention has no backward pass on a CPU."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        (block, *_) = config.build().layers.values()
        self.norm, self.layer = block.ffn_norm, block.feed_forward
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(std=0.05)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.norm(x))


def titan_loss(half: nn.Module) -> Tensor:
    return half(HIDDEN).square().sum()


@pytest.mark.usefixtures("no_cpp")
def test_torchtitan_compiles_with_the_backend() -> None:
    half = FeedForward(titan_config())
    plain = step(half, titan_loss)
    before = llmk.compile_report().replaced.get("rms_norm", 0)
    half.compile(backend="llmk", fullgraph=True)
    require_same(step(half, titan_loss), plain)
    assert llmk.compile_report().replaced.get("rms_norm", 0) > before


def test_torchtitan_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = titan_config()
    half = FeedForward(config)
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.config.override import OverrideConfig, apply_overrides, clear_overrides

    clear_overrides()
    titan = module_of_page("llmk_titan", "torchtitan", tmp_path, monkeypatch)
    assert apply_overrides(OverrideConfig(imports=["llmk_titan.norm"]), config)
    other = FeedForward(config)
    assert isinstance(other.norm, titan.LlmkRMSNorm)
    other.load_state_dict(half.state_dict())
    require_same(step(other, titan_loss), step(half, titan_loss))
    ours, theirs = titan.LlmkCrossEntropyLoss.Config().build(), CrossEntropyLoss.Config().build()
    logits = torch.randn(2, 16, 250)
    tokens = torch.tensor(TOKENS.numel())
    torch.testing.assert_close(ours(logits, TOKENS, tokens), theirs(logits, TOKENS, tokens))


def test_torchtune(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchtune")
    omegaconf = pytest.importorskip("omegaconf")
    from torchtune import config, training
    from torchtune.models.llama3_2 import llama3_2

    ((_, yaml),) = [block for block in blocks(PAGE, "yaml") if "_component_" in block[1]]
    loss_fn = config.instantiate(omegaconf.OmegaConf.create(yaml).loss)
    sizes = {"vocab_size": 256, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 32}
    model = llama3_2(**sizes, max_seq_len=64, intermediate_dim=64)
    labels = TOKENS.masked_fill(torch.arange(16) < 3, loss_fn.ignore_index).flatten()
    plain = step(model, lambda model: nn.CrossEntropyLoss()(model(TOKENS).flatten(0, 1), labels))
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "llmk")
    before = llmk.compile_report().replaced.get("swiglu", 0)
    training.compile_model(model, verbose=False)
    require_same(step(model, lambda model: loss_fn(model(TOKENS).flatten(0, 1), labels)), plain)
    assert llmk.compile_report().replaced.get("swiglu", 0) > before


def test_axolotl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    base = pytest.importorskip("axolotl.integrations.base")
    transformers = pytest.importorskip("transformers")
    module_of_page("llmk_axolotl", "axolotl", tmp_path, monkeypatch)
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=4))
    plain = step(model, lambda model: model(input_ids=TOKENS, labels=TOKENS).loss)
    plugins = base.PluginManager.get_instance()
    plugins.register("llmk_axolotl.LlmkPlugin")
    plugins.post_model_build({}, model)
    assert "fused_linear_ce" in capsys.readouterr().out
    require_same(step(model, lambda model: model(input_ids=TOKENS, labels=TOKENS).loss), plain)


def small_llama() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=4))


def model_loss(model: nn.Module) -> Tensor:
    return model(input_ids=TOKENS, labels=TOKENS).loss


def test_llama_factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    kernels = pytest.importorskip("llamafactory.v1.plugins.model_plugins.kernels.interface")
    model = small_llama()
    plain = step(model, model_loss)
    module_of_page("llmk_factory", "llamafactory", tmp_path, monkeypatch)
    kernels.KernelPlugin("llmk")(model=model, include_kernels="auto")
    assert "fused_linear_ce" in capsys.readouterr().out
    require_same(step(model, model_loss), plain)
    assert model(input_ids=TOKENS).logits.shape == (2, 16, 256)


def test_ms_swift(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    callbacks = pytest.importorskip("swift.callbacks")
    transformers = pytest.importorskip("transformers")
    (code,) = [code for _, code in blocks(PAGE, "py") if "callbacks_map" in code]
    (tmp_path / "llmk_swift.py").write_text(code)
    monkeypatch.setattr(sys, "path", sys.path[:])  # to which ms-swift adds the folder
    importlib.import_module("swift.utils").import_external_file(str(tmp_path / "llmk_swift.py"))
    model, original = small_llama(), small_llama()
    original.load_state_dict(model.state_dict())
    data = [{"input_ids": row, "labels": row} for row in TOKENS]
    options = {"output_dir": str(tmp_path), "max_steps": 2, "report_to": "none", "use_cpu": True, "save_strategy": "no"}
    args = transformers.TrainingArguments(**options)
    for m, made in ((model, [callbacks.callbacks_map["llmk"](args, None)]), (original, [])):
        transformers.Trainer(m, args, train_dataset=data, callbacks=made).train()
    assert "fused_linear_ce" in capsys.readouterr().out
    require_same([p.detach() for p in model.parameters()], [p.detach() for p in original.parameters()])


def test_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lightning = pytest.importorskip("lightning")
    page = module_of_page("llmk_lightning", "lightning", tmp_path, monkeypatch)
    batches: Any = [{"input_ids": TOKENS, "labels": TOKENS}] * 2
    options = {"accelerator": "cpu", "max_steps": 2, "logger": False, "enable_checkpointing": False}
    weights = []
    original = small_llama()
    for configured in (page.LlmkModule.configure_model, lambda self: None):
        monkeypatch.setattr(page.LlmkModule, "configure_model", configured)
        module = page.LlmkModule(small_llama())
        module.model.load_state_dict(original.state_dict())
        trainer = lightning.Trainer(**options, enable_progress_bar=False, enable_model_summary=False)
        trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
        weights.append([p.detach() for p in module.model.parameters()])
        assert (module.model(input_ids=TOKENS, labels=TOKENS).logits is None) == (len(weights) == 1)
    require_same(*weights)
    assert not torch.equal(weights[0][0], original.model.embed_tokens.weight)


def test_nemo_automodel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function that its recipes call with every loss takes it."""
    utils = pytest.importorskip("nemo_automodel.components.loss.utils")
    masked = pytest.importorskip("nemo_automodel.components.loss.masked_ce")
    page = module_of_page("llmk_automodel", "nemo_automodel", tmp_path, monkeypatch)
    model = small_llama()
    labels = TOKENS.masked_fill(torch.arange(16) < 3, -100)
    count = int((labels != -100).sum())

    def loss(loss_fn: nn.Module) -> Callable[[nn.Module], Tensor]:
        def called(model: Any) -> Tensor:
            output = model(input_ids=TOKENS, output_hidden_states=True)
            given = {"logits": output.logits, "hidden_states": output.hidden_states[-1], "model": model}
            return utils.calculate_loss(loss_fn, **given, labels=labels, num_label_tokens=count)

        return called

    plain = step(model, loss(masked.MaskedCrossEntropy()))
    require_same(step(model, loss(page.LlmkLinearCrossEntropy())), plain)
