"""Timing calls on a device so that the ways to do one thing can be compared.

Ways take turns: in each round every way is timed a few times, in an order that rotates from round to round, and the
median over all rounds counts. A chip that warms up, or a neighbour that comes and goes, then meets all of them alike.
"""

import contextlib
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

Call = Callable[[], Any]
ROUNDS = 4
SECONDS_OF_A_WAY = 0.5  # long calls are repeated less often: about so long for each way, but at least once a round
SLOW, SLOW_MS = 3.0, 20.0  # a way that takes so much longer than the fastest, and so long, is timed once


def first_line(error: BaseException) -> str:
    """The text of a row for a failure."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    lines = re.sub(r"\x1b\[[\d;]*m", "", str(error)).strip().splitlines()  # in no colours
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:60]


class Timer:
    """Times calls on a device, the cache flushed before each."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats
        self.on_gpu = device.type == "cuda"
        self.flush = torch.empty(256 * 2**20 if self.on_gpu else 0, dtype=torch.int8, device=device)

    def milliseconds(self, call: Call) -> float:
        """The median of one call alone."""
        return self.in_turns({"": call})[0][""]

    def in_turns(self, calls: Mapping[str, Call]) -> tuple[dict[str, float], dict[str, str]]:
        """The median milliseconds of each call, all of them taking turns; and the errors of those that failed."""
        times: dict[str, list[float]] = {name: [] for name in calls}
        failed: dict[str, str] = {}
        rounds = min(ROUNDS, self.repeats)
        first: dict[str, float] = {}
        for name, call in calls.items():
            try:
                self.once(call)
                first[name] = self.once(call)
            except Exception as error:  # whatever a peer raises belongs in its row
                failed[name] = first_line(error)
        counts = {
            name: max(1, min(self.repeats, int(1e3 * SECONDS_OF_A_WAY / max(ms, 1e-3))) // rounds)
            for name, ms in first.items()
        }
        for name, ms in first.items():
            if ms > max(SLOW_MS, SLOW * min(first.values())):
                times[name], counts[name] = [ms], 0
        for i in range(rounds):
            for name in rotated(list(calls), i):
                try:
                    for _ in range(0 if name in failed else counts[name]):
                        times[name].append(self.once(calls[name]))
                except Exception as error:
                    failed[name] = first_line(error)
        return {name: statistics.median(times[name]) for name in calls if name not in failed}, failed

    def once(self, call: Call) -> float:
        """Milliseconds of one call, from a cold cache."""
        if not self.on_gpu:
            start = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - start)
        self.flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def sustained(self, call: Call, seconds: float = 1.0) -> float:
        """Milliseconds of a call among many, back to back for at least so long: at a chip's power limit."""
        call()
        self.synchronize()
        start, calls = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            for _ in range(4):
                call()
            calls += 4
            self.synchronize()
        return 1e3 * (time.perf_counter() - start) / calls

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def peak_mib(self, call: Call) -> float | None:
        """Peak memory of a call above what was allocated before it; None on a CPU."""
        if not self.on_gpu:
            return None
        self.synchronize()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        call()
        return (torch.cuda.max_memory_allocated(self.device) - before) / 2**20


def rotated(names: list[str], by: int) -> list[str]:
    by %= max(1, len(names))
    return names[by:] + names[:by]


class Graphs:
    """Captures calls as CUDA graphs that share their memory, since no results are kept."""

    def __init__(self, device: torch.device) -> None:
        self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
        # A pool whose graphs are all gone, as after a capture that failed, cannot be used again: one stays.
        self.first = self.capture(lambda: torch.zeros(1, device=device))

    def capture(self, call: Call) -> torch.cuda.CUDAGraph:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream), _refusing_to_wait():
            call()
        torch.cuda.current_stream().wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            call()
        return graph


@contextlib.contextmanager
def _refusing_to_wait() -> Iterator[None]:
    """A call that waits for the device raises here, before it can spoil a capture."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def measure_ceilings(device: torch.device, dtype: torch.dtype, timer: Timer) -> dict[str, float]:
    """Bytes read and written by a copy, and the operations of a large GEMM, per second."""
    count, size = (2**31, 8192) if timer.on_gpu else (2**24, 512)
    source = torch.empty(count, dtype=torch.int8, device=device).random_()
    target = torch.empty_like(source)
    copy = timer.milliseconds(lambda: target.copy_(source))
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    gemm = timer.milliseconds(lambda: a @ b)
    return {"copy_bytes_per_s": 2e3 * count / copy, "gemm_flops_per_s": 2e3 * size**3 / gemm}
