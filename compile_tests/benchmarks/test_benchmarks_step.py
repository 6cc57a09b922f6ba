"""The benchmark of a training step runs where there is no GPU; it counts, judges and draws what it measured."""

import gc
import importlib
import json
import operator
import os
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")
pytest.importorskip("transformers")

from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama

import llmk.transformers
from benchmarks.limited import with_limit
from benchmarks.models import HYBRIDS, MODELS, VARIANTS, as_variant
from benchmarks.profiling import group_of
from benchmarks.step_report import losses_are_wrong, misses
from benchmarks.train_step import compile_counts, forget, main

CPU = torch.device("cpu")


def run(file: Path, *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--steps", "2", "--backend", "aot_eager", "--json", str(file)]) == 0
    return json.loads(file.read_text())


def models_alive() -> set[int]:
    return {id(thing) for thing in gc.get_objects() if issubclass(type(thing), PreTrainedModel)}


def test_variants_compute_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = models_alive()
    file, profile = tmp_path / "steps.json", tmp_path / "profile.json"
    first = run(file, "gemma-2-2b", "--device", "cpu", "--variants", "eager")
    options = ("gemma-2-2b", "--device", "cpu", "--append", "--profile", str(profile))
    results = run(file, *options, "--variants", "llmk-compiled,llmk")
    capsys.readouterr()
    rows = {row["variant"]: row for row in results["rows"]}
    assert list(rows) == ["eager", "llmk", "llmk compiled"]
    assert rows["eager"] == first["rows"][0]
    assert results["config"] == {"lr": 1e-3, "optimizer": "AdamW, fused", "backend": "aot_eager", "small": True}
    for row in rows.values():
        assert row["losses"] == pytest.approx(rows["eager"]["losses"], rel=1e-4)
        assert len(row["losses"]) == 15
        assert row["losses"][-1] < row["losses"][0] - 1
        assert len(row["times_ms"]) == 2
        assert row["tokens_per_s"] == pytest.approx(2 * 16 / row["ms"] * 1e3)
    counts = [rows["llmk compiled"][key] for key in ("graphs", "breaks", "recompiles")]
    assert counts == [1, 0, 0]
    profiles = json.loads(profile.read_text())["profiles"]
    assert [one["variant"] for one in profiles] == ["llmk", "llmk compiled"]
    assert {"aten::mm", "aten::_fused_adamw_"} <= {kernel["name"] for kernel in profiles[0]["kernels"]}
    assert models_alive() <= before


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_patched_everywhere(name: str) -> None:
    model = MODELS[name].build(CPU, small=True)
    with as_variant(model, VARIANTS["llmk"], "eager") as trained:
        assert trained is model
        tokens = MODELS[name].tokens(model, 2, 16)
        assert model(input_ids=tokens, labels=tokens).logits is None
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    assert len(norms) > 4
    assert llmk.transformers.patch(model).replaced["norm"] == len(norms)  # of a patched model, its report


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_compute_the_same(name: str, tmp_path: Path) -> None:
    results = run(tmp_path / "steps.json", name, "--device", "cpu", "--variants", "eager,llmk")
    plain, ours = results["rows"]
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    assert plain["losses"][-1] < plain["losses"][0] - 0.1


def test_a_variant_that_does_not_compile_in_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("llama-3.2-1b", "--device", "cpu", "--variants", "compiled", "--compile-limit", "1")
    (row,) = run(tmp_path / "steps.json", *options)["rows"]
    assert row["error"] == "did not compile in 1 s"
    assert row["seconds"] < 30
    assert "compiled        did not compile in 1 s" in capsys.readouterr().out


def test_a_limit_ends_a_process_that_compiles() -> None:
    measured: Any = with_limit(60, callable)  # of `compiled`, which it does not call
    assert measured is True
    assert with_limit(60, operator.call) is None  # calls it
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="did not compile in 1 s"):
        with_limit(1, _sleep)
    assert time.monotonic() - start < 30
    with pytest.raises(RuntimeError, match="its process ended"):
        with_limit(60, os.kill, 0)  # raises there, of a signal that is a function


def _sleep(compiled: Any) -> dict[str, Any]:
    time.sleep(600)
    return {}


