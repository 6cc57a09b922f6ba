"""opcheck on operators that are not llmk's: right ones keep what PyTorch asks of them, in every way of registering."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.libdevice import tanh

from compile_tests.helpers import strangers
from compile_tests.helpers.field_wrong import SLOW, WRONG
from compile_tests.helpers.pages import ROOT, blocks
from llmk.opcheck import check
from llmk.opcheck.calls import call
from llmk.opcheck.foreign.adapters import adapted
from llmk.opcheck.promises.table import HABITS
from llmk.opcheck.report.causes import causes
from llmk.opcheck.report.reports import notes
from llmk.opcheck.runner import Result
from llmk.registry import OPS, Op, Sample
from llmk.registry.devices import INTERPRET

CPU = torch.device("cpu")
RIGHT = {op.name: op for op in vars(strangers).values() if isinstance(op, Op)}
TRITON = ("add", "mysin", "softmax", "scale_")
NO_CPU_CODE = ("add", "softmax", "scale_")


@pytest.mark.kernels
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_one_keeps_every_promise(name: str) -> None:
    if name not in TRITON and INTERPRET:
        pytest.skip("the other run has it: no kernel is interpreted")
    results = check(RIGHT[name], dtypes=[torch.float32], skip=SLOW)
    assert [result for result in results if not result.passed] == []
    if name in NO_CPU_CODE and not INTERPRET:
        assert len(results) == 1
    else:
        verdicts = {result.promise: result.verdict for result in results}
        assert verdicts["values_and_gradients"] == "kept"
        assert verdicts["torch_opcheck"] == ("empty" if name == "exp" else "kept")


def test_no_code_for_a_cpu_is_said_once() -> None:
    results = check(RIGHT["softmax"], dtypes=[torch.float32])
    if INTERPRET:
        pytest.skip("there it runs")
    (note,) = notes(results)
    assert note.startswith(
        "softmax (reference): no CPU version: `--path interpreter`, or a GPU (RuntimeError: 0 active"
    )


@pytest.mark.kernels
def test_bfloat16_is_interpreted_where_it_is_asked_for() -> None:
    """Triton's interpreter adds the bits of two numbers, and a kernel that casts to float32 does not let it."""
    if not INTERPRET:
        pytest.skip("it is about the interpreter")
    only = ["values_and_gradients"]
    verdicts = {result.dtype: (result.promise, result.verdict) for result in check(RIGHT["add"], only=only)}
    assert verdicts["bfloat16"] == ("runs", "empty")
    assert verdicts["float16"] == ("values_and_gradients", "kept")
    asked = check(RIGHT["add"], dtypes=[torch.bfloat16], only=only)
    assert [result.verdict for result in asked] == ["broken"]
    assert [r.verdict for r in check(RIGHT["linear"], dtypes=[torch.bfloat16], only=only)] == ["kept"]


@torch.library.custom_op("strangers::asserts_cuda", mutates_args=())
def asserts_cuda(x: Tensor) -> Tensor:
    assert x.is_cuda
    return x.clone()


@torch.library.custom_op("strangers::raises", mutates_args=())
def raises(x: Tensor) -> Tensor:
    raise RuntimeError("an index is out of range")


def test_a_device_that_is_asked_for_is_no_broken_promise() -> None:
    refused = strangers.record(asserts_cuda, lambda x: x, dtypes=(torch.float32,))
    (result,) = check(refused)
    assert result.verdict == "empty"
    assert result.message.startswith("no CPU version: `--path interpreter`, or a GPU (AssertionError")
    (result,) = check(strangers.record(raises, lambda x: x, dtypes=(torch.float32,)), only=["deterministic"])
    assert result.verdict == "broken"
    assert result.message.startswith("odd width [(3, 37)]: RuntimeError: an index is out of range")


def test_a_missing_fake_is_one_cause_of_all_that_compiles() -> None:
    (cause,) = causes(check(WRONG["no_fake"].op, only=["default_dtype", "compiled_samples", "no_recompile"]))
    assert (cause.kind, len(cause.results)) == ("compile", 3)


