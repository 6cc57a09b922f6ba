"""Graphs of all kinds through the backend: modes, regions, breaks, sizes, Inductor and its caches."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.fx import GraphModule
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import llmk
from compile_tests.helpers.backend_checks import require_equal, require_same, require_same_step, rewritten
from compile_tests.helpers.fault_programs import randn, rms
from llmk.compiler import Report


class Twice(torch.autograd.Function):
    """Its gradient is not that of its forward, so that it shows who made it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 7 * grad


def around_a_function(x: Tensor, w: Tensor) -> Tensor:
    return F.silu(Twice.apply(rms(x))) * F.linear(x, w)


def test_an_autograd_function_stays_whole() -> None:
    report = require_equal(around_a_function, [randn(3, 8), randn(8, 8)])
    assert report.replaced == {"rms_norm": 1, "swiglu": 1}


@torch.compiler.allow_in_graph
def allowed(x: Tensor) -> Tensor:
    return Twice.apply(x)


def test_a_gradient_of_its_own_in_a_function_that_is_allowed_in_the_graph() -> None:
    report = require_equal(lambda x: F.silu(allowed(rms(x))) * x, [randn(3, 8)])
    assert report.replaced == {"rms_norm": 1, "swiglu": 1}
    assert [note.reason for note in report.left] == ["what is inside allowed stays as it is"]


def layer(x: Tensor, w: Tensor) -> Tensor:
    return F.silu(F.linear(rms(x), w)) * x


