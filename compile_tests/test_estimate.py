"""`python -m llmk.estimate`: figures are the results', it is near what was measured, and the page computes the same."""

import json
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from llmk.estimate import FIGURES, WAYS, at, estimate, parameters, sizes_from, sizes_of
from llmk.estimate import __main__ as command

pytest.importorskip("transformers")

from benchmarks import estimate_figures
from benchmarks.estimate_checks import checks, sizes_of_model
from benchmarks.models import MODELS

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "docs" / "_static" / "estimate.js"
MEMORY, TIME = 0.10, 0.20
MISSED = {
    # Transformers materializes a mask when it is compiled, and the attention of short layers is much of this step.
    ("qwen3-0.6b", "PyTorch compiled", "time"),
    # Its compiled experts keep less than the formula has.
    ("qwen3-30b-a3b-4-layers", "PyTorch compiled", "memory"),
}
LLAMA = "hidden=2048,intermediate=8192,layers=16,heads=32,kv_heads=8,vocabulary=128256"


def test_figures_are_those_of_the_results() -> None:
    assert estimate_figures.FIGURES.read_text() == estimate_figures.text()


def test_near_the_steps_that_were_measured() -> None:
    found = list(checks())
    assert {check.model for check in found} == set(MODELS)
    assert len(found) == len(MODELS) * len(WAYS)
    missed = {(check.model, check.way, "memory") for check in found if abs(check.memory_off) > MEMORY}
    missed |= {(check.model, check.way, "time") for check in found if abs(check.time_off) > TIME}
    assert missed == MISSED


CONFIGS: dict[str, dict[str, Any]] = {
    "small": {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": None,
        "vocab_size": 320,
        "tie_word_embeddings": False,
    },
    "nested": {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "vocab_size": 262144,
            "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": ["sliding_attention", "full_attention"],
        },
    },
    "experts": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}


def in_javascript(program: str, *inputs: Any) -> Any:
    """Return the value of an expression of the page's script."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    code = f"const {{estimate, sizesOf}} = require({json.dumps(str(SCRIPT))}); const input = {json.dumps(inputs)};"
    result = subprocess.run(
        [node, "-e", f"{code} console.log(JSON.stringify({program}))"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_the_page_computes_the_same() -> None:
    sizes = [*(sizes_of(config) for config in CONFIGS.values()), *(sizes_of_model(name) for name in MODELS)]
    settings = [(tokens, min(tokens, 2048), gpu) for tokens in (100, 16384) for gpu in FIGURES["gpus"]]
    calls = [(size, *setting, again) for size in sizes for setting in settings for again in (False, True)]
    ours = [estimate(*call) for call in calls]
    given = [[asdict(size), *more] for size, *more in calls]
    pages = in_javascript("input[1].map((call) => estimate(input[0], ...call))", FIGURES, given)
    assert [list(result) for result in pages] == [WAYS] * len(calls)
    for page, our in zip(pages, ours, strict=True):
        for way in WAYS:
            for part, figures in our[way].items():
                assert page[way][part]["gib"] == pytest.approx(figures["gib"], rel=1e-12)
                assert page[way][part]["ms"] == (figures["ms"] and pytest.approx(figures["ms"], rel=1e-12))


def test_the_page_reads_the_same_configurations() -> None:
    configs = list(CONFIGS.values())
    read = in_javascript("input[1].map((config) => sizesOf(input[0], config))", FIGURES, configs)
    assert read == [asdict(sizes_of(config)) for config in configs]


def test_sizes_by_name_are_a_configurations() -> None:
    assert sizes_from(LLAMA) == sizes_of_model("llama-3.2-1b")
    assert parameters(sizes_from(LLAMA)) == pytest.approx(1.236e9, rel=1e-3)
    assert parameters(sizes_from(LLAMA + ",tied=0")) - parameters(sizes_from(LLAMA)) == 2048 * 128256


@pytest.mark.parametrize("way", WAYS)
def test_a_checkpointed_layer_keeps_its_input(way: str) -> None:
    """One more layer keeps its input, and its weights and moments; at the loss nothing else of it is in memory."""
    small, large = (sizes_from(LLAMA.replace("layers=16", f"layers={layers}")) for layers in (16, 17))
    tokens, more = 65536, 6 * (parameters(large) - parameters(small)) + 2 * 65536 * 2048
    steps = [estimate(size, tokens, 2048, checkpointing=True)[way] for size in (small, large)]
    assert steps[1]["step"]["gib"] - steps[0]["step"]["gib"] == pytest.approx(more / 2**30)
    plain = estimate(small, tokens, 2048)[way]
    assert steps[0]["gated units"]["gib"] == plain["gated units"]["gib"] / 16
    assert steps[0]["step"]["ms"] - plain["step"]["ms"] == pytest.approx(steps[0]["checkpoints"]["ms"])


def test_between_and_outside_the_sizes_measured() -> None:
    points = [[1.0, 4.0], [4.0, 8.0], [64.0, 2.0]]
    assert [at(points, size) for size in (0.5, 1, 2, 4, 16, 64, 1e9)] == [4.0, 4.0, 6.0, 8.0, 5.0, 2.0, 2.0]
    assert at([], 1.0) is None


@pytest.mark.parametrize(
    ("model", "tokens", "message"),
    [
        ("hiden=3", "1", "hiden: expected one of hidden, layers, "),
        ("hidden=-3", "1", "hidden: expected a whole number, got '-3'"),
        ("hidden=64,layers=2,heads=4", "1", "vocabulary: expected a size, got none"),
        ("hidden=64,layers=2,heads=4,vocabulary=9", "1", "intermediate: expected at least 1 in a model without"),
        (LLAMA, "0", "argument --tokens: expected at least 1, got 0"),
        ("nowhere/config.json", "1", "No such file or directory: 'nowhere/config.json'"),
    ],
)
def test_refuses(model: str, tokens: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main([model, "--tokens", tokens])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"kv_lora_rank": 512}, "kv_lora_rank: the estimate does not know the layers of such a model, llama"),
        ({"layer_types": ["linear_attention"]}, "layer_types: expected attention alone, got"),
        ({"vocab_size": None}, "vocab_size: the configuration has none"),
        ({"hidden_size": "4096"}, "hidden_size: expected a whole number, got '4096'"),
        ({"num_attention_heads": [4, 4]}, r"num_attention_heads: expected a whole number, got \[4, 4\]"),
        ({"num_attention_heads": 0}, "heads: expected at least 1, got 0"),
        ({"model_type": "bert", "layer_norm_eps": 1e-12}, "layer_norm_eps: the estimate does not know the layers"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention: the estimate does not know"),
    ],
)
def test_a_model_that_the_formula_does_not_know(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sizes_of(CONFIGS["small"] | more)


def test_a_list_is_no_configuration() -> None:
    with pytest.raises(ValueError, match="expected a configuration, a JSON object, got a list"):
        sizes_of([CONFIGS["small"]])


def test_what_a_nested_configuration_leaves_to_its_class(tmp_path: Path) -> None:
    """The configurations are those of the files of Gemma-3-4b and Qwen3-VL."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    found = command.sizes(str(tmp_path))
    assert (found.heads, found.kv_heads, found.head_dim, found.vocabulary) == (8, 4, 256, 262208)
    assert (found.norms, found.qk_norm, found.offset_norms, found.gelu) == (4, True, True, True)
    assert parameters(found) == pytest.approx(3.88e9, rel=1e-2)
    outer = {"model_type": "qwen3_vl", "text_config": {"model_type": "qwen3_vl_text"}, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    found = command.sizes(str(tmp_path))
    assert found.qk_norm
    assert not found.tied
