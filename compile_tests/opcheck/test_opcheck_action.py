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


def run(folder: Path, files: str, path: Path = Path(sys.executable).parent) -> tuple[int, str, str]:
    """The script's status, what it prints, and what it gives the next step; `path` is where its Python is."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PATH": f"{path}{os.pathsep}{os.environ['PATH']}",
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


def test_a_package_is_checked(tmp_path: Path) -> None:
    """Files of a pattern; the findings are in the log and in the file for code scanning."""
    (tmp_path / "mylib").mkdir()
    (tmp_path / "mylib" / "half.py").write_text(OWN_OP.format(divisor=3))
    status, said, output = run(tmp_path, "mylib/*.py")
    assert status == 1, said
    assert "::error file=mylib/half.py,line=" in said
    assert output == f"sarif={tmp_path}/opcheck.sarif\n"
    found = json.loads((tmp_path / "opcheck.sarif").read_text())["runs"][0]["results"]
    assert [entry["ruleId"] for entry in found] == ["values_and_gradients"]


@pytest.mark.parametrize(("command", "code"), [("touch opcheck.sarif", 0), ("exit 2", 2)])
def test_the_status_is_opchecks(command: str, code: int, tmp_path: Path) -> None:
    """A script stands in for Python; where opcheck wrote no findings there is nothing to upload."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] || {command}\n')
    python.chmod(0o755)
    status, said, output = run(tmp_path, "half.py", path=tmp_path)
    assert (status, output) == (code, "" if code else f"sarif={tmp_path}/opcheck.sarif\n"), said


def test_the_action_gives_the_script_what_it_reads() -> None:
    yaml = pytest.importorskip("yaml")
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    first, upload = action["runs"]["steps"]
    assert first["run"] == f'bash "$GITHUB_ACTION_PATH/{SCRIPT.relative_to(ROOT)}"'
    assert set(first["env"]) == set(re.findall(r"OPCHECK_\w+", SCRIPT.read_text()))
    given = set(re.findall(r"inputs\.(\w+)", str([first["env"], upload["if"]])))
    assert given == set(action["inputs"])
    assert upload["with"]["sarif_file"] == action["outputs"]["sarif"]["value"]
