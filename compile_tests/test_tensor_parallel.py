"""`llmk.transformers.tensor_parallel`, by two processes on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

CHECKS = Path(__file__).parent / "tensor_parallel_checks.py"


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the processes run without interpreter")
def test_a_split_model_is_the_whole_model():
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, CHECKS], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
