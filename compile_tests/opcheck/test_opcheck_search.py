"""`--search` finds what no sample shows, and says it in few numbers."""

import math
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from compile_tests.helpers.aot import TARGETS, compile_for, launches
from compile_tests.helpers.mutants import record
from compile_tests.helpers.mutants_search import MUTANTS, SharedFormula, elementwise, mutant
from compile_tests.helpers.own_op import OWN_OP
from llmk.accuracy.neighbours import nudged
from llmk.opcheck import check
from llmk.opcheck.__main__ import main
from llmk.opcheck.calls import call, incoming_gradients
from llmk.opcheck.foreign.adapters import adapted
from llmk.opcheck.inputs import rebound
from llmk.opcheck.reference import reference_for
from llmk.opcheck.search.cases import Case, Cases, large_gradients, unit_gradients
from llmk.opcheck.search.decisions import at_decisions
from llmk.opcheck.search.derivatives import derivative_violation
from llmk.opcheck.search.judge import judge, nudged_together
from llmk.opcheck.search.refusals import refused_on_cpu
from llmk.opcheck.search.search import search
from llmk.opcheck.search.shrink import snippet
from llmk.registry import OPS, Op, Sample
from llmk.registry.devices import INTERPRET

CPU = torch.device("cpu")


def tensors(op: Op, sample: Sample) -> list[torch.Tensor]:
    return [value for value in op.bind(sample).values() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_that_no_sample_shows_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmk.opcheck.search.refusals.PATIENCE", 0.3)
    kind, make = MUTANTS[name]
    op = make(name)
    assert [result.passed for result in check(op, only=["values_and_gradients"])] == [True]
    (found,) = search(op, "cpu", torch.float32, seconds=30, most=1, shrinking=0.5).found
    assert found.finding.kind == kind, str(found)
    assert f"seed {found.drawn.seed}: " in str(found)
    if kind not in ("does not end", "raises"):
        exec(compile(snippet(op, found.shrunk), name, "exec"), {"print": lambda *results: None})


def test_a_finding_is_made_small() -> None:
    found = search(MUTANTS["cancels"][1]("cancels_small"), CPU, torch.float32, 60, most=1, shrinking=30).found[0]
    assert max(tensor.numel() for tensor in tensors(found.op, found.shrunk.sample)) <= 6, str(found)


def test_a_sound_op_is_not_found_wrong() -> None:
    op = record("square", overload=torch.ops.aten.square.default)
    cases = Cases(op, CPU, torch.float32)
    assert [found for found in (judge(op, cases[seed]) for seed in range(60)) if found] == []


def test_an_index_out_of_range_is_not_given_to_a_gpu() -> None:
    """PyTorch's kernels end the process at one, so whether the reference takes a case is asked on a CPU."""
    logits = torch.zeros(2, 3)
    for target, raises in (([0, 2], False), ([0, -100], True)):
        sample = Sample((logits, logits, torch.tensor(target)), {"ignore_index": 0})
        assert refused_on_cpu(OPS["ce_tvd"], Case(sample, unit_gradients, 0, sample)) == raises


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("embedding", torch.float32),  # an `assert` of PyTorch's, of a padding_idx that is no row
        ("fused_linear_distill", torch.bfloat16),  # a vocab_map with a class twice, which makes the loss NaN
        ("moe_permute", torch.float32),  # experts past the last, which PyTorch's composition takes
    ],
)
def test_arguments_that_only_the_cpu_implementation_refuses_are_not_judged(name: str, dtype: torch.dtype) -> None:
    op = adapted(OPS[name], CPU, [dtype])
    cases = Cases(op, CPU, dtype)
    refused = next(case for case in map(cases.__getitem__, range(700_000, 700_200)) if refused_on_cpu(op, case))
    assert judge(op, refused) is None


