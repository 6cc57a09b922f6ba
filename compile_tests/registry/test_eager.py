"""Tests which way a call takes in plain eager mode: past the dispatcher only where nobody would miss it."""

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensorMode

import llmk
from compile_tests.helpers.observers import Seeing, Subclass, counting
from compile_tests.helpers.stub_launches import stub_launches
from llmk.functional import cross_entropy, rms_norm
from llmk.registry import set_short_path_enabled, wrap_triton
from llmk.registry.eager.bypass import is_plain_eager, takes_fast_path
from llmk.registry.eager.launcher import Launcher

x, w = torch.randn(4, 8), torch.nn.Parameter(torch.randn(8))


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return True if each call of `rms_norm` came to its checks through the dispatcher."""
    calls: list[bool] = []
    call_operator = type(torch.ops.llmk.rms_norm.default).__call__.__code__

    def probe(name: str, tensor: Tensor, axis: str) -> None:
        if name == "input":
            frame, found = sys._getframe(), False
            while frame is not None:
                found |= frame.f_code is call_operator
                frame = frame.f_back
            calls.append(found)

    monkeypatch.setattr(sys.modules["llmk.ops.norm.rms_norm"], "check_rows", probe)
    return calls


def test_a_plain_call_needs_no_dispatcher(dispatched: list[bool]) -> None:
    rms_norm(x, w)
    rms_norm(x, weight=None, eps=1e-5, offset=1.0)
    assert dispatched == [False, False]


@pytest.mark.parametrize(
    ("args", "kwargs"), [((x.as_subclass(Subclass), w), {}), ((x, w, 1), {}), ((x, w), {"offset": 1})]
)
def test_other_types_are_the_dispatchers(args: Any, kwargs: Any, dispatched: list[bool]) -> None:
    rms_norm(*args, **kwargs)
    assert dispatched == [True]


@pytest.mark.parametrize(
    "context",
    [Seeing, torch.autograd.profiler.profile, counting, TwoTensorMode, partial(set_short_path_enabled, False)],
)
def test_whoever_looks_on_sees_the_operator(context: Any, dispatched: list[bool]) -> None:
    with context():
        assert not is_plain_eager()
        rms_norm(x, w)
    assert dispatched == [True]


def test_the_fast_path_has_one_switch() -> None:
    """A function and a context manager, for all threads."""
    assert is_plain_eager()
    with set_short_path_enabled(False):
        assert not is_plain_eager()
        assert not takes_fast_path((x,))
        with set_short_path_enabled(True):
            assert takes_fast_path((x,))
        with ThreadPoolExecutor(1) as threads:
            assert not threads.submit(is_plain_eager).result()
    assert is_plain_eager()
    set_short_path_enabled(False)
    assert not is_plain_eager()
    set_short_path_enabled(True)
    assert is_plain_eager()
    with pytest.raises(TypeError, match="mode: expected a bool, got None"):
        set_short_path_enabled(None)  # type: ignore[arg-type]


def test_without_the_fast_path_nothing_of_it_is_left() -> None:
    with set_short_path_enabled(False):
        assert not isinstance(wrap_triton(object()), Launcher)


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_number_past_64_bits_is_refused(number: int, enabled: bool) -> None:
    with set_short_path_enabled(enabled), pytest.raises(OverflowError, match=f"ignore_index: .*, got {number}"):
        cross_entropy(x, torch.zeros(4, dtype=torch.int64), ignore_index=number)


def test_a_default_device_does_not_look_on(dispatched: list[bool]) -> None:
    with torch.device("cpu"):
        rms_norm(x, w)
        with Seeing():
            rms_norm(x, w)
    torch.set_default_device("cpu")
    try:
        rms_norm(x, w)
    finally:
        torch.set_default_device(None)
    assert dispatched == [False, True, False]


def test_a_function_mode_and_a_profiler_know_its_name() -> None:
    with Seeing() as mode:
        rms_norm(x, w)
    assert mode.seen is torch.ops.llmk.rms_norm.default
    with torch.profiler.profile() as profile:
        rms_norm(x, w)
    assert "llmk::rms_norm" in [event.name for event in profile.events() or ()]


def test_tracers_keep_the_node() -> None:
    graph = torch.fx.symbolic_trace(lambda x, w: rms_norm(x, w)).graph
    assert torch.ops.llmk.rms_norm.default in [node.target for node in graph.nodes]
    torch._dynamo.reset()
    exported = torch._dynamo.export(lambda x: rms_norm(x, w))(x).graph_module.graph
    assert torch.ops.llmk.rms_norm.default in [node.target for node in exported.nodes]


@pytest.mark.parametrize("call", [rms_norm, torch.ops.llmk.rms_norm.default], ids=["functional", "ops"])
@pytest.mark.parametrize("stubbed", [False, True], ids=["CPU", "launches"])
def test_a_torchscript_trace_keeps_the_node(call: Any, stubbed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if stubbed:
        stub_launches(monkeypatch)

    weight = w.detach()

    def traced(x: Tensor) -> Tensor:
        return call(x, weight)

    for _ in range(4):
        traced(x)  # as often as it takes to fill the launch cache
    trace = torch.jit.trace(traced, (x,), check_trace=not stubbed)  # what a stub launches writes nothing
    assert "llmk::rms_norm" in str(trace.graph)
    if not stubbed:
        other = torch.randn(3, 8)
        torch.testing.assert_close(trace(other), traced(other))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of a module's check of shapes
def test_a_torchscript_trace_of_a_module_trains() -> None:
    module = llmk.nn.RMSNorm(8)
    trace, other = torch.jit.trace(module, (x,)), torch.randn(3, 8)
    gradients = []
    for fn in (trace, module):
        inputs = (other.clone().requires_grad_(), module.weight)
        gradients.append(torch.autograd.grad(fn(inputs[0]).square().sum(), inputs))
    torch.testing.assert_close(*gradients)


def test_a_wrong_call_is_refused() -> None:
    for args, kwargs in [((), {}), ((x, w, 1e-6, 0.0), {}), ((x,), {"scale": 1.0}), (([1.0],), {})]:
        with pytest.raises((TypeError, RuntimeError)):
            rms_norm(*args, **kwargs)


negative: Tensor = torch._neg_view(x)  # type: ignore[attr-defined]


@pytest.mark.parametrize("other", [negative, x.to("meta"), x.as_subclass(Subclass), torch.tensor(3).item])
def test_kernels_do_not_read_what_is_not_plain(other: Any) -> None:
    assert takes_fast_path((x, None, w, 1e-6, 3, "mean", torch.float32))
    assert not takes_fast_path((x, other))
