"""A careless rule is harmless: planted ones are refused by what is around them, and what raises costs a match alone."""

import ast
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compile_tests.helpers.backend_checks import require_same, rewriting
from compile_tests.helpers.backend_compare import require_unchanged, with_backend
from compile_tests.helpers.fault_programs import randn
from compile_tests.helpers.planted_rules import planted, reasons
from llmk.accuracy.neighbours import with_default_dtype
from llmk.compiler import Report, backend, replace, report, trial_cache
from llmk.compiler.patterns import Arg, Call, Cast, GraphBuilder, KeywordArg
from llmk.registry.private import compilers

ROOT = Path(__file__).resolve().parents[2]
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No answer of another run, and a warning of each failure."""
    monkeypatch.setattr(trial_cache, "_known", {})
    monkeypatch.setattr(trial_cache, "cache_folder", lambda: None)
    report.warn_once.cache_clear()
    yield
    report.warn_once.cache_clear()


def test_a_rule_that_ignores_an_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = Call("div", KeywordArg("a"), KeywordArg("b"), rounding_mode=Arg("mode"))
    planted(monkeypatch, lambda builder, values: builder(aten.div.Tensor, values["a"], values["b"]), pattern)
    found = require_unchanged(lambda a, b: torch.div(a, b, rounding_mode="floor"), [randn(3, 4), randn(3, 4)])
    assert found.replaced == {}
    assert "tried with N(0, 1), it is not the same" in reasons(found)


def test_a_pattern_leaves_a_node_with_an_argument_that_it_does_not_name(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(
        monkeypatch,
        lambda builder, values: builder(aten.mul.Tensor, **values),
        Call("div", KeywordArg("self"), KeywordArg("other")),
    )
    found = require_unchanged(lambda a, b: torch.div(a, b, rounding_mode="floor"), [randn(3, 4), randn(3, 4)])
    assert (found.replaced, found.left) == ({}, [])


def test_a_rule_that_moves_a_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(builder: GraphBuilder, values: Mapping[str, Any]) -> Any:
        return builder(aten.layer_norm.default, builder(aten.to.dtype, values["x"], torch.bfloat16), [16])

    pattern = Call("to", Call("layer_norm", KeywordArg("x"), Arg("shape"), eps=Arg("eps")), torch.bfloat16)
    planted(monkeypatch, build, pattern)
    found = require_unchanged(lambda x: F.layer_norm(x, (16,)).to(torch.bfloat16), [randn(4, 16)])
    assert found.replaced == {}
    assert "tried with N(0, 1), it is not the same" in reasons(found)


def test_a_rule_that_merges_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(builder: GraphBuilder, values: Mapping[str, Any]) -> Any:
        product = builder(aten.mul.Tensor, values["a"], values["b"])
        return product, product

    product = Call("mul", KeywordArg("a"), KeywordArg("b"))
    planted(monkeypatch, build, product, product)
    found = require_unchanged(lambda a, b: (a * b, a * b), [randn(3, 4), randn(3, 4)])
    assert found.replaced == {}
    assert "share memory" in reasons(found)


def test_a_rule_that_gives_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(
        monkeypatch,
        lambda builder, values: builder(aten.view.default, values["a"], [4, 3]),
        Call("t", KeywordArg("a")) | CLONE,
    )
    found = require_unchanged(lambda a: a.clone(), [randn(4, 3)])
    assert found.replaced == {}
    assert "share memory" in reasons(found)


CLONE = Call("clone", KeywordArg("a"))


class Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * x


def test_a_rule_that_drops_an_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    """The statistics that batch norm writes, which its schema does not declare."""
    options = [Arg(name) for name in ("weight", "bias", "mean", "variance", "training", "momentum", "eps", "cudnn")]
    pattern = Call("mul", Call("batch_norm", KeywordArg("x"), *options), KeywordArg("x"))

    def build(builder: GraphBuilder, values: Mapping[str, Any]) -> Any:
        v = values
        norm = builder(aten.batch_norm.default, v["x"], v["weight"], v["bias"], None, None, True, 0.1, v["eps"], False)
        return builder(aten.mul.Tensor, norm, v["x"])

    planted(monkeypatch, build, pattern)
    found = require_unchanged(Statistics(), [randn(8, 4)])
    assert found.replaced == {}
    assert "written in place" in reasons(found)


def test_a_rule_that_reads_another_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right at 0 and at ties, and nowhere else."""
    planted(
        monkeypatch,
        lambda builder, values: builder(aten.relu.default, values["x"]),
        Cast(Call("silu", KeywordArg("x"))),
    )
    found = require_unchanged(F.silu, [randn(3, 4)])
    assert found.replaced == {}