def test_an_operator_without_a_cpu_implementation_refuses_nothing() -> None:
    """Its error may name an argument, as Triton's for a tensor that is not on a GPU."""

    def on_a_gpu(input: Tensor) -> Tensor:
        raise ValueError("Pointer argument cannot be accessed from Triton (input is a cpu tensor?)")

    op = elementwise("on_a_gpu", on_a_gpu, lambda input: input + 0)
    case = Cases(op, CPU, torch.float32)[0]
    assert not refused_on_cpu(op, case)


@pytest.mark.parametrize("name", ["rms_norm", "cross_entropy", "moe_permute"])
def test_a_seed_is_always_the_same_case(name: str) -> None:
    op = OPS[name]
    for seed in range(12):
        torch.manual_seed(seed)  # whatever was drawn before
        first, second = (Cases(op, CPU, torch.float32)[seed] for _ in range(2))
        assert str(first.sample) == str(second.sample)
        pairs = zip(tensors(op, first.sample), tensors(op, second.sample), strict=True)
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


@pytest.mark.skipif(INTERPRET, reason="the host does not look at a map then")
def test_an_error_may_name_a_tensor_of_a_list() -> None:
    """The operator's own error does: `vocab_map[0]` refuses a map that has a class twice."""
    op = adapted(OPS["fused_linear_distill"], CPU, [torch.float32])
    sample = next(sample for sample in op.samples(CPU, torch.float32) if "in any order" in sample.why)
    values = op.bind(sample)
    values["vocab_map_0"] = torch.full_like(values["vocab_map_0"], 3)
    wrong = rebound(op, sample, values, "a class twice")
    with pytest.raises(ValueError, match=r"vocab_map\[0\]"):
        call(op, wrong)
    assert judge(op, Case(wrong, unit_gradients, 0, wrong)) is None


def test_every_pair_of_options_comes() -> None:
    """Defaults too, and what the operator's own error says that an option may be."""
    cases = Cases(OPS["fused_linear_preference"], CPU, torch.float32)
    assert {"exo_pair", "robust", "sigmoid"} <= set(cases.options["loss_type"])
    exo = [pair for pair in cases.pairs if pair.get("loss_type") == "exo_pair" and "label_smoothing" in pair]
    assert {"its default", "0.0", "0.5", "1.0"} <= {repr(pair["label_smoothing"]) for pair in exo}


def test_numbers_at_a_decision_stay_in_the_domain() -> None:
    """kl_div's logarithms are never positive and its probabilities never negative."""
    cases = Cases(OPS["kl_div"], CPU, torch.float16)
    found = [case for seed in (4, 36, 132, 196) for case in at_decisions(cases, cases[seed], time.monotonic() + 20)]
    assert found
    for case in found:
        values = cases.op.bind(case.sample)
        assert bool((values["input"] <= 0).all())
        assert bool((values["target"] >= 0).all())


def test_rows_that_hold_nan_are_those_that_the_call_ignores() -> None:
    cases, poisoned = Cases(OPS["jsd"], CPU, torch.bfloat16), 0
    for case in (cases[seed] for seed in range(400)):
        if any("ignores" in change for change in case.changed):
            values = cases.op.bind(case.sample)
            counts = values["labels"] != values.get("ignore_index", -100)
            poisoned += 1
            assert not bool((values["input"].isnan() | (values["input"] == math.inf))[counts].any()), str(case.sample)
    assert poisoned > 2


def moe_case(dtype: torch.dtype, ups: float, down: float, weight: float) -> Case:
    """One token of ones with one expert, whose gates are 64."""
    options = {"dtype": dtype, "device": CPU}
    gate_up = torch.tensor([[[16.0] * 4] * 2 + [[ups] * 4] * 2], **options)
    down_weight = torch.tensor([[[down, -down], [down, 0.0], [down, -down], [0.0, down]]], **options)
    indices = torch.zeros(1, 1, dtype=torch.int64, device=CPU)
    sample = Sample((torch.ones(1, 4, **options), gate_up, down_weight, indices, torch.tensor([[weight]], **options)))
    return Case(sample, large_gradients, 0, sample)


