"""The GitHub action of the repository, in a project that is not llmk."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from compile_tests.helpers.own_op import OWN_OP

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / ".github" / "actions" / "opcheck.sh"


def run(folder: Path, files: str) -> tuple[int, str, str]:
    """The script's status, what it prints, and what it gives the next step."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "GITHUB_ACTIONS": "true",
        "GITHUB_ACTION_PATH": str(ROOT),
        "GITHUB_OUTPUT": str(folder / "output"),
        "OPCHECK_FILES": files,
        "OPCHECK_OPTIONS": "--device cpu --path reference --dtype float32 --only values_and_gradients,no_mutation",
        "OPCHECK_SARIF": str(folder / "opcheck.sarif"),
    }
    done = subprocess.run(
        ["bash", str(SCRIPT)], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    output = folder / "output"
    return done.returncode, done.stdout + done.stderr, output.read_text() if output.is_file() else ""


@pytest.mark.parametrize(("divisor", "code"), [(2, 0), (3, 1)])
def test_a_package_is_checked(divisor: int, code: int, tmp_path: Path) -> None:
    """Files of a pattern; the findings are in the log and in the file for code scanning."""
    (tmp_path / "mylib").mkdir()
    (tmp_path / "mylib" / "half.py").write_text(OWN_OP.format(divisor=divisor))
    status, said, output = run(tmp_path, "mylib/*.py")
    assert status == code, said
    assert ("::error file=mylib/half.py,line=" in said) == bool(code)
    assert output == f"sarif={tmp_path}/opcheck.sarif\n"
    found = json.loads((tmp_path / "opcheck.sarif").read_text())["runs"][0]["results"]
    assert [entry["ruleId"] for entry in found] == ["values_and_gradients"] * code


def test_what_cannot_be_imported_leaves_nothing_to_upload(tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text("import no_such_package\n")
    status, said, output = run(tmp_path, "half.py")
    assert (status, output) == (2, "")
    assert "half.py, line 1: ModuleNotFoundError" in said


def test_the_action_gives_the_script_what_it_reads() -> None:
    yaml = pytest.importorskip("yaml")
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    first, upload = action["runs"]["steps"]
    assert first["run"] == f'bash "$GITHUB_ACTION_PATH/{SCRIPT.relative_to(ROOT)}"'
    assert set(first["env"]) == set(re.findall(r"OPCHECK_\w+", SCRIPT.read_text()))
    given = set(re.findall(r"inputs\.(\w+)", str([first["env"], upload["if"]])))
    assert given == set(action["inputs"])
    assert upload["with"]["sarif_file"] == action["outputs"]["sarif"]["value"]
