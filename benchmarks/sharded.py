"""`torchrun --nproc-per-node 2 -m benchmarks.sharded`: losses whose classes are spread over ranks, beside one rank's.

Each rank has its classes of the weights, `Shard(0)`, and all tokens, of which every fifth is ignored. Of forward and
backward: milliseconds of the sharded call and of the same call by one rank that has all classes, both losses, and how
far the gradients are apart, as the norm of the difference over the norm of the unsharded gradient.
"""

import argparse
import contextlib
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from benchmarks.report import header
from benchmarks.run import DTYPE
from llmk.functional import fused_linear_ce, fused_linear_jsd, linear_logprobs

SHAPES, SMALL_SHAPES = [(4096, 2048, 151936), (1024, 4096, 128256)], [(32, 16, 64)]
REPEATS = 6


def _policy_loss(logprobs: Tensor, entropy: Tensor) -> Tensor:
    return -(logprobs + 0.1 * entropy).mean()


LOSSES: dict[str, Callable[..., Tensor]] = {
    "linear_logprobs": lambda x, w, t, *teacher: _policy_loss(*linear_logprobs(x, w, t)),
    "linear_logprobs skip_ignored": lambda x, w, t, *teacher: _policy_loss(
        *linear_logprobs(x, w, t, skip_ignored=True)
    ),
    "fused_linear_jsd": lambda x, w, t, *teacher: fused_linear_jsd(x, w, *teacher, labels=t),
    "fused_linear_ce": lambda x, w, t, *teacher: fused_linear_ce(x, w, t),
}


def tensors(shape: tuple[int, int, int], device: torch.device) -> tuple[Tensor, ...]:
    """Tokens, weight, targets, a teacher's tokens and weight: the same on every rank."""
    N, H, V = shape
    x, teacher_x = (torch.randn(N, H, device=device, dtype=DTYPE) for _ in range(2))
    weight, teacher_weight = (torch.randn(V, H, device=device, dtype=DTYPE) / H**0.5 for _ in range(2))
    target = torch.randint(0, V, (N,), device=device)
    target[::5] = -100
    same = (x, weight, target, teacher_x, teacher_weight)
    for tensor in same:
        dist.broadcast(tensor, 0)
    return same


def milliseconds(step: Callable[[], Any], device: torch.device) -> float:
    seconds = []
    for _ in range(REPEATS):
        dist.barrier()
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds)


def apart(gradient: Tensor, right: Tensor) -> float:
    return ((gradient.double() - right.double()).norm() / right.double().norm()).item()


def compare(loss: Callable[..., Tensor], given: tuple[Tensor, ...], mesh: DeviceMesh) -> dict[str, float]:
    x, weight, target, teacher_x, teacher_weight = given
    own = [x.clone().requires_grad_(), distribute_tensor(weight, mesh, [Shard(0)]).detach().requires_grad_()]
    whole = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    own_teacher = distribute_tensor(teacher_weight, mesh, [Shard(0)])

    def everywhere(tensor: Tensor) -> DTensor:
        return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)

    def one() -> tuple[float, Tensor, Tensor]:
        found = loss(*whole, target, teacher_x, teacher_weight)
        return found.detach(), *torch.autograd.grad(found, whole)  # type: ignore[return-value]

    def sharded() -> tuple[float, Tensor, Tensor]:
        x, weight = own
        found = loss(everywhere(x), weight, everywhere(target), everywhere(teacher_x), own_teacher)
        return found.full_tensor().detach(), *torch.autograd.grad(found, own)  # type: ignore[attr-defined, return-value]

    right, right_dx, right_dw = one()
    found, dx, dw = sharded()
    return {
        "loss": float(right),
        "sharded_loss": float(found),
        "dx": apart(dx, right_dx),
        "dw": apart(dw.full_tensor(), right_dw),  # type: ignore[attr-defined]
        "ms": milliseconds(one, x.device),
        "sharded_ms": milliseconds(sharded, x.device),
    }


@contextlib.contextmanager
def all_ranks(kind: str, timeout: datetime.timedelta | None = None) -> Iterator[tuple[DeviceMesh, torch.device]]:
    """A mesh of the processes that torchrun started, and this one's device; on a GPU one for each process."""
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=timeout)
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device(kind, dist.get_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    yield init_device_mesh(kind, (dist.get_world_size(),)), device
    dist.destroy_process_group()


def write(file: Path | None, results: dict[str, Any]) -> None:
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(results, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sharded", description="Time losses of classes that are spread over ranks."
    )
    parser.add_argument("--device", help="cuda if there is one, else cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    options = parser.parse_args(arguments)
    kind = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[dict[str, Any]] = []
    with all_ranks(kind) as (mesh, device):
        first = mesh.get_rank() == 0
        for shape in SHAPES if kind == "cuda" else SMALL_SHAPES:
            given = tensors(shape, device)
            for name, loss in LOSSES.items():
                row = {"loss_of": name, "shape": list(shape), **compare(loss, given, mesh)}
                rows.append(row)
                if first:
                    print(said(row))
        if first:
            write(options.json, {**header(device, DTYPE, {}, {}), "ranks": mesh.size(), "rows": rows})
    return 0


def said(row: dict[str, Any]) -> str:
    return (
        f"{row['loss_of']:<30}{'x'.join(map(str, row['shape'])):<18}{row['ms']:>8.2f} ms, sharded "
        f"{row['sharded_ms']:>8.2f}; gradients apart by {row['dx']:.1e}, {row['dw']:.1e}"
    )


if __name__ == "__main__":
    sys.exit(main())
