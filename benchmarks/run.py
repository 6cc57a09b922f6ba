"""`python -m benchmarks.run [OP ...]`: time llmk's operators beside plain PyTorch, eager and compiled, and the peers.

For each workload of an operator's record: forward, forward and backward, both replayed as CUDA graphs (the device's
time without the host's) where they are not long, and peak memory above the inputs. All ways to compute a workload run
in one process and take turns. The floor is the larger of (bytes it must move / measured copy bandwidth) and (operations
it must do / measured GEMM rate), both measured first, in the same process; where it is the latter, the chip is kept
busy for a second before, and each way also runs back to back for a second. On a CPU one small sample is timed, to keep
the code tested. Last comes the host time of a small eager call, see host.py. The modules of `compositions.py` are timed
in the same way where they are named.
"""

import argparse
import functools
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.compositions import COMPOSITIONS
from benchmarks.host import measure_host
from benchmarks.peers import PEERS, find_peers
from benchmarks.report import header, op_results, print_rows
from benchmarks.ways import make_ways
from llmk.bench.measure import compiler_config, measure, release
from llmk.bench.timing import Timer, measure_ceilings
from llmk.registry import OPS, Op, Sample

DTYPE = torch.bfloat16


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description="Time llmk's operators beside plain PyTorch and other libraries."
    )
    parser.add_argument(
        "ops", nargs="*", metavar="OP", help="operators and compositions by name; all operators by default"
    )
    parser.add_argument("--device", help="cuda if there is one, else cpu")
    parser.add_argument("--peers", metavar="NAME,NAME", help=f"of {', '.join(PEERS)}; or none; all by default")
    parser.add_argument("--tune", action="store_true", help="let peers tune what they can tune, which takes long")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="time compiled ways too")
    parser.add_argument("--first", action="store_true", help="only the first of an operator's workloads")
    parser.add_argument("--host-only", action="store_true", help="only the host time of small calls")
    parser.add_argument("--repeats", type=int, default=20, help="timed calls of each (default 20)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here, operator by operator")
    parser.add_argument("--append", action="store_true", help="keep FILE's rows of operators that are not named")
    options = parser.parse_args(arguments)
    for name in options.ops:
        if name not in OPS and name not in COMPOSITIONS:
            parser.error(f"no operator {name!r}; there are {', '.join([*OPS, *COMPOSITIONS])}")
    if options.peers is not None:
        options.peers = [] if options.peers == "none" else options.peers.split(",")
        for name in options.peers:
            if name not in PEERS:
                parser.error(f"no peer {name!r}; there are {', '.join(PEERS)}")
    if options.repeats < 1:
        parser.error(f"--repeats: expected at least 1, got {options.repeats}")
    return options


def record_of(name: str, device: torch.device) -> Op:
    return OPS[name] if name in OPS else COMPOSITIONS[name](device.type == "cuda")


def samples_of(op: Op, device: torch.device) -> Iterator[Sample]:
    """The workloads, one after the other; on a CPU the first small sample."""
    torch.manual_seed(0)
    if device.type == "cuda":
        yield from op.workloads(device, DTYPE) if op.workloads else ()
    else:
        yield next(iter(op.samples(device, DTYPE)))


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
        op = record_of(name, device)
        for sample in itertools.islice(samples_of(op, device), 1 if options.first else None):
            make = functools.partial(make_ways, op, sample, peers, options.compile)
            measured = measure(op, sample, timer, ceilings, make)
            print_rows(measured)
            rows += measured
        results.replace("rows", name, rows)
    release(timer)
    for row in measure_host([name for name in names if name in OPS], device, DTYPE):
        results.replace("host_us", row["op"], [row])


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    with compiler_config() as config:
        run(options, device, config)
    return 0


if __name__ == "__main__":
    sys.exit(main())
