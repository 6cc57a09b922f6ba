"""Operators without a record: samples from the signature or a Hypothesis strategy, and another operator beside."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compile_tests.helpers import strangers
from llmk.opcheck import __main__ as command
from llmk.opcheck import assert_passes, check
from llmk.opcheck.__main__ import main
from llmk.opcheck.report.causes import causes
from llmk.opcheck.report.reports import notes
from llmk.opcheck.runner import Result
from llmk.registry import Op

pytest.importorskip("hypothesis")

from hypothesis import strategies

FLOAT32 = [torch.float32]
VALUES = ["values_and_gradients"]
FAST = ["values_and_gradients", "torch_opcheck", "no_mutation", "no_alias", "strided_inputs", "edge_rows"]
RIGHT = {op.name: op for op in vars(strangers).values() if isinstance(op, Op)}
SHAPES = {
    "mul": ("tensors of one shape", "gradients of a, b"),
    "linear": ("every tensor given [(3, 37), (7, 37), (7,)]", "gradients of x, weight, bias"),
    "crop": ("odd width [(3, 37)]", "no gradients"),
    "tile_rows": ("no rows [(0, 8)]", "no gradients"),
    "concat": ("odd width [(3, 37), (3, 37)]", "gradients of xs"),
    "add_out": ("powers of two [(4, 16), (4, 16), (4, 16)]", "no gradients"),
    "exp": ("odd width [(3, 37)]", "gradients of x"),
}


def said(results: list[Result]) -> str:
    return "\n".join(notes(results))


def broken(results: list[Result]) -> list[str]:
    return [result.promise for result in results if not result.passed]


@pytest.mark.parametrize("name", SHAPES)
def test_a_signature_gives_samples(name: str) -> None:
    """And the record's reference says what is right on them."""
    record = RIGHT[name]
    results = check(record.overload, reference=record.reference, dtypes=FLOAT32, only=FAST)
    assert broken(results) == []
    assert {r.promise: r.verdict for r in results}["values_and_gradients"] == "kept"
    for words in SHAPES[name]:
        assert words in said(results)


def test_without_a_reference_no_result_is_compared() -> None:
    results = check(strangers.linear, dtypes=FLOAT32, only=FAST)
    verdicts = {result.promise: result.verdict for result in results}
    assert verdicts["values_and_gradients"] == "empty"
    assert verdicts["torch_opcheck"] == "kept"
    assert "no reference, so no result is compared" in said(results)


def doubles(x: Tensor, scale: float, upper: bool = False) -> Tensor:
    return x * (-scale if upper else scale)


def weighted(x: Tensor, weight: Tensor) -> Tensor:
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight: expected {tuple(x.shape[-1:])}, got {tuple(weight.shape)}")
    return x * weight


def product(a: Tensor, b: Tensor) -> Tensor:
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"b: expected {a.shape[1]} rows, got {b.shape[0]}")
    return a @ b


def picked(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(-1, index.unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (doubles, "upper flipped [(3, 37)]"),
        (weighted, "rows, then vectors: odd width [(3, 37), (37,)]"),
        (product, "matrices to multiply, vectors: odd width [(3, 37), (37, 7)]"),
        (picked, "odd width [(3, 37), (3,)]"),
    ],
)
def test_shapes_are_those_that_the_operator_takes(function: Any, words: str) -> None:
    results = check(function, reference=function, dtypes=FLOAT32, only=VALUES)
    assert words in said(results)
    assert broken(results) == []


def test_a_wrong_gradient_is_found_without_a_record() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.square()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0] * ctx.saved_tensors[0]

    def wrong(x: Tensor) -> Tensor:
        return Wrong.apply(x)

    (found,) = causes(check(wrong, reference=torch.square, dtypes=FLOAT32, only=VALUES))
    assert found.kind == "wrong gradients"
    assert re.match(r"(odd width|powers of two) \[.*\]: gradient of x: element", found.first.message)


def test_arguments_that_no_signature_tells_are_named() -> None:
    def moded(x: Tensor, mode: str) -> Tensor:
        return x

    (result,) = check(moded, dtypes=FLOAT32)
    assert (result.verdict, result.promise) == ("empty", "samples")
    assert result.message == "no samples: of mode the signature has no default, and says str; give samples"
    (result,) = check(strangers.unpack_nibbles, dtypes=FLOAT32)
    assert result.message.startswith("no samples: it refuses those made from its signature")
    with pytest.raises(AssertionError, match=r"nothing was checked(.|\n)*of mode the signature has no default"):
        assert_passes(moded, dtypes=FLOAT32)
    with pytest.raises(TypeError, match=r"op: expected an operator, a function or a llmk.registry.Op, got 3"):
        check(3)  # type: ignore[arg-type]


def test_a_dtype_is_no_integer() -> None:
    """The `type` of a schema's argument tells them apart."""
    given = []

    def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
        given.append(dtype)
        return x.to(dtype, copy=True)

    operator = torch.library.custom_op("strangers_signatures::cast", cast, mutates_args=())
    operator.register_fake(lambda x, dtype: torch.empty_like(x, dtype=dtype))
    for op in (operator, cast):
        results = check(op, dtypes=FLOAT32, only=["no_mutation", "torch_opcheck"])
        assert all(result.passed for result in results)
        assert {torch.float16} == set(given)


