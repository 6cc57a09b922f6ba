"""`llmk.nn.expert_parallel_moe` and `llmk.transformers.expert_parallel`, by two and four processes on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the processes run without interpreter")
def test_ranks_are_one_process() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "compile_tests.helpers.expert_parallel_checks"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
