"""`python -m llmk.bench OP ...`: time operators of llmk beside plain PyTorch on this machine, and the floor.

A call is forward and backward. The floor is the larger of (bytes it must move / measured copy bandwidth) and
(operations it must do / measured rate of matrix products). On a GPU every size that the operator's record names as one
that users run is timed, replayed as a CUDA graph where it can be; on a CPU the smallest, or a small sample where that
would take long. With `--shape` these sizes are, of operators over tokens, hidden features and classes, and a line
says in what chunks.
Exit 2: there is no such operator or device.
"""

import argparse
import functools
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import NoReturn

import torch

from llmk.bench.measure import Row, compiler_config, figure, measure
from llmk.bench.timing import Timer, measure_ceilings
from llmk.bench.ways import own_ways, ways_of
from llmk.opcheck.__main__ import DTYPES, device_named
from llmk.registry import OPS, Op, Sample
from llmk.registry.private.tensors import FakeTensorMode

CPU_BYTES, CPU_FLOPS = 5e8, 2e10  # of a call that a CPU does in about a second
LAUNCH_MS = 0.01  # a multiple of a floor below what a launch takes says nothing


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"bench: {message}", file=sys.stderr)
        raise SystemExit(2)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(prog="python -m llmk.bench", description="Time llmk's operators beside plain PyTorch.")
    parser.add_argument("ops", nargs="+", metavar="OP", help="an operator's name, such as rms_norm")
    parser.add_argument("--device", type=device_named, help="cuda if there is one, else cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="(default: bfloat16)")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=True, help="time compiled calls too (default: yes)"
    )
    parser.add_argument("--shape", type=sizes, metavar="NxHxV", help="sizes in place of the operator's, in its order")
    parser.add_argument("--repeats", type=int, default=20, help="timed calls of each (default: 20)")
    options = parser.parse_args(arguments)
    for name in options.ops:
        if name not in OPS:
            parser.error(f"no operator {name!r}; there are {', '.join(OPS)}")
        if options.shape and OPS[name].sized is None:
            takes = ", ".join(other for other, op in OPS.items() if op.sized is not None)
            parser.error(f"argument --shape: {name} has no other sizes; these have: {takes}")
    if options.repeats < 1:
        parser.error(f"argument --repeats: expected at least 1, got {options.repeats}")
    options.device = options.device or device_named("cuda" if torch.cuda.is_available() else "cpu")
    return options


def sizes(text: str) -> tuple[int, ...]:
    """Read sizes such as 8192x4096x128256."""
    found = tuple(int(size) for size in text.split("x") if size.isdecimal())
    if len(found) != 3 or text.count("x") != 2 or not all(found):
        raise argparse.ArgumentTypeError(f"expected three positive sizes such as 8192x4096x128256, got {text!r}")
    return found


def calls(op: Op, device: torch.device, dtype: torch.dtype, shape: Sequence[int] | None = None) -> Iterator[Sample]:
    """Yield the calls to time, one after the other, so that one call's inputs are there at a time."""
    torch.manual_seed(0)
    if shape is not None:
        assert op.sized is not None
        yield op.sized(shape, device, dtype)
    elif device.type != "cpu" and op.workloads is not None:
        yield from op.workloads(device, dtype)
    else:
        yield _call_for_a_cpu(op, dtype)


def _call_for_a_cpu(op: Op, dtype: torch.dtype) -> Sample:
    """The smallest workload, or the first small sample where each of them would take a CPU long."""
    device = torch.device("cpu")
    sizes: list[tuple[int, int]] = []
    if op.workloads is not None and op.cost is not None:
        with FakeTensorMode():  # sizes without the memory
            costs = [op.cost(*sample.args, **sample.kwargs) for sample in op.workloads(device, dtype)]
        sizes = [
            (cost.bytes_full, i)
            for i, cost in enumerate(costs)
            if cost.bytes_full <= CPU_BYTES and cost.flops_full <= CPU_FLOPS
        ]
    if not sizes:
        return next(iter(op.samples(device, dtype)))
    assert op.workloads is not None
    return next(sample for i, sample in enumerate(op.workloads(device, dtype)) if i == min(sizes)[1])


def print_rows(rows: Sequence[Row]) -> None:
    """One call: a line for each way to compute it."""
    floor = rows[0]["floor_full_ms"]
    known = floor > LAUNCH_MS
    print(f"\n{rows[0]['op']}, {rows[0]['workload']}: floor {floor:.3f} ms" + " (a launch takes longer)" * (not known))
    print(f"  {'':<16}{'ms':>10}{'x floor':>10}{'x torch':>10}{'MiB':>10}")
    plain = next((figure(row) for row in rows if row["way"] == "torch eager"), None)
    for row in rows:
        ms = figure(row)
        if ms is None:
            print(f"  {row['way']:<16}  {row.get('error', 'not timed')}")
            continue
        cells = [f"{ms:.3f}", f"{ms / floor:.2f}" if known else "", f"{plain / ms:.2f}" if plain else ""]
        cells.append("" if row["peak_mib"] is None else f"{row['peak_mib']:.0f}")
        print(f"  {row['way']:<16}" + "".join(f"{cell:>10}" for cell in cells))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    device, dtype = options.device, DTYPES[options.dtype]
    timer = Timer(device, options.repeats)
    ceilings = measure_ceilings(device, dtype, timer)
    name = torch.cuda.get_device_name(device) if timer.on_gpu else "cpu"
    print(
        f"{name}, {options.dtype}: a copy {ceilings['copy_bytes_per_s'] / 1e12:.3f} TB/s, "
        f"matrix products {ceilings['gemm_flops_per_s'] / 1e12:.3g} TFLOP/s\n"
        "forward and backward; x floor: over the least possible time, x torch: speedup"
    )
    with compiler_config():
        for op in (OPS[name] for name in options.ops):
            for sample in calls(op, device, dtype, options.shape):
                make = functools.partial(ways_of, op, sample, own_ways(op, options.compile), {})
                print_rows(measure(op, sample, timer, ceilings, make))
                if op.plan is not None:
                    line = op.plan(*sample.args, **sample.kwargs)
                    print(textwrap.fill(line, 80, initial_indent="  ", subsequent_indent="  "))
    return 0


if __name__ == "__main__":
    sys.exit(main())
