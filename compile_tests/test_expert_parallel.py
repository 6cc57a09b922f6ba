"""`llmk.nn.expert_parallel_moe`: two and four processes on the CPU, equal to one."""

import expert_parallel_checks
import pytest
import sharding_checks


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_are_one_process(ranks, tmp_path) -> None:
    wrong = sharding_checks.in_processes(expert_parallel_checks.equal, (ranks,), tmp_path)
    assert not wrong, "\n".join(wrong)
