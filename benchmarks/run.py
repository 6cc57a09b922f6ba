"""`python -m benchmarks.run [OP ...]`: time llmk's operators beside plain PyTorch, eager and compiled, and the peers.

For each workload of an operator's record: forward, forward and backward, both replayed as CUDA graphs (the device's
time without the host's) where they are not long, and peak memory above the inputs. All ways to compute a workload run
in one process and take turns. The floor is the larger of (bytes it must move / measured copy bandwidth) and (operations
it must do / measured GEMM rate), both measured first, in the same process; where it is the latter, the chip is kept
busy for a second before, and each way also runs back to back for a second. On a CPU one small sample is timed, to keep
the code tested. Last comes the host time of a small eager call, see host.py.
"""

import argparse
import contextlib
import gc
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from tqdm import tqdm

from benchmarks.host import measure_host
from benchmarks.peers import PEERS, Installed, find_peers
from benchmarks.report import header, op_results, print_rows
from benchmarks.timing import SLOW, Graphs, Timer, first_line, measure_ceilings
from benchmarks.ways import Way, make_ways
from llmk.registry import OPS, Cost, Op, Sample

DTYPE = torch.bfloat16
CONFIG = {"guess_tangent_strides_as_outputs": True}
"""Without it torch 2.11 copies gradients whose strides differ from those of a compiled function's outputs."""


LONG_MS = 10.0
"""From this floor on calls are not replayed as a CUDA graph: the host is ahead of the device anyway."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description="Time llmk's operators beside plain PyTorch and other libraries."
    )
    parser.add_argument("ops", nargs="*", metavar="OP", help="operators by name; all by default")
    parser.add_argument("--device", help="cuda if there is one, else cpu")
    parser.add_argument("--peers", metavar="NAME,NAME", help=f"of {', '.join(PEERS)}; or none; all by default")
    parser.add_argument("--tune", action="store_true", help="let peers tune what they can tune, which takes long")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="time compiled ways too")
    parser.add_argument("--host-only", action="store_true", help="only the host time of small calls")
    parser.add_argument("--repeats", type=int, default=20, help="timed calls of each (default 20)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here, operator by operator")
    parser.add_argument("--append", action="store_true", help="keep FILE's rows of operators that are not named")
    options = parser.parse_args(arguments)
    for name in options.ops:
        if name not in OPS:
            parser.error(f"no operator {name!r}; there are {', '.join(OPS)}")
    if options.peers is not None:
        options.peers = [] if options.peers == "none" else options.peers.split(",")
        for name in options.peers:
            if name not in PEERS:
                parser.error(f"no peer {name!r}; there are {', '.join(PEERS)}")
    if options.repeats < 1:
        parser.error(f"--repeats: expected at least 1, got {options.repeats}")
    return options


def beginning_of_row(op: Op, sample: Sample, ceilings: dict[str, float]) -> dict[str, Any]:
    """What every way's row has: which workload, which bound and its floors."""
    cost = op.cost(*sample.args, **sample.kwargs) if op.cost else Cost()

    def times(nbytes: int, flops: int) -> tuple[float, float]:
        return 1e3 * nbytes / ceilings["copy_bytes_per_s"], 1e3 * flops / ceilings["gemm_flops_per_s"]

    forward, full = times(cost.bytes_forward, cost.flops_forward), times(cost.bytes_full, cost.flops_full)
    bound = "memory" if full[0] > full[1] else "matrix"
    return {"bound": bound, "floor_forward_ms": max(forward), "floor_full_ms": max(full)}


def measure(
    op: Op, sample: Sample, timer: Timer, ceilings: dict[str, float], peers: list[Installed], compiled: bool
) -> list[dict[str, Any]]:
    """A row for each way to compute the sample."""
    common = beginning_of_row(op, sample, ceilings)
    torch._dynamo.reset()
    release(timer)
    ways, rows = make_ways(op, sample, peers, compiled)
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


def release(timer: Timer) -> None:
    """Give back what the last ways held."""
    gc.collect()
    if timer.on_gpu:
        torch.cuda.empty_cache()


def _warm_up(way: Way, row: dict[str, Any], timer: Timer) -> bool:
    """Whether the way runs, everything compiled; its peak memory."""
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


def _take_turns(key: str, calls: dict[str, Any], rows: dict[str, dict[str, Any]], timer: Timer) -> None:
    times, failed = timer.in_turns(calls)
    for name, ms in times.items():
        rows[name][f"{key}_ms"] = ms
    for name, error in failed.items():
        rows[name].setdefault("error", error)


def _replay(ways: list[Way], rows: dict[str, dict[str, Any]], timer: Timer, common: dict[str, Any]) -> None:
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


def _sustain(ways: list[Way], rows: dict[str, dict[str, Any]], timer: Timer) -> None:
    fastest = min((row["full_ms"] for row in rows.values() if "full_ms" in row), default=0.0)
    for way in ways:
        row = rows[way.name]
        if way.full is None or "error" in row or row["full_ms"] > SLOW * fastest:
            continue
        try:
            rows[way.name]["full_sustained_ms"] = timer.sustained(way.full)
        except Exception as error:
            rows[way.name]["error"] = first_line(error)


def samples_of(op: Op, device: torch.device) -> Iterator[Sample]:
    """The workloads, one after the other; on a CPU the first small sample."""
    torch.manual_seed(0)
    if device.type == "cuda":
        yield from op.workloads(device, DTYPE) if op.workloads else ()
    else:
        yield next(iter(op.samples(device, DTYPE)))


@contextlib.contextmanager
def compiler_config() -> Iterator[dict[str, Any]]:
    """The settings of CONFIG that this PyTorch has, for all compiled ways alike."""
    config = torch._functorch.config
    known = {name: value for name, value in CONFIG.items() if hasattr(config, name)}
    with config.patch(known):  # type: ignore[attr-defined]
        yield known


def run(options: argparse.Namespace, device: torch.device, config: dict[str, Any]) -> None:
    timer = Timer(device, options.repeats)
    ceilings = measure_ceilings(device, DTYPE, timer)
    peers = [] if options.host_only else find_peers(options.peers, options.tune)
    versions = {peer.name: peer.version for peer in peers}
    results = op_results(
        options.json, header(device, DTYPE, versions, {**config, "tune": options.tune}), ceilings, options.append
    )
    print(
        f"copy {ceilings['copy_bytes_per_s'] / 1e12:.2f} TB/s, GEMM {ceilings['gemm_flops_per_s'] / 1e12:.0f} TFLOP/s"
        "\nms of forward, of forward and backward (full), of full replayed as a CUDA graph, and of full back to back"
        "\nfor a second; the last two, where there are any, beside the floor and the best of peers and compiled torch"
    )
    names = options.ops or list(OPS)
    for name in tqdm([] if options.host_only else names, desc="ops", disable=not sys.stderr.isatty()):
        rows: list[dict[str, Any]] = []
        for sample in samples_of(OPS[name], device):
            measured = measure(OPS[name], sample, timer, ceilings, peers, options.compile)
            print_rows(measured)
            rows += measured
        results.replace("rows", name, rows)
    release(timer)
    for row in measure_host(names, device, DTYPE):
        results.replace("host_us", row["op"], [row])


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    with compiler_config() as config:
        run(options, device, config)
    return 0


if __name__ == "__main__":
    sys.exit(main())
