"""llmk's layers in the slots of transformers' `use_kernels`, with the package `kernels` itself."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("kernels")
CHECKS = Path(__file__).with_name("kernel_slots_checks.py")


@pytest.fixture(scope="module")
def errors() -> dict[str, str]:
    """The failure of each check, by its name. In one process of their own: see there."""
    path = os.pathsep.join([str(CHECKS.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, CHECKS], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def names() -> list[str]:
    functions = (node for node in ast.parse(CHECKS.read_text()).body if isinstance(node, ast.FunctionDef))
    return [function.name for function in functions if function.name.startswith("check_")]


@pytest.mark.parametrize("name", names())
def test_kernel_slots(name: str, errors: dict[str, str]):
    assert errors[name] == "", errors[name]
