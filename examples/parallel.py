"""One model on one device or many: the processes, and the ways to spread a model over them.

Every process takes part with one device. Started by torchrun they find each other through its environment variables;
started without it there is one. In bfloat16 all ways keep the weights, their gradients' sum and the optimizer in
float32 and compute in bfloat16, so that they train the same model.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from llmk.transformers import tensor_parallel

WAYS = ("none", "ddp", "fsdp", "tp")

T = TypeVar("T")


class Processes:
    """This process and the others of the run."""

    def __init__(self) -> None:
        self.rank, self.local_rank = (int(os.environ.get(name, 0)) for name in ("RANK", "LOCAL_RANK"))
        self.count, self.count_on_host = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        self.store: Any = HashStore()

    def start(self, device: torch.device) -> None:
        """Find the other processes. Until `end`, they are torch.distributed's default group."""
        if "WORLD_SIZE" in os.environ:
            self.store, _, _ = next(rendezvous("env://"))
        backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
        dist.init_process_group(backend, store=self.store, rank=self.rank, world_size=self.count, device_id=device_id)

    def end(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def from_first(self, make: Callable[[], T], refusal: tuple[type[Exception], ...]) -> T:
        """Return what `make` returns in the first process; what it refuses there is raised in all."""
        made: list[Any] = [None]
        if self.rank == 0:
            try:
                made = [make()]
            except refusal as error:
                made = [error]
        if self.count > 1:
            dist.broadcast_object_list(made)
        if isinstance(made[0], refusal):
            raise made[0]
        return made[0]

    def give_up(self, message: str, code: int) -> NoReturn:
        """End this process. When one fails the others do too, at their next exchange: only the first says why."""
        if self._is_first_to_fail():
            print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr, flush=True)
        if self.count > 1:
            os._exit(code)  # an orderly end would wait for the others
        sys.exit(code)

    def _is_first_to_fail(self) -> bool:
        try:
            return self.store.add("failures", 1) == 1
        except dist.DistError:  # the store's own process has failed
            return False

    def mean(self, x: Tensor) -> float:
        if self.count > 1:
            dist.all_reduce(x)
        return x.item() / self.count


# ---- ways to spread a model


@dataclass(frozen=True)
class Part:
    """The number of parts of each batch, and which one this process has."""

    index: int
    count: int

    def of(self, batch: Tensor) -> Tensor:
        return batch.chunk(self.count)[self.index]


class Arranged(NamedTuple):
    module: nn.Module  # called with the model's arguments
    part: Part


def arrange(model: PreTrainedModel, way: str, dtype: torch.dtype, processes: Processes) -> Arranged:
    """Spread a float32 model over the processes, to compute in `dtype`."""
    device, count = model.device, processes.count
    if way == "none":
        return Arranged(_computing_in(dtype, model), Part(0, 1))
    if way == "ddp":
        ids = [device.index] if device.type == "cuda" else None
        module = DistributedDataParallel(_computing_in(dtype, model), device_ids=ids, gradient_as_bucket_view=True)
        return Arranged(module, Part(processes.rank, count))
    mesh = init_device_mesh(device.type, (count,))
    if way == "fsdp":
        shard(model, mesh, dtype)
        return Arranged(model, Part(processes.rank, count))
    tensor_parallel(model, mesh)
    return Arranged(_computing_in(dtype, model), Part(0, 1))


def data_parallel_size(way: str, processes: Processes) -> int:
    return processes.count if way in ("ddp", "fsdp") else 1


def shard(model: PreTrainedModel, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Each layer is gathered when it runs; the embedding, the last norm and the projection once a step, as the root."""
    policy = MixedPrecisionPolicy() if dtype == torch.float32 else MixedPrecisionPolicy(dtype, torch.float32)
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def layers_of(model: Any) -> list[nn.Module]:
    return list(model.base_model.layers)


class Cast(nn.Module):
    """A float32 model run with its parameters in another dtype; their gradients come back in float32."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, **inputs: Any) -> Any:
        parameters = {name: parameter.to(self.dtype) for name, parameter in self.model.named_parameters()}
        return functional_call(self.model, parameters, (), inputs)


def _computing_in(dtype: torch.dtype, model: nn.Module) -> nn.Module:
    return model if dtype == torch.float32 else Cast(model, dtype)


def compile_layers(model: Any, loss_too: bool) -> None:
    """Compile what computes between the gathering of parameters and the summing of gradients.

    FSDP's hooks run around a layer's `forward`, and DDP sums gradients as layers give them: compiled layer by layer,
    both happen between compiled graphs and while others compute. And what is compiled for one layer serves the next.
    The loss of logits is compiled on its own; a patched model has an operator for it.
    """
    for module in [*layers_of(model), model.base_model.norm]:
        module.forward = torch.compile(module.forward, fullgraph=True)
    if loss_too:
        model.loss_function = torch.compile(model.loss_function, fullgraph=True)


# ---- parameters, some of them spread and some whole


def parameter_groups(model: nn.Module) -> list[list[nn.Parameter]]:
    """Apart, as no foreach or fused kernel takes both: those that are spread over the processes, and the others."""
    spread = [isinstance(parameter, DTensor) for parameter in model.parameters()]
    groups = [
        [p for p, is_spread in zip(model.parameters(), spread, strict=True) if is_spread is s] for s in (True, False)
    ]
    return [group for group in groups if group]


def clip_gradients(groups: list[list[nn.Parameter]], largest: float) -> None:
    """Scale all gradients so that their norm is `largest` at most."""
    norms = [nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    norm = torch.linalg.vector_norm(torch.stack(whole))
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, largest, norm)
