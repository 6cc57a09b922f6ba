"""`python -m benchmarks.moe`: the experts of a mixture, by the number of tokens and by the number of experts.

For each size: milliseconds of forward and backward and MiB above the inputs, of `moe_experts`, of transformers'
experts with `grouped_mm`, of both compiled for sizes that change, and of the six grouped products alone; replayed as
CUDA graphs, taking turns. Liger's fused experts come last, where it is installed: its kernels are tuned first, for each
hidden size. Each token's experts are drawn at random. Rows are written as they are measured.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.expert_parallel import SIZES, write
from benchmarks.peers import find_peers
from benchmarks.report import header
from benchmarks.run import DTYPE
from benchmarks.targets import PRODUCTS
from llmk.bench.measure import release
from llmk.bench.timing import Graphs, Timer, first_line
from llmk.functional import moe_experts

TOKENS, EXPERTS = (16384, 1024, 2048, 4096, 8192, 32768), (8, 32, 64, 256)
QWEN3_30B = [*((T, 128, 8, 2048, 768) for T in TOKENS), *((16384, E, 8, 2048, 768) for E in EXPERTS)]
SERIES = (QWEN3_30B, [(16384, 32, 4, 2880, 2880)])
SMALL_SERIES = ([(32, 4, 2, 16, 8), (16, 4, 2, 16, 8), (64, 4, 2, 16, 8)], [(16, 2, 1, 16, 16)])
LIGER_HIDDEN = (16, 2048)
"""The sizes at which Liger is timed: for a hidden size of 2880 its tuning did not end in 200 seconds."""
WRONG = 0.02  # of a result's norm

Call = Callable[..., Any]
Row = dict[str, Any]


class Experts:
    """The inputs of one size, which all ways share."""

    def __init__(self, sizes: tuple[int, ...], device: torch.device) -> None:
        T, E, K, H, I = sizes  # noqa: E741
        generator = torch.Generator(device).manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=DTYPE, generator=generator)

        self.x = randn(T, H).requires_grad_()
        self.gate_up = torch.nn.Parameter(randn(E, 2 * I, H) / H**0.5)
        self.down = torch.nn.Parameter(randn(E, H, I) / I**0.5)
        self.indices = torch.rand(T, E, device=device, generator=generator).topk(K, dim=1).indices
        self.weights = randn(T, K).softmax(-1).requires_grad_()
        self.leaves = [self.x, self.gate_up, self.down, self.weights]
        self.received = randn(T, H)

    def full(self, experts: Call) -> Call:
        """Forward and backward."""
        return lambda: torch.autograd.grad(self.forward(experts), self.leaves, self.received)

    def forward(self, experts: Call) -> Tensor:
        return experts(self.x, self.gate_up, self.down, self.indices, self.weights)

    def products(self) -> Call:
        """The six grouped products of forward and backward."""
        (N, E), (H, I) = (self.indices.numel(), self.gate_up.shape[0]), self.down.shape[1:]  # noqa: E741
        ends = torch.bincount(self.indices.flatten(), minlength=E).cumsum(0).int()
        rows = [torch.randn(N, width, device=ends.device, dtype=DTYPE) for width in (H, 2 * I, I)]
        gate_up, down = self.gate_up.detach(), self.down.detach()

        def call() -> None:
            x, both, hidden = rows
            for a, b in ((x, gate_up.transpose(1, 2)), (hidden, down.transpose(1, 2)), (x, down), (both, gate_up)):
                F.grouped_mm(a, b, offs=ends)
            F.grouped_mm(x.t(), hidden, offs=ends)
            F.grouped_mm(both.t(), x, offs=ends)

        return call


def transformers_experts(compiled: bool) -> Call:
    """transformers' own module, given the layers; imported here, as it may be missing."""
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(num_experts=1, hidden_size=1, moe_intermediate_size=1)
    config._experts_implementation = "grouped_mm"
    module: Any = Qwen3MoeExperts(config)
    run = torch.compile(module, fullgraph=True) if compiled else module

    def experts(x: Tensor, gate_up: Any, down: Any, indices: Tensor, weights: Tensor) -> Tensor:
        module.num_experts, module.gate_up_proj, module.down_proj = len(gate_up), gate_up, down
        return run(x, indices, weights)

    return experts


