"""The GIoU example, run as a user runs it, on a few boxes."""

import re
from pathlib import Path

import pytest

from compile_tests.helpers.scripts import run_script
from llmk.registry.devices import INTERPRET

EXAMPLE = Path(__file__).parents[2] / "examples" / "giou.py"


@pytest.mark.skipif(INTERPRET, reason="the example runs without interpreter")
def test_all_ways_give_the_same_losses() -> None:
    done = run_script(EXAMPLE, "--device", "cpu", "--steps", "3", "--batch", "2", "--boxes", "8")
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r" (\d\.\d{6})$", done.stdout, re.MULTILINE)]
    assert len(losses) == 5
    assert losses == pytest.approx(losses[:1] * 5, rel=1e-5)
    assert max(map(len, done.stdout.splitlines())) <= 80
