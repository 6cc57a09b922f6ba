"""`llmk.transformers.tensor_parallel`, by two processes on the CPU."""

from pathlib import Path

import pytest

from llmk.registry.devices import INTERPRET

pytest.importorskip("transformers")

from compile_tests.helpers.rank_processes import errors_of_ranks
from compile_tests.helpers.tensor_parallel_checks import checks


@pytest.mark.skipif(INTERPRET, reason="the processes run without interpreter")
def test_a_split_model_is_the_whole_model(tmp_path: Path) -> None:
    errors = errors_of_ranks(checks, 2, tmp_path)
    assert not errors, "\n".join(errors)
