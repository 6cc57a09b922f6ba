"""`python -m benchmarks.ignored`: a fused linear loss where some of the tokens are ignored, by the share that counts.

For each share: milliseconds of forward and backward, back to back for half a second, of llmk with `skip_ignored` and
without it, of each peer that has the loss, and of compiled PyTorch, one after the other. Which tokens count is drawn at
random, and so are the weights.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import find_peers
from benchmarks.report import header
from benchmarks.run import DTYPE
from llmk.bench.timing import Timer, first_line
from llmk.bench.ways import way_of
from llmk.registry import OPS, Sample

SHAPES, SMALL_SHAPES = [(8192, 2048, 151936), (8192, 4096, 128256)], [(64, 16, 96)]
SHARES = (1.0, 0.7, 0.5, 0.3, 0.1, 0.0)


def sample_of(shape: tuple[int, int, int], share: float, device: torch.device) -> Sample:
    N, H, V = shape
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(N, H, device=device, dtype=DTYPE, generator=generator)
    weight = torch.randn(V, H, device=device, dtype=DTYPE, generator=generator) / H**0.5
    target = torch.randint(0, V, (N,), device=device, generator=generator)
    order = torch.randperm(N, device=device, generator=generator)
    target[order[round(share * N) :]] = -100
    return Sample((x, weight, target))


def functions(sample: Sample, compiled: bool, peers: Sequence[Any]) -> dict[str, tuple[str, Callable[..., Any]]]:
    """Return the operator that each way computes, and how, by the way's name."""

    def logprobs(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.llmk.linear_logprobs(x, weight, target, skip_ignored=True)

    ce, reference = torch.ops.llmk.fused_linear_ce, OPS["fused_linear_ce"].reference
    ways: dict[str, tuple[str, Callable[..., Any]]] = {
        "llmk": ("fused_linear_ce", ce),
        "llmk skip_ignored": ("fused_linear_ce", lambda *args: ce(*args, skip_ignored=True)),
        "llmk linear_logprobs skip_ignored": ("linear_logprobs", logprobs),
    }
    for peer in peers:
        function = peer.function("fused_linear_ce", sample.args, {})
        if function is not None:
            ways[peer.name] = ("fused_linear_ce", function)
    if compiled:
        ways["torch compiled"] = ("fused_linear_ce", torch.compile(reference, dynamic=False))
    return ways


def measure(
    sample: Sample, ways: dict[str, tuple[str, Callable[..., Any]]], timer: Timer, seconds: float
) -> list[dict]:
    rows = []
    for name, (op, function) in ways.items():
        row: dict[str, Any] = {"way": name}
        try:
            full = way_of(name, OPS[op], sample, function).full
            assert full is not None
            full()
            row |= {"mib": timer.peak_mib(full), "ms": timer.sustained(full, seconds)}
        except Exception as error:  # whatever a library raises belongs in its row
            row["error"] = first_line(error)
        rows.append(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ignored", description="Time losses of ignored tokens.")
    parser.add_argument("--device", help="cuda if there is one, else cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="time compiled PyTorch")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    options = parser.parse_args(arguments)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    timer = Timer(device, repeats=1)
    shapes, seconds = (SHAPES, 0.5) if timer.on_gpu else (SMALL_SHAPES, 0.01)
    peers, rows = find_peers(["liger-kernel", "cut-cross-entropy"]), []
    for shape in shapes:
        ways = functions(sample_of(shape, 1.0, device), options.compile, peers)
        print(f"{'x'.join(map(str, shape))}, forward and backward, ms and MiB above the inputs")
        for share in SHARES:
            for row in measure(sample_of(shape, share, device), ways, timer, seconds):
                row = {"shape": list(shape), "share": share, **row}
                rows.append(row)
                mib = "" if row.get("mib") is None else f"{row['mib']:>8.0f}"
                print(
                    f"{share:>6.0%}  {row['way']:<36}{row.get('ms', float('nan')):>9.3f}{mib}  {row.get('error', '')}"
                )
    if options.json:
        versions = {peer.name: peer.version for peer in peers}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**header(device, DTYPE, versions, {}), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