def ways(compiled: bool) -> dict[str, Call]:
    """Return functions of tokens, layers, indices and weights, by name."""
    found: dict[str, Call] = {"llmk": moe_experts}
    if compiled:
        found["llmk compiled"] = torch.compile(moe_experts, fullgraph=True)
    try:
        found["grouped_mm eager"] = transformers_experts(compiled=False)
        if compiled:
            found["grouped_mm compiled"] = transformers_experts(compiled=True)
    except ImportError as error:
        print(f"transformers: {first_line(error)}")
    return found


def liger_experts() -> dict[str, Call]:
    from liger_kernel.ops import LigerFusedMoEFunction  # type: ignore[import-not-found]

    return {"liger-kernel": lambda x, up, down, i, w: LigerFusedMoEFunction.apply(x, up, down, i.int(), w)}


def measure(given: Experts, functions: dict[str, Call], timer: Timer, products: bool) -> Iterator[Row]:
    """A row for each way."""
    rows: dict[str, Row] = {}
    calls: dict[str, Call] = {}
    if products:
        functions = functions | {PRODUCTS: lambda *given: None}
    right = given.forward(moe_experts).detach()
    for name, function in functions.items():
        row = rows[name] = {"way": name}
        try:
            if name != PRODUCTS and not (given.forward(function) - right).norm() < WRONG * right.norm():
                raise ArithmeticError("wrong result")
            call = given.products() if name == PRODUCTS else given.full(function)
            call()
            row["mib"] = timer.peak_mib(call)
            calls[name] = call
        except Exception as error:  # whatever a library raises belongs in its row
            row["error"] = first_line(error)
    if timer.on_gpu:
        graphs = Graphs(timer.device)
        calls = {name: replayed(call, rows[name], graphs) for name, call in calls.items()}
    times, failed = timer.in_turns(calls)
    for name, row in rows.items():
        yield row | ({"ms": times[name]} if name in times else {"error": failed[name]} if name in failed else {})


def replayed(call: Call, row: Row, graphs: Graphs) -> Call:
    """Capture a call as a CUDA graph, so that the host's time is not in it, unless the call waits for the device."""
    try:
        return graphs.capture(call).replay
    except Exception as error:
        row["not_captured"] = first_line(error)
        return call


def measured(series: Sequence[tuple[int, ...]], compiled: bool, timer: Timer, peer: bool = False) -> Iterator[Row]:
    """The rows of sizes that follow one another, which compiled code is told of as they come."""
    torch.compiler.reset()
    functions = liger_experts() if peer else ways(compiled)
    for sizes in series:
        given = Experts(sizes, timer.device)
        for row in measure(given, functions, timer, products=not peer):
            yield {**dict(zip(SIZES, sizes, strict=True)), **row}
        del given
        release(timer)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.moe", description="Time the experts of a mixture.")
    parser.add_argument("--device", help="cuda if there is one, else cpu")
    parser.add_argument("--repeats", type=int, default=10, help="timed calls of each (default 10)")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="time compiled code")
    parser.add_argument("--liger", action=argparse.BooleanOptionalAction, default=True, help="time Liger's experts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    options = parser.parse_args(arguments)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    timer = Timer(device, options.repeats)
    every = SERIES if timer.on_gpu else SMALL_SERIES
    peers = {peer.name: peer.version for peer in find_peers(["liger-kernel"])} if options.liger else {}
    about, rows = header(device, DTYPE, peers, {}), []

    def add(found: Iterator[Row]) -> None:
        for row in found:
            rows.append(row)
            print(said(row), flush=True)
            write(options.json, {**about, "rows": rows})

    for series in every:
        add(measured(series, options.compile, timer))
    if peers:
        add(measured([sizes for series in every for sizes in series if sizes[3] in LIGER_HIDDEN], False, timer, True))
    return 0


def said(row: Row) -> str:
    head = f"{'x'.join(str(row[size]) for size in SIZES):<24}{row['way']:<22}"
    if "error" in row:
        return head + row["error"]
    mib = "" if row.get("mib") is None else f"{row['mib']:>8.0f} MiB"
    return f"{head}{row['ms']:>9.3f} ms{mib}{'  as called' if 'not_captured' in row else ''}"


if __name__ == "__main__":
    sys.exit(main())
