"""Numbers that change between calls: the backend makes no more graphs of a program than Inductor does."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from compile_tests.helpers.backend_checks import THROUGH_AUTOGRAD, require_same, rewriting
from compile_tests.helpers.breadth import some_of
from compile_tests.helpers.planted_rules import planted, reasons
from compile_tests.helpers.without_cpp import WITHOUT_CPP
from llmk.compiler import Report, compile, trial_cache
from llmk.compiler.graph_builder import NO_CONSTANT
from llmk.compiler.patterns import Arg, Call, GraphBuilder, KeywordArg

VALUES = [0.5 + i / 8 for i in range(10)]


def norm(x: Tensor, w: Tensor, t: Tensor, number: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + number) * w[0]


def shifted_norm(x: Tensor, w: Tensor, t: Tensor, number: float) -> Tensor:
    return F.rms_norm(x, (8,)) * (w[0] + number)


def layer_norm(x: Tensor, w: Tensor, t: Tensor, number: float) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return x / (x.pow(2).mean(-1, keepdim=True) + number).sqrt() * w[0]


def tempered_logprobs(x: Tensor, w: Tensor, t: Tensor, number: float) -> Tensor:
    return (F.linear(x, w) / number).log_softmax(-1).gather(-1, t[:, None])


def scaled_loss(x: Tensor, w: Tensor, t: Tensor, number: float) -> Tensor:
    return F.cross_entropy(number * F.linear(x, w), t)


def capped_loss(x: Tensor, w: Tensor, t: Tensor, number: float) -> Tensor:
    return F.cross_entropy(number * torch.tanh(F.linear(x, w) / number), t)


def weighted_loss(x: Tensor, w: Tensor, t: Tensor, number: float) -> Tensor:
    """The number is read after the loss, and hinders nothing."""
    return F.cross_entropy(F.linear(x, w), t) * number


PROGRAMS = (norm, shifted_norm, layer_norm, tempered_logprobs, scaled_loss, capped_loss, weighted_loss)


def args() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(6, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True), torch.arange(6)]


class Holding(nn.Module):
    """The number is an attribute."""

    def __init__(self, fn: Callable[..., Tensor]) -> None:
        super().__init__()
        self.fn, self.number = fn, VALUES[0]

    def forward(self, x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return self.fn(x, w, t, self.number)


def graphs(fn: Callable[..., Tensor], make: Callable[[Any], Any], held: bool) -> int:
    """Return the number of graphs for ten values, each of which gives what the function gives."""
    torch._dynamo.reset()
    counters.clear()
    module = Holding(fn)
    run = make(module if held else fn)
    for number in VALUES:
        module.number = number
        require_same(run, lambda *x, number=number: fn(*x[:3], number), [*args(), *([] if held else [number])])
    return counters["stats"]["unique_graphs"]


CASES = [(fn, held, dynamic) for fn in PROGRAMS for held in (False, True) for dynamic in (None, True)]
FEW = [(norm, True, None), (tempered_logprobs, False, None), (capped_loss, True, True), (shifted_norm, False, True)]


@pytest.mark.parametrize(
    "case", some_of(CASES, FEW), ids=lambda case: "-".join(map(str, (case[0].__name__, *case[1:])))
)
def test_as_many_graphs_as_inductor_makes(case: tuple[Callable[..., Tensor], bool, bool | None]) -> None:
    """The first value, then any. With `dynamic=True` a number that a module holds is a constant until it changes."""
    fn, held, dynamic = case
    report, settings = Report(), {"dynamic": dynamic, "fullgraph": True, "options": WITHOUT_CPP}
    mine = graphs(fn, lambda f: compile(f, report=report, **settings), held)
    assert mine <= (2 if held or dynamic is None else 1)
    if not held:
        assert mine == graphs(fn, lambda f: torch.compile(f, **settings), held)
    if fn in (weighted_loss, shifted_norm):
        assert list(report.replaced.values()) == [mine]
    elif mine > 1:
        assert NO_CONSTANT in reasons(report)


def calls(fn: Callable[[Tensor, float], Tensor], report: Report) -> int:
    """Return the number of graphs of ten calls with another number each."""
    torch._dynamo.reset()
    counters.clear()
    run = torch.compile(fn, backend=rewriting(report, then=THROUGH_AUTOGRAD), fullgraph=True)
    for number in VALUES:
        require_same(run, fn, [torch.ones(3, requires_grad=True), number])
    return counters["stats"]["unique_graphs"]


def test_an_operator_gets_no_number_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern that takes any argument need not think of it."""

    def build(builder: GraphBuilder, values: Mapping[str, Any]) -> Any:
        return builder(torch.ops.aten.mul.Tensor, values["x"], values["number"])

    planted(monkeypatch, build, Call("mul", KeywordArg("x"), Arg("number")))
    report = Report()
    assert calls(lambda x, number: x * number, report) == 2
    assert report.replaced == {"planted": 1}, str(report)
    assert NO_CONSTANT in reasons(report)


def test_a_trial_guards_on_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is put in may compute with the number, where no kernel takes it."""

    def build(builder: GraphBuilder, values: Mapping[str, Any]) -> Any:
        half = builder(torch.ops.aten.mul.Scalar, values["x"], 0.5)
        parts = [builder(torch.ops.aten.div.Tensor, half, values["number"]) for _ in range(2)]
        return builder(torch.ops.aten.add.Tensor, *parts)

    planted(monkeypatch, build, Call("div", KeywordArg("x"), Arg("number")))
    monkeypatch.setattr(trial_cache, "_known", {})
    report = Report()
    assert calls(lambda x, number: x / number, report) == 2
    assert report.replaced == {"planted": 2}, str(report)
    assert "without a trial" not in str(report)


def with_a_class_left_out(x: Tensor, w: Tensor, t: Tensor, g: Tensor, ignored: int) -> Tensor:
    """A gated unit and a loss."""
    return F.cross_entropy(F.linear(F.silu(g) * x, w), t, ignore_index=ignored)


def test_a_whole_number_that_changes() -> None:
    """There are as many graphs as with AOTAutograd alone, and the other operators stay in all of them."""
    report, counted = Report(), []
    for backend in (rewriting(report, then=THROUGH_AUTOGRAD), "aot_eager"):
        torch._dynamo.reset()
        counters.clear()
        run = torch.compile(with_a_class_left_out, backend=backend, fullgraph=True)
        for ignored in range(10):
            require_same(run, with_a_class_left_out, [*args(), torch.ones(6, 8), ignored])
        counted.append(counters["stats"]["unique_graphs"])
    assert counted[0] == counted[1]
    assert report.replaced == {"fused_linear_ce": 1, "swiglu": counted[0]}, str(report)


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_a_number_that_depends_on_data() -> None:
    """The one operator that cannot take it is left, and the other ones stay."""
    report = Report()

    def fn(x: Tensor, w: Tensor, t: Tensor, g: Tensor, ignored: Tensor) -> Tensor:
        return with_a_class_left_out(x, w, t, g, ignored.item())  # type: ignore[arg-type]

    torch._dynamo.reset()
    run = compile(fn, report=report, fullgraph=True, options=WITHOUT_CPP)
    require_same(run, fn, [*args(), torch.ones(6, 8), torch.tensor(3)])
    assert report.replaced == {"swiglu": 1}, str(report)
    assert NO_CONSTANT in reasons(report)
