"""One cause is one paragraph: results that are wrong alike, or end with the same error, the gravest first."""

import re

import torch
from torch import Tensor

from compile_tests.helpers.mutants import record, square
from llmk.opcheck import check
from llmk.opcheck.inputs import MEMORY
from llmk.opcheck.report.causes import causes
from llmk.opcheck.runner import Result
from llmk.registry import Sample


def broken(promise: str, message: str, wrong: str = "", dtype: str = "float32", path: str = "reference") -> Result:
    return Result("mine", "cpu", dtype, path, promise, False, message, 0.1, 1, wrong)


def test_a_missing_factor_is_one_finding() -> None:
    """The finding has the input, what is right and the first wrong element."""
    op = square("missing_factor", backward=lambda grad, x: grad * x)
    results = check(op, skip=["compiled", "no_recompile", "torch_opcheck", "default_dtype", "default_device"])
    assert sum(not result.passed for result in results) >= 8
    (cause,) = causes(results)
    assert cause.kind == "wrong gradients"
    assert cause.first.promise == "values_and_gradients"
    text = str(cause)
    assert text.startswith("wrong gradients: missing_factor float32 (reference) breaks values_and_gradients:\n")
    assert re.search(r"\n  a (matrix|larger one) \[.*\]: gradient of input: ", text)  # whichever of the two is worse
    assert re.search(r"the first of \d+ wrong elements, \[0, 0\], is ", text)
    assert ", expected " in text
    assert ", where input is " in text
    assert text.partition("\n  and")[0].endswith("; the worst of 2 samples")
    assert "scaled_gradient" in cause.others
    assert cause.others.startswith(f"and {len({r.promise for r in cause.results}) - 1} more promises: ")


def test_the_first_wrong_element_is_not_a_rounding() -> None:
    def forward(x: Tensor) -> Tensor:
        y = x * x
        y[..., -1] += 1
        return y

    (result,) = check(square("wrong_column", forward), only=["values_and_gradients"])
    assert result.wrong == "output 0"
    assert "the first of 5 wrong elements, [0, 6], is " in result.message


def test_the_same_error_is_one_cause_whatever_the_sample() -> None:
    texts = [
        "a matrix [(5, 7)]: does not compile: BackendCompilerFailed: backend='x' raised: RuntimeError: bad size 35",
        "RuntimeError: bad size 64 (backward, line 12)",
        "in another thread it raises RuntimeError: bad size 3",
    ]
    promises = ("compiled", "scaled_gradient", "another_thread")
    (cause,) = causes([broken(promise, text) for promise, text in zip(promises, texts, strict=True)])
    assert cause.kind == "wrong values"
    assert len(cause.results) == 3
    found = causes(
        [broken("no_alias", "a [(3,)]: output 0 shares memory"), broken("no_mutation", "RuntimeError: other")]
    )
    assert len(found) == 2


def test_the_gravest_is_first_and_dtypes_and_paths_are_together() -> None:
    results = [
        broken("clean_graph", "a [(2,)]: the compiled graph has a copy"),
        broken("compiled", "a [(2,)]: does not compile: InternalError: no"),
        broken("no_alias", "a [(2,)]: output 0 shares memory with input x"),
        broken("scaled_gradient", "wrong", "gradient of x"),
        broken("edge_rows", "wrong", "output 0"),
        broken("edge_rows", "wrong", "output 0", "bfloat16", "interpreter"),
    ]
    found = causes(results)
    assert [cause.kind for cause in found] == ["wrong values", "wrong gradients", "memory", "compile", "habits"]
    assert found[0].headline == "wrong values: mine float32, bfloat16 (reference, interpreter) breaks edge_rows:"
    assert found[0].others == ""


def test_a_right_operator_has_none() -> None:
    op = record("right", overload=torch.ops.aten.square.default)
    assert causes(check(op, only=["values_and_gradients"])) == []


def test_what_is_wrong_for_its_memory_is_one_cause() -> None:
    results = [
        broken("values_and_gradients", "a [(2,)]: output 0: element 1 is 3, right is 4", "output 0"),
        broken("compiled", "a [(2,)]: does not compile: InternalError: no"),
        broken("scaled_gradient", "a [(2,)]: gradient of x: element 1 is 3, right is 4", "gradient of x"),
        broken("no_mutation", "a [(2,)]: input x was mutated", MEMORY),
    ]
    memory, compiles = causes(results)
    assert (memory.kind, memory.first.promise, len(memory.results)) == ("memory", "no_mutation", 3)
    assert compiles.kind == "compile"


def test_nan_that_is_computed_was_written() -> None:
    """Unlike that of memory which nobody wrote."""

    def computed(x: Tensor) -> Tensor:
        y = x * x
        y[..., -1] = float("nan")
        return y

    def unwritten(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        y[..., :-1] = (x * x)[..., :-1]
        return y

    found = [check(square(fn.__name__, fn), only=["every_element_written"])[0] for fn in (computed, unwritten)]
    assert [result.passed for result in found] == [True, False]


def test_a_reference_that_overflows_is_named() -> None:
    def softmax(x: Tensor) -> Tensor:
        return x.exp() / x.exp().sum(-1, keepdim=True)

    op = square("right_softmax", lambda x: x.softmax(-1), reference=softmax, differentiable=())
    sample = Sample((torch.full((2, 3), 1000.0, dtype=torch.float32),), why="large")
    (result,) = check(op, [sample], only=["values_and_gradients"])
    assert result.message.endswith("; the reference itself is NaN for finite inputs")
