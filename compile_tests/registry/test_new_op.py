"""A new file under ops/ is enough: the registry, opcheck, the tests and the docs find it with no other edit."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAME = "leaky_relu_squared"
REPLAYED = "tutorial_sum"
"""The tutorial's operator by another name: it has a launch cache."""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository with the documentation's example and the tutorial's operator dropped into it."""
    root = tmp_path_factory.mktemp("new_op") / "llmk"
    made = shutil.ignore_patterns(".*", "__pycache__", "_build", "build", "dist", "runs", "*.egg-info")
    shutil.copytree(ROOT, root, symlinks=True, ignore=made)
    shutil.copy(ROOT / "docs" / "example_op.py", root / "ops" / "pointwise" / f"{NAME}.py")
    tutorial = (ROOT / "ops" / "pointwise" / "add.py").read_text()
    renamed = re.sub(r"\b(_?)add(?=_|\b)", rf"\1{REPLAYED}", tutorial)
    (root / "ops" / "pointwise" / f"{REPLAYED}.py").write_text(renamed)
    return root


def run(copy: Path, *arguments: str, pythonpath: bool = True) -> str:
    """Run Python in the copy, whose llmk comes before an installed one."""
    environment = os.environ | {"PYTHONPATH": str(copy)}
    if not pythonpath:
        del environment["PYTHONPATH"]
    result = subprocess.run(
        [sys.executable, *arguments], cwd=copy, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout


def test_registry_has_it(copy: Path) -> None:
    code = f"""
import torch, llmk
from llmk.registry import OPS
print(llmk.__file__, OPS["{NAME}"].schema)
x = torch.tensor([-2.0, 3.0], requires_grad=True)
y = torch.ops.llmk.{NAME}(x, 0.5)
y.sum().backward()
assert y.tolist() == [1.0, 9.0]
assert x.grad.tolist() == [-1.0, 6.0]
"""
    out = run(copy, "-c", code)
    assert str(copy) in out
    assert f"llmk::{NAME}(Tensor input, float negative_slope" in out


def test_opcheck_passes_it(copy: Path) -> None:
    options = ["--device", "cpu", "--dtype", "float32", "--skip", "compiled"]  # what Inductor makes of any operator
    out = run(copy, "-m", "llmk.opcheck", NAME, *options)
    assert NAME in out


def test_tests_include_it(copy: Path) -> None:
    """Started as `pytest FILE`, which unlike `python -m pytest` brings no folder to import from."""
    options = ["--collect-only", "-o", "addopts=-q", "-p", "no:cacheprovider"]
    out = run(copy, "-P", "-m", "pytest", *options, "compile_tests/ops/test_numerics.py", pythonpath=False)
    ids = [line for line in out.splitlines() if NAME in line.partition("[")[2]]
    assert ids, out


def test_one_with_a_launch_cache_passes_its_tests(copy: Path) -> None:
    tests = ["compile_tests/registry/test_launch_cache.py", "compile_tests/registry/test_launch_cache_public.py"]
    out = run(copy, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-rp", "-k", REPLAYED, *tests)
    assert len(re.findall(rf"^PASSED .*{REPLAYED}", out, re.MULTILINE)) == 3


def test_docs_have_its_page(copy: Path, tmp_path: Path) -> None:
    """The page is what `write_pages` writes for each of OPS; the test of the site has it write them all."""
    if importlib.util.find_spec("sphinx") is None:
        pytest.skip("not installed: sphinx")
    code = f"""
import sys
from pathlib import Path
sys.path.insert(0, "docs")
from op_pages import OPS, index_page, op_page
folder = Path({str(tmp_path)!r})
(folder / "page.md").write_text(op_page(OPS["{NAME}"], folder / "plots"))
(folder / "index.md").write_text(index_page(list(OPS.values())))
"""
    run(copy, "-c", code)
    page = (tmp_path / "page.md").read_text()
    assert f"torch.ops.llmk.{NAME}" in page
    assert "dx = dy * 2 * l" in page
    assert f"({NAME}.md)" in (tmp_path / "index.md").read_text()
