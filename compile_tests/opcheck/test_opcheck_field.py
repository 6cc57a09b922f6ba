"""opcheck on operators as the field has them: no finding in right ones, and the cause of wrong ones first."""

import random

import pytest

from compile_tests.helpers.field_cheats import IN_TRITON as WRONG_IN_TRITON
from compile_tests.helpers.field_cheats import WRONG
from compile_tests.helpers.field_right import IN_TRITON, RIGHT, broken_by_pytorch
from compile_tests.helpers.field_wrong import SLOW
from llmk.opcheck import check
from llmk.opcheck.report.causes import causes
from llmk.opcheck.report.reports import notes
from llmk.registry.devices import INTERPRET


@pytest.mark.kernels
@pytest.mark.parametrize("name", [*RIGHT, *IN_TRITON])
def test_a_right_one_has_no_finding(name: str) -> None:
    if (name in IN_TRITON) is not INTERPRET:
        pytest.skip("the other run has it")
    results = check((RIGHT | IN_TRITON)[name], skip=SLOW)
    found = [cause for cause in causes(results) if cause.first.promise != broken_by_pytorch(name)]
    assert found == [], "\n".join(map(str, found))
    verdicts = {result.promise: result.verdict for result in results}
    assert verdicts["values_and_gradients"] == "kept"


@pytest.mark.kernels
@pytest.mark.parametrize("name", [*WRONG, *WRONG_IN_TRITON])
def test_a_wrong_one_is_named_by_its_cause(name: str) -> None:
    if (name in WRONG_IN_TRITON) is not INTERPRET:
        pytest.skip("the other run has it")
    wrong = (WRONG | WRONG_IN_TRITON)[name]
    found = causes(check(wrong.op, skip=SLOW))
    assert wrong.is_named_by(found), "\n".join(map(str, found))
    assert len(found) <= 4, "\n".join(map(str, found))


@pytest.mark.kernels
def test_a_sum_by_atomics_is_noted() -> None:
    """It depends on the order of the programs, as every sum in floating point does; what races is broken."""
    if not INTERPRET:
        pytest.skip("it is about the kernels")
    (result,) = check(IN_TRITON["column_sum"], only=["any_program_order"])
    assert result.passed
    (note,) = notes([result])
    assert note.endswith("of out_ptr depends on the order of the programs (reversed): it is a sum by atomics")


def test_the_callers_random_numbers_go_on() -> None:
    """Whatever is seeded for a check."""
    state = random.getstate()
    check(RIGHT["rms_norm"], only=["side_effects"])
    assert random.getstate() == state
