"""opcheck must be able to fail: operators broken on purpose, one way each, are caught under the right name."""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence

import pytest
import torch

from compile_tests.helpers.field_cheats import WRONG
from compile_tests.helpers.mutants import BROKEN, BROKEN_WHERE_ASKED, nan_past_the_exponent, record, square
from compile_tests.helpers.mutants_gpu import BROKEN_ON_A_GPU
from compile_tests.helpers.mutants_kernels import BROKEN_KERNELS
from compile_tests.helpers.mutants_rows import BROKEN_ROWS
from llmk.opcheck import check
from llmk.opcheck.calls import call, require_no_gross_error, traced_kinds
from llmk.opcheck.inputs import BrokenPromise, watched_by
from llmk.opcheck.promises.compiled import compiled_samples
from llmk.opcheck.promises.gradients import require_finite
from llmk.opcheck.promises.table import GPU_PROMISES, INTERPRETER_PROMISES, OF_LAYERS, ON_REQUEST, PROMISES
from llmk.opcheck.promises.values import fresh_numbers
from llmk.ops.rotary import rope
from llmk.registry import OPS, Sample

NAMES = [promise.__name__ for promise in PROMISES]


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_op_is_caught_under_its_name(name: str) -> None:
    promise, make = BROKEN[name]
    results = check(make(name), only=[promise])
    broken = [result for result in results if not result.passed]
    assert broken, results
    assert broken[0].promise == promise, broken[0]
    assert broken[0].message


@pytest.mark.parametrize("name", BROKEN_WHERE_ASKED)
def test_what_is_asked_by_name_finds_what_the_others_do_not(name: str) -> None:
    promise, make = BROKEN_WHERE_ASKED[name]
    op = make(name)
    assert all(result.passed for result in check(op, only=["compiled_samples", "compiled"]))
    (result,) = check(op, only=[promise])
    assert "a long row" in result.message


