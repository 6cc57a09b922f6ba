"""Tests of the documentation: its Python runs, its commands exist, and the site builds without a warning."""

import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from compile_tests.helpers.pages import PAGES, PYTHON_PAGES, ROOT, blocks, script_of
from compile_tests.helpers.scripts import run_script


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=lambda page: page.name)
def test_python_runs(page: Path, tmp_path: Path) -> None:
    result = run_script(script_of(page, tmp_path))
    assert result.returncode == 0, f"{page.name}:\n{result.stdout}\n{result.stderr}"


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
    options = ["--collect-only", "--noconftest", "-q", "-o", "addopts="]
    command = [sys.executable, "-I", "-m", "pytest", "compile_tests/test_ranges.py", *options]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_readme_names_every_operator() -> None:
    from llmk.registry import OPS

    readme = (ROOT / "README.md").read_text()
    for op in OPS.values():
        file = f"{op.module.removeprefix('llmk.').replace('.', '/')}.py"
        assert re.search(rf"`{op.name}`[^\]]*\]\({file}\)", readme), op.name
