"""`python -m benchmarks.growth [OP ...]`: time and peak memory of operators against one size at a time.

Each curve changes one size over two orders of magnitude and keeps the rest: row operators have the same number of
elements in ever wider rows. llmk runs eagerly at every size and plain PyTorch compiled at every other one, forward and
backward together, replayed as CUDA graphs. The floor is that of `benchmarks.run`. On a CPU every size is 64 times
smaller and a curve has two points, to keep the code tested.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.report import header
from benchmarks.run import DTYPE
from llmk.bench.measure import beginning_of_row, compiler_config
from llmk.bench.timing import Graphs, Timer, measure_ceilings
from llmk.registry import OPS, Op, Sample

Make = Callable[..., Tensor]
WIDTHS = (256, 768, 2048, 5120, 12288, 32768, 50257, 128256, 262144)
TOKENS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
VOCABULARIES = (2000, 8000, 32000, 50257, 64000, 128256, 256000)
HIDDEN_SIZES = (512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True)
class Curve:
    """One size of an operator that grows: `call(size, randn, unit)` makes the call; a CPU's `unit` is smaller."""

    op: str
    against: str
    fixed: str
    sizes: tuple[int, ...]
    call: Callable[[int, Make, int], Sample]


def _row_call(name: str) -> Callable[[int, Make, int], Sample]:
    """2^26 elements in rows of a given width."""

    def call(N: int, randn: Make, unit: int) -> Sample:
        M = max(1, 2**20 * unit // N)
        x = randn(M, N)
        if name == "rms_norm":
            return Sample((x, randn(N)))
        if name == "add_rms_norm":
            return Sample((x, randn(M, N), randn(N)))
        if name == "layer_norm":
            return Sample((x, randn(N), randn(N)))
        if name == "cross_entropy":
            return Sample((x, torch.randint(0, N, (M,), device=x.device)))
        if name == "kl_div":
            return Sample((x.log_softmax(-1), randn(M, N).softmax(-1)), {"reduction": "batchmean"})
        return Sample((x,))

    return call


def _swiglu_call(tokens: int, randn: Make, unit: int) -> Sample:
    return Sample((randn(tokens, 128 * unit), randn(tokens, 128 * unit)))


def _rope_call(tokens: int, randn: Make, unit: int) -> Sample:
    q, k = (randn(1, tokens, heads, 2 * unit).transpose(1, 2) for heads in (32, 8))
    angles = randn(1, tokens, 2 * unit)
    return Sample((q, k, angles.cos(), angles.sin()))


def _linear_ce(N: int, H: int, V: int, randn: Make) -> Sample:
    x = randn(N, H)
    return Sample((x, randn(V, H) / H**0.5, torch.randint(0, V, (N,), device=x.device)))


ROW_OPS = ("rms_norm", "add_rms_norm", "layer_norm", "softmax", "cross_entropy", "kl_div")
CURVES = (
    *(Curve(op, "columns", "2^26 elements", WIDTHS, _row_call(op)) for op in ROW_OPS),
    Curve("swiglu", "tokens", "8192 columns", TOKENS, _swiglu_call),
    Curve("rope", "tokens", "32 and 8 heads of 128", TOKENS, _rope_call),
    Curve(
        "fused_linear_ce",
        "tokens",
        "hidden size 2048, vocabulary 32768",
        TOKENS[:-1],
        lambda N, randn, unit: _linear_ce(N, 32 * unit, 512 * unit, randn),
    ),
    Curve(
        "fused_linear_ce",
        "hidden size",
        "4096 tokens, vocabulary 32768",
        HIDDEN_SIZES,
        lambda H, randn, unit: _linear_ce(64 * unit, H, 512 * unit, randn),
    ),
    Curve(
        "fused_linear_ce",
        "vocabulary",
        "4096 tokens, hidden size 2048",
        VOCABULARIES,
        lambda V, randn, unit: _linear_ce(64 * unit, 32 * unit, V, randn),
    ),
)


def points(curve: Curve, device: torch.device) -> Iterator[tuple[int, Sample, bool]]:
    """Each size, its call, and whether plain PyTorch is timed too: not everywhere, for compiling takes seconds."""
    small = device.type != "cuda"

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=DTYPE)

    for i, size in enumerate(curve.sizes[:2] if small else curve.sizes):
        size = size // 64 if small else size
        yield size, curve.call(size, randn, 1 if small else 64), i % 4 == 0