def test_what_liger_replaces_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(model: Any) -> None:
        modeling_llama.LlamaMLP = "replaced"  # type: ignore[assignment]
        model.replaced = True

    module: Any = ModuleType("liger_kernel.transformers")
    module.apply_liger_kernel_to_llama = apply
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", module)
    before = modeling_llama.LlamaMLP
    model = MODELS["llama-3.2-1b"].build(CPU, small=True)
    with as_variant(model, VARIANTS["liger"], "eager"):
        assert model.replaced
        assert modeling_llama.LlamaMLP == "replaced"
    assert modeling_llama.LlamaMLP is before


def test_a_missing_library_and_a_failure(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setitem(
        importlib.import_module("benchmarks.peers").PEERS,
        "liger-kernel",
        SimpleNamespace(name="liger-kernel", version=lambda: None),
    )
    monkeypatch.setattr("benchmarks.models.Model.build", lambda *_: 1 / 0)
    results = run(tmp_path / "steps.json", "qwen3-0.6b", "--device", "cpu", "--variants", "eager,liger")
    assert [(row["variant"], row["error"]) for row in results["rows"]] == [
        ("eager", "ZeroDivisionError: division by zero")
    ]
    output = capsys.readouterr().out
    assert "liger-kernel: missing" in output
    assert "division by zero" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["bert"], "no model 'bert'"), (["--variants", "fast"], "no variant 'fast'"), (["--steps", "0"], "at least 1")],
)
def test_arguments_are_checked(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


def test_graphs_breaks_and_recompiles_are_counted() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    forget(CPU)
    compiled = torch.compile(broken, backend="eager", dynamic=False)
    compiled(torch.ones(2))
    assert compile_counts() == {"graphs": 2, "breaks": 1, "recompiles": 0}
    compiled(torch.ones(3))
    assert compile_counts() == {"graphs": 4, "breaks": 2, "recompiles": 2}
    forget(CPU)
    assert compile_counts() == {"graphs": 0, "breaks": 0, "recompiles": 0}


def test_kernels_are_grouped_by_name() -> None:
    kernels = {
        "rms_norm_kernel": "llmk",
        "rms_norm_backward_kernel_0": "llmk",
        "triton_poi_fused__scaled_dot_product_flash_attention_view_0": "inductor",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<cutlass>": "attention",
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT": "gemm",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>": "optimizer",
        "Memcpy DtoD (Device -> Device)": "copies",
        "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda>": "copies",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>": "other",
    }
    assert {kernel: group_of(kernel) for kernel in kernels} == kernels


def row(variant: str, ms: float, gib: float, losses: tuple[float, float], breaks: int = 0) -> dict[str, Any]:
    return {
        "model": "llama-3.2-1b",
        "variant": variant,
        "compiled": "compiled" in variant,
        "batch_size": 8,
        "seq_len": 2048,
        "ms": ms,
        "peak_gib": gib,
        "tokens_per_s": 16384e3 / ms,
        "losses": list(losses),
        "graphs": breaks + 1,
        "breaks": breaks,
        "recompiles": 0,
    }


RIGHT = (12.17, 0.0175)
ROWS = [
    row("eager", 322.1, 57.2, RIGHT),
    row("compiled", 274.4, 31.5, RIGHT),
    row("llmk", 240.0, 25.0, RIGHT),
    row("llmk compiled", 210.0, 22.0, (12.17, 0.0176)),
    row("liger compiled", 299.0, 34.5, (13.17, 2047.0), breaks=14),
    {**row("liger", 1, 0, RIGHT), "error": "out of memory"},
]


def test_steps_are_judged() -> None:
    assert misses(ROWS[3], ROWS) == []
    assert misses(ROWS[2], ROWS) is None  # without a target
    assert misses({**ROWS[3], "batch_size": 4}, ROWS) is None
    assert misses({**ROWS[3], "error": "out of memory"}, ROWS) == ["out of memory"]
    slow = {**row("llmk compiled", 231.0, 24.0, (12.17, 0.03), breaks=2)}
    fast = row("liger", 225.0, 26.3, RIGHT)
    expected = ["5.0% over", "24.0 GiB", "2 breaks", "liger 225 ms", "loss 0.0300"]
    assert misses(slow, [ROWS[0], slow, fast]) == expected
    assert [row["variant"] for row in ROWS if losses_are_wrong(row, ROWS)] == ["liger compiled"]
    assert losses_are_wrong({**ROWS[1], "losses": [12.17, float("nan")]}, ROWS)
