"""`llmk.nn.expert_parallel_moe` and `llmk.transformers.expert_parallel`, by two and four processes on the CPU."""

from pathlib import Path

import pytest

from llmk.registry.devices import INTERPRET

pytest.importorskip("transformers")

from compile_tests.helpers.expert_parallel_checks import checks
from compile_tests.helpers.rank_processes import errors_of_ranks


@pytest.mark.skipif(INTERPRET, reason="the processes run without interpreter")
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_are_one_process(world: int, tmp_path: Path) -> None:
    errors = errors_of_ranks(checks, world, tmp_path)
    assert not errors, "\n".join(errors)