@triton.jit
def times_kernel(x_ptr, out_ptr, scale, SIZE: tl.constexpr):
    cols = tl.arange(0, SIZE)
    tl.store(out_ptr + cols, tl.load(x_ptr + cols) * scale.to(tl.float32))


@triton.jit
def tanh_kernel(x_ptr, out_ptr, scale, SIZE: tl.constexpr):
    cols = tl.arange(0, SIZE)
    tl.store(out_ptr + cols, scale * tanh(tl.load(x_ptr + cols)))


@triton.jit
def mistaken_kernel(x_ptr, out_ptr, scale, SIZE: tl.constexpr):
    cols = tl.arange(0, SIZE)
    tl.store(out_ptr + cols, tl.load(x_ptr + cols) * scale.as_float())


def verdict_of_launching(kernel: Any) -> Result:
    def launched(x: Tensor) -> Tensor:
        kernel[(1,)](x, out := torch.empty_like(x), 0.5, SIZE=x.numel())
        return out

    def reference_launched(x: Tensor) -> Tensor:
        return x * 0.5

    record = strangers.record(launched, reference_launched, dtypes=(torch.float32,))
    samples = [Sample((torch.randn(16, device="cpu", dtype=torch.float32),), why="a block")]
    return check(record, samples, only=["values_and_gradients"])[0]


@pytest.mark.kernels
def test_what_the_interpreter_lacks_is_no_broken_promise() -> None:
    if not INTERPRET:
        pytest.skip("it is about the interpreter")
    for kernel in (times_kernel, tanh_kernel):
        result = verdict_of_launching(kernel)
        assert result.verdict == "empty", result
        assert result.message.startswith("does not run in Triton's interpreter: a GPU (InterpreterError")
    assert verdict_of_launching(mistaken_kernel).verdict == "broken"


def test_an_error_that_is_its_own_cause_ends() -> None:
    """The error is raised again because of what a promise raised within Triton's error."""

    def launched(x: Tensor) -> Tensor:
        outer, inner = RuntimeError("outer"), AttributeError("inner")
        outer.__cause__ = inner
        raise inner from outer

    op = strangers.record(launched, lambda x: x, dtypes=(torch.float32,))
    samples = [Sample((torch.randn(4, device="cpu", dtype=torch.float32),), why="four")]
    assert check(op, samples, only=["values_and_gradients"])[0].verdict == "broken"


def test_habits_of_llmk_are_asked_of_others_by_name_only() -> None:
    op = dataclasses.replace(RIGHT["mul"], dtypes=(torch.float32,))
    skipped = {promise.__name__ for promise in HABITS}
    kept = {result.promise for result in check(op, skip=[*SLOW, "torch_opcheck", "compiled_samples"])}
    assert kept & skipped == set()
    (result,) = check(op, only=["refuses_transforms"])
    assert result.promise == "refuses_transforms"
    assert OPS["add"].is_own
    assert not op.is_own


