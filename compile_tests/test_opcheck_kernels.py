"""opcheck finds faults of a kernel's own code without a GPU, in Triton's interpreter."""

import dataclasses
from typing import Any

import pytest
import torch

from compile_tests.planted_kernels import BROKEN_KERNELS, sound_kernel, square_by
from llmk.opcheck import check
from llmk.opcheck.runner import promises_for
from llmk.registry.backends import INTERPRET

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not INTERPRET, reason="without a GPU kernels run in Triton's interpreter"),
]

NAMES = [promise.__name__ for promise in promises_for(torch.device("cpu"))]
OF_KERNELS = NAMES[: NAMES.index("far_rows") + 1]


@pytest.mark.parametrize(("kernel", "promise", "message"), BROKEN_KERNELS, ids=lambda value: str(value)[:30])
def test_a_broken_kernel_is_caught_under_its_name(kernel: Any, promise: str, message: str) -> None:
    results = check(square_by(kernel), promises=NAMES[: NAMES.index(promise) + 1])
    broken = [result for result in results if not result.passed]
    assert broken[0].promise == promise, broken
    assert message in broken[0].message


def test_a_sound_kernel_is_not() -> None:
    results = check(square_by(sound_kernel), promises=OF_KERNELS)
    assert {result.verdict for result in results} == {"kept"}, results


def test_an_operator_without_kernels_has_nothing_to_check() -> None:
    op = dataclasses.replace(square_by(sound_kernel), overload=torch.ops.aten.square.default)
    results = check(op, promises=["in_bounds", "any_program_order", "no_float_atomics", "long_offsets"])
    assert {result.verdict for result in results} == {"empty"}
