"""The kernel that `python -m llmk.hub` writes, and llmk's layers in transformers' slots, with the package `kernels`."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from llmk.hub import VARIANT, kernel_files, write
from llmk.hub import __main__ as hub

pytest.importorskip("kernels")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "kernel"
    assert hub.main([str(folder), "--repository", "someone/llmk", "--version", "3"]) == 0
    return folder


def test_the_kernel_and_slots_with_the_package(folder: Path) -> None:
    """All checks of hub_checks.py, by names, in one process."""
    command = [sys.executable, "-m", "compile_tests.helpers.hub_checks", str(folder)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout)
    assert len(errors) > 20
    assert not any(errors.values()), "\n".join(f"{name}:\n{error}" for name, error in errors.items() if error)


def test_files(folder: Path) -> None:
    """No import of llmk is left, nor a name in its namespace, and another text has another name."""
    variant = folder / "build" / VARIANT
    name = json.loads((variant / "metadata.json").read_text())["id"]
    paths = [*variant.rglob("*.py")]
    assert {path.relative_to(variant).as_posix() for path in paths} == kernel_files().keys()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert not ast.unparse(node).startswith(("import llmk", "from llmk")), path
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.ops":
                assert node.attr in (name, "aten", "higher_order", "triton"), (path, node.attr)
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not re.search(r"\bllmk::|^llmk$", node.value), path


def test_card(folder: Path) -> None:
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: kernels\n")
    assert 'get_kernel("someone/llmk", version=3' in card
    assert not re.search("@[A-Z_]+@", card)


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="folder: expected one that is empty or not there, got"):
        write(tmp_path)
    with pytest.raises(SystemExit):
        hub.main([str(tmp_path)])
    assert "error: folder: expected one that is empty" in capsys.readouterr().err
