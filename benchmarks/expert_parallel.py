"""`torchrun --nproc-per-node 2 -m benchmarks.expert_parallel`: experts spread over ranks, beside one rank with all.

Each rank has its experts, `Shard(0)`, and its share of the tokens, whose experts are drawn at random. Of forward and
backward: milliseconds and MiB above the inputs of each way to exchange tokens, of the gather compiled and in a CUDA
graph, and of one rank that has all experts and all tokens; and how far result and gradients are apart from that rank's,
as the norm of the difference over the norm, the largest of any rank. Rows are written as they are measured.
"""

import argparse
import datetime
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.report import header
from benchmarks.run import DTYPE
from benchmarks.sharded import all_ranks, apart, milliseconds, write
from llmk.bench.timing import Timer, first_line
from llmk.functional import moe_experts
from llmk.nn import expert_parallel_moe

SHAPES, SMALL_SHAPES = [(16384, 128, 8, 2048, 768), (16384, 32, 4, 2880, 2880)], [(32, 8, 2, 16, 8)]
SIZES = ("tokens", "experts", "top_k", "hidden", "intermediate")
TENSORS = ("y", "dx", "dgate_up", "ddown", "dweights")
CAPTURED = "all_gather in a CUDA graph"  # whose memory is its own
Results = list[Tensor]


def tensors(shape: tuple[int, ...], device: torch.device) -> tuple[list[Tensor], Tensor, Tensor]:
    """Tokens, both layers and routing weights; each token's experts; the incoming gradient: the same on every rank."""
    T, E, K, H, F = shape

    def randn(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=device, dtype=DTYPE)

    indices = torch.rand(T, E, device=device).topk(K, dim=1).indices
    given = [randn(T, H), randn(E, 2 * F, H) / H**0.5, randn(E, H, F) / F**0.5, randn(T, K).softmax(-1)]
    received = randn(T, H)
    for tensor in (*given, indices, received):
        dist.broadcast(tensor, 0)
    return given, indices, received


def share(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    return whole.chunk(mesh.size())[mesh.get_local_rank()].clone()


def ways(given: list[Tensor], indices: Tensor, received: Tensor, mesh: DeviceMesh) -> dict[str, Callable[[], Results]]:
    """Return the functions of this rank's result and gradients, by name; the first has those of all ranks."""
    x, gate_up, down, weights = given
    layers = [distribute_tensor(layer, mesh, [Shard(0)]) for layer in (gate_up, down)]
    own_indices, own_received = share(indices, mesh), share(received, mesh)
    whole = [t.clone().requires_grad_() for t in given]
    own = [t.detach().clone().requires_grad_() for t in (share(x, mesh), *layers, share(weights, mesh))]

    def one() -> Results:
        x, gate_up, down, weights = whole
        y = moe_experts(x, gate_up, down, indices, weights)
        return [y.detach(), *torch.autograd.grad(y, whole, received)]

    def by(exchange: str, function: Callable[..., Tensor]) -> Callable[[], Results]:
        def ranks() -> Results:
            x, gate_up, down, weights = own
            y = function(x, gate_up, down, own_indices, weights, exchange=exchange)
            gradients = torch.autograd.grad(y, own, own_received)
            return [y.detach(), *(g.to_local() if hasattr(g, "to_local") else g for g in gradients)]  # type: ignore[attr-defined]

        return ranks

    found = {"one rank": one, **{e: by(e, expert_parallel_moe) for e in ("all_gather", "all_to_all")}}
    found["all_gather compiled"] = by("all_gather", torch.compile(expert_parallel_moe, fullgraph=True))
    if x.is_cuda:
        found[CAPTURED] = captured(found["all_gather"])
    return found


def captured(function: Callable[[], Results]) -> Callable[[], Results]:
    """The same, recorded at its first call."""
    graph, results = torch.cuda.CUDAGraph(), []

    def replay() -> Results:
        if not results:
            with torch.cuda.graph(graph):
                results.extend(function())
        graph.replay()
        return results

    return replay


def measure(way: Callable[[], Results], right: Results, device: torch.device, mesh: DeviceMesh) -> dict[str, Any]:
    results = way()
    whole = len(results[0]) == len(right[0])
    row: dict[str, Any] = {}
    for name, found, expected in zip(TENSORS, results, right, strict=True):
        far = torch.tensor(apart(found, expected if whole else share(expected, mesh)), device=device)
        dist.all_reduce(far, dist.ReduceOp.MAX)
        row[name] = far.item()
    del results
    mib = Timer(device, repeats=1).peak_mib(way)
    return {"ms": milliseconds(way, device), "mib": mib and round(mib), **row}


def rows_of(shape: tuple[int, ...], device: torch.device, mesh: DeviceMesh) -> Iterator[dict[str, Any]]:
    """A row for each way, none of which outlives this: NCCL waits for ever for a communicator of a CUDA graph's."""
    found = ways(*tensors(shape, device), mesh)
    right = found["one rank"]()
    for name, way in found.items():
        row: dict[str, Any] = {"way": name, **dict(zip(SIZES, shape, strict=True))}
        try:
            row |= measure(way, right, device, mesh)
            if name == CAPTURED:
                row["mib"] = None
        except Exception as error:  # all ranks meet it, and it belongs in the row
            row["error"] = first_line(error)
        yield row


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.expert_parallel", description="Time experts that are spread over ranks."
    )
    parser.add_argument("--device", help="cuda if there is one, else cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    options = parser.parse_args(arguments)
    kind = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[dict[str, Any]] = []
    with all_ranks(kind, datetime.timedelta(seconds=120)) as (mesh, device):
        about = {**header(device, DTYPE, {}, {}), "ranks": mesh.size()}
        for shape in SHAPES if kind == "cuda" else SMALL_SHAPES:
            for row in rows_of(shape, device, mesh):
                rows.append(row)
                if mesh.get_rank() == 0:
                    print(said(row), flush=True)
                    write(options.json, {**about, "rows": rows})
    return 0


def said(row: dict[str, Any]) -> str:
    sizes = "x".join(str(row[size]) for size in SIZES)
    if "error" in row:
        return f"{sizes:<24}{row['way']:<28}{row['error']}"
    far = ", ".join(f"{name} {row[name]:.0e}" for name in TENSORS)
    return f"{sizes:<24}{row['way']:<28}{row['ms']:>9.2f} ms{row['mib'] or 0:>7} MiB  apart by {far}"


if __name__ == "__main__":
    sys.exit(main())