def test_what_a_definition_overflows_at_is_no_fault() -> None:
    """The product of a routing weight and a hidden row, which is an intermediate result in the inputs' dtype."""
    case = moe_case(torch.float16, ups=8.0, down=2.0**-6, weight=60.0)
    assert not bool(call(OPS["moe_experts"], case.sample).outputs[0].isfinite().all())
    assert judge(OPS["moe_experts"], case) is None


def test_gradients_of_a_lost_step_are_not_judged() -> None:
    """A hidden row of zeros has a gradient that overflows, so the weights' is NaN, as the rows' is too large."""
    case = moe_case(torch.bfloat16, ups=0.0, down=2.0**125, weight=1.0)
    gradients = call(OPS["moe_experts"], case.sample, grads=case.grads).gradients
    assert gradients["weights"] is not None
    assert bool(gradients["weights"].isnan().all())
    assert judge(OPS["moe_experts"], case) is None


def test_a_row_beside_one_that_overflows_is_not_judged() -> None:
    """Gradients past float16's end take its range with them: small ones become 0, and the step is lost anyway."""
    op = OPS["fused_linear_policy"]
    case = Cases(op, CPU, torch.float16)[30162]
    rows = call(op, case.sample, grads=case.grads).gradients["input"]
    assert rows is not None
    assert bool(rows.isinf().any())
    assert judge(op, case) is None


def test_one_tensor_given_twice_stays_one() -> None:
    x = torch.randn(3, 4, dtype=torch.float32, device="cpu")
    outcome = call(OPS["add"], Sample((x, x)))
    assert outcome.inputs["input"] is outcome.inputs["other"]
    assert outcome.inputs["input"] is not x


def test_a_constant_of_the_reference_stays_one() -> None:
    """A detached term of the reference is no fault of its gradient; a wrong formula is."""

    def reference(input: torch.Tensor) -> torch.Tensor:
        return input * input.detach()

    detached = elementwise("detached", lambda x: x * x, reference)
    cases = Cases(detached, CPU, torch.float32)
    assert not any(judge(detached, cases[seed]) for seed in range(20))
    shared = elementwise("shared_again", SharedFormula.apply, SharedFormula.apply)
    assert any(judge(shared, Cases(shared, CPU, torch.float32)[seed]) for seed in range(20))


def test_products_of_arguments_may_overflow_and_powers_of_one_may_not() -> None:
    """blocks * query * weight leaves float32, the score does not; x * x of a formula that could scale x is found."""
    options = {"dtype": torch.float32, "device": "cpu"}
    numbers = (-57.0, (1, 1, 1)), (-0.062, (1,)), (-1.28e38, (1,))
    blocks, query, weight = (torch.full(shape, x, **options) for x, shape in numbers)
    sample = Sample((blocks, query, weight))
    assert judge(OPS["attention_residual"], Case(sample, incoming_gradients, 0, sample)) is None
    # A score of -inf has a weight of 0, and another vector comes out.
    numbers = torch.tensor([[[200.0, 100.0]], [[1.0, 1.0]]]), torch.tensor([-1.0, -1.0]), torch.tensor([2e37, 2e37])
    assert OPS["attention_residual"].overload(*numbers).tolist() == [[1.0, 1.0]]
    assert judge(OPS["attention_residual"], Case(Sample(numbers), unit_gradients, 0, Sample(numbers))) is None
    squares = elementwise("squares", lambda x: x * x / x, lambda x: x * 1.0)
    sample = Sample((torch.full((2, 3), 1e30, **options),))
    found = judge(squares, Case(sample, unit_gradients, 0, sample))
    assert found is not None
    assert found.kind == "value"


def test_options_that_have_an_answer_elsewhere_are_no_mistake() -> None:
    """An eps of 0 makes a row of one value NaN, as it does in PyTorch, and no other."""
    column = torch.randn(7, 1, dtype=torch.float32, device="cpu")
    template, sample = Sample((column,)), Sample((column,), {"eps": 0.0})
    assert judge(OPS["layer_norm"], Case(sample, unit_gradients, 1, template, changed=("eps=0.0",))) is None


