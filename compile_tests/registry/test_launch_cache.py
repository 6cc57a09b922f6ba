"""The launch cache repeats what the launching function does, and only for a call that looks the same."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from compile_tests.helpers.observers import WATCHERS, watch
from compile_tests.helpers.stub_launches import Run, copied, named, note_buffers, stub_launches
from llmk.opcheck.calls import call
from llmk.registry import OPS, KernelOp, Op, empty, set_short_path_enabled, wrap_triton
from llmk.registry.eager import launch_cache
from llmk.registry.eager.launch_cache import Capture, LaunchCache, captures
from llmk.registry.eager.launcher import contiguous_layout
from llmk.registry.launch import HAS_LAUNCHER

pytestmark = pytest.mark.skipif(not HAS_LAUNCHER, reason="the interpreter and AMD have no launch cache")

CPU = torch.device("cpu")


@triton.jit
def kernel(x_ptr, w_ptr, y_ptr, N):
    pass


class Launching:
    """The part of a kernel op that a capture asks for, around a launching function; it notes whether that ran."""

    apply = None

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.launch_cache: Any = True
        self.fn, self.ran = fn, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.ran, outputs = True, self.fn(*args, **kwargs)
        if captures.current is not None:
            captures.current.note_call(self, args, outputs)
        return outputs


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    return stub_launches(monkeypatch)


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch, runs: list[Run]) -> list[Tensor]:
    return note_buffers(monkeypatch)


def kernel_calls(op: Op) -> Iterator[tuple[KernelOp, tuple[Any, ...]]]:
    """The arguments of kernel ops with a launch cache over the operator's samples, forward and backward."""
    calls: list[tuple[KernelOp, tuple[Any, ...]]] = []
    original = KernelOp.__call__

    def recording(self: KernelOp, *args: Any) -> Any:
        flags = () if self.derivative.keeps is None else self.derivative.flags(args)
        calls.append((self, tuple(arg.detach() if isinstance(arg, Tensor) else arg for arg in (*args, *flags))))
        return original(self, *args)

    KernelOp.__call__ = recording
    try:
        with set_short_path_enabled(False):  # the fast path repeats launches and scales in place
            for dtype in (torch.float32, torch.float16):  # one of them may not call every kernel op
                missing = {kernel_op for kernel_op in op.kernel_ops if kernel_op.launch_cache is not None}
                if missing - {kernel_op for kernel_op, _ in calls}:
                    for sample in op.samples(CPU, dtype):
                        call(op, sample)
    finally:
        KernelOp.__call__ = original
    return ((kernel_op, args) for kernel_op, args in calls if kernel_op.launch_cache is not None)


CACHED = [name for name, op in OPS.items() if any(kernel_op.launch_cache is not None for kernel_op in op.kernel_ops)]


@pytest.mark.parametrize("name", CACHED)
def test_a_repeated_call_does_what_the_function_does(name: str, runs: list[Run], buffers: list[Tensor]) -> None:
    found: set[KernelOp] = set()
    for kernel_op, args in list(kernel_calls(OPS[name])):
        repeated = LaunchCache()
        for _ in range(2):
            repeated(kernel_op._bypass, args)
        if not any(repeated.captured.values()):
            continue
        found.add(kernel_op)
        runs.clear()
        captures.current = capture = Capture([arg for arg in args if isinstance(arg, Tensor)])
        outputs = kernel_op.fn(*args)
        captures.current = None
        expected = named(runs, capture.tensors)
        runs.clear()
        buffers.clear()
        others = tuple(map(copied, args))
        result = repeated(kernel_op._bypass, others)
        assert named(runs, [*(arg for arg in others if isinstance(arg, Tensor)), *buffers]) == expected
        for new, old in zip(*((r if isinstance(r, tuple) else (r,)) for r in (result, outputs)), strict=True):
            assert (new.shape, new.stride(), new.dtype) == (old.shape, old.stride(), old.dtype)
            (i,) = [i for i, buffer in enumerate(buffers) if buffer is new]
            assert capture.buffers[i].data_ptr() == old.data_ptr()
    assert found == {kernel_op for kernel_op in OPS[name].kernel_ops if kernel_op.launch_cache is not None}


def doubled(x: Tensor, w: Tensor | None, scale: float = 2.0, n: int = 1) -> Tensor:
    y = empty(x.shape, x.dtype, x.device)
    wrap_triton(kernel)[(x.numel(),)](x, w, y, n)
    return y


def worked_out(fn: Callable[..., Any], *calls: tuple[Any, ...], **kwargs: Any) -> list[bool]:
    """Return which of the calls the function itself was run for."""
    ran: list[bool] = []
    launching, repeated = Launching(fn), LaunchCache()
    for args in calls:
        launching.ran = False
        repeated(launching, args, kwargs)
        ran.append(launching.ran)
    return ran


