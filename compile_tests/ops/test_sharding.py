"""DTensors through every operator's sharding strategy, and split models: the same numbers as in one process."""

import pytest

from compile_tests.helpers import sharding_checks as checks
from compile_tests.helpers import sharding_models as models


@pytest.mark.parametrize(
    ("check", "mesh_shape"),
    [(checks.on_two_processes, (2,)), (checks.two_dimensions, (2, 2)), (models.train, (2,))],
    ids=["operators", "two_dimensions", "models"],
)
def test_split(check, mesh_shape, tmp_path) -> None:
    wrong = checks.in_processes(check, mesh_shape, tmp_path)
    assert not wrong, f"{len(wrong)} differ:\n" + "\n".join(wrong[:10])