def test_a_decision_that_the_composition_gets_wrong_is_not_refused() -> None:
    """The threshold of sparsemax among 31 ties, within float32's unit of them."""
    op = OPS["sparsemax"]
    cases = Cases(op, CPU, torch.float32)
    near = at_decisions(cases, cases[1036], math.inf)
    assert len(near) == 2
    assert [judge(op, case) for case in near] == [None, None]


def judged(name: str, dtype: torch.dtype, *numbers: Any, seed: int = 0) -> Any:
    """The finding on a call with unit gradients; an argument that is one list is one tensor."""
    made = {id(value): torch.tensor(value, dtype=dtype, device=CPU) for value in numbers}
    sample = Sample(tuple(made[id(value)] for value in numbers))
    return judge(OPS[name], Case(sample, unit_gradients, seed, sample))


FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("name", "dtype", "seed"),
    [
        ("softmax", FLOAT32, 6894),  # five roundings of a sum of which one is nearly all; PyTorch has them on 64 inputs
        ("fused_linear_preference", FLOAT16, 30347),  # equal columns, whose exact gradient is 0: one number's rounding,
        ("vocab_parallel_linear_ce", FLOAT16, 30022),  # which is held against those of a whole binade
        ("vocab_parallel_linear_ce", FLOAT16, 30724),  # equal classes have other logits in a second product
        ("fused_linear_ce_metrics", FLOAT16, 30577),  # a sum of 16 exponentials is off by two units of 1
    ],
)
def test_drawn_calls_that_are_no_fault(name: str, dtype: torch.dtype, seed: int) -> None:
    assert judge(OPS[name], Cases(OPS[name], CPU, dtype)[seed]) is None


BOXES = [[103.5, 126.0, 160.0, 197.0]]


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("name", "dtype", "numbers", "seed"),
    [
        # Areas of 1e45, at which PyTorch's loss is NaN, too, and one of its gradients happens to be 0.
        ("giou_loss", FLOAT32, ([[0.0] * 4], [[0.0, 0.0, 3.8e22, 6.6e22]]), 0),
        # 1 - A / (A + 1e-5) moves by four units of 1 over a step and by one over a quarter of it: 3.64 are right.
        ("giou_loss", BFLOAT16, (BOXES, BOXES), 30601),
        # The divergence over one class is 1e-63, and a rounding of the mixture's logarithm is 1e-16.
        ("jsd", BFLOAT16, ([[-9.205945134170987e-32]], [[0.0]]), 0),
        # 1.4e-45 times its logarithm, which the kernel knows of normal numbers only.
        ("kl_div", FLOAT32, ([[0.0]], [[1.401298464324817e-45]]), 0),
        # A weight of 5e-17, for which 2.5e-13 is right; in float64 it adds nothing to the sum of 1, and 0 comes out.
        ("attention_residual", FLOAT32, ([[[8.0, 8.0]], [[0.0, 0.0]]], [3.25, -3.125], [300.0, 300.0]), 0),
    ],
)
def test_numbers_that_are_no_fault(name: str, dtype: torch.dtype, numbers: tuple[Any, ...], seed: int) -> None:
    assert judged(name, dtype, *numbers, seed=seed) is None


def test_a_reference_has_the_gradient_of_a_logsumexp_that_loses_its_logarithm() -> None:
    """Two classes at 1e26 have 1/2 each; torch.logsumexp gives both of them 1."""
    sample = Sample((torch.tensor([[1e26]]), torch.tensor([[1.0], [1.0], [0.0]]), 1))
    assert judge(OPS["linear_topk"], Case(sample, unit_gradients, 0, sample, decides=True)) is None


