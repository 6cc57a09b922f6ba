"""Tensor parallelism for Hugging Face causal language models: each process has a part of every layer.

Source: Shoeybi et al., "Megatron-LM", 2019, https://arxiv.org/abs/1909.08053. The layers are PyTorch's own
`ColwiseParallel` and `RowwiseParallel`. Between attention and feed-forward blocks every process has all hidden states,
as plain tensors; inside a block it has some heads, or some features, and what the processes compute is summed once at
the block's end, and once more in the backward pass for the gradient of its input.

The embedding and the output projection are split along the vocabulary. A patched model hands the projection's part to
`fused_linear_ce`, so that logits are neither whole nor gathered.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

COLUMNS = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"})
ROWS = frozenset({"o_proj", "down_proj"})


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split a causal language model over the processes of a mesh, in place.

    Attention and feed-forward blocks are found by the names of their projections (`q_proj`, `k_proj`, `v_proj`,
    `o_proj`; `gate_proj`, `up_proj`, `down_proj`). Embedding and output projection stay tied if they are. All other
    parameters stay plain tensors, alike in every process. Of the norms that every head uses, such as `q_norm` and
    `k_norm`, the gradients are summed over the processes.

    Parameters that are split become DTensors: an optimizer needs a group of parameters for them, and one for the rest.

    Args:
        model: The model, the same in every process, after `patch` and before it is wrapped or has run compiled.
            Each process feeds it the same batch.
        mesh: A mesh of one dimension.

    Raises:
        ValueError: The mesh has more than one dimension; the model has no such blocks, or blocks with other parameters
            too, such as packed projections; heads or features cannot be shared evenly.
    """
    if mesh.ndim != 1:
        raise ValueError(f"mesh: expected one dimension, got {mesh.ndim}")
    blocks = list(_blocks(model))
    if not blocks:
        raise ValueError(f"model: {type(model).__name__} has no blocks of {sorted(COLUMNS | ROWS)}")
    for block in blocks:
        block.check(mesh.size())
    for block in blocks:
        _split_block(block, mesh)
    _split_vocabulary(model, mesh)


class Block(NamedTuple):
    """A module in which each process has some of the heads, or some of the features between its projections."""

    name: str
    module: nn.Module
    projections: dict[str, nn.Linear]
    of_each_head: dict[str, nn.Module]
    """Modules with parameters that every head uses."""

    @property
    def head_dim(self) -> int:
        """Features that stay together."""
        return getattr(self.module, "head_dim", 0) if "q_proj" in self.projections else 1

    def check(self, ranks: int) -> None:
        if not self.head_dim:
            raise ValueError(f"model: {self.name} does not say its head_dim")
        for name, projection in self.projections.items():
            features = projection.in_features if name in ROWS else projection.out_features
            units = features // self.head_dim
            if units % ranks:
                kind = "heads" if self.head_dim > 1 else "features"
                raise ValueError(f"model: {ranks} processes cannot share the {units} {kind} of {self.name}.{name}")
        own = [name for name, _ in self.module.named_parameters(recurse=False)]
        for name, child in self.of_each_head.items():
            sizes = {tuple(parameter.shape) for parameter in child.parameters()}
            if sizes != {(self.head_dim,)}:
                own.append(name)
        if own:
            raise ValueError(f"model: cannot split {self.name}, which has {', '.join(own)} beside its projections")


def _blocks(model: nn.Module) -> Iterator[Block]:
    for name, module in model.named_modules():
        children = dict(module.named_children())
        if (COLUMNS | ROWS) & children.keys():
            projections = {n: c for n, c in children.items() if n in COLUMNS | ROWS and isinstance(c, nn.Linear)}
            others = {n: c for n, c in children.items() if n not in projections and any(True for _ in c.parameters())}
            yield Block(name, module, projections, others)


def _split_block(block: Block, mesh: DeviceMesh) -> None:
    plan: dict[str, ParallelStyle] = {
        name: RowwiseParallel() if name in ROWS else ColwiseParallel() for name in block.projections
    }
    parallelize_module(block.module, mesh, plan)
    block.module.register_forward_pre_hook(_enter(mesh), with_kwargs=True)
    for module in block.of_each_head.values():
        for parameter in module.parameters():
            parameter.register_hook(_summed(mesh))


def _enter(mesh: DeviceMesh) -> Callable[..., Any]:
    """One DTensor of the hidden states for all projections: their gradients are added first, then summed over ranks."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        if args:
            return (_whole(args[0], mesh), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": _whole(kwargs["hidden_states"], mesh)}

    return hook


def _whole(x: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False)


def _summed(mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    """Each process has the gradient that comes from its own heads."""

    def hook(gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total, group=mesh.get_group())
        return total

    return hook


# ---- the vocabulary


def _split_vocabulary(model: Any, mesh: DeviceMesh) -> None:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = getattr(head, "weight", None) is embedding.weight
    for module in (embedding, head):
        if module is not None:
            distribute_module(module, mesh, _split_rows)
            module.register_forward_pre_hook(functools.partial(_enter_vocabulary, mesh=mesh))
            module.register_forward_hook(_leave_vocabulary)
    if head is not None and tied:
        head.weight = embedding.weight


def _split_rows(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for key, parameter in module.named_parameters(recurse=False):
        split = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
        module.register_parameter(key, nn.Parameter(split, requires_grad=parameter.requires_grad))


def _enter_vocabulary(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> tuple[Any, ...]:
    """Tokens, or hidden states for logits. With targets the loss is computed from the plain hidden states."""
    return inputs if len(inputs) > 1 else (_whole(inputs[0], mesh),)


def _leave_vocabulary(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """Not asynchronously: a compiled layer gives no gradient to what is still on its way."""
    return output.redistribute(placements=[Replicate()]).to_local() if isinstance(output, DTensor) else output
