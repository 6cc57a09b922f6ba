"""opcheck finds faults of a kernel's own code without a GPU, in Triton's interpreter."""

import dataclasses
from typing import Any

import pytest
import torch

from compile_tests.helpers.mutants_kernels import (
    BROKEN_KERNELS,
    bounded_turns_kernel,
    never_ends_kernel,
    sound_kernel,
    square_by,
)
from llmk.opcheck import check
from llmk.opcheck.calls import call
from llmk.opcheck.promises.table import OF_LAYERS
from llmk.opcheck.runner import promises_for
from llmk.registry.devices import INTERPRET

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not INTERPRET, reason="without a GPU kernels run in Triton's interpreter"),
]

NAMES = [promise.__name__ for promise in promises_for(torch.device("cpu"))]
LAYERS = {promise.__name__ for promise in OF_LAYERS}
SHARING = ["in_bounds", "any_program_order", "no_float_atomics", "long_offsets"]
OF_KERNELS = [name for name in NAMES[: NAMES.index("far_rows") + 1] if name not in LAYERS]


@pytest.mark.parametrize(("kernel", "promise", "message"), BROKEN_KERNELS, ids=lambda value: str(value)[:30])
def test_a_broken_kernel_is_caught_under_its_name(kernel: Any, promise: str, message: str) -> None:
    results = check(square_by(kernel), only=NAMES[: NAMES.index(promise) + 1])
    broken = [result for result in results if not result.passed]
    assert broken[0].promise == promise, broken
    assert message in broken[0].message


@pytest.mark.parametrize("kernel", [sound_kernel, bounded_turns_kernel])
def test_a_sound_kernel_is_not(kernel: Any) -> None:
    results = check(square_by(kernel), only=OF_KERNELS)
    assert {result.verdict for result in results} == {"kept"}, results


def test_the_promises_of_kernels_share_their_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[Any]()
    monkeypatch.setattr("llmk.opcheck.promises.kernels.call", lambda op, sample: calls.append(call(op, sample)))
    op = square_by(sound_kernel)
    results = check(op, only=[*SHARING, "every_kernel_ends"])
    assert {result.verdict for result in results} == {"kept"}, results
    assert len(calls) == len(op.dtypes) * len(list(op.samples(torch.device("cpu"), torch.float32)))


def test_an_operator_without_kernels_has_nothing_to_check() -> None:
    op = dataclasses.replace(square_by(sound_kernel), overload=torch.ops.aten.square.default)
    results = check(op, only=SHARING)
    assert {result.verdict for result in results} == {"empty"}


def test_a_loop_that_does_not_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop is stopped by its turns, whatever its source looks like, and in every check that calls it."""
    monkeypatch.setattr("llmk.opcheck.interpreted.interpreter.MOST_TURNS", 300)
    monkeypatch.setattr("llmk.opcheck.promises.kernels.unbounded_loops", lambda kernel: [])
    results = check(square_by(never_ends_kernel), only=["every_kernel_ends", "values_and_gradients"])
    assert [result.passed for result in results] == [False, False]
    assert all("never_ends_kernel: a loop has made 448 turns and goes on" in r.message for r in results), results