def checkpointed(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(2):
        x = checkpoint(layer, x, w, use_reentrant=False)
    return rms(x)


def test_inside_and_around_checkpointed_regions() -> None:
    report = require_equal(checkpointed, [randn(3, 8), randn(8, 8)])
    assert report.replaced == {"rms_norm": 3, "swiglu": 2}


def partly_without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        kept = rms(x)
    return x * scale + kept


def test_no_match_across_a_change_of_gradient_mode() -> None:
    report = require_equal(partly_without_gradients, [randn(3, 8)])
    assert report.replaced == {"rms_norm": 1}
    assert torch.is_grad_enabled()


def partly_in_autocast(x: Tensor, w: Tensor) -> Tensor:
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        y = F.silu(F.linear(x * scale, w)) * F.linear(x, w)
        z = F.layer_norm(y, (8,))
    return rms(z.to(x.dtype))


def test_no_match_across_autocast() -> None:
    """It leaves float64 alone."""
    report = require_equal(partly_in_autocast, [randn(3, 8), randn(8, 8)])
    assert report.replaced == {"layer_norm": 1, "rms_norm": 1, "swiglu": 1}
    assert not torch.is_autocast_enabled("cpu")


def one_kernel_of_attention(x: Tensor) -> Tensor:
    y = rms(x)
    with sdpa_kernel(SDPBackend.MATH):
        y = F.scaled_dot_product_attention(y, y, y)
    return unit(y)


def test_settings_stay_around_what_they_are_for() -> None:
    """The choice of attention's kernels is made by calls in the graph that take and give no tensor."""
    graphs: list[GraphModule] = []
    report = Report()
    rewritten(one_kernel_of_attention, report, look=graphs.append)(randn(1, 2, 4, 8))
    names = [re.sub(r"_\d+$", "", str(getattr(node.target, "__name__", node.target))) for node in graphs[0].graph.nodes]
    at = names.index("scaled_dot_product_attention")
    assert "_sdpa_kernel" in names[:at]
    assert "_sdpa_kernel" in names[at:]
    assert report.replaced == {"rms_norm": 1, "swiglu": 1}


def annotated(x: Tensor) -> Tensor:
    with torch.fx.traceback.annotate({"part": "first"}):
        y = rms(x).sin()
    return unit(y)


def test_annotations_stay() -> None:
    graphs: list[GraphModule] = []
    rewritten(annotated, Report(), look=graphs.append)(randn(3, 8))
    calls = graphs[0].graph.find_nodes(op="call_function", target=torch.ops.llmk.rms_norm.default)
    assert [node.meta["custom"] for node in calls] == [{"part": "first"}]


def with_a_break(x: Tensor) -> Tensor:
    x = rms(x)
    torch._dynamo.graph_break()
    return F.relu(x).square()


def test_each_graph_by_itself() -> None:
    report = require_equal(with_a_break, [randn(3, 8)])
    assert report.graphs == 2
    assert report.replaced == {"relu_squared": 1, "rms_norm": 1}


def with_what_nobody_reads(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    mean = x.pow(2).mean(-1, keepdim=True)
    logits = F.linear(x * torch.rsqrt(mean + 1e-6), w)
    (mean.sqrt(), (logits.argmax(-1) == target).float().mean(), F.dropout(x))
    return F.cross_entropy(logits, target)


def test_what_nobody_reads_is_in_nobodys_way() -> None:
    """Metrics that are made and dropped. Random numbers stay where Inductor promises those of eager mode."""
    args = [randn(3, 8), randn(8, 8), torch.tensor([1, 2, 3])]
    assert require_equal(with_what_nobody_reads, args).replaced == {"fused_linear_ce": 1, "rms_norm": 1}
    next_numbers = []
    with torch._inductor.config.patch(fallback_random=True):
        for run in (with_what_nobody_reads, rewritten(with_what_nobody_reads, Report())):
            torch.manual_seed(0)
            run(*args)
            next_numbers.append(torch.rand(()).item())
    assert next_numbers[0] == next_numbers[1]


def unit(x: Tensor) -> Tensor:
    return F.silu(x) * (x + 1)


TORCH_FUNC: list[Callable[[Tensor], Tensor]] = [
    torch.func.vmap(rms),
    torch.func.vmap(unit),
    torch.func.vmap(lambda x: rms((2 * x).add_(1))),
    torch.func.vmap(torch.func.grad(lambda x: unit(x).sum())),
    lambda x: torch.func.jvp(unit, (x,), (x.cos(),))[1],
    lambda x: torch.func.vjp(rms, x)[1](x)[0],
]


@pytest.mark.parametrize("fn", TORCH_FUNC)
def test_inside_torch_func_nothing_is_replaced(fn: Callable[[Tensor], Tensor]) -> None:
    def with_others_around(x: Tensor) -> Tensor:
        return rms(fn(unit(x)))

    report = require_equal(with_others_around, [randn(3, 8)])
    assert report.replaced == {"rms_norm": 1, "swiglu": 1}
    assert "what is inside torch.func stays as it is" in {note.reason for note in report.left}


def past_autograd(x: Tensor) -> Tensor:
    y = rms(x)
    y.data.mul_(2)
    return unit(y)


def test_data_of_a_tensor() -> None:
    """Autograd does not see that it is written into: an operator that has saved it would be wrong in silence."""
    report = require_equal(past_autograd, [randn(3, 8)])
    assert report.replaced == {"swiglu": 1}
    assert "something that it reads is written in place later" in {note.reason for note in report.left}


def test_beside_a_tensor_of_a_subclass() -> None:
    def fn(x: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
        y = rms(x)
        return F.silu(two) * two, unit(y)

    report, x, two = Report(), randn(3, 8), TwoTensor(torch.ones(3, 8), torch.full((3, 8), 2.0))
    (of_two, of_x), (also_of_two, also_of_x) = fn(x, two), rewritten(fn, report)(x, two)
    assert torch.equal(also_of_two.b, of_two.b)
    torch.testing.assert_close(also_of_x, of_x)
    assert report.replaced == {"rms_norm": 1, "swiglu": 1}
    assert [note.reason for note in report.left] == ["what takes or gives a TwoTensor stays as it is"]


def test_a_tensor_that_a_trace_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be a constant in the place of what the graph computes."""
    monkeypatch.setattr("llmk.compiler.segments.DATA_OF_TENSOR", None)
    report = require_equal(past_autograd, [randn(3, 8)])
    assert report.replaced == {}
    assert [note.reason for note in report.left] == ["it reads a tensor that comes from where a trace does not look"]


def heads(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor, target: Tensor) -> Tensor:
    B, S, _ = x.shape
    q = F.linear(rms(x), w).view(B, S, 2, 4).transpose(1, 2)
    a, b = q.chunk(2, dim=-1)
    turned = q * cos + torch.cat((-b, a), dim=-1) * sin
    k = 2 * q
    a, b = k.chunk(2, dim=-1)
    other = k * cos + torch.cat((-b, a), dim=-1) * sin
    hidden = (turned * other).transpose(1, 2).reshape(B, S, -1)
    return F.cross_entropy(F.linear(hidden, w).view(B * S, -1), target.view(-1))


def arguments_for(B: int, S: int) -> list[Tensor]:
    target = torch.randint(0, 8, (B, S), generator=torch.Generator().manual_seed(0))
    return [randn(B, S, 8), randn(8, 8), torch.rand(S, 4), torch.rand(S, 4), target]


def test_other_sizes_need_one_more_graph() -> None:
    report = Report()
    run = rewritten(heads, report)
    for B, S in ((2, 3), (4, 5), (6, 7), (3, 9)):
        require_same(run, heads, arguments_for(B, S))
    assert report.graphs == 2
    assert report.replaced == {"fused_linear_ce": 2, "rms_norm": 2, "rope": 2}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8, eps=1e-6)
        self.gate, self.up, self.down = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layer = Block()
        self.head = nn.Linear(8, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.layer(self.embedding(ids) + torch.tensor([0.5] * 8))  # the constant moves to the new graph
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.usefixtures("no_cpp")
def test_through_inductor() -> None:
    """The backend is found by name, with the options that Inductor takes."""
    torch.manual_seed(0)
    model, ids = Model(), torch.randint(0, 11, (2, 5))
    report = llmk.compile_report()
    report.clear()
    run = torch.compile(model, backend="llmk", fullgraph=True, options={"max_autotune": False})
    require_same_step(model, run, [ids])
    assert report.graphs == 1
    assert report.replaced == {"fused_linear_ce": 1, "rms_norm": 1, "swiglu": 1}
    assert re.search(r"swiglu +1  layer\n", f"{report}\n"), str(report)
    assert max(map(len, str(report).splitlines())) <= 80


@pytest.mark.usefixtures("no_cpp")
def test_other_rules_miss_the_caches() -> None:
    """The same rules hit the caches, others miss them."""
    x = randn(3, 8).detach()
    with fresh_cache():
        found = []
        for without in ([], [], ["rms_norm"]):
            torch._dynamo.reset()
            counters.clear()
            run = llmk.compile(rms, without=without, report=Report())
            require_same(run, rms, [x])
            found.append([counters["aot_autograd"][f"autograd_cache_{what}"] for what in ("hit", "miss")])
    assert found == [[0, 1], [1, 0], [0, 1]]


@pytest.mark.parametrize("argument", ["only", "without"])
def test_unknown_operators(argument: str) -> None:
    options: dict[str, Any] = {argument: ["rms_nrom"]}
    with pytest.raises(ValueError, match=rf"{argument}: expected some of add_rms_norm, .*, got 'rms_nrom'"):
        llmk.compile(rms, **options)
    options = {argument: "rms_norm"}
    with pytest.raises(TypeError, match=rf"{argument}: expected a list of operators, got the string 'rms_norm'"):
        llmk.compile(rms, **options)


def test_options_that_are_not_inductors_are_named_with_what_takes_them() -> None:
    message = r"options: expected settings of Inductor: .*drop_logits; .* are arguments of llmk\.compile"
    with pytest.raises(ValueError, match=message):
        llmk.compile(rms, options={"drop_logits": True})
    for options in ({"no_such": True}, {"drop_logits": 1}, {"only": "rms_norm"}):
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="expected"):
            torch.compile(rms, backend="llmk", options=options)(torch.randn(4, 8))
