"""opcheck finds faults of a kernel's own code without a GPU, in Triton's interpreter."""

import dataclasses
from typing import Any

import pytest
import torch
from torch.library import wrap_triton

from compile_tests.helpers.field_wrong import IN_TRITON
from compile_tests.helpers.mutants_kernels import (
    BROKEN_KERNELS,
    bounded_turns_kernel,
    load_without_mask_kernel,
    never_ends_kernel,
    sound_kernel,
    square_by,
)
from llmk.accuracy.neighbours import copy_with_layout
from llmk.opcheck import availability, check
from llmk.opcheck.calls import call
from llmk.opcheck.promises import kernels as kernel_promises
from llmk.opcheck.promises.table import OF_LAYERS
from llmk.opcheck.runner import promises_for
from llmk.registry import Sample
from llmk.registry.devices import INTERPRET
from llmk.registry.private.kernels import interpreter as find_interpreter

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not INTERPRET, reason="without a GPU kernels run in Triton's interpreter"),
]

interpreter = find_interpreter()
NAMES = [promise.__name__ for promise in promises_for(torch.device("cpu"))]
LAYERS = {promise.__name__ for promise in OF_LAYERS}
SHARING = ["in_bounds", "any_program_order", "no_float_atomics", "long_offsets"]
OF_KERNELS = [name for name in NAMES[: NAMES.index("far_rows") + 1] if name not in LAYERS]


@pytest.mark.parametrize(("kernel", "promise", "message"), BROKEN_KERNELS, ids=lambda value: str(value)[:30])
def test_a_broken_kernel_is_caught_under_its_name(kernel: Any, promise: str, message: str) -> None:
    (result,) = check(square_by(kernel), only=[promise])
    assert (result.promise, result.passed) == (promise, False), result
    assert message in result.message


@pytest.mark.parametrize("kernel", [sound_kernel, bounded_turns_kernel])
def test_a_sound_kernel_is_not(kernel: Any) -> None:
    results = check(square_by(kernel), only=OF_KERNELS)
    assert {result.verdict for result in results} == {"kept"}, results


def test_the_promises_of_kernels_share_their_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[Any]()
    monkeypatch.setattr(
        kernel_promises,
        "call_unless_strides_refused",
        lambda op, sample, change: calls.append(call(op, sample, change=change)),
    )
    op = square_by(sound_kernel)
    results = check(op, only=[*SHARING, "every_kernel_ends"])
    assert {result.verdict for result in results} == {"kept"}, results
    assert len(calls) == 3 * len(op.dtypes) * len(list(op.samples(torch.device("cpu"), torch.float32)))  # layouts


def test_a_kernel_that_takes_the_strides_for_granted_is_told_from_its_own_code() -> None:
    """Of a GPU's kernels no more than that is interpreted."""
    (result,) = check(IN_TRITON["any_strides"].op, only=["in_bounds"])
    assert "copy_kernel loads offset" in result.message


def test_an_operator_may_launch_what_is_interpreted() -> None:
    """Older releases of torch take no kernel of the interpreter's class."""
    kernel: Any = object()
    assert wrap_triton(kernel) is kernel


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter copies a GPU's tensors, and the copies back: here those of tensors that are no copies."""
    executor, copies = interpreter.GridExecutor, list[torch.Tensor]()
    copy_in, copy_back = executor._init_args_hst, executor._restore_args_dev

    def copied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or any(value.data_ptr() == copy.data_ptr() for copy in copies):
            return value
        copies.append(copy_with_layout(value))
        return copies[-1]

    def copying(self: Any, args: Any, kwargs: Any) -> Any:
        return copy_in(self, [copied(value) for value in args], {name: copied(v) for name, v in kwargs.items()})

    def copying_back(self: Any, *given: Any) -> None:
        copy_back(self, *given)
        copies.clear()

    monkeypatch.setattr(executor, "_init_args_hst", copying)
    monkeypatch.setattr(executor, "_restore_args_dev", copying_back)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(("kernel", "promise", "message"), BROKEN_KERNELS[:6], ids=lambda value: str(value)[:30])
def test_a_gpus_broken_kernel_is_caught(kernel: Any, promise: str, message: str) -> None:
    (result,) = check(square_by(kernel), only=[promise])
    assert not result.passed
    assert message in result.message


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_gpus_sound_kernel_is_not() -> None:
    results = check(square_by(sound_kernel), only=[*SHARING, "every_kernel_ends", "values_and_gradients"])
    assert {result.verdict for result in results} == {"kept"}, results


def test_a_gpus_large_samples_are_not_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may take hours there; one that is small enough is interpreted."""
    op = square_by(sound_kernel)
    small, large = (Sample((torch.ones(4, n, dtype=torch.float32, device="cpu"),)) for n in (37, 100))
    monkeypatch.setattr(kernel_promises, "device_of", lambda op, sample: torch.device("cuda"))
    monkeypatch.setattr(kernel_promises, "MOST_INTERPRETED", 200)
    results = [check(op, samples, only=["in_bounds"])[-1] for samples in ([small, large], [large])]
    assert [(result.verdict, result.calls) for result in results] == [
        ("kept", 4),  # of three layouts, and the sample
        ("empty", 0),
    ]
    assert results[1].message.startswith("not interpreted: no sample has at most ")


def test_a_gpus_kernel_that_the_interpreter_lacks_is_no_broken_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it runs, the GPU says; what it does out of bounds is broken there as well."""

    def fails(input: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("no such instruction")

    for device, refused in (("cpu", False), ("cuda", True)):
        monkeypatch.setattr(availability, "device_of", lambda op, sample, device=device: torch.device(device))
        op = dataclasses.replace(square_by(sound_kernel), overload=fails)
        (result,) = check(op, only=["in_bounds"])
        assert result.passed == refused, result
    assert result.message.startswith("does not run in Triton's interpreter: a GPU (NotImplementedError: no such")
    (result,) = check(square_by(load_without_mask_kernel), only=["in_bounds"])
    assert not result.passed


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
