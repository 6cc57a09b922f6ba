"""The backend in two processes that share a batch: DistributedDataParallel, and FSDP2 by the layer."""

import copy
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from compile_tests.helpers.backend_checks import THROUGH_AUTOGRAD, require_right, rewriting
from compile_tests.helpers.plain_models import Llama, S, V
from compile_tests.helpers.sharding_checks import in_processes
from llmk.accuracy.neighbours import Change
from llmk.compiler import Report


def replicated(model: Llama, report: Report) -> nn.Module:
    backend = rewriting(report, then=THROUGH_AUTOGRAD)
    return torch.compile(nn.parallel.DistributedDataParallel(model), backend=backend)  # type: ignore[return-value]


def fully_sharded(model: Llama, report: Report) -> nn.Module:
    for layer in model.layers:
        layer.compile(backend=rewriting(report, then=THROUGH_AUTOGRAD), fullgraph=True)
        fully_shard(layer)
    return fully_shard(model)  # type: ignore[return-value]


def alone(model: nn.Module, halves: tuple[Tensor, ...], change: Change) -> list[Tensor]:
    """The mean loss and its gradients, in one process without a compiler."""
    changed = copy.deepcopy(model)
    for parameter in changed.parameters():
        parameter.data = change(parameter.data)
    loss = torch.stack([changed(half) for half in halves]).mean()
    loss.backward()
    return [loss.detach(), *(p.grad for p in changed.parameters() if p.grad is not None)]


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(mesh: DeviceMesh) -> Iterator[str]:
    model, halves = Llama(), torch.randint(0, V, (4, S)).split(2)
    for way in (replicated, fully_sharded):
        torch._dynamo.reset()
        mine, report = copy.deepcopy(model), Report()
        split = way(mine, report)  # which adds up gradients as long as it lives
        loss = split(halves[mesh.get_local_rank()])
        loss.backward()
        mean = loss.detach() / mesh.size()
        dist.all_reduce(mean)
        got = [mean, *(whole(p.grad) for p in mine.parameters() if p.grad is not None)]
        require_right(got, lambda change: alone(model, halves, change))
        found = {"add_rms_norm", "attention", "rms_norm", "rope", "swiglu"}
        if way is replicated:
            found |= {"fused_linear_ce"}
        if set(report.replaced) != found:
            yield f"{way.__name__}: {report}"


def test_two_processes(tmp_path: Path) -> None:
    assert not in_processes(train, (2,), tmp_path)