class Subclass(Tensor):
    pass


storage = torch.zeros(64)
aligned, shifted = storage[:16].view(4, 4), storage[1:17].view(4, 4)


def test_the_third_call_is_repeated(runs: list[Run]) -> None:
    assert worked_out(doubled, *[(aligned, None)] * 4) == [True, True, False, False]
    assert len(runs) == 3  # the first was Triton's own


@pytest.mark.parametrize(
    "other",
    [
        (shifted, None),
        (aligned.half(), None),
        (aligned.clone().t(), None),
        (aligned[:2], None),
        (aligned, aligned),
        (aligned, None, 3.0),
        (aligned, None, 2.0, 16),
        (aligned, None, 2.0, True),
        (aligned, None, 2.0, 1.0),
        (aligned, None, 2.0, 1 - 2**32),
        (torch.nn.Parameter(aligned), None),
        (aligned.to("meta"), None),
    ],
)
def test_what_is_worked_out_again(other: tuple[Any, ...], runs: list[Run]) -> None:
    usual = (aligned, None, 2.0, 1)
    other += usual[len(other) :]
    assert worked_out(doubled, usual, usual, usual, other) == [True, True, False, True]


def test_the_other_zero_is_another_number(runs: list[Run]) -> None:
    usual, other = (aligned, None, 0.0), (aligned, None, -0.0)
    assert worked_out(doubled, usual, usual, usual, other) == [True, True, False, True]


def test_who_wants_gradients_is_worked_out_again(runs: list[Run]) -> None:
    repeated, launching = LaunchCache(), Launching(doubled)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            for _ in range(3):
                launching.ran = False
                repeated(launching, (aligned, None))
            assert not launching.ran
    assert len(repeated.captured.values()) == 2


def test_arguments_by_name_are_told_apart_by_it(runs: list[Run]) -> None:
    repeated, launching = LaunchCache(), Launching(lambda x, *, w=None, v=None: doubled(x, w))
    for name in ("w", "v"):
        repeated(launching, (aligned,), {name: None})
        repeated(launching, (aligned,), {name: None})
    assert len(repeated.captured.values()) == 2


