"""llmk's layers in the slots of transformers' `use_kernels`, with the package `kernels` itself."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("kernels")
ROOT = Path(__file__).resolve().parents[2]
CHECKS = "compile_tests.helpers.kernel_slots_checks"


@pytest.fixture(scope="module")
def errors() -> dict[str, str]:
    """The failure of each check, by its name. In one process of their own: see there."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", CHECKS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def names() -> list[str]:
    source = (ROOT / f"{CHECKS.replace('.', '/')}.py").read_text()
    functions = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    return [function.name for function in functions if function.name.startswith("check_")]


@pytest.mark.parametrize("name", names())
def test_kernel_slots(name: str, errors: dict[str, str]):
    assert errors[name] == "", errors[name]
