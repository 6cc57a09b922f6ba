"""Measuring the ways to compute one call, all of them in one process and taking turns."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

from llmk.bench.timing import SLOW, Graphs, Timer, first_line
from llmk.bench.ways import Way
from llmk.registry import Cost, Op, Sample
from llmk.registry.private.compilers import autograd_config

Row = dict[str, Any]
Make = Callable[[], tuple[list[Way], dict[str, Row]]]

CONFIG = {"guess_tangent_strides_as_outputs": True}
"""The compiler's options; without this one torch 2.11 copies gradients whose strides differ from the outputs'."""


LONG_MS = 10.0
"""The floor from which on calls are not replayed as a CUDA graph: the host is ahead of the device anyway."""


def beginning_of_row(op: Op, sample: Sample, ceilings: dict[str, float]) -> Row:
    """The columns of every way's row: which workload, which bound and its floors."""
    cost = op.cost(*sample.args, **sample.kwargs) if op.cost else Cost()

    def times(nbytes: int, flops: int) -> tuple[float, float]:
        return 1e3 * nbytes / ceilings["copy_bytes_per_s"], 1e3 * flops / ceilings["gemm_flops_per_s"]

    forward, full = times(cost.bytes_forward, cost.flops_forward), times(cost.bytes_full, cost.flops_full)
    bound = "memory" if full[0] > full[1] else "matrix"
    return {"bound": bound, "floor_forward_ms": max(forward), "floor_full_ms": max(full)}


def measure(op: Op, sample: Sample, timer: Timer, ceilings: dict[str, float], make: Make) -> list[Row]:
    """A row for each way to compute the sample; `make` makes the ways, and the beginnings of their rows."""
    common = beginning_of_row(op, sample, ceilings)
    torch.compiler.reset()
    release(timer)
    ways, rows = make()
    release(timer)
    ways = [way for way in ways if _warm_up(way, rows[way.name], timer)]
    if common["bound"] == "matrix" and timer.on_gpu and ways:
        timer.sustained(ways[0].full or ways[0].forward)
    _take_turns("forward", {way.name: way.forward for way in ways}, rows, timer)
    _take_turns("full", {way.name: way.full for way in ways if way.full}, rows, timer)
    if timer.on_gpu:
        if common["floor_full_ms"] < LONG_MS:
            _replay(ways, rows, timer, common)
        if common["bound"] == "matrix":
            _sustain(ways, rows, timer)
    return [
        {"op": op.name, "workload": sample.why, "way": name, **common, "peak_mib": None, **row}
        for name, row in rows.items()
    ]


def figure(row: Row) -> float | None:
    """The milliseconds of forward and backward that ways are compared by: sustained, else replayed, else as called."""
    return row.get("full_sustained_ms") or row.get("replayed_ms") or row.get("full_ms")


def release(timer: Timer) -> None:
    """Give back what the last ways held."""
    gc.collect()
    if timer.on_gpu:
        torch.cuda.empty_cache()


def _warm_up(way: Way, row: Row, timer: Timer) -> bool:
    """Return True if the way runs, everything compiled; its peak memory."""
    try:
        for call in (way.forward, way.full or way.forward):
            for _ in range(2):
                call()
        row["peak_mib"] = timer.peak_mib(way.full or way.forward)
        if way.full is None:
            row["error"] = "forward only"
    except Exception as error:  # whatever a peer raises belongs in its row
        row["error"] = first_line(error)
        return False
    return True


def _take_turns(key: str, calls: dict[str, Any], rows: dict[str, Row], timer: Timer) -> None:
    times, failed = timer.in_turns(calls)
    for name, ms in times.items():
        rows[name][f"{key}_ms"] = ms
    for name, error in failed.items():
        rows[name].setdefault("error", error)


def _replay(ways: list[Way], rows: dict[str, Row], timer: Timer, common: Row) -> None:
    """The ways that can be captured, as CUDA graphs; the rows of the others say why not."""
    floors = {part: common[f"floor_{part}_ms"] for part in ("forward", "full")}
    graphs = Graphs(timer.device)
    for key, part in (("forward_replayed", "forward"), ("replayed", "full")):
        replays = {}
        for way in ways:
            call = getattr(way, part)
            if call is None or "not_captured" in rows[way.name]:
                continue
            try:
                replays[way.name] = graphs.capture(call).replay
            except Exception as error:  # a call that waits for the device cannot be part of a graph
                rows[way.name]["not_captured"] = first_line(error)
        _take_turns(key, replays, rows, timer)
        for row in rows.values():  # kernels on a stream of their own escape a capture
            if row.get(f"{key}_ms", floors[part]) < 0.5 * floors[part]:
                del row[f"{key}_ms"]
                row["not_captured"] = "the graph does less than the call"


def _sustain(ways: list[Way], rows: dict[str, Row], timer: Timer) -> None:
    fastest = min((row["full_ms"] for row in rows.values() if "full_ms" in row), default=0.0)
    for way in ways:
        row = rows[way.name]
        if way.full is None or "error" in row or row["full_ms"] > SLOW * fastest:
            continue
        try:
            rows[way.name]["full_sustained_ms"] = timer.sustained(way.full)
        except Exception as error:
            rows[way.name]["error"] = first_line(error)


@contextlib.contextmanager
def compiler_config() -> Iterator[dict[str, Any]]:
    """The settings of CONFIG that this PyTorch has, for all compiled ways alike."""
    config = autograd_config()
    known = {name: value for name, value in CONFIG.items() if hasattr(config, name)}
    with config.patch(known) if known else contextlib.nullcontext():
        yield known
