"""opcheck on KernelBench problems: `Model` is the reference of `ModelNew`."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_tests.helpers.kernelbench_problems import CHEATS, HEAD, IN_TRITON, RIGHT
from llmk.opcheck import check
from llmk.opcheck.__main__ import _places
from llmk.opcheck.foreign.loading import NotLoaded, find_ops
from llmk.opcheck.report.causes import causes
from llmk.opcheck.report.reports import notes
from llmk.opcheck.runner import Result
from llmk.registry.devices import INTERPRET


def checked(folder: Path, name: str, text: str, **options: Any) -> list[Result]:
    (folder / f"{name}.py").write_text(HEAD + text)
    (op,) = find_ops([str(folder / f"{name}.py")])
    assert op.name == name
    return check(op, **options)


@pytest.mark.kernels
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_problem_has_no_finding(name: str, tmp_path: Path) -> None:
    if (name in IN_TRITON) is not INTERPRET:
        pytest.skip("the other run has it")
    results = checked(tmp_path, name, RIGHT[name])
    assert causes(results) == [], "\n".join(map(str, causes(results)))
    verdicts = {result.promise: result.verdict for result in results}
    assert {verdicts[promise] for promise in ("values_and_gradients", "fresh_numbers", "no_alias")} == {"kept"}
    assert "compiled" not in verdicts


@pytest.mark.kernels
@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_named(name: str, tmp_path: Path) -> None:
    if (name in IN_TRITON) is not INTERPRET:
        pytest.skip("the other run has it")
    words, text = CHEATS[name]
    softplus = torch.nn.functional.softplus
    results = checked(tmp_path, name, text)
    said = [f"{cause.headline} {cause.first.message}" for cause in causes(results)] + list(notes(results))
    assert any(re.search(words, line) for line in said), "\n".join(said)
    assert torch.nn.functional.softplus is softplus


def test_parameters_get_gradients_and_keep_their_sizes(tmp_path: Path) -> None:
    """Parameters that both modules have are arguments; else the weights are those of one seed."""
    only = ["values_and_gradients"]
    said = list(notes(checked(tmp_path, "layer_norm_gelu", RIGHT["layer_norm_gelu"], only=only)))
    assert said == ["layer_norm_gelu (reference): gradients of x, self_norm_weight, self_norm_bias"]
    said = list(notes(checked(tmp_path, "packed_linear", RIGHT["packed_linear"], only=only)))
    assert said == ["packed_linear (reference): gradients of x"]


def test_what_a_file_replaces_is_put_back(tmp_path: Path) -> None:
    """Functions of PyTorch when it is imported, and the reference when `ModelNew` is constructed."""
    head = "class ModelNew(Model):\n"
    constructor = (
        "    def __init__(self, n):\n        super().__init__(n)\n        Model.forward = ModelNew.forward\n\n"
    )
    text = RIGHT["batch_norm_max"].replace(head, head + constructor)
    softplus = torch.nn.functional.softplus
    results = checked(tmp_path, "replaces_all", f"F.softplus = F.relu\n{text}", only=["side_effects"])
    assert "it replaces replaces_all.Model.forward" in str(causes(results)[0])
    assert torch.nn.functional.softplus is softplus


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("class ModelNew: ...", "ValueError: it has ModelNew, and no Model"),
        (RIGHT["swish"].partition("def get_inputs")[0], "ValueError: it has ModelNew, and no get_inputs"),
        (RIGHT["packed_linear"].partition("def get_init")[0], "TypeError: Model.__init__.. missing 2 required"),
    ],
)
def test_what_is_no_problem_is_said(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(NotLoaded, match=rf"lacks.py: {words}"):
        checked(tmp_path, "lacks", text)


def test_a_finding_is_shown_where_the_module_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("problem.py").write_text(HEAD + CHEATS["constant_of_one_size"][1])
    line = Path("problem.py").read_text().partition("return x.sum(-1) / 24")[0].count("\n")
    assert _places(find_ops(["problem.py"])) == {"problem": ("problem.py", line)}
