"""The kernel that `python -m llmk.hub` writes, with the package `kernels` itself."""

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
CHECKS = "compile_tests.helpers.hub_checks"
ALONE = """
import sys
from pathlib import Path

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("llmk", "transformers"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
import kernels, torch
kernel = kernels.get_local_kernel(Path(sys.argv[1]))
x, weight = torch.randn(4, 16, requires_grad=True), torch.randn(16, requires_grad=True)
kernel.rms_norm(x, weight).sum().backward()
names = [name for name in torch._C._dispatch_get_all_op_names() if "llmk" in name]
assert x.grad is not None and names and all(name.startswith(f"{kernel.__name__}::") for name in names), names
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "kernel"
    assert hub.main([str(folder), "--repository", "someone/llmk", "--version", "3"]) == 0
    return folder


def run(*arguments: str) -> str:
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def errors(folder: Path) -> dict[str, str]:
    """The failure of each check, by its name."""
    return json.loads(run("-m", CHECKS, str(folder)))


def names() -> list[str]:
    functions = ast.parse((ROOT / f"{CHECKS.replace('.', '/')}.py").read_text()).body
    return [f.name for f in functions if isinstance(f, ast.FunctionDef) and f.name.startswith("check_")]


@pytest.mark.parametrize("name", names())
def test_kernel(name: str, errors: dict[str, str]) -> None:
    assert errors[name] == "", errors[name]


def test_a_kernel_needs_neither_llmk_nor_transformers(folder: Path) -> None:
    run("-c", ALONE, str(folder))


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