@pytest.mark.skipif(INTERPRET, reason="it stands for the kernel on a GPU, whose exponential the interpreter has not")
@pytest.mark.parametrize("seed", [700004, 700031, 700043])
@pytest.mark.parametrize(("units", "found"), [(1, False), (512, True)])
def test_a_loss_may_lose_what_plain_exponentials_do(
    units: int, found: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is off by the same where there are few different numbers, and terms of the loss cancel."""

    def kernel(x: Tensor, y: Tensor, beta: float) -> tuple[Tensor, Tensor]:
        x, y = x.clamp(min=-1e4), y.clamp(min=-1e4)
        q, p = (torch.exp2(logs * math.log2(math.e)) * (1 + units * 2.0**-23) for logs in (x, y))
        log_m = torch.where(x == y, x, (beta * p + (1 - beta) * q).clamp(min=1e-38).log())
        df = (1 - beta) * (q * (x - log_m))
        return beta * (p * (y - log_m)) + df, df

    monkeypatch.setattr("llmk.ops.loss._divergence_kernels.divergence_of_cpu", kernel)
    monkeypatch.setattr("llmk.ops.loss.jsd.runs_kernels", lambda name, tensor: True)
    finding = judge(OPS["jsd"], Cases(OPS["jsd"], CPU, torch.float16)[seed])
    assert (finding is not None and finding.where == "output 0") == found, finding


@pytest.mark.parametrize(("past", "found"), [(4e-7, False), (1e-4, True)])
def test_a_limit_within_the_roundings_of_a_sum_is_not_judged(past: float, found: bool) -> None:
    """One sum of 640 is past the limit by less than it may lose, and the operator holds it to be within, or by more."""

    def limited(input: Tensor, weight: Tensor, limit: float = 1.0) -> Tensor:
        sums = input.double() @ weight.double()
        return torch.where(sums > limit, limit, sums).to(input.dtype)

    def gradients(grad: Tensor, inputs: Any, keywords: Any) -> tuple[Tensor, Tensor]:
        x, w = inputs
        kept = grad * (x.double() @ w.double() <= 1 + 2 * past)
        return kept @ w.t(), x.t() @ kept

    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=generator, dtype=torch.float32, device=CPU) for shape in ((40, 30), (30, 16)))
    rest = x.double()[0, 1:] @ w.double()[1:, 0]
    w[0, 0] = (1 + past - rest) / x.double()[0, 0]
    assert 1 < float(x.double()[0] @ w.double()[:, 0]) < 1 + 2 * past
    schema, name = "(Tensor input, Tensor weight) -> Tensor", f"limited_{found}"
    sample = Sample((x, w))
    op = mutant(name, schema, limited, limited, lambda: iter([sample]), gradients, ("input", "weight"))
    finding = judge(op, Case(sample, unit_gradients, 0, sample))
    assert (finding is not None) == found, finding


@pytest.mark.parametrize("seed", [20, 76])
def test_gradients_of_another_choice_are_not_judged(seed: int) -> None:
    """A cap makes classes equal in float32, and neither the operator nor the composition chooses as float64 does."""
    cases = Cases(OPS["linear_topk"], CPU, torch.float32)
    near = at_decisions(cases, cases[seed], time.monotonic() + 30) if seed == 76 else []
    assert [judge(OPS["linear_topk"], case) for case in (cases[seed], *near)] == [None] * (1 + len(near))


@pytest.mark.parametrize(("lost", "found"), [(torch.finfo(torch.float32).tiny, False), (1e-30, True)])
def test_an_entropy_may_lose_what_is_no_normal_number(
    lost: float, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One class of 1e-39, which is 9e-38 of an entropy of as much; a larger one that is lost is a fault."""
    monkeypatch.setattr("llmk.opcheck.search.judge.INTERPRET", True)

    def entropy(input: Tensor, least: float = 0.0) -> Tensor:
        logs = input.log_softmax(-1)
        p = logs.exp()
        return -torch.where(p < least, 0.0, p * logs).sum(-1)

    op = elementwise(f"entropy_{found}", lambda input: entropy(input, lost), entropy)
    sample = Sample((torch.tensor([[0.0, math.log(lost / 10), -1000.0]], dtype=torch.float32, device=CPU),))
    finding = judge(op, Case(sample, unit_gradients, 0, sample))
    assert (finding is not None) == found, finding


@pytest.mark.skipif(INTERPRET, reason="the interpreter loses none, for which the CPU implementation stands here")
@pytest.mark.parametrize(("logits", "found"), [([0.0, 1.0, 100.0], False), ([0.0, 10.0, 80.0], True)])
def test_a_decision_between_subnormal_numbers_is_not_judged(
    logits: list[float], found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores of 4e-44 and 1e-43 may both be 0, so that the first is chosen; those of 2e-35 and 4e-31 may not."""

    def scores(input: Tensor, scoring: str) -> Tensor:
        p = input.float().softmax(-1)
        return torch.where(p < 1e-30, 0.0, p)

    monkeypatch.setattr("llmk.opcheck.search.judge.INTERPRET", True)
    monkeypatch.setattr("llmk.ops.experts._routing._scores_cpu", scores)
    options = {"dtype": torch.float32, "device": CPU}
    sample = Sample((torch.tensor([logits], **options), 3), {"bias": torch.zeros(3, **options)})
    finding = judge(OPS["router_topk"], Case(sample, unit_gradients, 0, sample, decides=True))
    assert (finding is not None) == found, finding


@pytest.mark.skipif(INTERPRET, reason="kernels may lose subnormals")
def test_on_a_cpu_subnormal_numbers_are_judged() -> None:
    def doubled(x: Tensor) -> Tensor:
        return 2 * x

    op: Op = record("neg", overload=torch.ops.aten.neg.default, reference=doubled)
    tiny = torch.full((4,), 1e-40, dtype=torch.float32, device=CPU)
    sample = Sample((tiny,))
    found = judge(op, Case(sample, unit_gradients, 0, sample))
    assert found is not None
    assert found.kind == "value"


def test_a_fault_in_a_reference_is_not_taken_for_a_refusal() -> None:
    """One that does not take a call raises what PyTorch raises for it."""

    def mistaken(x: Tensor) -> Tensor:
        return x.no_such_method()  # type: ignore[operator]

    def refuses(x: Tensor) -> Tensor:
        raise ValueError("x: expected another")

    def asserts(x: Tensor) -> Tensor:  # as torch.nn.functional.embedding does
        raise AssertionError("x must be another")

    sample = Sample((torch.ones(4, dtype=torch.float32, device=CPU),))
    for reference in (refuses, asserts):
        op: Op = record("neg", overload=torch.ops.aten.neg.default, reference=reference)
        assert judge(op, Case(sample, unit_gradients, 0, sample)) is None
    wrong: Op = record("neg", overload=torch.ops.aten.neg.default, reference=mistaken)
    with pytest.raises(AttributeError, match="no_such_method"):
        judge(wrong, Case(sample, unit_gradients, 0, sample))


def test_neighbours_of_the_largest_number_are_finite() -> None:
    for change in (nudged(0), nudged_together(0)):
        largest = torch.full((64,), torch.finfo(torch.float32).max, dtype=torch.float32, device=CPU)
        assert bool(change(largest).isfinite().all())
        assert bool(change(largest * 2).isinf().all())


def test_a_decision_within_half_a_unit_is_not_refused() -> None:
    """Two probabilities that differ by 4e-9 of themselves, of numbers that differ by 6e-8 of themselves or nothing."""
    cases = Cases(OPS["ce_tvd"], CPU, torch.float32)
    near = at_decisions(cases, cases[30188], math.inf)
    assert len(near) == 2
    assert [judge(OPS["ce_tvd"], case) for case in near] == [None, None]


def test_roundings_that_differ_among_equal_numbers_are_no_decision() -> None:
    """Equal classes, in two products whose sums have another order, and logits of 1e5 with a unit of 8e-3."""

    def one_product(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (input @ weight.t()).log_softmax(-1)

    def two_products(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.cat([input @ part.t() for part in (weight[:32], weight[32:])], -1).log_softmax(-1)

    x = torch.randn(4, 12, generator=torch.Generator().manual_seed(0)) * 30
    sample = Sample((x, torch.full((37, 12), 1000.0)))
    schema = "(Tensor input, Tensor weight) -> Tensor"
    op = mutant("two_products", schema, two_products, one_product, lambda: iter([sample]), None, ("input", "weight"))
    assert judge(op, Case(sample, unit_gradients, 0, sample, decides=True)) is None


@pytest.mark.kernels
@pytest.mark.parametrize("name", ["add", "softmax"])
def test_the_interpreter_gets_no_subnormal_bfloat16(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its conversions make other numbers of them."""
    monkeypatch.setattr("llmk.opcheck.search.regimes.INTERPRET", True)
    cases, tiny = Cases(OPS[name], CPU, torch.bfloat16), torch.finfo(torch.bfloat16).tiny
    drawn = [cases[seed] for seed in range(400)]
    drawn += [case for seed in (4, 12, 20, 28) for case in at_decisions(cases, cases[seed], time.monotonic() + 20)]
    for case in drawn:
        for tensor in tensors(cases.op, case.sample):
            assert not bool(((tensor != 0) & (tensor.abs() < tiny)).any()), str(case.sample)


@pytest.mark.kernels
def test_a_result_that_the_interpreter_cannot_write_is_no_fault() -> None:
    """A sum of 3e-39 in bfloat16, a quarter of the smallest normal number."""
    tiny = torch.finfo(torch.bfloat16).tiny
    a, b = (torch.tensor([[x * tiny]], dtype=torch.bfloat16, device=CPU) for x in (1.25, -1.0))
    assert judge(OPS["add"], Case(Sample((a, b)), unit_gradients, 0, Sample((a, b)))) is None


@pytest.mark.kernels
@pytest.mark.skipif(not INTERPRET, reason="it is the interpreter that is slow")
def test_a_slow_call_in_the_interpreter_is_not_held_endless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmk.opcheck.search.refusals.PATIENCE", 1e-3)
    assert judged("softmax", torch.float32, [[0.0, 1.0]]) is None


@pytest.mark.skipif(INTERPRET, reason="it compiles, and a call in the interpreter has no limit")
def test_a_call_that_compiles_is_not_held_endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel for another GPU, compiled anew in each call and in more time than a call may take."""
    monkeypatch.setattr("llmk.opcheck.search.refusals.PATIENCE", 0.05)
    monkeypatch.setattr(triton.knobs.compilation, "always_compile", True)
    launch = launches(OPS["softmax"], torch.float32, workloads=False)[0]
    took: list[float] = []

    def compiles(x: Tensor) -> Tensor:
        began = time.monotonic()
        compile_for(launch, TARGETS["sm_90"])
        took.append(time.monotonic() - began)
        return x + 1

    op = elementwise("compiles", compiles, lambda input: input + 1)
    case = Cases(op, CPU, torch.float32)[0]
    assert judge(op, case) is None
    assert took
    assert min(took) > 0.05


@pytest.mark.parametrize("width", [1e-12, 1.0])
def test_differences_beyond_a_narrow_jump_say_nothing(width: float) -> None:
    """A step past the jump has a slope that is far too small; a wrong formula of a wide one is found."""

    class Tanh(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return width * torch.tanh(x / width)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return grads[0] * (1.0 if width == 1e-12 else 1.01) / torch.cosh(x / width) ** 2

    op = elementwise(f"tanh_{width:g}".replace("-", "_"), Tanh.apply, Tanh.apply)
    sample = Sample((torch.tensor([0.0, 0.3], dtype=torch.float32, device="cpu"),))
    reference = reference_for(op, sample, call(op, sample), incoming_gradients)
    assert (derivative_violation(op, sample, reference, 0) is None) == (width == 1e-12)


@pytest.mark.usefixtures("forked_checks")
def test_command_line_searches_an_op_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "my_op.py"
    file.write_text(OWN_OP.format(divisor=3))
    options = ["--device", "cpu", "--dtype", "float32", "--path", "reference", "--search", "2", "--seed", "3"]
    found, printed = main([str(file), *options]), capsys.readouterr().out
    assert found == 1, printed
    assert "half float32 (reference) breaks search:\n  seeds 3 to " in printed
    assert re.search(r"value: output 0: element \d+ is \S+, right is \S+", printed)
    assert "outputs = torch.ops.mylib.half(input)" in printed