def measure(curve: Curve, timer: Timer, ceilings: dict[str, float]) -> Iterator[dict[str, Any]]:
    """A row for each size and way."""
    op = OPS[curve.op]
    for size, sample, both in points(curve, timer.device):
        row = {"op": op.name, "against": curve.against, "fixed": curve.fixed, "size": size}
        row |= beginning_of_row(op, sample, ceilings)
        yield {**row, "way": "llmk eager", **_time(op, sample, op.overload, timer)}
        if both:
            torch._dynamo.reset()
            compiled = torch.compile(op.reference, dynamic=False)
            yield {**row, "way": "torch compiled", **_time(op, sample, compiled, timer)}


def _time(op: Op, sample: Sample, fn: Callable[..., Any], timer: Timer) -> dict[str, Any]:
    try:
        full = _forward_and_backward(op, sample, fn)
        full()
        peak = timer.peak_mib(full)
        if not timer.on_gpu:
            return {"full_ms": timer.milliseconds(full), "peak_mib": peak}
        graph = Graphs(timer.device).capture(full)
        return {"replayed_ms": timer.milliseconds(graph.replay), "peak_mib": peak}
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}


def _forward_and_backward(op: Op, sample: Sample, fn: Callable[..., Any]) -> Callable[[], Any]:
    bound = op.bind(sample)
    wanted = [bound[name].requires_grad_() for name in op.trained or op.differentiable if name in bound]

    def call() -> tuple[Tensor, ...]:
        outputs = fn(*sample.args, **sample.kwargs)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    grads = [torch.randn_like(output) for output in call()]
    return lambda: torch.autograd.grad(call(), wanted, grads)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = list(dict.fromkeys(curve.op for curve in CURVES))
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.growth", description="Time and peak memory of operators against one size at a time."
    )
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"all by default: {', '.join(names)}")
    parser.add_argument("--device", help="cuda if there is one, else cpu")
    parser.add_argument("--repeats", type=int, default=20, help="timed calls of each (default 20)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    options = parser.parse_args(arguments)
    for name in options.ops:
        if name not in names:
            parser.error(f"no curve of {name!r}; there are {', '.join(names)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.manual_seed(0)
    timer = Timer(device, options.repeats)
    ceilings = measure_ceilings(device, DTYPE, timer)
    print(f"{'':<44}{'size':>9}{'ms':>10}{'x floor':>9}{'MiB':>9}")
    rows: list[dict[str, Any]] = []
    curves = [curve for curve in CURVES if curve.op in (options.ops or OPS)]
    with compiler_config() as config:
        for curve in tqdm(curves, desc="curves", disable=not sys.stderr.isatty()):
            for row in measure(curve, timer, ceilings):
                print_row(row)
                rows.append(row)
            if options.json:
                results = {**header(device, DTYPE, {}, config), "ceilings": ceilings, "rows": rows}
                options.json.parent.mkdir(parents=True, exist_ok=True)
                options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def print_row(row: dict[str, Any]) -> None:
    head = f"{row['op']}, {row['against']}, {row['way']}"
    if "error" in row:
        tqdm.write(f"{head:<44}{row['size']:>9} {row['error']}")
        return
    time = row.get("replayed_ms") or row["full_ms"]
    memory = "" if row["peak_mib"] is None else f"{row['peak_mib']:.0f}"
    tqdm.write(f"{head:<44}{row['size']:>9}{time:>10.3f}{time / row['floor_full_ms']:>9.2f}{memory:>9}")


if __name__ == "__main__":
    sys.exit(main())
