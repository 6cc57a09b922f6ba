"""The plugin of pytest, in a project that is not llmk."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from compile_tests.helpers.own_op import OWN_OP
from compile_tests.helpers.scripts import run_script

ROOT = Path(__file__).resolve().parents[2]
FEW = "values_and_gradients or no_mutation or batch_invariant or edge_rows"


RUN = """
import os, sys, pytest
os.chdir(os.path.dirname(__file__))
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # it may be installed
sys.exit(pytest.main(["-p", "llmk_pytest", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


def run_pytest(folder: Path, *arguments: str) -> tuple[int, list[str]]:
    (folder / "run.py").write_text(RUN)
    done = run_script(folder / "run.py", *arguments)
    return done.returncode, (done.stdout + done.stderr).splitlines()


def test_each_promise_is_a_test(tmp_path: Path) -> None:
    for name, divisor in (("right", 2), ("wrong", 3)):
        (tmp_path / f"{name}.py").write_text(OWN_OP.format(divisor=divisor).replace("mylib", f"mylib_{name}"))
    (tmp_path / "test_other.py").write_text("def test_not_asked_for():\n    assert False\n")
    files = "--opcheck", "right.py", "--opcheck", "wrong.py"
    found, lines = run_pytest(tmp_path, "-v", *files, "--opcheck-dtype", "float32", "-k", FEW)
    assert found == pytest.ExitCode.TESTS_FAILED, lines
    verdicts = dict(line.split()[:2] for line in lines if ".py::half" in line.partition(" ")[0])
    assert verdicts == {
        f"{name}.py::half-float32-{promise}": verdict
        for name, of_values in (("right", "PASSED"), ("wrong", "FAILED"))
        for promise, verdict in (
            ("values_and_gradients", of_values),
            ("no_mutation", "PASSED"),
            ("edge_rows", "SKIPPED"),
        )
    }
    assert any("output 0: element" in line for line in lines)


def test_what_is_wrong_with_a_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "my_ops.py").write_text("import no_such_package\n")
    found, lines = run_pytest(tmp_path, "--opcheck", "my_ops.py")
    assert found == pytest.ExitCode.INTERRUPTED
    assert any(
        line.endswith("my_ops.py, line 1: ModuleNotFoundError: No module named 'no_such_package'") for line in lines
    )
    found, lines = run_pytest(tmp_path, "--opcheck", "other.py")
    assert (found, lines) == (pytest.ExitCode.USAGE_ERROR, ["ERROR: --opcheck: no file other.py", ""])


def test_other_runs_do_not_import_llmk(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import sys\n\ndef test_it():\n    assert 'torch' not in sys.modules\n")
    (tmp_path / "run.py").write_text(RUN)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, tmp_path / "run.py"], env=environment, check=False).returncode == 0
