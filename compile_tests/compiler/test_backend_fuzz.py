"""The backend on some of the fuzzer's programs, the same ones in every run, and the fuzzer itself."""

import contextlib
from dataclasses import replace
from itertools import islice
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from compile_tests.helpers.backend_compare import difference, eager, outcome, with_backend
from compile_tests.helpers.breadth import some_of
from compile_tests.helpers.fuzz_calls import CALLS
from compile_tests.helpers.fuzz_damage import DAMAGES, damaged
from compile_tests.helpers.fuzz_program import Input, Line, Program, Ref, aten
from compile_tests.spellings.every import SPELLINGS
from llmk.compiler import backend, trace
from llmk.compiler.rules import all_rules

pytest.importorskip("transformers")

from tools.backend_fuzz import Tally, check, programs, shrunk, usable


@pytest.mark.parametrize("seed", some_of(range(8), range(3)))
def test_nothing_changes(seed: int) -> None:
    """Values, gradients, memory, effects and the random state stay as they are, in programs damaged more and more."""
    for i, program in enumerate(islice(filter(usable, programs(Random(seed))), 16)):
        say = check(program, quick=i % 4 > 0)
        assert say is None, f"{say}\n{program.snippet()}"


def test_every_rule_is_spelled() -> None:
    assert {each.operator for each in SPELLINGS.values()} == {rule.name for rule in all_rules()}


def test_every_damage_is_done() -> None:
    for name in DAMAGES:
        random = Random(0)
        changed = ((program, damaged(random, program, [name])) for program in islice(programs(random), 20))
        assert any(after is not None and after != before for before, after in changed), name


@pytest.mark.parametrize("seed", some_of(range(20), range(5)))
def test_programs_run_as_they_are_written(seed: int) -> None:
    """Line by line and as Python."""
    program = next(filter(usable, (replace(each, called="") for each in programs(Random(seed)))))
    names: dict[str, Any] = {}
    exec(program.snippet(), names)
    written = outcome(eager, names["program"], names["args"])
    assert not written.error
    assert difference(written, program.function(), program.args()) is None


def scaled_unit(called: str) -> Program:
    """A gated unit times what is written in the program, and a number that changes."""
    lines = (
        Line("v0", aten.silu.default, (Ref("x0"),)),
        Line("v1", aten.mul.Tensor, (Ref("v0"), Ref("x1"))),
        Line("v2", torch.tensor, ([0.5, 1.5, 2.0, 3.0],), {"dtype": torch.float32}, segment="break2"),
        Line("v3", aten.mul.Tensor, (Ref("v1"), Ref("v2")), segment="break2"),
        Line("v4", aten.add.Tensor, (Ref("v3"), Ref("n0"))),
    )
    inputs = Input("x0", (3, 4)), Input("x1", (3, 4)), Input("n0", (), kind="number", plus=0.75)
    return Program(inputs, lines, ("v4",), called)


@pytest.mark.parametrize("called", CALLS)
def test_a_program_is_called_in_every_way(called: str) -> None:
    program = scaled_unit(called)
    assert usable(program)
    assert check(program) is None


def test_hooks_see_nothing_of_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """They read the memory of what is saved, which the tensors of a graph do not have."""
    tally = Tally()
    assert check(scaled_unit("hooked"), tally) is None
    assert tally.last == ("swiglu",)
    monkeypatch.setattr(backend, "saved_tensors_unhooked", contextlib.nullcontext)
    check(scaled_unit("hooked"), tally)
    assert not tally.last


def test_another_literals_graph_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def held(gm: GraphModule, value: Tensor) -> Any:
        gm.held = value
        return gm.graph.call_function(aten.lift_fresh_copy.default, (gm.graph.create_node("get_attr", "held"),))

    monkeypatch.setattr(trace, "_literal", held)
    assert check(replace(scaled_unit("from a cache"), lines=without_breaks()), seeds=1) is not None


def without_breaks() -> tuple[Line, ...]:
    return tuple(replace(line, segment="") for line in scaled_unit("").lines)


def right(x: Tensor) -> tuple[Tensor, ...]:
    return x.sin().unsqueeze(0), x.sin().unsqueeze(0), x * x + 1e3


