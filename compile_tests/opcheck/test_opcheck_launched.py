"""In Triton's interpreter opcheck checks an operator's kernels, and says where it has checked none."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.library import custom_op

from compile_tests.helpers import strangers
from compile_tests.helpers.mutants_kernels import sound_kernel, square_by
from llmk.opcheck import __main__ as command
from llmk.opcheck import assert_passes, check
from llmk.opcheck.__main__ import main, parse, paths
from llmk.opcheck.foreign.loading import find_ops
from llmk.opcheck.report.causes import causes
from llmk.opcheck.report.reports import notes, table
from llmk.registry import OPS, Op
from llmk.registry.devices import INTERPRET

pytestmark = pytest.mark.kernels
interpreted = pytest.mark.skipif(not INTERPRET, reason="it is about the interpreter")
EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "example_triton_op.py"
FLOAT32 = [torch.float32]
PLACES = "tl.program_id(0).to(tl.int64) * N + cols"
ZERO = "(dy * u * 2.0 * r).to(dg_ptr", "(dy * u * tl.where(g == 0, 1.0, 2.0 * r)).to(dg_ptr"
"""The gradient at 0 is not 0, but at the numbers of most samples it is right."""
FAULTS = {
    "zero_gradient": ("values_and_gradients", "gradient of gate", ZERO),
    "zero_gradient_no_sample": (
        "harsh_values",
        "gradient of gate",
        ZERO,
        ('    yield Sample((randn(3, 20).relu(), randn(3, 20)), why="gates of exactly 0")\n', ""),
    ),
    "store_mask": (
        "in_bounds",
        "stores to offset",
        ("element_ty), mask=mask)\n\n\n", "element_ty))\n\n\n"),
    ),
    "grad_contiguous": ("expanded_gradient", "of dy_ptr", ("dy, g, u = grad.contiguous(),", "dy, g, u = grad,")),
    "nan_lost": ("harsh_values", "nan is right", ("r = tl.where(g <= 0, 0.0, g)  #", "r = tl.maximum(g, 0.0)  #")),
    "int32": ("long_offsets", "in 32 bits", (PLACES, PLACES.replace(".to(tl.int64)", ""))),
}
"""What is planted in the example's kernels: the promise that says it first, words of its message, the changes."""
ASKED = [*dict.fromkeys(promise for promise, *_ in FAULTS.values()), "second_derivatives", "autocast"]


def changed(folder: Path, *changes: tuple[str, str]) -> Op:
    text = EXAMPLE.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "my_op.py").write_text(text)
    (op,) = find_ops([str(folder / "my_op.py")])
    return op


@interpreted
@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_kernel_is_found_behind_a_right_function_for_the_cpu(fault: str, tmp_path: Path) -> None:
    """All that one fault breaks is one cause."""
    promise, words, *changes = FAULTS[fault]
    (cause,) = causes(check(changed(tmp_path, *changes), dtypes=FLOAT32, only=ASKED))
    assert (cause.first.promise, words in cause.first.message) == (promise, True), str(cause)


def test_the_documentations_operator_is_right(tmp_path: Path) -> None:
    only = ASKED if INTERPRET else [*ASKED[:2], "strided_inputs", "compiled_samples"]
    results = assert_passes(changed(tmp_path), dtypes=[torch.float32, torch.bfloat16], only=only)
    assert {result.verdict for result in results} == {"kept"} if INTERPRET else {"kept", "empty"}
    assert "no kernel" not in table(results)


def test_a_function_for_the_cpu_is_checked_without_the_interpreter(tmp_path: Path) -> None:
    op = changed(tmp_path, ("(dy * u * 2 * r)", "(dy * u * r)"))
    assert bool(causes(check(op, dtypes=FLOAT32, only=["values_and_gradients"]))) is not INTERPRET
    direct = torch.ops.mylib.squared_relu_glu_backward(*torch.ones(3, 2, 5, dtype=torch.float32, device="cpu"))
    assert bool((direct[0] == 1).all()), "outside of a check the CPU has its own function again"


@interpreted
def test_the_function_of_another_device_is_no_kernel_that_ran() -> None:
    """opcheck sees the kernel, and that a CPU has another function."""

    @custom_op("llmk_test::for_a_gpu", mutates_args=())
    def for_a_gpu(input: Tensor) -> Tensor:
        return input * input

    @for_a_gpu.register_kernel("cuda")
    def _(input: Tensor) -> Tensor:
        output = torch.empty_like(input)
        sound_kernel[(1,)](input, output, *input.shape, input.stride(0), BLOCK=128)  # type: ignore[index]
        return output

    op = strangers.record(for_a_gpu, lambda input: input * input)
    results = check(op, only=["no_mutation"])
    assert [(result.promise, result.passed) for result in results] == [("runs", False)]
    assert results[0].message.startswith("no kernel ran: it names sound_kernel, and launches none; ")
    assert "0/1" in table(results)
    with pytest.raises(AssertionError, match="no kernel ran"):
        assert_passes(op, only=["no_mutation"])


@interpreted
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("square", "no kernel ran, and its code names none"),
        ("by_hand", "no kernel ran, and torch.library.Library or C++ hides its code"),
    ],
)
def test_an_operator_without_kernels_is_not_counted_as_kernels(name: str, words: str) -> None:
    def square(input: Tensor) -> Tensor:
        return input * input

    if name == "square":
        operator = custom_op("llmk_test::plain_square", square, mutates_args=())
        operator.register_kernel("cpu")(lambda input: input * input)
    else:
        library = torch.library.Library("llmk_test_by_hand", "DEF")
        library.define("square(Tensor input) -> Tensor")
        library.impl("square", square, "CPU")
        operator = torch.ops.llmk_test_by_hand.square
    results = assert_passes(strangers.record(operator, square), dtypes=FLOAT32, only=["no_mutation", "deterministic"])
    assert table(results).splitlines()[1].split()[:5] == ["square", "interpreter", "float32", "no", "kernel"]
    assert list(notes(results)) == [f"square (interpreter): {words}"]


@interpreted
def test_a_dtype_without_kernels_is_told_from_one_with() -> None:
    def square(input: Tensor) -> Tensor:
        return by_kernel.overload(input) if input.dtype == torch.float16 else input * input

    by_kernel = square_by(sound_kernel)
    dtypes = (torch.float32, torch.float16)
    op = strangers.record(square, lambda input: input * input, dtypes=dtypes)
    results = check(op, only=["no_mutation"])
    assert [result.no_kernel for result in results] == ["no kernel ran in this dtype", ""]


@interpreted
def test_a_path_that_is_asked_for_is_taken_where_the_shell_interprets() -> None:
    taken = [paths(parse(["add", "--device", "cpu", *words]), "add") for words in ([], ["--path", "reference"])]
    assert taken == [["interpreter"], ["reference"]]


def test_what_had_nothing_to_check_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "check_all", lambda options: check(OPS["add"], dtypes=FLOAT32, only=options.only))
    only = "no_mutation,cuda_graphs,can_torch_compile"
    assert main(["add", "--device", "cpu", "--only", only]) == 0
    assert "1 promises kept, 0 broken, 1 with nothing to check: can_torch_compile\n" in capsys.readouterr().out
