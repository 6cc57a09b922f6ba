"""Models of llmk.nn that are split: replicated (DDP), sharded (FSDP2), and by tensor and sequence (DTensor)."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from llmk import functional
from llmk.nn import LayerNorm, LinearCrossEntropyLoss, RMSNorm, SwiGLUMLP

HIDDEN, VOCABULARY, HEADS, TOKENS = 16, 40, 4, 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.mlp, self.second = RMSNorm(HIDDEN), SwiGLUMLP(HIDDEN, 24), LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x + self.mlp(self.first(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.Sequential(Layer(), Layer())
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.loss = LinearCrossEntropyLoss()

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.layers(self.embedding(tokens)), self.head.weight, target)


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _differences(name: str, found: dict[str, Tensor], expected: dict[str, Tensor]) -> Iterator[str]:
    for key, tensor in expected.items():
        try:
            torch.testing.assert_close(_full(found[key]), tensor)
        except AssertionError as error:
            yield f"{name}, {key}: {str(error).splitlines()}"


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def _replicated(model: Model, backend: str | None) -> nn.Module:
    split = nn.parallel.DistributedDataParallel(model)
    return torch.compile(split, backend=backend) if backend else split  # type: ignore[return-value]


def _fully_sharded(model: Model, backend: str | None) -> nn.Module:
    for layer in model.layers:
        if backend:
            layer.compile(backend=backend, fullgraph=True)
        fully_shard(layer)
    return fully_shard(model)  # type: ignore[return-value]


def data_parallel(mesh: DeviceMesh) -> Iterator[str]:
    """Each process has half the batch, and gets the loss and the gradients of its mean."""
    tokens, target = torch.randint(0, VOCABULARY, (2, 4, TOKENS))
    model = Model()
    expected = {"loss": model(tokens, target)}
    expected["loss"].backward()
    expected = {"loss": expected["loss"].detach()} | _gradients(model)
    mine = slice(2 * mesh.get_local_rank(), 2 * mesh.get_local_rank() + 2)
    ways: list[Callable[[Model, str | None], nn.Module]] = [_replicated, _fully_sharded]
    for backend in (None, "aot_eager"):
        for way in ways:
            torch._dynamo.reset()
            copy = Model()
            copy.load_state_dict(model.state_dict())
            split = way(copy, backend)  # which adds up gradients as long as it lives
            loss = split(tokens[mine], target[mine])
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            found = {"loss": mean / mesh.size()} | _gradients(copy)
            yield from _differences(f"{way.__name__}, {backend}", found, expected)


class Block(nn.Module):
    """A layer of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm, self.mlp = RMSNorm(HIDDEN), RMSNorm(HIDDEN), SwiGLUMLP(HIDDEN, 24)
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.attention_norm(x)
        q, k, v = (p(h).unflatten(-1, (HEADS, HIDDEN // HEADS)).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = functional.rope(q, k, cos, sin)
        q, k, v = (t.to_local() if isinstance(t, DTensor) else t for t in (q, k, v))
        heads = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        normed, x = functional.add_rms_norm(self.o(heads.transpose(1, 2).flatten(2)), x, self.mlp_norm.weight)
        return x + self.mlp(normed)


def _parallelize(block: Block, mesh: DeviceMesh) -> None:
    """Sequence parallel between the projections, whose weights are split by columns, then by rows."""
    columns = ColwiseParallel(use_local_output=False)
    rows = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    norm = SequenceParallel()
    gathered = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    plan = {"q": columns, "k": columns, "v": columns, "o": rows, "attention_norm": norm, "mlp_norm": norm}
    plan |= {"mlp": gathered, "mlp.gate_proj": columns, "mlp.up_proj": columns, "mlp.down_proj": rows}
    parallelize_module(block, mesh, plan)


def tensor_parallel(mesh: DeviceMesh) -> Iterator[str]:
    """A layer whose activations are split by tokens, then by heads and features, gives what it gives whole."""
    x, cos, sin, gradient = (
        torch.randn(2, TOKENS, HIDDEN),
        *torch.randn(2, 1, TOKENS, 4),
        torch.randn(2, TOKENS, HIDDEN),
    )
    block = Block()
    output = block(x, cos, sin)
    output.backward(gradient)
    expected = {"output": output.detach()} | _gradients(block)
    for backend in (None, "aot_eager"):
        torch._dynamo.reset()
        copy = Block()
        copy.load_state_dict(block.state_dict())
        _parallelize(copy, mesh)
        if backend:
            copy.compile(backend=backend, fullgraph=True)

        def split(tensor: Tensor, placement: Any) -> DTensor:
            return distribute_tensor(tensor, mesh, (placement,), src_data_rank=None)

        found = copy(split(x, Shard(1)), split(cos, Replicate()), split(sin, Replicate()))
        if found.placements != (Shard(1),):
            yield f"tensor parallel, {backend}: expected tokens to stay split, got {found.placements}"
        found.backward(split(gradient, Shard(1)))
        yield from _differences(f"tensor parallel, {backend}", {"output": found.detach()} | _gradients(copy), expected)


def train(mesh: DeviceMesh) -> Iterator[str]:
    yield from data_parallel(mesh)
    yield from tensor_parallel(mesh)