def one_memory(x: Tensor) -> tuple[Tensor, ...]:
    y = x.sin()
    return y.unsqueeze(0), y.unsqueeze(0), x * x + 1e3


def inexact(x: Tensor) -> tuple[Tensor, ...]:
    return x.sin().unsqueeze(0), x.sin().unsqueeze(0), (x.bfloat16() * x).float() + 1e3


def another_dtype(x: Tensor) -> tuple[Tensor, ...]:
    return x.sin().unsqueeze(0), x.sin().unsqueeze(0).double(), x * x + 1e3


def without_a_gradient(x: Tensor) -> tuple[Tensor, ...]:
    return x.sin().unsqueeze(0), x.sin().unsqueeze(0).detach(), x * x + 1e3


def random_numbers(x: Tensor) -> tuple[Tensor, ...]:
    torch.rand(1)
    return right(x)


def writing(x: Tensor) -> tuple[Tensor, ...]:
    found = right(x)
    x.detach().mul_(2)
    return found


def not_finite(x: Tensor) -> tuple[Tensor, ...]:
    a, b, c = right(x)
    return a, b, c * torch.inf


WRONG = (one_memory, inexact, another_dtype, without_a_gradient, random_numbers, writing, not_finite)


@pytest.mark.parametrize("wrong", WRONG)
def test_differences_are_seen(wrong: Any) -> None:
    args = [torch.linspace(1, 2, 12).view(3, 4).requires_grad_()]
    assert difference(outcome(eager, right, args), right, args) is None
    assert difference(outcome(eager, wrong, args), right, args) is not None


def test_programs_shrink() -> None:
    """What is left of a program is what the difference needs."""
    lines = [Line("v0", aten.sin.default, (Ref("x0"),)), Line("v1", aten.cos.default, (Ref("v0"),), segment="no_grad1")]
    lines.append(Line("v2", aten.mul.Tensor, (Ref("v1"), Ref("x1"))))
    program = Program((Input("x0", (3,)), Input("x1", (3,), plus=1e3)), tuple(lines), ("v2", "v0"))
    small = shrunk(program, lambda p: any(line.target is aten.cos.default for line in p.lines))
    assert [str(line.target) for line in small.lines] == ["aten.cos.default"]
    assert [x.name for x in small.inputs] == ["x0"]


def twice(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    logits = aten.linear(x, weight)
    aten.rand_like(logits)
    return aten.cross_entropy_loss(logits, target), aten.cross_entropy_loss(logits, target)


def test_each_property_may_be_as_in_eager_mode_or_as_compiled() -> None:
    """AOTAutograd leaves out the unused draw and merges equal results; the backend's may be two."""
    args = (torch.randn(6, 8), torch.randn(13, 8, requires_grad=True), torch.randint(13, (6,)))
    plain, got = outcome(eager, twice, args), outcome(with_backend(), twice, args)
    assert got.random != plain.random
    assert got.shares == plain.shares
    assert difference(got, twice, args) is None
    got.shares["output 1"] = "input 0"
    assert difference(got, twice, args) == "output 1 has the memory of input 0, right is output 1"


def causal_twice(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    return aten.scaled_dot_product_attention(q, k, v, mask), aten.scaled_dot_product_attention(q, k, v, mask.view(6, 6))


def test_equal_results_may_share_memory_as_inductors_do() -> None:
    args = [torch.randn(2, 2, 6, 4, requires_grad=True) for _ in range(3)]
    assert difference(outcome(with_backend(), causal_twice, args), causal_twice, args) is None


def sine_of_divergence(log_probs: Tensor, logits: Tensor) -> Tensor:
    return aten.sin(aten.kl_div(log_probs, aten.log_softmax(logits, -1), 2, log_target=True))


def test_a_value_between_two_functions_may_be_rounded() -> None:
    """PyTorch's own result is right by chance: two of its roundings cancel, where the operator has one."""
    torch.manual_seed(0)
    args = [(torch.randn(6, 13) * scale).bfloat16() for scale in (1e-3, 1e-5)]
    got = outcome(with_backend(), sine_of_divergence, args)
    assert difference(got, sine_of_divergence, args) is None
    got.values["output 0"] += 0.5
    assert difference(got, sine_of_divergence, args) is not None
