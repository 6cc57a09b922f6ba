"""A new file under ops/ is enough: the registry, opcheck, the tests and the docs find it with no other edit."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compile_tests.helpers.rank_processes import server
from llmk.opcheck import check
from llmk.registry import OPS

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "example_op.py"
NAME = "leaky_relu_squared"
FINDS = f"""
import importlib.util, sys
import pytest, torch, llmk
from llmk.registry import OPS

print(llmk.__file__, OPS["{NAME}"].schema)
x = torch.tensor([-2.0, 3.0], requires_grad=True)
y = torch.ops.llmk.{NAME}(x, 0.5)
y.sum().backward()
assert y.tolist() == [1.0, 9.0]
assert x.grad.tolist() == [-1.0, 6.0]
if importlib.util.find_spec("sphinx") is not None:
    from pathlib import Path
    sys.path.insert(0, "docs")
    from op_pages import index_page, op_page
    page = op_page(OPS["{NAME}"], Path(sys.argv[1]))
    assert "torch.ops.llmk.{NAME}" in page
    assert "dx = dy * 2 * l" in page
    assert "({NAME}.md)" in index_page(list(OPS.values()))
files = "ops/test_numerics", "registry/test_launch_cache", "registry/test_launch_cache_public"
options = ["-o", "addopts=", "-p", "no:cacheprovider", "-rp", "-k", "{NAME}"]
sys.exit(pytest.main([*options, *(f"compile_tests/{{file}}.py" for file in files)]))
"""


def test_it_is_found(tmp_path: Path) -> None:
    """In a copy of the repository with the documentation's example, its pages are written and its tests pass."""
    copy = tmp_path / "llmk"
    made = shutil.ignore_patterns(".*", "__pycache__", "_build", "build", "dist", "runs", "*.egg-info")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=made)
    shutil.copy(EXAMPLE, copy / "ops" / "pointwise" / f"{NAME}.py")
    environment = os.environ | {"PYTHONPATH": str(copy)}  # before an installed one
    command = [sys.executable, "-c", FINDS, str(tmp_path / "plots")]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.startswith(f"{copy}/llmk/__init__.py llmk::{NAME}(Tensor input, float negative_slope")
    passed = re.findall(rf"^PASSED compile_tests/(\w+)/\S+\[{NAME}", done.stdout, re.MULTILINE)
    assert (passed.count("ops"), passed.count("registry")) == (6, 3), done.stdout


def write_broken(file: Path) -> None:
    """Write what opcheck finds in the documentation's example."""
    assert list(OPS)
    spec = importlib.util.spec_from_file_location(f"llmk.ops.pointwise.{NAME}", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    results = check(OPS[NAME], dtypes=[torch.float32], skip=["compiled"])  # what Inductor makes of any operator
    file.write_text("\n".join(f"{result.promise}: {result.message}" for result in results if not result.passed))


@pytest.mark.kernels
def test_opcheck_passes_it(tmp_path: Path) -> None:
    """In a process of its own, whose operators no other test sees."""
    process = server().Process(target=write_broken, args=(tmp_path / "broken",))
    process.start()
    process.join()
    assert (tmp_path / "broken").read_text() == ""
