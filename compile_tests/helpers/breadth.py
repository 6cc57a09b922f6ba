"""Parameters of a test of which a run takes some, and one with `--breadth` the others."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def some_of(values: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """Return the values as parameters; those that are not kept have the marker `breadth`."""
    parameters = list(values)
    missing = [value for value in kept if value not in parameters]
    assert not missing, f"no parameter of this test: {missing}"
    return [value if value in kept else pytest.param(value, marks=pytest.mark.breadth) for value in parameters]
