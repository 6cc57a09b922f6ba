"""The report says what runs, also where Dynamo has compiled it before, for another report."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

import llmk
from llmk.compiler import Report
from llmk.compiler import backend as backend_module


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[GraphModule]:
    """The graphs that were compiled. They run as they are, without Inductor."""
    graphs: list[GraphModule] = []

    def compile_fx(gm: GraphModule, *_: Any, **__: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    monkeypatch.setattr(backend_module.compilers, "compile_fx", compile_fx)
    torch._dynamo.reset()
    return graphs


def unit(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


class Unit(nn.Module):
    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return unit(gate, up)


def broken(gate: Tensor, up: Tensor) -> Tensor:
    y = unit(gate, up)
    torch._dynamo.graph_break()
    return unit(y, up)


def arguments(rows: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 8), torch.randn(rows, 8)


@pytest.mark.parametrize(("made", "units"), [(lambda: unit, 1), (Unit, 1), (lambda: broken, 2)])
def test_a_second_compile_has_a_report(made: Callable[[], Any], units: int, compiled: list[GraphModule]) -> None:
    """The second may be of the same function, or of another module with its code, for which Dynamo compiles nothing."""
    first, second = Report(), Report()
    for report in (first, second, first):
        llmk.compile(made(), report=report)(*arguments())
    assert (first.graphs, second.graphs) == (units, units)
    assert first.replaced == second.replaced == {"swiglu": units}
    assert len(compiled) == units


def test_only_what_runs_is_in_the_report() -> None:
    """And not what the same settings compiled for other sizes, or of another function."""
    first, second = Report(), Report()
    run = llmk.compile(unit, report=first, dynamic=False)
    for rows in (3, 5):
        run(*arguments(rows))
    llmk.compile(unit, report=second, dynamic=False)(*arguments(5))
    assert (first.graphs, second.graphs) == (2, 1)


def test_a_report_that_is_cleared_says_what_runs_then() -> None:
    report = llmk.compile_report()
    torch.compile(unit, backend="llmk")(*arguments())
    report.clear()
    assert report.graphs == 0
    torch.compile(unit, backend="llmk")(*arguments())
    assert (report.graphs, report.replaced) == (1, {"swiglu": 1})


def test_a_function_inside_another_one_is_no_obstacle() -> None:
    """Dynamo looks through what `llmk.compile` gives, as through what `torch.compile` gives."""
    report, inner = Report(), llmk.compile(unit, report=Report())
    again = llmk.compile(lambda x, y: inner(x, y) + 1, report=report, fullgraph=True)
    again(*arguments())
    assert (report.graphs, report.replaced) == (1, {"swiglu": 1})
    nested = Report()
    llmk.compile(inner, report=nested, fullgraph=True)(*arguments())
    assert (nested.graphs, nested.replaced) == (1, {"swiglu": 1})


@pytest.mark.parametrize("options", [{}, {"padding": 2}, {"groups": 2}, {"stride": 2, "groups": 4}, {"channels": 1}])
def test_a_plain_convolution_leaves_no_note(options: dict[str, Any]) -> None:
    report, channels = Report(), options.get("channels", 8)
    conv = nn.Conv1d(channels, 8, 3, **{name: value for name, value in options.items() if name != "channels"})
    llmk.compile(conv, report=report)(torch.randn(2, channels, 10))
    assert report.graphs == 1
    assert not report.notes, str(report)
