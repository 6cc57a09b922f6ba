"""Tests which loops of a kernel have a bound, as `every_kernel_ends` reads it from the source."""

import ast

import pytest

from llmk.opcheck.interpreted.loops import kernels_of, loop_is_bounded
from llmk.registry import OPS

BOUNDED = [
    "while i < N:\n    i += 1",
    "while i <= N - 1:\n    i = i + 16",
    "while N > i:\n    i += 1",
    "while tries > 0:\n    tries -= 1",
    "while tries > 0:\n    tries = tl.where(done, 0, tries - 1)",
    "while (i < MAX) and (count != last):\n    last = count\n    i += 1",
    "while (i < MAX) & (count != last):\n    count, i = f(count), i + 1",
    "while (i < MAX) or (j < 2):\n    i += 1\n    j += 1",
    "while i < N:\n    if x > 0:\n        i += 1\n    i += 1",
]
UNBOUNDED = [
    "while count != last:\n    last = count\n    count = f(last)",
    "while count < last:\n    count = f(last)",
    "while True:\n    x = f(x)",
    "while i < N:\n    i -= 1",
    "while i < N:\n    if x > 0:\n        i += 1",
    "while i < N:\n    i += 1\n    N += 1",
    "while i < N:\n    i += step",
    "while i < tl.load(p):\n    i += 1",
    "while i < 5:\n    i = tl.where(x > 0, 2, i + 1)",
    "while (i < MAX) or (count != last):\n    i += 1\n    last = count",
    "while i != N:\n    i += 2",
    "while i < N:\n    i += 1\n    for i in range(3):\n        x += 1",
]


@pytest.mark.parametrize("source", BOUNDED)
def test_a_counter_bounds_a_loop(source: str) -> None:
    assert loop_is_bounded(ast.parse(source).body[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("source", UNBOUNDED)
def test_what_the_data_decides_does_not(source: str) -> None:
    assert not loop_is_bounded(ast.parse(source).body[0])  # type: ignore[arg-type]


def test_the_kernels_of_every_operator_are_found() -> None:
    """The kernels are found with those that they call."""
    launching = {name: [o.fn for o in op.kernel_ops if not o.is_plain] for name, op in OPS.items()}
    named = {name: {kernel.fn.__name__ for kernel in kernels_of(fns)} for name, fns in launching.items() if fns}
    assert all(any(kernel.endswith("_kernel") for kernel in kernels) for kernels in named.values()), named
    assert "column_moments" in named["group_norm"]