def test_a_rule_that_multiplies_a_gradient_by_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """An infinite gradient times 0 is no number, where none should come through: a mean over no tokens has one."""

    def build(builder: GraphBuilder, values: Mapping[str, Any]) -> Any:
        mask = builder(aten.to.dtype, builder(aten.gt.Scalar, values["x"], 0), torch.float32)
        return builder(aten.mul.Tensor, values["x"], mask)

    planted(monkeypatch, build, Call("relu", KeywordArg("x")))
    found = require_unchanged(lambda x: x.relu().sum() / 0.0, [randn(3, 4)])
    assert found.replaced == {}
    assert "gradients that are infinite" in reasons(found)
    with torch.no_grad():
        assert require_unchanged(torch.relu, [randn(3, 4).detach()]).replaced == {"planted": 1}


def unit(g: Tensor, u: Tensor) -> Tensor:
    return F.silu(g) * u


def raises(*args: Any, **kwargs: Any) -> Any:
    raise KeyError("planted")


@pytest.mark.parametrize(
    ("holder", "name"),
    [
        (replace, "find"),
        (replace, "ReplacementBuilder"),
        (replace, "cached_difference"),
        (replace, "needed"),
        (backend, "traced"),
        (backend, "replace_all"),
        (backend, "put_back"),
        (backend, "segments"),
        (backend, "MutationsElsewhere"),
    ],
)
def test_what_raises_changes_nothing(monkeypatch: pytest.MonkeyPatch, holder: Any, name: str) -> None:
    monkeypatch.setattr(holder, name, raises)
    with pytest.warns(RuntimeWarning, match="KeyError: 'planted'"):
        found = require_unchanged(unit, [randn(3, 4), randn(3, 4)])
    assert found.replaced == {}
    assert "planted" in reasons(found)


@pytest.mark.parametrize("where", ["its pattern", "its replacement"])
def test_a_rule_that_raises_changes_nothing(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, raises, Call("silu", KeywordArg("x")))
    if where == "its pattern":
        monkeypatch.setattr(replace._Replacing, "_match", raises)
    with pytest.warns(RuntimeWarning, match="leaves planted as it is: its rule raised KeyError"):
        assert require_unchanged(unit, [randn(3, 4), randn(3, 4)]).replaced == {}


def test_a_warning_comes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "traced", raises)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in (2, 3):
            torch._dynamo.reset()
            torch.compile(unit, backend=rewriting(Report()))(randn(rows, 4), randn(rows, 4))
    assert len([w for w in caught if "planted" in str(w.message)]) == 1


def test_inductor_that_fails_on_what_was_put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the graph compiles as it was."""
    calls = []

    def compile_fx(gm: Any, example_inputs: Any, **options: Any) -> Any:
        calls.append("swiglu" in gm.code)
        return raises() if calls[-1] else gm

    monkeypatch.setattr(compilers, "compile_fx", compile_fx)
    found = Report()
    torch._dynamo.reset()
    from llmk import compile as llmk_compile

    with pytest.warns(RuntimeWarning, match="planted"):
        require_same(llmk_compile(unit, report=found), unit, [randn(3, 4), randn(3, 4)])
    assert calls == [True, False]
    assert found.replaced == {}


def test_inductor_that_fails_on_one_of_two_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the other one stays."""
    compiled = []

    def compile_fx(gm: Any, example_inputs: Any, **options: Any) -> Any:
        compiled.append([name for name in ("rms_norm", "swiglu") if f"llmk.{name}" in gm.code])
        return raises() if "swiglu" in compiled[-1] else gm

    monkeypatch.setattr(compilers, "compile_fx", compile_fx)
    found = Report()
    torch._dynamo.reset()
    from llmk import compile as llmk_compile

    def fn(g: Tensor, u: Tensor) -> Tensor:
        return F.silu(F.rms_norm(g, (4,), eps=1e-6)) * u

    with pytest.warns(RuntimeWarning, match="planted"):
        require_same(llmk_compile(fn, report=found), fn, [randn(3, 4), randn(3, 4)])
    assert compiled[0] == ["rms_norm", "swiglu"]
    assert compiled[-1] == ["rms_norm"]
    assert found.replaced == {"rms_norm": 1}
    assert "planted" in reasons(found)


def test_inductor_that_fails_on_the_graph_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises as it does without llmk."""
    monkeypatch.setattr(compilers, "compile_fx", raises)
    torch._dynamo.reset()
    from llmk import compile as llmk_compile

    with pytest.raises(Exception, match="planted"):
        llmk_compile(lambda x: x + 1)(randn(3))


def test_a_trial_is_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The result is kept in the process, and for those that have the same cache."""
    made = []
    before = trial_cache.difference
    monkeypatch.setattr(trial_cache, "difference", lambda question: made.append(question) or before(question))
    monkeypatch.setattr(trial_cache, "cache_folder", lambda: str(tmp_path))
    for _ in range(2):
        require_unchanged(unit, [randn(3, 4), randn(3, 4)])
    assert len(made) == 1
    monkeypatch.setattr(trial_cache, "_known", {})
    assert require_unchanged(unit, [randn(3, 4), randn(3, 4)]).replaced == {"swiglu": 1}
    assert len(made) == 1


