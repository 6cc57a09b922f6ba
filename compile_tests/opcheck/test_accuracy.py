"""The accuracy rule must be able to fail at every scale of a result: what is damaged on purpose is refused."""

import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compile_tests.helpers.field_right import RIGHT, FlashAttention
from llmk.accuracy.rule import rounded_once
from llmk.opcheck import accuracy_violation
from llmk.opcheck.calls import BrokenPromise, call, incoming_gradients, require_accurate
from llmk.opcheck.foreign.adapters import adapted
from llmk.registry import OPS, Sample

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ROWS, COLUMNS = 6, 40
SMALL_ROW = 2


def small_row_zeroed(y: Tensor) -> Tensor:
    return torch.where((torch.arange(ROWS, device=y.device) == SMALL_ROW)[:, None], 0.0, y).to(y.dtype)


def half_of_the_rows_zeroed(y: Tensor) -> Tensor:
    return torch.where((torch.arange(ROWS, device=y.device) % 2 == 0)[:, None], 0.0, y).to(y.dtype)


def largest_entries_only(y: Tensor) -> Tensor:
    return torch.where(y.abs() >= y.abs().topk(COLUMNS // 10, dim=-1).values[:, -1:], y, 0.0).to(y.dtype)


def one_column_wrong(y: Tensor) -> Tensor:
    return torch.where(torch.arange(COLUMNS, device=y.device) == 5, 1.06 * y, y).to(y.dtype)


def one_small_element_wrong(y: Tensor) -> Tensor:
    place = torch.arange(ROWS * COLUMNS, device=y.device).view(ROWS, COLUMNS) == SMALL_ROW * COLUMNS + 7
    return torch.where(place, 1.2 * y, y).to(y.dtype)


def nan_where_finite(y: Tensor) -> Tensor:
    place = torch.arange(ROWS * COLUMNS, device=y.device).view(ROWS, COLUMNS) == 3
    return torch.where(place, float("nan"), y).to(y.dtype)


def finite_where_nan(y: Tensor) -> Tensor:
    return y.nan_to_num(0.0)


class Damaged(torch.autograd.Function):
    """The identity, with a gradient that is damaged on its way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, which: str) -> Tensor:
        ctx.which = which
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return DAMAGES[ctx.which](grad), None


DAMAGES = {
    fn.__name__: fn
    for fn in (
        small_row_zeroed,
        half_of_the_rows_zeroed,
        largest_entries_only,
        one_column_wrong,
        one_small_element_wrong,
        nan_where_finite,
        finite_where_nan,
    )
}


def softmax_of(dtype: torch.dtype, damage: str, device: torch.device) -> Sample:
    x = 2 * torch.randn(ROWS, COLUMNS, device=device)
    if damage == "finite_where_nan":
        x[0, 3] = float("nan")
    return Sample((x.to(dtype),), why="random")


def swiglu_of(dtype: torch.dtype, damage: str, device: torch.device) -> Sample:
    """One row small beside the others."""
    gate, up = torch.randn(ROWS, COLUMNS, device=device), torch.randn(ROWS, COLUMNS, device=device)
    up[SMALL_ROW] *= 1e-3
    gate[SMALL_ROW] *= 0.1
    if damage == "finite_where_nan":
        up[0, 3] = gate[0, 3] = float("nan")
    return Sample((gate.to(dtype), up.to(dtype)), why="a small row")


SAMPLES: dict[str, Callable[..., Sample]] = {"softmax": softmax_of, "swiglu": swiglu_of}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SAMPLES)
def test_what_is_damaged_is_refused(name: str, dtype: torch.dtype, device: torch.device) -> None:
    op = OPS[name]
    for damage in DAMAGES:
        sample = SAMPLES[name](dtype, damage, device)

        def output_damaged(*args: Any, damage: str = damage) -> Tensor:
            return DAMAGES[damage](op.overload(*args))

        def gradient_damaged(x: Tensor, *args: Any, damage: str = damage) -> Tensor:
            return op.overload(Damaged.apply(x, damage), *args)

        for fn, where in ((op.overload, None), (output_damaged, "output 0"), (gradient_damaged, "gradient of")):
            outcome = call(op, sample, fn=fn)
            if where is None:
                require_accurate(op, sample, outcome)
                continue
            with pytest.raises(BrokenPromise, match=where):
                require_accurate(op, sample, outcome)


def without_a_sum(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str) -> Tensor:
    z = torch.nn.functional.linear(input, weight, bias)
    return z * torch.sigmoid(z * (1.5957691216057308 + 0.07135481627260025 * z * z))


def with_a_sum(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str) -> Tensor:
    """Compute in float32, as cuBLASLt's epilogue does."""
    z = torch.nn.functional.linear(input.float(), weight.float())
    return (z / 2 * (1 + torch.tanh(0.7978845608028654 * (z + 0.044715 * z**3)))).to(input.dtype)


def test_a_formula_has_the_error_bound_of_its_record(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """The one path whose 1 + tanh cancels, by a composition that has no such sum."""
    op = dataclasses.replace(OPS["linear_act"], reference=without_a_sum)
    z = torch.linspace(-6, 6, 97, device=device)[:, None].to(torch.bfloat16)
    sample = Sample((torch.ones(3, 1, dtype=z.dtype, device=device), z), {"activation": "gelu_tanh"}, why="each z")

    def changed(change: Callable[[Tensor], Tensor]) -> None:
        require_accurate(op, sample, call(op, sample, wanted=(), fn=lambda *args, **options: change(formula(*args))))

    def formula(*args: Tensor) -> Tensor:
        return with_a_sum(*args, activation="gelu_tanh")

    right = without_a_sum(*(t.double() for t in sample.args), activation="gelu_tanh")
    lost = (formula(*sample.args) == 0) & (right != 0)
    assert bool(lost.any())  # there is something to lose
    with pytest.raises(BrokenPromise, match="output 0"):  # our kernels must not lose it
        changed(lambda y: y)
    monkeypatch.setattr(sys.modules[op.module], "choose_path", lambda *args: "epilogue")
    changed(lambda y: y)
    ordinary = right.abs() > 1e-3
    for change in (
        lambda y: 2 * y,
        lambda y: y.masked_fill(ordinary & (right > -0.01), 0.0),
        lambda y: torch.where(right == right[:, 24:25], 2 * y, y),
        lambda y: torch.where(lost, 1e-4, y).to(y.dtype),
    ):
        with pytest.raises(BrokenPromise, match="output 0"):
            changed(change)


@pytest.mark.parametrize(("seed", "rows", "row"), [(14, 31, 26), (78, 33, 7), (90, 33, 27)])
def test_one_rounding_that_all_neighbours_share_is_chance(seed: int, rows: int, row: int) -> None:
    """Rows whose target has a p of 0.96 to 0.99: the composition was lucky with p - 1, and on every neighbour again."""
    op = OPS["vocab_parallel_linear_ce"]
    assert op.resized is not None
    torch.manual_seed(seed)
    drawn = {count: op.resized(count, torch.device("cpu"), torch.float32) for count in (31, 33)}
    outcome = call(op, drawn[rows])
    _, weight, target = drawn[rows].args
    gradient = outcome.gradients["input"]
    assert gradient is not None
    unit = 2**-24 * incoming_gradients(outcome.outputs)[0] / rows * weight[target[row]]  # the error of p

    def check(units: int) -> None:
        damaged = torch.where(torch.arange(rows)[:, None] == row, gradient + units * unit, gradient)
        gradients = outcome.gradients | {"input": damaged}
        require_accurate(op, drawn[rows], dataclasses.replace(outcome, gradients=gradients))

    check(0)
    for units in (-16, 16):
        with pytest.raises(BrokenPromise, match="gradient of input"):
            check(units)


@pytest.mark.parametrize("seed", [9, 11, 25, 45, 53])
def test_another_order_of_sums_that_cancel_is_no_fault(seed: int) -> None:
    """Attention to few keys: its backward pass takes a sum over the keys from the output, where PyTorch adds it up."""
    op = adapted(RIGHT["flash_attention"], torch.device("cpu"), (torch.float32,))
    torch.manual_seed(seed)
    (sample,) = op.samples(torch.device("cpu"), torch.float32)
    require_accurate(op, sample, call(op, sample))

    class Rounded(FlashAttention):
        """With that sum in TF32 for the queries of two keys."""

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v, out, probs = ctx.saved_tensors
            delta = (grad * out).sum(-1, keepdim=True)
            delta[..., 1, :] = (delta[..., 1, :].view(torch.int32) & -(2**13)).view(torch.float32)
            scores = probs * (grad @ v.mT - delta) * q.shape[-1] ** -0.5
            return scores @ k, scores.mT @ q, probs.mT @ grad

    with pytest.raises(BrokenPromise, match="gradient of q"):
        require_accurate(op, sample, call(op, sample, fn=Rounded.apply))


@pytest.mark.parametrize(
    ("actual", "holds"),
    [(1.0, True), (1.0 + 2**-22, True), (1.0 + 2**-18, False), (float("nan"), False), (float("inf"), False)],
)
def test_the_rule_for_the_whole_tensor(actual: float, holds: bool) -> None:
    exact = torch.ones(2000, dtype=torch.float64)
    composition = torch.full((2000,), 1.0 + 2**-23)
    result = torch.full((2000,), 1.0)
    result[7] = actual
    assert (accuracy_violation(result, composition, exact) is None) == holds


def test_the_rule_for_special_values() -> None:
    exact = torch.tensor([float("nan"), float("inf"), 1.0], dtype=torch.float64)
    assert accuracy_violation(exact.float(), exact.float(), exact) is None
    assert accuracy_violation(torch.tensor([0.0, float("inf"), 1.0]), exact.float(), exact) is not None
    assert accuracy_violation(torch.tensor([float("nan"), -float("inf"), 1.0]), exact.float(), exact) is not None
    # A finite number is not excused because the composition gives it too.
    finite = torch.tensor([0.0, float("inf"), 1.0])
    assert accuracy_violation(finite, finite, exact) is not None


def test_the_largest_number_and_infinity_are_one_unit_apart() -> None:
    """Truncation ends at the largest number, where rounding gives infinity already."""
    for dtype in DTYPES:
        largest = torch.finfo(dtype).max
        exact = torch.tensor([1.0, largest * (1 + 0.4 * torch.finfo(dtype).eps)], dtype=torch.float64)
        finite, infinite = torch.tensor([1.0, largest], dtype=dtype), torch.tensor([1.0, float("inf")], dtype=dtype)
        for actual in (finite, infinite):
            assert accuracy_violation(actual, infinite, exact) is None
        assert accuracy_violation(finite, infinite, 1.01 * exact) is not None
        assert accuracy_violation(-finite, infinite, exact) is not None


def test_a_condition_tells_elements_apart() -> None:
    """An error that is small for the tensor, and for an element that cancels, is large for one that does not."""
    exact = torch.tensor([[1e3, 1.0, 1.0]] * 400, dtype=torch.float64)
    error_bound = torch.tensor([[1e3, 1e3, 1.0]] * 400, dtype=torch.float64) * 2**-23
    composition = (exact + 0.5 * error_bound).float()
    for column, holds in ((1, True), (2, False)):
        actual = exact.clone()
        actual[5, column] += 200 * 2**-23
        assert accuracy_violation(actual.float(), composition, exact) is None
        found = accuracy_violation(actual.float(), composition, exact, error_bound=error_bound)
        assert (found is None) == holds


@pytest.mark.parametrize(
    ("exact", "actual", "right"), [(65519.0, 65504.0, True), (65519.0, float("inf"), True), (70000.0, 65504.0, False)]
)
def test_what_rounds_to_the_largest_number_need_not_be_infinite(exact: float, actual: float, right: bool) -> None:
    result, composition = (torch.tensor([x, 1.0], dtype=torch.float16) for x in (actual, float("inf")))
    found = accuracy_violation(result, composition, torch.tensor([exact, 1.0], dtype=torch.float64))
    assert (found is None) == right, found


def test_where_the_composition_is_finite_by_mistake_so_may_be_the_operator() -> None:
    """A mean of squares that overflows makes 0 of a normalized row, and a gradient of 1e39 becomes 1e30."""
    exact, composition = (torch.tensor([x, 1.0], dtype=torch.float64, device="cpu") for x in (1e39, 1e30))
    for actual, right in ((2e30, True), (math.inf, True), (math.nan, False)):
        result = torch.tensor([actual, 1.0], dtype=torch.float32, device="cpu")
        assert (accuracy_violation(result, composition.float(), exact) is None) == right


@pytest.mark.parametrize(
    ("dtype", "lost", "right"),
    [
        (torch.float32, 7e-41, True),
        (torch.float32, 1e-37, False),
        (torch.bfloat16, 1e-39, True),
        (torch.bfloat16, 1e-36, False),
        (torch.float16, 1e-6, False),  # a subnormal number that is a normal one of float32
        (torch.float64, 7e-41, False),
    ],
)
def test_what_is_no_normal_number_of_float32_may_be_0_in_kernels(
    dtype: torch.dtype, lost: float, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = torch.full((3, 5), lost, dtype=torch.float64, device="cpu")
    zeros, bound = torch.zeros_like(exact, dtype=dtype), 1e-7 * exact
    for in_kernels in (False, True):
        monkeypatch.setattr("llmk.accuracy.rule.INTERPRET", in_kernels)
        assert rounded_once(zeros, exact) == (right and in_kernels)
        found = accuracy_violation(zeros, exact.to(dtype), exact, error_bound=bound)
        assert (found is None) == (right and in_kernels), found


@pytest.mark.parametrize("x", [-14.0, -7.6875, -3.0, 0.5, 19.5, 22.2])
def test_a_reference_has_no_sum_that_cancels(x: float) -> None:
    """1 + erf, 1 + tanh and 1 - tanh^2 lose all digits in float64, too, where the result is small and not 0."""
    weight = torch.ones(1, dtype=torch.float64, device="cpu")
    input, alpha = (torch.tensor([value], dtype=torch.float64, device="cpu") for value in (x, 1.0))
    u = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    erf, tanh = OPS["geglu"].reference(input, weight, approximate="none"), OPS["geglu"].reference(input, weight)
    assert float(erf) == pytest.approx(x / 2 * math.erfc(-x / math.sqrt(2)), rel=1e-12, abs=0.0)
    assert float(tanh) == pytest.approx(x / (1 + math.exp(-2 * u)), rel=1e-12, abs=0.0)
    input.requires_grad_()
    (slope,) = torch.autograd.grad(OPS["dyt"].reference(input, alpha, weight), input)
    assert float(slope) == pytest.approx(math.cosh(x) ** -2, rel=1e-12, abs=0.0)
    logits = torch.tensor([[x, 0.0]], dtype=torch.float64, device="cpu", requires_grad=True)
    target = torch.ones(1, dtype=torch.int64, device="cpu")
    (slopes,) = torch.autograd.grad(OPS["cross_entropy"].reference(logits, target, softcap=1.0), logits)
    p = 1 / (1 + math.exp(-math.tanh(x)))
    assert float(slopes[0, 0]) == pytest.approx(p * math.cosh(x) ** -2, rel=1e-12, abs=0.0)
