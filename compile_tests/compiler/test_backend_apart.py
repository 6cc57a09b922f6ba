"""What the backend does while it compiles is seen by no hook and changed by no mode of the caller's."""

import contextlib
import functools
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from compile_tests.helpers.backend_checks import require_same, rewriting
from llmk.apart import apart_from_caller
from llmk.compiler import Report, trial_cache


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replacement is tried here, as no answer of another test is known."""
    monkeypatch.setattr(trial_cache, "_known", {})
    monkeypatch.setattr(trial_cache, "cache_folder", lambda: None)


def block(x: Tensor, g: Tensor, w: Tensor, v: Tensor, t: Tensor) -> Tensor:
    """A norm, a gated unit and a loss."""
    y = F.layer_norm(x, (8,), g)
    h = F.silu(F.linear(y, w)) * F.linear(y, w + 1)
    return F.cross_entropy(F.linear(h, v), t)


FOUND = {"fused_linear_ce": 1, "layer_norm": 1, "swiglu": 1}


def args() -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (4, 8), (8,), (8, 8), (11, 8)
    return [*(torch.randn(shape, requires_grad=True) for shape in shapes), torch.tensor([1, 0, 10, -100])]


def compiled(found: Report) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(block, backend=rewriting(found))


def test_hooks_on_saved_tensors_see_what_the_program_saves() -> None:
    """The call that compiles saves the same as the next."""
    seen: list[list[Any]] = []

    def keep(x: Tensor) -> Tensor:
        seen[-1].append((type(x), x.shape))
        return x

    found = Report()
    run, given = compiled(found), args()
    for _ in range(2):
        seen.append([])
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            run(*given).backward()
    assert seen[0] == seen[1]
    assert found.replaced == FOUND


def test_hooks_that_refuse_what_is_not_the_programs() -> None:
    found, storages = Report(), set[int]()

    def keep(x: Tensor) -> Tensor:
        storages.add(x.untyped_storage().data_ptr())  # a fake tensor has none
        return x

    run = compiled(found)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        require_same(run, block, args())
    assert found.replaced == FOUND


POLICY = functools.partial(create_selective_checkpoint_contexts, lambda ctx, op, *a, **k: CheckpointPolicy.MUST_SAVE)
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "non-reentrant": {"use_reentrant": False},
    "to the end": {"use_reentrant": False, "early_stop": False},
    "without a random state": {"use_reentrant": False, "preserve_rng_state": False},
    "selective": {"use_reentrant": False, "context_fn": POLICY},
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_checkpoint_around_a_compiled_function(kind: str) -> None:
    found = Report()
    inner = compiled(found)

    def run(*given: Any) -> Any:
        return checkpoint(inner, *given, **CHECKPOINTS[kind])

    for _ in range(2):
        require_same(run, block, args())
    if kind != "selective":  # under whose dispatch mode Dynamo compiles nothing
        assert found.replaced.keys() == FOUND.keys()


def test_a_checkpoint_around_a_module_with_a_compiled_one() -> None:
    """Compiled in the pass that computes again, as the first one was without gradients of its own."""
    found = Report()
    inner = compiled(found)

    def nested(*given: Any) -> Any:
        return checkpoint(lambda *x: 2 * inner(*x), *given, use_reentrant=False)

    def run(*given: Any) -> Any:
        return checkpoint(nested, *given, use_reentrant=False)

    require_same(run, lambda *given: 2 * block(*given), args())
    assert found.replaced.keys() == FOUND.keys()


class Looking(TorchFunctionMode):
    """Calls what it is told of."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatching(TorchDispatchMode):
    """Calls what it is told of."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


AROUND: dict[str, Callable[[], Any]] = {
    "a function mode": Looking,
    "a dispatch mode": Dispatching,
    "a default device": lambda: torch.device("cpu"),
    "a default dtype": lambda: default_dtype(torch.float64),
    "anomaly detection": torch.autograd.detect_anomaly,
    "deterministic algorithms": deterministic,
    "tensors saved elsewhere": torch.autograd.graph.save_on_cpu,
    "no hooks allowed": lambda: torch.autograd.graph.disable_saved_tensors_hooks("none here"),
    "a profiler": torch.autograd.profiler.profile,
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("around", AROUND)
def test_around_the_first_call(around: str) -> None:
    """The state of the random generators is as it was too."""
    found = Report()
    run, state = compiled(found), torch.get_rng_state()

    def within(*given: Any) -> Any:
        with AROUND[around]():
            return run(*given)

    given = args()
    state = torch.get_rng_state()
    require_same(within, block, given)
    assert torch.equal(torch.get_rng_state(), state)
    assert found.replaced == ({} if around == "a dispatch mode" else FOUND), str(found)


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected in")
def test_a_loss_that_is_scaled_to_infinity_under_anomaly_detection() -> None:
    """A trial may have gradients that are no numbers; those of the caller's are for the caller's checks."""

    def divided(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (x / 0.0 * 0.0).sum().backward()
        assert x.grad is not None
        return x.grad

    with torch.autograd.detect_anomaly():
        assert apart_from_caller(divided, torch.ones(2)).isnan().all()
        assert torch.is_anomaly_enabled()
        with pytest.raises(RuntimeError, match="nan"):
            divided(torch.ones(2))


def test_a_module_under_modes_of_its_own() -> None:
    """Autocast and the gradient mode are the program's: what it computes depends on them."""
    model, found = nn.RMSNorm(8), Report()
    torch._dynamo.reset()
    run = torch.compile(model, backend=rewriting(found))
    x = torch.randn(4, 8)
    with torch.no_grad():
        assert not run(x).requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        assert run(x).dtype == model(x).dtype
    assert run(x).requires_grad
    assert found.replaced == {"rms_norm": 3}


def test_threads_put_back_what_was_before_all_of_them() -> None:
    """The first to begin ends first, after the second has begun."""
    second_runs, first_is_done = threading.Event(), threading.Event()

    def first() -> None:
        apart_from_caller(second_runs.wait, 10)
        first_is_done.set()

    def second() -> None:
        second_runs.set()
        first_is_done.wait(10)

    torch.manual_seed(0)
    state, filters = torch.get_rng_state(), list(warnings.filters)
    torch.set_default_dtype(torch.float64)
    try:
        thread = threading.Thread(target=first)
        thread.start()
        while torch.get_default_dtype() != torch.float32:  # until it has begun
            time.sleep(1e-3)
        apart_from_caller(second)
        thread.join()
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), state)
    assert list(warnings.filters) == filters
