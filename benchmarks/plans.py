"""`python -m benchmarks.plans`: whether another plan of `fused_linear_ce` beats the one that is chosen.

For each size the chosen plan, and others of ever smaller chunks: milliseconds of forward and backward pass, back to
back for a while, all plans in turns, and peak memory above the inputs. A plan is beaten where another one takes 3% less
time and 3% less memory.
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.report import header
from llmk.bench.timing import Timer
from llmk.ops.linear_loss.chunked.plan import ROW_MULTIPLE, Plan, memory, plan
from llmk.registry import OPS, cdiv

DTYPE = torch.bfloat16
TOKENS, HIDDEN, CLASSES = (512, 2048, 8192, 32768, 65536), (1024, 2048, 4096, 8192), (32000, 128256, 262144)
MOST_FLOPS = 6.5e13
"""FLOPs of one product; larger sizes are left out."""
SMALL = [(64, 16, 96), (256, 16, 96)]
CHUNKS = (1, 2, 4, 8, 16)
"""The numbers of chunks tried at a size, besides the one that is chosen."""
MOST_MEMORY = 16 * 2**30
"""Bytes of a plan that is tried."""
ROUNDS = 2
BEATEN = 0.97


def sizes() -> Iterator[tuple[int, int, int]]:
    for N, H, V in itertools.product(TOKENS, HIDDEN, CLASSES):
        if 2 * N * H * V <= MOST_FLOPS:
            yield N, H, V


def plans(N: int, H: int, V: int) -> list[Plan]:
    """Return the chosen plan, and others."""
    chosen, units = plan((N, H, V), DTYPE, on_host=False), cdiv(N, ROW_MULTIPLE)
    rows = sorted({cdiv(units, chunks) * ROW_MULTIPLE for chunks in CHUNKS})
    tried = [plan((N, H, V), DTYPE, on_host=False, chunk_size=each) for each in rows]
    return [chosen, *(each for each in tried if each != chosen and memory(N, H, V, DTYPE, each) <= MOST_MEMORY)]


def measure(timer: Timer, shape: tuple[int, int, int], seconds: float) -> list[dict[str, Any]]:
    N, H, V = shape
    x, weight = (torch.randn(size, H, device=timer.device, dtype=DTYPE).requires_grad_() for size in (N, V))
    target = torch.randint(0, V, (N,), device=timer.device)
    tried = plans(*shape)

    def step(each: Plan) -> None:
        with mock.patch("llmk.ops.linear_loss.chunked._call.plan", return_value=each):
            OPS["fused_linear_ce"].overload(x, weight, target).backward()
        x.grad = weight.grad = None  # what is above the inputs is measured from here

    times: list[list[float]] = [[] for _ in tried]
    memory = [timer.peak_mib(lambda each=each: step(each)) for each in tried]
    for _ in range(ROUNDS):
        for found, each in zip(times, tried, strict=True):
            found.append(timer.sustained(lambda each=each: step(each), seconds / ROUNDS))
    return [
        {"chunk_rows": each.chunk_rows, "rounded_sums": each.rounded_sums, "ms": statistics.mean(found), "mib": mib}
        for each, found, mib in zip(tried, times, memory, strict=True)
    ]


def beaten_by(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the plans that beat the first."""
    chosen = rows[0]
    return [
        row
        for row in rows[1:]
        if row["ms"] < BEATEN * chosen["ms"] and (row["mib"] or 0.0) < BEATEN * (chosen["mib"] or 0.0)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plans", description="Time plans of fused_linear_ce.")
    parser.add_argument("--device", help="cuda if there is one, else cpu")
    parser.add_argument("--seconds", type=float, default=0.25, help="the seconds of each plan at each size")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    options = parser.parse_args(arguments)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    timer, rows = Timer(device, repeats=1), []
    for shape in sizes() if timer.on_gpu else SMALL:
        found = measure(timer, shape, options.seconds)
        rows.append({"shape": shape, "plans": found})
        chosen, better = found[0], beaten_by(found)
        mib = "" if chosen["mib"] is None else f"{chosen['mib']:.0f} MiB"
        print(f"{'x'.join(map(str, shape)):>20}{chosen['ms']:>10.2f} ms {mib:>10}  beaten by {len(better)}", flush=True)
    print(
        f"{sum(bool(beaten_by(row['plans'])) for row in rows)} of {len(rows)} sizes have a plan that beats the chosen"
    )
    if options.json:
        about = header(device, DTYPE, {}, {})
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
