"""Tests of the documentation: its Python runs, its commands exist, and the site builds without a warning."""

import dataclasses
import importlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compile_tests.helpers.pages import PAGES, PYTHON_PAGES, ROOT, blocks, script_of
from compile_tests.helpers.scripts import run_script
from llmk.registry import Op


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=lambda page: page.name)
def test_python_runs(page: Path, tmp_path: Path) -> None:
    result = run_script(script_of(page, tmp_path))
    assert result.returncode == 0, f"{page.name}:\n{result.stdout}\n{result.stderr}"


def test_a_page_says_where_what_git_does_not_have_is_shown() -> None:
    """A line that is a comment for the site, and text for whoever reads the file, says it."""
    found = 0
    for page in sorted((ROOT / "docs").glob("*.md")):
        text = page.read_text()
        said = f"% Generated: `make docs` writes what comes here, and `docs/_build/html/{page.stem}.html` shows it.\n\n"
        assert text.count("```{include} ops/") == text.count(f"{said}```{{include}} ops/"), page.name
        found += text.count(said)
    assert found > 10
    assert "`make docs`" in (ROOT / "README.md").read_text()


def test_reports_of_opcheck_are_named_with_their_day() -> None:
    page = (ROOT / "docs" / "opcheck.md").read_text()
    named = re.findall(r'href="(opcheck-\w+(?:-\w+)?)\.html">[^<]*</a>, ([\d-]+)', page)
    assert len(named) == page.count('<a href="opcheck-')
    for name, day in named:
        assert json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["date"] == day, name


def test_the_table_of_a_records_fields_says_which_are_required() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (required )?\|", (ROOT / "docs" / "opcheck.md").read_text(), re.MULTILINE)
    required = {name for name, says_so in rows if says_so}
    fields = dataclasses.fields(Op)
    missing = dataclasses.MISSING
    assert required == {f.name for f in fields if f.default is missing and f.default_factory is missing}
    assert {name for name, _ in rows} <= {f.name for f in fields}


def test_versions_fit_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A column for each release: no cell of a check that passed is longer than a few words."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    rows = [line for line in importlib.import_module("version_page").version_table().splitlines() if line[:1] == "|"]
    cells = [cell.strip() for row in rows for cell in row.strip("|").split("|")[1:]]
    passed = [cell for cell in cells if cell.startswith("ok")]
    assert len(passed) > 20
    assert [cell for cell in passed if len(cell) > 40] == []


def test_make_verbs_exist() -> None:
    makefile = ROOT / "Makefile"
    if not makefile.exists():
        pytest.skip("no Makefile")
    targets = set(re.findall(r"^([\w-]+):", makefile.read_text(), re.MULTILINE))
    named = {
        verb
        for page in [*PAGES, ROOT / "CONTRIBUTING.md"]
        for verb in re.findall(r"(?:^|`)make ([a-z]+)", page.read_text(), re.MULTILINE)
    }
    assert named
    assert named <= targets


def test_commands_exist() -> None:
    text = "\n".join(code for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "RELEASING.md"] for code in shell(page))
    modules = set(re.findall(r"\bpython -m (\S+)", text))
    files = set(re.findall(r"^(?:python|torchrun)(?: --?\S+(?: \d+)?)* (\w\S*\.py)", text, re.MULTILINE))
    assert {"llmk", "llmk.bench", "llmk.opcheck"} <= modules
    assert "examples/train_hf.py" in files
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []
    assert [name for name in files if not (ROOT / name).exists()] == []


def shell(page: Path) -> list[str]:
    return [code for _, code in blocks(page, "sh")]


def test_links_lead_somewhere() -> None:
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose):
            written_when_the_site_is_built = page.parent.name == "docs" and link.startswith("ops/")
            if not written_when_the_site_is_built:
                assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_pytest_finds_what_is_not_installed() -> None:
    """The documentation's `pytest compile_tests -k NAME` works with nothing set."""
    command = [
        sys.executable,
        "-I",
        "-m",
        "pytest",
        "compile_tests/benchmarks/test_plots.py",
        "--collect-only",
        "-q",
    ]
    result = subprocess.run([*command, "-o", "addopts="], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_formulas_are_of_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    from llmk.registry import OPS

    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    formulas = importlib.import_module("formulas").FORMULAS
    assert "rms_norm" in formulas
    assert set(formulas) <= set(OPS)


def test_an_operator_of_several_results_has_an_example_without_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    from llmk.registry import OPS

    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    examples = importlib.import_module("op_example")
    assert "q_rotated, k_rotated = llmk.functional.rope(" in examples.example(OPS["rope"])
    monkeypatch.delitem(examples.OUTPUTS, "rope")
    assert "y0, y1 = llmk.functional.rope(" in examples.example(OPS["rope"])


def test_readme_names_every_operator() -> None:
    from llmk.registry import OPS

    readme = (ROOT / "README.md").read_text()
    for op in OPS.values():
        file = f"{op.module.removeprefix('llmk.').replace('.', '/')}.py"
        assert re.search(rf"`{op.name}`[^\]]*\]\({file}\)", readme), op.name


def test_pages_of_operators_are_for_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """They say when another way is better; targets, and what missed them, are on the contributors' page."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    page = pytest.importorskip("benchmark_page")
    for op in ("softmax", "fused_linear_ce", "rms_norm"):
        text = "\n".join([*page.benchmark_of(op, ROOT, "plots"), page.when_not(op)])
        assert not re.search(r"\btargets? (?:is|of)\b|\bmissed\b|\breached\b|% over", text)
    assert "4096x131072: QuACK takes 1.44 ms, llmk 1.61" in page.when_not("softmax")
    assert "compiled PyTorch takes 5.73 ms, llmk 6.78" in page.when_not("linear_logprobs")
    assert "PyTorch's own code takes the same time and memory" in page.when_not("relu_squared")
    assert page.when_not("rms_norm").startswith("For inference alone")
    assert "missed" in page.targets()


def test_a_page_of_an_operator_says_once_what_it_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from llmk.registry import OPS

    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    page = pytest.importorskip("op_pages").op_page(OPS["rope"], tmp_path)
    assert page.count("Rotate queries and keys by their positions' angles") == 1
    assert page.index("Rotate queries and keys by") < page.index("## Reference") < page.index(".. py:function::")


def test_the_gallery_is_what_the_backend_makes() -> None:
    """The graph of one of its models is made again."""
    gallery = pytest.importorskip("tools.gallery")
    kept = json.loads(gallery.RESULT.read_text())
    assert list(kept["models"]) == list(gallery.PUBLIC)
    if kept["versions"] != {"torch": torch.__version__, "transformers": gallery.transformers.__version__}:
        pytest.skip("made with other versions")
    assert gallery.graphs_of("Starcoder2") == kept["models"]["Starcoder2"]
