"""A public operator's cached launches stand for the whole call: checks, kernel op and the graph of its gradients."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensorMode

from compile_tests.helpers.observers import Seeing, Subclass, counting
from compile_tests.helpers.stub_launches import Run, copied, named, note_buffers, stub_launches
from llmk import functional
from llmk.opcheck.inputs import as_list, differentiable_inputs, prepare
from llmk.registry import OPS, set_short_path_enabled
from llmk.registry.eager.launch_cache import Capture, LaunchCache, captures, pending
from llmk.registry.launch import HAS_LAUNCHER

pytestmark = pytest.mark.skipif(not HAS_LAUNCHER, reason="the interpreter and AMD have no launch cache")

CPU = torch.device("cpu")
CACHED = [name for name, op in OPS.items() if any(k.launch_cache is not None and k.has_backward for k in op.kernel_ops)]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    return stub_launches(monkeypatch)


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch, runs: list[Run]) -> list[Tensor]:
    return note_buffers(monkeypatch)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch, runs: list[Run]) -> list[str]:
    """The arguments that rms_norm checks, call after call."""
    made: list[str] = []
    checks: dict[str, Callable[..., Any]] = {
        "check_rows": lambda name, *args: made.append(name),
        "check_parameter": lambda name, tensor, *args: None if tensor is None else made.append(name),
    }
    for check, note in checks.items():
        monkeypatch.setattr(sys.modules["llmk.ops.norm.rms_norm"], check, note)
    return made


def saved_by(outputs: list[Tensor], tensors: list[Tensor]) -> list[Any]:
    """Return the node of the outputs' gradients, and which of the tensors it keeps."""
    places = {tensor.data_ptr(): i for i, tensor in enumerate(tensors) if tensor.data_ptr()}
    nodes: list[Any] = [output.grad_fn for output in outputs]
    return [
        (node.name(), [t if t is None else places.get(t.data_ptr()) for t in node.saved_tensors])
        for node in nodes
        if node is not None
    ]


@pytest.mark.parametrize("trained", [False, True], ids=["forward", "trained"])
@pytest.mark.parametrize("name", CACHED)
def test_a_repeated_call_does_what_the_first_did(
    name: str, trained: bool, runs: list[Run], buffers: list[Tensor]
) -> None:
    op, public, repeats = OPS[name], OPS[name].function.__wrapped__, 0
    for sample in op.samples(CPU, torch.float32):
        args, kwargs, tensors = prepare(op, sample, differentiable_inputs(op, sample) if trained else ())
        repeated = LaunchCache()
        for _ in range(2):
            repeated(public, tuple(args), kwargs)
        if not any(repeated.captured.values()):
            continue
        repeats += 1
        runs.clear()
        captures.current = capture = Capture(list(tensors.values()))
        expected = as_list(public(*args, **kwargs))
        captures.current = None
        launched = named(runs, capture.tensors)
        runs.clear()
        buffers.clear()
        others = tuple(map(copied, args)), {key: copied(value) for key, value in kwargs.items()}
        given = [value for value in (*others[0], *others[1].values()) if isinstance(value, Tensor)]
        result = as_list(repeated(public, *others))
        assert launched
        assert named(runs, [*given, *buffers]) == launched
        assert saved_by(result, [*given, *buffers]) == saved_by(expected, capture.tensors)
        for new, old in zip(result, expected, strict=True):
            assert (new.shape, new.stride(), new.dtype) == (old.shape, old.stride(), old.dtype)
            assert new.requires_grad == old.requires_grad
            (i,) = [i for i, buffer in enumerate(buffers) if buffer is new]
            assert capture.buffers[i].data_ptr() == old.data_ptr()
    assert repeats


def test_the_third_call_checks_nothing(checked: list[str]) -> None:
    """Whichever way it comes, as soon as it looks the same."""
    x, w = torch.zeros(3, 5, 7), torch.zeros(7)
    for call, args, kwargs, checks in [
        (functional.rms_norm, (x, w, 1e-5), {}, 2),
        (torch.ops.llmk.rms_norm, (x, w, 1e-5), {}, 0),
        (functional.rms_norm, (x,), {"weight": w, "eps": 1e-4}, 2),
        (functional.rms_norm, (x, w), {"eps": 1e-4}, 2),
        (functional.rms_norm, (x, w, 1e-3), {}, 2),
        (functional.rms_norm, (x[:2], w, 1e-5), {}, 2),
        (functional.rms_norm, (x, w.half(), 1e-5), {}, 2),
        (functional.rms_norm, (x, torch.nn.Parameter(w), 1e-5), {}, 2),
        (functional.rms_norm, (x, w, 1e-5), {"offset": 1.0}, 2),
        (functional.rms_norm, (x, w, 1e-5), {}, 0),
    ]:
        checked.clear()
        for _ in range(3):
            call(*args, **kwargs)
        assert checked == ["input", "weight"] * checks