def test_trials_draw_the_same_whatever_the_default_dtype_is() -> None:
    x, w = randn(4, 8), randn(5, 8)
    target = torch.tensor([0, 2, -100, 1])
    with with_default_dtype(torch.float64):
        found = Report()
        torch._dynamo.reset()
        torch.compile(lambda x, w: F.cross_entropy(F.linear(x, w), target), backend=rewriting(found))(x, w)
    assert found.replaced == {"fused_linear_ce": 1}, str(found)


def test_without_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replace, "cached_difference", raises)
    found = Report()
    require_unchanged(unit, [randn(3, 4), randn(3, 4)], with_backend(found, verify=False))
    assert found.replaced == {"swiglu": 1}
    assert "verify=False" in str(found)


def test_large_sizes_are_tried_small(monkeypatch: pytest.MonkeyPatch) -> None:
    questions = []
    before = trial_cache.difference
    monkeypatch.setattr(trial_cache, "difference", lambda question: questions.append(question) or before(question))

    def loss(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w).view(-1, w.shape[0]).float(), t.view(-1))

    x, w, t = torch.randn(2, 512, 64), torch.randn(4096, 64).requires_grad_(), torch.zeros(2, 512, dtype=torch.long)
    found = Report()
    torch._dynamo.reset()
    torch.compile(loss, backend=rewriting(found))(x, w, t)
    assert found.replaced == {"fused_linear_ce": 1}
    assert questions
    assert "without a trial" not in str(found)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def shifted_loss(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w)[:, :-1].flatten(0, 1), t[:, 1:].flatten())


def loss_without_a_class(x: Tensor, w: Tensor, t: Tensor, ignore_index: int) -> Tensor:
    return F.cross_entropy(F.linear(x, w), t, ignore_index=ignore_index)


def labels(B: int, S: int) -> tuple[Tensor, Tensor, Tensor]:
    return randn(B, S, 8), randn(11, 8), (torch.arange(B * S) % 11).view(B, S)


def heads(*shape: int) -> Tensor:
    return torch.zeros(1, 1, 1, 1).expand(shape)


TRIED: dict[str, tuple[Any, list[Any], str]] = {
    "sizes of labels are other symbols": (shifted_loss, [labels(2, 5), labels(3, 4)], "fused_linear_ce"),
    "ignore_index is a class among many": (
        loss_without_a_class,
        [(randn(9, 8), randn(60000, 8), torch.arange(9), 59999)],
        "fused_linear_ce",
    ),
    "many axes of middle size": (
        lambda q, k, cos, sin: (rotated(q, cos, sin), rotated(k, cos, sin)),
        [(heads(16, 16, 48, 64), heads(16, 16, 48, 64), torch.ones(48, 64), torch.ones(48, 64))],
        "rope",
    ),
    "four large axes": (
        lambda gate, up: F.silu(gate) * up,
        [(heads(20, 33, 50, 70), heads(20, 33, 50, 70))],
        "swiglu",
    ),
}


@pytest.mark.parametrize("name", TRIED)
def test_sizes_are_found_that_fit(name: str) -> None:
    fn, calls, operator = TRIED[name]
    found = Report()
    torch._dynamo.reset()
    run = torch.compile(fn, backend=rewriting(found))
    for args in calls:
        run(*args)
    assert found.replaced == {operator: len(calls)}
    assert "without a trial" not in str(found), str(found)


RULES = sorted(path for path in ROOT.glob("ops/**/*.py") if "compiler.patterns" in path.read_text())
FOLLOWERS = [ROOT / "llmk" / "compiler" / name for name in ("attention.py", "spellings.py")]


@pytest.mark.parametrize("path", [*RULES, *FOLLOWERS], ids=lambda path: str(path.relative_to(ROOT)))
def test_rules_read_nodes_through_their_schema(path: Path) -> None:
    """A rule reaches no argument of a node but through `arguments`, which leaves what it does not name."""
    assert list(arguments_taken(ast.parse(path.read_text()))) == []


def arguments_taken(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("args", "kwargs"):
            yield ast.unparse(node)


def test_the_scan_sees() -> None:
    assert list(arguments_taken(ast.parse("x = node.args[0]"))) == ["node.args"]
    assert len(RULES) >= 6  # families of operators
