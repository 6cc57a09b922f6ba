"""opcheck holds a row's results to their bits, whatever rows are beside it."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from compile_tests.helpers.mutants import record
from compile_tests.helpers.mutants_rows import BROKEN_ROWS, Block, row_sums_by, sound
from llmk.opcheck import check
from llmk.opcheck.calls import call
from llmk.opcheck.promises.rows import (
    Batch,
    IndependentRows,
    independent_rows,
    owed,
    products_by_row,
    samples_with_rows,
)
from llmk.ops.linear_loss.rows.projection import MatrixProjection
from llmk.registry import OPS, BatchDependent, Op, Sample
from llmk.registry.devices import INTERPRET

CPU = torch.device("cpu")
WITHOUT_ROWS = {
    *("fused_linear_distill", "fused_linear_jsd", "fused_linear_jsd_ce", "jsd"),  # means over the batch
    "info_nce",  # whose rows are each other's negatives
    *("grouped_linear", "moe_permute", "moe_unpermute"),  # rows sorted by expert
}


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float32, device=CPU)


@pytest.mark.kernels
@pytest.mark.parametrize("block", BROKEN_ROWS, ids=lambda block: block.__name__)
def test_rows_that_depend_on_others_are_caught(block: Block, device: torch.device) -> None:
    if device.type == "cpu" and not INTERPRET:
        pytest.skip("kernels run in Triton's interpreter or on a GPU")
    (result,) = check(row_sums_by(block), device=device, only=["batch_invariant"])
    assert (result.promise, result.passed) == ("batch_invariant", False), result
    assert BROKEN_ROWS[block] in result.message


@pytest.mark.kernels
def test_a_product_that_splits_few_rows_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product adds up two halves of the features, as a library's may, so that more programs run."""
    if not INTERPRET:
        pytest.skip("kernels run in Triton's interpreter")

    logits_of = MatrixProjection._all_logits

    def split(self: MatrixProjection, rows: slice) -> Tensor:
        if rows.stop - rows.start >= 4:
            return logits_of(self, rows)
        (x, weight), half = (self.x[rows], self.weights.weight), self.x.shape[1] // 2
        return torch.mm(x[:, :half], weight[:, :half].t()) + torch.mm(x[:, half:], weight[:, half:].t())

    monkeypatch.setattr(MatrixProjection, "_all_logits", split)
    (result,) = check(OPS["linear_logprobs"], device="cpu", dtypes=[torch.float32], only=["batch_invariant"])
    assert result.verdict == "broken", result
    assert "of the last 1 rows is not that of all 4" in result.message


@pytest.mark.kernels
def test_rows_of_their_own_are_not(device: torch.device) -> None:
    if device.type == "cpu" and not INTERPRET:
        pytest.skip("kernels run in Triton's interpreter or on a GPU")
    (result,) = check(row_sums_by(sound), device=device, only=["batch_invariant"])
    assert result.verdict == "kept", result


@pytest.mark.kernels
@pytest.mark.parametrize("name", OPS)
def test_rows_of_an_operator_keep_their_bits(name: str) -> None:
    """The results round nothing away in float32; opcheck does it in CI in bfloat16."""
    if not INTERPRET:
        pytest.skip("kernels run in Triton's interpreter; on a GPU opcheck asks")
    (result,) = check(OPS[name], device="cpu", dtypes=[torch.float32], only=["batch_invariant"])
    is_plain = all(op.is_plain for op in OPS[name].kernel_ops)
    assert result.verdict == ("empty" if is_plain or name in WITHOUT_ROWS else "kept"), result


@pytest.mark.skipif(INTERPRET, reason="the kernels' rows are checked")
def test_plain_pytorch_on_a_cpu_promises_no_bits() -> None:
    (result,) = check(OPS["softmax"], device="cpu", dtypes=[torch.float32], only=["batch_invariant"])
    assert result.verdict == "empty"


def test_operators_without_independent_rows() -> None:
    """A new operator has rows, or is named among those that have none."""
    found = {name for name, op in OPS.items() if not samples_with_rows(op, list(op.samples(CPU, torch.float32)))}
    assert found == WITHOUT_ROWS


