"""opcheck must be able to fail: operators broken on purpose, one way each, are caught under the right name."""

import pytest
import torch

from compile_tests.planted import BROKEN, record
from compile_tests.planted_gpu import BROKEN_ON_A_GPU
from compile_tests.planted_kernels import BROKEN_KERNELS
from llmk.opcheck import check
from llmk.opcheck.promises import GPU_PROMISES, INTERPRETER_PROMISES, PROMISES

NAMES = [promise.__name__ for promise in PROMISES]


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_op_is_caught_under_its_name(name: str) -> None:
    promise, make = BROKEN[name]
    results = check(make(name), promises=NAMES[: NAMES.index(promise) + 1])
    broken = [result for result in results if not result.passed]
    assert broken, results
    assert broken[0].promise == promise, broken[0]
    assert broken[0].message


def test_a_sound_op_passes() -> None:
    """PyTorch's own square: nothing of the above is a false alarm."""
    results = check(record("square", overload=torch.ops.aten.square.default))
    assert [result for result in results if not result.passed] == []
    verdicts = {result.promise: result.verdict for result in results}
    assert verdicts["compiled_samples"] == verdicts["clean_graph"] == "kept"  # the second looks at the first's traces


def test_every_promise_has_a_broken_op() -> None:
    named = [promise for promise, _ in BROKEN.values()]
    named += [promise for _, promise, _ in BROKEN_KERNELS]
    named += [promise for promise, _ in BROKEN_ON_A_GPU.values()]
    assert set(named) == {promise.__name__ for promise in PROMISES + INTERPRETER_PROMISES + GPU_PROMISES}
    assert len(named) >= 20