@pytest.mark.parametrize(
    "other",
    [torch._neg_view(aligned), aligned.to_sparse(), aligned.as_subclass(Subclass), [aligned], 1j],  # type: ignore[attr-defined]
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_key(other: Any, runs: list[Run]) -> None:
    for args in ((other, aligned), (aligned, other)):
        assert all(worked_out(lambda x, w: doubled(aligned, None), *[args] * 4))


@pytest.mark.parametrize("where", WATCHERS)
def test_who_watches_launches_sees_all_of_them(where: str, runs: list[Run]) -> None:
    """A watcher is there from the start, or comes after a capture, which knows nothing that was built for it."""
    repeated, launching = LaunchCache(), Launching(doubled)
    for watched in (True, False, True):
        with pytest.MonkeyPatch.context() as patch:
            if watched:
                watch(where, kernel, patch)
            runs.clear()
            for _ in range(4):
                repeated(launching, (aligned, None))
            assert len(runs) == (0 if watched else 3)  # the first of them was Triton's own
    assert len(repeated.captured.values()) == 1


def copies(x: Tensor, w: Tensor) -> Tensor:
    return doubled(x.t().contiguous(), w)


def begins_elsewhere(x: Tensor, w: Tensor) -> Tensor:
    return doubled(x[2:], w)


def writes_itself(x: Tensor, w: Tensor) -> Tensor:
    return doubled(x, w).zero_()


def allocates_itself(x: Tensor, w: Tensor) -> Tensor:
    doubled(x, w)
    return torch.empty(x.shape)


def returns_a_part(x: Tensor, w: Tensor) -> Tensor:
    return doubled(x, w)[:2]


def returns_a_row_repeated(x: Tensor, w: Tensor) -> Tensor:
    return doubled(x, w)[:1].expand(4, 4)


def returns_its_input(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return doubled(x, w), x


@pytest.mark.parametrize(
    "fn",
    [
        copies,
        begins_elsewhere,
        writes_itself,
        allocates_itself,
        returns_a_part,
        returns_a_row_repeated,
        returns_its_input,
    ],
)
def test_what_is_never_repeated(fn: Callable[..., Any], runs: list[Run]) -> None:
    assert all(worked_out(fn, *[(aligned, torch.zeros(4))] * 4))


def test_what_calls_several_kernel_ops_or_another_is_never_repeated(runs: list[Run]) -> None:
    """A public operator's function may call several; each of the kernel ops has a cache of its own, if any."""
    launching, another = Launching(doubled), Launching(doubled)
    another.launch_cache = None
    for calls, repeats in [((launching,), True), ((launching, launching), False), ((another,), False)]:
        made, repeated = [], LaunchCache()

        def public(x: Tensor, calls: Any = calls, made: list[int] = made) -> Tensor:
            made.append(1)
            return [call(x, None) for call in calls][-1]

        for _ in range(3):
            repeated(public, (aligned,))
        assert len(made) == (2 if repeats else 3)


def test_axes_of_what_is_returned_may_be_swapped(runs: list[Run]) -> None:
    x = torch.zeros(2, 3, 4)
    repeated, launching = LaunchCache(), Launching(lambda x: doubled(x, None).transpose(0, 2))
    made = [repeated(launching, (x,)) for _ in range(3)]
    (captured,) = repeated.captured.values()
    assert captured is not None
    assert {(y.shape, y.stride(), y.untyped_storage().nbytes()) for y in made} == {((4, 3, 2), (1, 4, 12), 96)}


def test_arguments_of_one_storage(runs: list[Run]) -> None:
    """Told apart where they are what is launched; not by a view, nor where the two are one tensor."""
    rows = storage[16:32].view(4, 4)
    assert not worked_out(doubled, *[(aligned, rows)] * 4)[3]
    assert worked_out(lambda x, w: doubled(x.view(-1), w), *[(aligned, rows)] * 4)[3]
    assert worked_out(doubled, *[(aligned, aligned)] * 4)[3]


@pytest.mark.parametrize("fn", [doubled, lambda x, w: doubled(x.view(-1), w)], ids=["as it is", "a view"])
@pytest.mark.parametrize("first", ["the same", "of one storage"])
def test_what_shares_memory_says_nothing_of_what_does_not(first: str, fn: Callable[..., Any], runs: list[Run]) -> None:
    """Whichever comes first."""
    others = (aligned, aligned if first == "the same" else storage[16:32].view(4, 4))
    apart = (aligned, aligned.clone())
    worked = worked_out(fn, others, others, others, apart, apart, apart)
    assert not worked[5]
    repeated, launching = LaunchCache(), Launching(fn)
    for args in (apart, apart, others):
        assert repeated(launching, args).numel() == aligned.numel()
    assert len(repeated.captured.values()) == 1


class SlowKey:
    """Another thread may run wherever a dict asks for its hash, as it may anywhere on a free-threaded Python."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __hash__(self) -> int:
        time.sleep(0)
        return self.number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SlowKey) and other.number == self.number


def test_eight_threads_look_up_what_the_others_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_cache, "_MOST_CALLS", 8)
    recent, barrier = launch_cache._RecentKeys(), threading.Barrier(8)

    def work(thread: int) -> int:
        barrier.wait()
        wrong = 0
        for n in range(300):
            key: Any = SlowKey((n * (1 + thread)) % 7)
            if key not in recent:
                recent[key] = key.number
            wrong += recent.get(key) not in (None, key.number)
        return wrong

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(work, range(8))) == 0
    assert len(recent.values()) <= 8


def test_eight_threads_share_one_cache(runs: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets the result of its own call."""
    monkeypatch.setattr(launch_cache, "_MOST_CALLS", 8)
    repeated, barrier = LaunchCache(), threading.Barrier(8)

    def work(thread: int) -> None:
        barrier.wait()
        for n in range(300):
            x = torch.empty(1 + (n + thread) % 11, 3)
            launching = Launching(doubled)
            assert repeated(launching, (x, None, 2.0, thread)).shape == x.shape

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert len(repeated.captured.values()) <= 8


def test_cached_launches_do_not_pile_up(runs: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_cache, "_MOST_CALLS", 4)
    repeated, launching = LaunchCache(), Launching(doubled)
    for n in range(20):
        for _ in range(2):
            repeated(launching, (aligned, None, 2.0, n))
    assert len(repeated.captured.values()) <= 4


def test_what_is_called_often_stays_cached(runs: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else is called in between, once each or again and again."""
    monkeypatch.setattr(launch_cache, "_MOST_CALLS", 16)
    ran = 0

    def counting(*args: Any) -> Tensor:
        nonlocal ran
        ran += args[2] == 2.0
        return doubled(*args)

    repeated, launching = LaunchCache(), Launching(counting)
    for n in range(200):
        repeated(launching, (aligned, None, 2.0))
        for _ in range(n % 4):
            repeated(launching, (aligned, None, 3.0, n))
    assert ran == 2


@pytest.mark.parametrize("shape", [(), (0,), (7,), (0, 16), (4, 0), (2, 0, 3), (2, 3, 5), (1, 1, 4)])
def test_buffers_are_laid_out_as_torch_does(shape: tuple[int, ...]) -> None:
    sizes, strides = contiguous_layout(torch.Size(shape))
    assert type(sizes) is tuple
    assert (sizes, strides) == (shape, torch.empty(shape).stride())