def test_dtypes_that_an_operator_refuses_are_said() -> None:
    results = check(strangers.numpy_sin, reference=torch.sin, only=VALUES)
    assert {result.dtype for result in results if result.verdict == "kept"} == {"float32", "float16"}
    assert "not in bfloat16, which it refuses (TypeError: Got unsupported ScalarType BFloat16)" in said(results)


def test_a_strategy_draws_the_same_samples_each_time() -> None:
    shapes = strategies.tuples(strategies.integers(1, 5), strategies.integers(1, 9))
    calls = shapes.map(lambda shape: (torch.ones(shape, dtype=torch.float32, device="cpu"),))
    seen: list[list[tuple[int, ...]]] = []
    for _ in range(2):
        seen.append([])

        def square(x: Tensor) -> Tensor:
            seen[-1].append(tuple(x.shape))
            return x.square()

        (_, result) = check(square, calls, reference=torch.square, dtypes=FLOAT32, only=VALUES)
        assert result.verdict == "kept"
    assert seen[0] == seen[1]
    assert len(set(seen[0])) > 3


def rounds(x: Tensor) -> Tensor:
    """Round as kernels do."""
    return (x.float() * torch.sigmoid(x.float())).to(x.dtype)


def swish_of(slope: float) -> Any:
    def swish(x: Tensor) -> Tensor:
        return x * torch.sigmoid(slope * x)

    return swish


def test_another_operator_is_the_reference() -> None:
    results = check(swish_of(1.0), reference=torch.nn.functional.silu, skip=[*COMPILING])
    assert broken(results) == []
    assert {result.dtype for result in results} == {"float32", "float16", "bfloat16"}
    assert "forward and backward of resized [(1024, 24)] in float32: " in said(results)
    wrong = check(swish_of(1.01), reference=torch.nn.functional.silu, only=VALUES)
    assert broken(wrong) == VALUES * 3


COMPILING = (
    "compiled",
    "compiled_samples",
    "no_recompile",
    "default_dtype",
    "default_device",
    "finite_gradients",
)


def test_a_reference_that_rounds_to_float32_says_what_is_right_in_16_bits() -> None:
    results = check(torch.nn.functional.silu, [(torch.randn(3, 37),)], reference=rounds, only=VALUES)
    assert {(r.dtype, r.verdict) for r in results if r.promise in VALUES} == {
        ("float16", "kept"),
        ("bfloat16", "kept"),
    }
    assert "rounds float64 to float32" in said(results)
    (result,) = check(torch.nn.functional.silu, [(torch.randn(3, 37),)], reference=rounds, dtypes=FLOAT32, only=VALUES)
    assert "ask for float16 or bfloat16" in result.message
    results = check(swish_of(1.01), reference=rounds, only=VALUES)
    assert broken(results) == VALUES * 2


def test_a_records_reference_is_replaced() -> None:
    record = dataclasses.replace(RIGHT["mul"], dtypes=(torch.float32,))
    assert broken(check(record, reference=torch.mul, only=VALUES)) == []
    assert broken(check(record, reference=torch.add, only=VALUES)) == VALUES
    (result,) = check(record, reference=torch.relu, only=VALUES)
    assert result.message.startswith("the reference refuses the call odd width [(3, 37), (3, 37)] (TypeError: ")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import torch\n\n\ndef double(x: torch.Tensor) -> torch.Tensor:\n    return 2 * x\n\n\n"
        "def twice(x):\n    return x + x\n\n\ndef thrice(x):\n    return 3 * x\n"
    )
    return tmp_path


@pytest.mark.usefixtures("forked_checks")
def test_an_operator_is_named_on_the_command_line(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["mine.py:double", "--device", "cpu", "--path", "reference", "--dtype", "float32", "--only", VALUES[0]]
    assert main([*words, "--reference", "mine.py:thrice"]) == 1
    out = capfd.readouterr().out
    assert "double (reference): samples made from its signature, tensors of one shape: odd width [(3, 37)]" in out
    assert "wrong values: double float32 (reference) breaks values_and_gradients:" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mine.py:nosuch"], "mine.py has no nosuch"),
        (["mine.py:torch"], "mine.py:torch is no operator, function or llmk.registry.Op"),
        (["mine.py"], "mine.py holds no llmk.registry.Op; name one of its operators: mine.py:NAME"),
        (
            ["add", "swiglu", "--reference", "mine.py:twice"],
            "argument --reference: it is for one operator, and these are 2",
        ),
        (["mine.py:twice", "--search", "1"], "argument --search: twice has no llmk.registry.Op with samples"),
        (
            ["add", "--search", "1", "--reference", "mine.py:twice"],
            "argument --reference: there is none with --search, which has the record's",
        ),
        (["add", "--reference", "swiglu"], "argument --reference: expected MODULE:NAME, got 'swiglu'"),
    ],
)
def test_what_there_is_not_is_said(
    folder: Path, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "check_all", lambda options: [])
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--device", "cpu"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"opcheck: {message}\n"
