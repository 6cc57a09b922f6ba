"""`python -m benchmarks.chunks`: what `fused_linear_ce`'s `chunk_size` costs in time and in memory.

For each chunk size: milliseconds of forward and backward, back to back for a second, peak memory above the inputs, and
the time of the matrix products alone in the same chunks. The operator and its products take turns.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.products import linear_ce_products
from benchmarks.report import header
from benchmarks.run import DTYPE
from llmk.bench.timing import Timer
from llmk.bench.ways import way_of
from llmk.ops.linear_loss.chunked.plan import plan
from llmk.registry import OPS, Sample

SHAPE, CHUNK_SIZES = (8192, 4096, 128256), (512, 1024, 2048, 4096, 8192, 0)
SMALL_SHAPE, SMALL_CHUNK_SIZES = (64, 16, 96), (16, 64, 0)
ROUNDS = 2


def measure(sample: Sample, chunk_size: int, timer: Timer, seconds: float) -> dict[str, Any]:
    """One line of the table."""
    kwargs = {"chunk_size": chunk_size}
    op = OPS["fused_linear_ce"]
    full = way_of("llmk eager", op, Sample(sample.args, kwargs), op.overload).full
    assert full is not None
    _, products = linear_ce_products(*sample.args, **kwargs)
    full()
    mib = timer.peak_mib(full)
    times = [[timer.sustained(call, seconds / ROUNDS) for call in (full, products)] for _ in range(ROUNDS)]
    ms, products_ms = (statistics.mean(column) for column in zip(*times, strict=True))
    x, weight, _ = sample.args
    chosen = plan((*x.shape, weight.shape[0]), x.dtype, on_host=x.is_cpu, chunk_size=chunk_size)
    found = {"ms": ms, "products_ms": products_ms, "mib": mib}
    return {"chunk_size": chunk_size, "chunk_rows": chosen.chunk_rows, **found}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chunks", description="Time fused_linear_ce's chunks.")
    parser.add_argument("--device", help="cuda if there is one, else cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    options = parser.parse_args(arguments)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    timer = Timer(device, repeats=1)
    (N, H, V), chunk_sizes = (SHAPE, CHUNK_SIZES) if timer.on_gpu else (SMALL_SHAPE, SMALL_CHUNK_SIZES)
    seconds = 2.0 if timer.on_gpu else 0.01
    torch.manual_seed(0)
    x = torch.randn(N, H, device=device, dtype=DTYPE)
    weight = torch.randn(V, H, device=device, dtype=DTYPE) / H**0.5
    sample = Sample((x, weight, torch.randint(0, V, (N,), device=device)))
    _, products = linear_ce_products(*sample.args)
    timer.sustained(products, seconds)  # a warm chip
    print(f"fused_linear_ce {N}x{H}x{V}, forward and backward, sustained")
    print(f"{'chunk_size':>10}{'rows':>8}{'ms':>10}{'products':>10}{'ratio':>8}{'MiB':>8}")
    rows = []
    for chunk_size in chunk_sizes:
        row = measure(sample, chunk_size, timer, seconds)
        rows.append(row)
        mib = "" if row["mib"] is None else f"{row['mib']:.0f}"
        times = f"{row['ms']:>10.3f}{row['products_ms']:>10.3f}{row['ms'] / row['products_ms']:>8.3f}"
        print(f"{chunk_size:>10}{row['chunk_rows']:>8}{times}{mib:>8}")
    if options.json:
        about = header(device, DTYPE, {}, {})
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**about, "shape": [N, H, V], "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