@pytest.mark.skipif(shutil.which("ninja") is None, reason="torch.utils.cpp_extension builds with ninja")
def test_an_operator_of_a_cpp_extension(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It keeps every promise, with its record and without, and a wrong factor of its own is found."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    from compile_tests.helpers import strangers_cpp

    leaky = strangers_cpp.LEAKY
    results = check(leaky, dtypes=[torch.float32], skip=SLOW)
    assert [result for result in results if not result.passed] == []
    assert {result.verdict for result in results if result.promise == "torch_opcheck"} == {"kept"}
    bare = check(leaky.overload, reference=leaky.reference, dtypes=[torch.float32], only=["values_and_gradients"])
    assert "gradients of x" in "\n".join(notes(bare))
    assert bare[-1].verdict == "kept"

    def reference_wrong(x: Tensor, slope: float = 0.01) -> Tensor:
        return strangers_cpp.reference_leaky(x, 2 * slope)

    wrong = dataclasses.replace(leaky, reference=reference_wrong)
    (cause,) = causes(check(wrong, dtypes=[torch.float32], only=["values_and_gradients"]))
    assert "output 0: element" in cause.first.message


def test_the_documentations_example_passes() -> None:
    names: dict[str, object] = {}
    code = next(text for _, text in blocks(ROOT / "docs" / "opcheck.md", "python") if "custom_op" in text)
    exec(compile(code, "opcheck.md", "exec"), names)
    op = names["SCALED_SQUARE"]
    assert isinstance(op, Op)
    assert [result for result in check(op, dtypes=[torch.float32], skip=["compiled"]) if not result.passed] == []


def test_mutated_arguments_are_results() -> None:
    """And what the caller gave keeps its numbers."""
    op = adapted(RIGHT["add_out"], CPU, [torch.float32])
    (sample,) = op.samples(CPU, torch.float32)
    before = sample.kwargs["out"].clone()
    outcome = call(op, sample)
    (result,) = outcome.outputs
    assert torch.equal(result, sample.args[0] + sample.args[1])
    assert torch.equal(sample.kwargs["out"], before)


def test_lists_are_arguments_of_their_own() -> None:
    op = adapted(RIGHT["concat"], CPU, [torch.float32])
    assert op.argument_names() == ["xs_0", "xs_1", "xs_2", "dim"]
    assert op.differentiable == ("xs_0", "xs_1", "xs_2")
    two, three = op.samples(CPU, torch.float32)
    assert two.args[2] is None
    outcome = call(op, three, ["xs_1"])
    assert list(outcome.gradients) == ["xs_1"]
    assert outcome.outputs[0].shape == (3, 18)


def test_a_record_of_the_one_form_is_not_changed() -> None:
    assert adapted(OPS["add"], CPU, [torch.float32]) is OPS["add"]


def test_what_is_wrong_with_another_form_is_found() -> None:
    """The reference of a mutating operator, a list's gradient and an integer result count."""

    def first_broken(op: Op) -> str:
        results = check(op, dtypes=[torch.float32], only=["values_and_gradients"])
        return results[0].message

    def reference_sin(x: Tensor) -> None:
        x.cos_()

    def reference_concat(xs: list[Tensor], dim: int) -> Tensor:
        return torch.cat([2 * xs[0], *xs[1:]], dim) - torch.cat(
            [xs[0].detach(), *(torch.zeros_like(x) for x in xs[1:])], dim
        )

    def reference_max(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.max(-1).values, x.max(-1).indices + 1

    assert "output 0" in first_broken(dataclasses.replace(RIGHT["sin_inplace"], reference=reference_sin))
    assert "gradient of xs_0" in first_broken(dataclasses.replace(RIGHT["concat"], reference=reference_concat))
    assert "output 1: element 0 is " in first_broken(
        dataclasses.replace(RIGHT["max_and_index"], reference=reference_max)
    )


def test_a_wrong_number_made_of_integers_alone_is_found() -> None:
    """No input moves by a rounding there, so the error bound is 0 and the far inputs are the sample."""

    def reference_wrong(packed: Tensor, scale: float) -> Tensor:
        return 2 * strangers.reference_unpack_nibbles(packed, scale)

    wrong = dataclasses.replace(RIGHT["unpack_nibbles"], reference=reference_wrong)
    (result,) = check(wrong, only=["values_and_gradients"])
    assert result.message.startswith("bytes [(3, 8)]: output 0: element ")


def test_integers_may_depend_on_the_inputs_rounding() -> None:
    """Either index of two equal elements is right."""

    def last_of_the_largest(x: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = x.flip(-1).max(-1)
        return values, x.shape[-1] - 1 - indices

    op = dataclasses.replace(RIGHT["max_and_index"], reference=last_of_the_largest, differentiable=())
    for row in ([1.0, 0.0, 1.0], [2.0, 2.0, 1.0]):
        sample = Sample((torch.tensor([row], dtype=torch.float32, device="cpu"),), why="a row")
        (result,) = check(op, [sample], dtypes=[torch.float32], only=["values_and_gradients"])
        assert result.passed, result.message