def test_what_is_wrong_is_refused_each_time(runs: list[Run]) -> None:
    x, w = torch.zeros(3, 5, 9), torch.zeros(9)
    for _ in range(3):
        functional.rms_norm(x, w)
        with pytest.raises(ValueError, match="weight: expected shape"):
            functional.rms_norm(x, w[:3])
        with pytest.raises(ValueError, match="weight: expected it on cpu like input, got meta"):
            functional.rms_norm(x, w.to("meta"))
        with pytest.raises(TypeError, match="expected a dense tensor"):
            functional.rms_norm(x.to_sparse(), w)
        with pytest.raises(TypeError, match="unexpected keyword"):
            functional.rms_norm(x, w, **{"epsilon": 1e-6})


CONTEXTS = {
    "function mode": Seeing,
    "profiler": torch.autograd.profiler.profile,
    "dispatch mode": counting,
    "another dispatch mode": TwoTensorMode,
    "switched off": partial(set_short_path_enabled, False),
    "forward-mode AD": forward_ad.dual_level,
    "autocast": partial(torch.autocast, "cpu"),
}


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
@pytest.mark.parametrize("call", [functional.rms_norm, torch.ops.llmk.rms_norm.default], ids=["functional", "ops"])
def test_whoever_looks_on_sees_the_call(call: Callable[..., Any], context: Any, checked: list[str]) -> None:
    x, w = torch.zeros(3, 5, 11), torch.zeros(11, requires_grad=True)
    for _ in range(3):
        call(x, w)
    checked.clear()
    call(x, w)
    assert not checked
    with context() as mode:
        call(x, w)
    assert checked or mode.seen is torch.ops.llmk.rms_norm.default


def test_transforms_and_other_tensors_see_the_call(checked: list[str]) -> None:
    x, w = torch.zeros(3, 5, 13), torch.zeros(13)
    for _ in range(3):
        functional.rms_norm(x, w)
    with pytest.raises(NotImplementedError, match=r"llmk::rms_norm does not support torch\.func"):
        torch.func.grad(lambda x: functional.rms_norm(x, w).sum())(x)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode AD"):
        functional.rms_norm(forward_ad.make_dual(x, x), w)
    checked.clear()
    functional.rms_norm(x.as_subclass(Subclass), w)
    assert checked


def test_a_number_of_another_type_is_the_dispatchers(runs: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it comes: what was registered for the operator counts."""
    x, calls = torch.zeros(3, 5, 15), []
    call_operator = torch._ops.OpOverload.__call__

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        return call_operator(self, *args, **kwargs)

    monkeypatch.setattr(torch._ops.OpOverload, "__call__", counting)
    for _ in range(4):
        functional.rms_norm(x, None, 1)
    assert calls == [torch.ops.llmk.rms_norm.default] * 4


def test_who_is_told_of_saved_tensors_may_call_an_operator(runs: list[Run]) -> None:
    x, w, other, inside = torch.zeros(3, 5, 17), torch.zeros(17, requires_grad=True), torch.zeros(2, 17), []
    for _ in range(3):
        functional.rms_norm(x, w)

    def pack(tensor: Tensor) -> Tensor:
        if not inside:
            inside.append(tensor)
            with torch.enable_grad():
                inside.append(functional.rms_norm(other, w).shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        assert functional.rms_norm(x, w).shape == x.shape
    assert inside[1] == other.shape


def test_a_call_that_fails_leaves_nothing_behind(runs: list[Run]) -> None:
    x, w = torch.zeros(3, 5, 17), torch.zeros(17, requires_grad=True)
    with torch.inference_mode():
        constant = torch.zeros(3, 5, 17)
    repeated, public = LaunchCache(), getattr(functional.rms_norm, "__wrapped__")  # noqa: B009 no name of its type's
    for _ in range(3):
        repeated(public, (x, w))
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
        repeated(public, (constant, w))
    assert pending.launch is None
    (captured,) = repeated.captured.values()

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    captured.apply = interrupted
    with pytest.raises(KeyboardInterrupt):
        repeated(public, (x, w))
    assert pending.launch is None