@pytest.mark.parametrize(
    ("dtype", "inputs", "lost", "kept"),
    [
        (torch.float16, [20.0, 100.0], 1000.0, 1.0),  # 2 * 1000 * 100 leaves float16
        (torch.float32, [200.0, 1000.0], 1e33, 1e31),  # 2 * 1e33 * 1000 and another input leave float32
    ],
    ids=["dtype", "product"],
)
def test_gradients_need_not_be_finite_where_one_is_too_large(
    dtype: torch.dtype, inputs: list[float], lost: float, kept: float
) -> None:
    """The step is lost then, whatever the others are."""
    op = square("nan_where_large", backward=nan_past_the_exponent)
    sample = Sample((torch.tensor(inputs, dtype=dtype, device="cpu"),))

    def require_finite_for(size: float) -> None:
        def grads(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return [torch.full_like(output, size) for output in outputs]

        require_finite(op, sample, call(op, sample, grads=grads), grads)

    require_finite_for(lost)
    with pytest.raises(BrokenPromise, match="is nan where outputs are finite and"):
        require_finite_for(kept)


def test_strides_may_cost_what_they_cost_pytorch() -> None:
    """Its products of matrices that lie otherwise add up in another order."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        exact = x.is_contiguous() or x.dtype == torch.float64
        return x * x if exact else (x * x).bfloat16().float()

    ops = [square("rounds_as_pytorch", rounded, reference=rounded), square("rounds_more", rounded)]
    results = [result for op in ops for result in check(op, only=["strided_inputs"])]
    assert [result.passed for result in results] == [True, False], results


def test_another_order_of_sums_and_nan_are_no_fault_of_a_call() -> None:
    """Each backward pass rounds in another way, as atomics on a GPU have it."""
    turns = itertools.count()

    def in_some_order(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return 2 * grad * x * (1 + next(turns) % 2 * torch.finfo(torch.float32).eps)

    def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        x = torch.randn(5, 7, device=device, dtype=dtype)
        x[0], x[1, 0] = torch.nan, torch.inf
        yield Sample((x,), why="NaN in places")

    op = square("some_order", backward=in_some_order, samples=samples)
    results = check(op, only=["two_calls", "checkpointed"])
    assert [result.verdict for result in results] == ["kept", "kept"], results


def test_a_long_sum_in_turn_is_no_gross_error() -> None:
    """It loses far more than PyTorch's tree does, as a sum by atomics on a GPU; two more digits lost are an error."""

    def in_turn(x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x[0])
        for row in x:
            total += row
        return total

    def tree(x: torch.Tensor) -> torch.Tensor:
        return x.double().sum(0).to(x.dtype)

    sample = Sample((torch.randn(4097, 100, dtype=torch.float32, device="cpu"),), why="long")
    op = square("sum_in_turn", in_turn, reference=tree, differentiable=())
    require_no_gross_error(op, sample, call(op, sample))
    rounded = square("sum_in_bfloat16", lambda x: tree(x.bfloat16()).float(), reference=tree, differentiable=())
    with pytest.raises(BrokenPromise, match="output 0: element"):
        require_no_gross_error(rounded, sample, call(rounded, sample))


@pytest.mark.parametrize("heads", [2, 5])
def test_a_view_of_an_output_leaves_a_graph_with_it(monkeypatch: pytest.MonkeyPatch, heads: int) -> None:
    """Numbers are other ones in silence where the axes that an operator has swapped have one length."""
    q, angles = torch.randn(2, heads, 5, 8), torch.rand(1, 5, 8)
    samples = [Sample((q, q.clone(), angles, angles.clone()), why="heads")]
    compiled_samples(OPS["rope"], samples)
    monkeypatch.setattr(rope, "swapped", lambda x, dtype: x.to(dtype).contiguous().transpose(1, 2))
    with pytest.raises(BrokenPromise, match="other numbers" if heads == 5 else "with a view of an output"):
        compiled_samples(OPS["rope"], samples[:])


def test_drawn_numbers_may_overflow_where_pytorch_does() -> None:
    """The mean of sixteen losses near 1e38, which PyTorch's composition sums first too."""
    logits, target = torch.zeros(16, 4), torch.zeros(16, dtype=torch.int64)
    logits[:, 0] = -1e38
    fresh_numbers(OPS["cross_entropy"], [Sample((logits, target), why="a sum past float32")])


def test_a_sound_op_passes() -> None:
    """PyTorch's own square: nothing of the above is a false alarm."""
    results = check(record("square", overload=torch.ops.aten.square.default), only=NAMES)
    assert [result for result in results if not result.passed] == []
    verdicts = {result.promise: result.verdict for result in results}
    assert verdicts["compiled_samples"] == verdicts["clean_graph"] == "kept"  # the second looks at the first's traces


def test_a_sample_of_each_width_is_traced() -> None:
    """One column, short, wide and long, without a GPU too; each of the smallest that there is."""
    traced: list[Sample] = []
    samples = [
        Sample((torch.rand(2, columns, dtype=torch.float32, device="cpu"),), why=str(columns))
        for columns in (0, 1, 16, 20, 5000, 600, 20_000, 100_003)
    ]
    with watched_by(traced.append):
        compiled_samples(record("square", overload=torch.ops.aten.square.default), samples)
    assert {sample.why for sample in traced} == {"1", "16", "600", "20000"}


def test_in_16_bits_each_choice_is_traced_once() -> None:
    """Of two switches the four combinations in float32, and two calls in bfloat16 that have both of each."""
    op = record("square", overload=torch.ops.aten.square.default)
    switched = dataclasses.replace(op, overload=torch.ops.aten.native_dropout.default)
    for dtype, count in ((torch.float32, 4), (torch.bfloat16, 2)):
        x = torch.rand(5, 7, dtype=dtype, device="cpu")
        samples = [Sample((y, 0.5, train)) for y in (x, x[0].repeat(9)) for train in (True, False)]
        assert len(traced_kinds(switched, samples)) == count


def test_every_promise_has_a_broken_op() -> None:
    named = [promise for promise, _ in BROKEN.values()]
    named += [promise for promise, _ in BROKEN_WHERE_ASKED.values()]
    named += [promise for _, promise, _ in BROKEN_KERNELS]
    named += [promise for promise, _ in BROKEN_ON_A_GPU.values()]
    named += ["batch_invariant"] * len(BROKEN_ROWS)
    named += [promise.__name__ for promise in OF_LAYERS]  # test_opcheck_hub.py has layers that break them
    named += [word for wrong in WRONG.values() for word in re.findall(r"breaks (\w+)", wrong.words)]
    known = PROMISES + ON_REQUEST + INTERPRETER_PROMISES + GPU_PROMISES
    assert set(named) == {promise.__name__ for promise in known}
    assert len(named) >= 20


def test_a_default_device_does_not_matter() -> None:
    """Random numbers are drawn by generators of the CPU, wherever tensors are made by default."""
    with torch.device("meta"):
        results = check(OPS["softmax"], dtypes=[torch.bfloat16], only=["values_and_gradients", "edge_rows"])
    assert all(result.passed for result in results), results
