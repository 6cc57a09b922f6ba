"""`llmk.transformers.tensor_parallel`, by two processes on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the processes run without interpreter")
def test_a_split_model_is_the_whole_model():
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "compile_tests.helpers.tensor_parallel_checks"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
