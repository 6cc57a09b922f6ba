"""The examples of losses and of a mixture run, and leave a plot."""

from pathlib import Path

import pytest

from compile_tests.helpers.scripts import run_script

EXAMPLES = Path(__file__).parents[2] / "examples"


PRETRAINED = ("distill", "distill_on_policy", "dpo", "grpo", "grpo --replay")


@pytest.mark.parametrize("command", [*(f"{name} --pretraining 1" for name in PRETRAINED), "moe"])
def test_it_runs(command: str, tmp_path: Path) -> None:
    for module in ("matplotlib", "tokenizers"):
        pytest.importorskip(module)
    name, *options = command.split()
    result = run_script(EXAMPLES / f"{name}.py", *options, "--steps", 1, "--output", tmp_path)
    assert result.returncode == 0, result.stderr
    assert not result.stderr
    assert (tmp_path / f"{name}.png").stat().st_size > 1000