@pytest.mark.parametrize(
    ("name", "arguments", "results"),
    [
        ("linear_logprobs", {"input", "target"}, {"output 0", "output 1", "gradient of input"}),
        (
            "fused_linear_policy",
            {"input", "target", "advantages", "old_logps"},
            {"output 1", "output 2", "gradient of input"},
        ),
        ("rms_norm", {"input"}, {"output 0", "gradient of input"}),
        ("attention_residual", {"blocks"}, {"output 0", "gradient of blocks"}),
    ],
)
def test_rows_are_found(name: str, arguments: set[str], results: set[str]) -> None:
    rows = samples_with_rows(OPS[name], list(OPS[name].samples(CPU, torch.float32)))[0][1]
    assert (set(rows.arguments), set(rows.results)) == (arguments, results)
    assert rows.axis == (name == "attention_residual")


def test_an_argument_that_is_as_long_by_chance_has_no_rows() -> None:
    sample = Sample((randn(8, 8), randn(8)), why="as many rows as columns")
    rows = independent_rows(OPS["rms_norm"], sample)
    assert rows is not None
    assert (rows.arguments, rows.results) == (("input",), ("output 0", "gradient of input"))


def test_rows_that_the_operator_refuses_are_left_out() -> None:
    """The reference takes the state of one channel beside the weight of three."""
    op = OPS["causal_conv1d"]
    sample = next(each for each in op.samples(CPU, torch.float32) if each.why == "fewer tokens than taps")
    rows = independent_rows(op, sample)
    assert rows is not None
    assert "weight" not in rows.arguments
    batch = Batch(op, sample, rows.axis, lambda sample, grads: call(op, sample, grads=grads))
    assert not list(batch.differences(rows, 1))


def test_what_a_record_says_of_a_library_is_left_out_on_a_gpu() -> None:
    rows = IndependentRows(0, ("input",), ("output 0", "gradient of input"))
    op: Op = record("square", overload=torch.ops.aten.square.default, batch_dependent={"output 0": "a product"})
    assert owed(op, rows, torch.bfloat16).results == ("gradient of input",)
    known = BatchDependent.float32_products("output 0")
    op = record("square", overload=torch.ops.aten.square.default, batch_dependent=known)
    assert owed(op, rows, torch.float32).results == ("gradient of input",)
    assert owed(op, rows, torch.bfloat16) == rows
    known_in_bfloat16 = {name: set(op.batch_dependent_in(torch.bfloat16)) for name, op in OPS.items()}
    assert {name: results for name, results in known_in_bfloat16.items() if results} == {
        "gated_linear": {"output 0", "gradient of gate", "gradient of up"},
        "linear_act": {"output 0", "gradient of input"},
        "rms_norm_linear": {"output 0", "output 1", "output 2", "gradient of input"},
    }


def test_a_mean_and_a_single_row_have_none() -> None:
    mean: Op = record("mean", overload=torch.ops.aten.mean.default, reference=lambda input: input.mean())
    assert independent_rows(mean, Sample((randn(4, 3),))) is None
    assert independent_rows(OPS["rms_norm"], Sample((randn(1, 3), None))) is None


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 2])
def test_products_of_rows_do_not_depend_on_others(count: int) -> None:
    a, b, bias = randn(33, 300), randn(300, 40), randn(40)
    before = torch.mm(a, b)
    with threads(count), products_by_row():
        whole, with_bias = torch.mm(a, b), torch.addmm(bias, a, b, out=torch.empty_like(before))
        for rows in (1, 7, 16):
            out = torch.empty_like(before[-rows:])
            assert torch.equal(torch.mm(a[-rows:], b), whole[-rows:])
            assert torch.equal(torch.mm(a[-rows:], b, out=out), whole[-rows:])
            assert torch.equal(torch.addmm(bias, a[-rows:], b, out=out), with_bias[-rows:])
    torch.testing.assert_close(whole, before, rtol=1e-4, atol=1e-4)
    assert torch.equal(torch.mm(a, b), before)  # PyTorch's own again
