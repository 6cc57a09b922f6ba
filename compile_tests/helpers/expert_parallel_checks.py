"""Experts over ranks, against one process that has all."""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from compile_tests.helpers.families import small_model, tokens
from compile_tests.helpers.rank_slices import OwnRows
from llmk.nn import expert_parallel_moe
from llmk.opcheck.calls import call, require_accurate
from llmk.opcheck.inputs import BrokenPromise
from llmk.registry import OPS, Sample
from llmk.transformers import expert_parallel

OP = OPS["moe_experts"]
T, E, K, H, F = 12, 8, 3, 10, 6
LAYERS = ("gate_up", "down", "gate_up_bias", "down_bias")
EVEN = {2: (0, 6, 12), 4: (0, 3, 6, 9, 12)}
UNEVEN = {2: ((0, 5, 12), (0, 12, 12)), 4: ((0, 0, 7, 8, 12), (0, 1, 1, 12, 12))}
"""The first tokens of the ranks, and the end of the last one's."""


class AllRows(torch.autograd.Function):
    """The rows of all ranks, on each of them; the gradient of its own."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        own, places, rank = args
        ctx.own = slice(places[rank], places[rank + 1])
        whole = own.new_zeros((places[-1], own.shape[1]))
        whole[ctx.own] = own
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        return grad_outputs[0][ctx.own], None, None


def spread(whole: Tensor, mesh: DeviceMesh, placement: Placement | None = None) -> DTensor:
    """A layer that every process has, as a DTensor; its gradient is whole again."""
    return DTensor.from_local(whole, mesh, [Replicate()], run_check=False).redistribute(
        placements=[placement or Shard(0)]
    )


def together(mesh: DeviceMesh, places: tuple[int, ...], fn: Callable[..., Tensor], exchange: str) -> Any:
    """`moe_experts` of all tokens by the ranks together."""
    rank = mesh.get_local_rank()
    start, stop = places[rank], places[rank + 1]

    def experts(
        input: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor, **options: Any
    ) -> Tensor:
        own: Any = [OwnRows.apply(each, start, stop) for each in (input, weights)]
        layers = {"gate_up": gate_up, "down": down, **{n: t for n, t in options.items() if n in LAYERS}}
        layers = {name: spread(layer, mesh) for name, layer in layers.items()}
        rest = {name: value for name, value in options.items() if name not in LAYERS}
        output = fn(own[0], indices=indices[start:stop], weights=own[1], exchange=exchange, **layers, **rest)
        assert output.shape == own[0].shape
        assert output.dtype == input.dtype
        return AllRows.apply(output, places, rank)

    return experts


def samples(dtype: torch.dtype, tokens: int = T) -> Iterator[Sample]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype)

    def sample(why: str, indices: Tensor, weights: Tensor | None = None, **options: Any) -> Sample:
        layers = randn(E, 2 * F, H) / H**0.5, randn(E, H, F) / F**0.5
        if options.get("transposed"):
            layers = tuple(layer.transpose(1, 2).contiguous() for layer in layers)
        weights = torch.rand(tokens, K).to(dtype) + 0.1 if weights is None else weights
        return Sample((randn(tokens, H), *layers, indices, weights), options, why=why)

    chosen = torch.rand(tokens, E).topk(K, dim=1).indices
    gpt_oss = {"interleaved": True, "transposed": True, "limit": 1.0, "alpha": 1.702, "up_offset": 1.0}
    biases = {"gate_up_bias": randn(E, 2 * F), "down_bias": randn(E, H)}
    yield sample("GPT-OSS's gate, biases", chosen.int(), **gpt_oss, **biases)
    yield sample("one expert has all", chosen.clamp(min=E - 1), torch.rand(tokens, K) + 0.1)
    yield sample("ranks whose experts have none, pairs of no expert", torch.where(chosen < E // 4, chosen, E))


def differences(
    mesh: DeviceMesh, places: tuple[int, ...], exchange: str, dtype: torch.dtype, fn: Any = expert_parallel_moe
) -> Iterator[str]:
    for sample in samples(dtype):
        try:
            require_accurate(OP, sample, call(OP, sample, fn=together(mesh, places, fn, exchange)))
        except BrokenPromise as broken:
            yield f"{exchange}, {places}, {dtype}, {sample.why}: {broken}"


def equal(mesh: DeviceMesh) -> Iterator[str]:
    """Yield differences from one process with all experts and all tokens."""
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16)[: 4 // mesh.size()]:  # four ranks round as two do
        yield from differences(mesh, EVEN[mesh.size()], "all_gather", dtype)
        for places in UNEVEN[mesh.size()]:
            yield from differences(mesh, places, "all_to_all", dtype)
    nobody = (0,) * (mesh.size() + 1)
    for exchange in ("all_gather", "all_to_all"):
        sample = next(samples(torch.float32, tokens=0))
        require_accurate(OP, sample, call(OP, sample, fn=together(mesh, nobody, expert_parallel_moe, exchange)))
    if mesh.size() == 2:
        yield from in_a_graph(mesh)
        yield from refusals(mesh)
        yield from of_transformers(mesh, "Qwen3Moe")
        yield from of_transformers(mesh, "GptOss")


def in_a_graph(mesh: DeviceMesh) -> Iterator[str]:
    """The gather has no break."""
    fn = torch.compile(expert_parallel_moe, fullgraph=True, backend="aot_eager")
    yield from differences(mesh, EVEN[2], "all_gather", torch.float32, fn)


def refusals(mesh: DeviceMesh) -> Iterator[str]:
    """Everything that does not fit is named, by all ranks, before anything is sent."""
    x, gate_up, down, indices, weights = next(samples(torch.float32)).args
    layers = {"gate_up": gate_up.transpose(1, 2), "down": down.transpose(1, 2)}
    sharded = {name: spread(layer, mesh) for name, layer in layers.items()}
    split_inside = spread(layers["down"], mesh, Shard(1))
    odd = spread(layers["gate_up"][:5], mesh)
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"exchange": "broadcast"}, ValueError, "exchange: expected one of 'all_gather', 'all_to_all', got"),
        ({"gate_up": layers["gate_up"]}, TypeError, "gate_up: expected a DTensor placed Shard(0), got a plain"),
        ({"down_bias": torch.zeros(E, H)}, TypeError, "down_bias: expected a DTensor"),
        ({"down": split_inside}, ValueError, "down: expected Shard(0) on a mesh of one dimension"),
        ({"gate_up": odd}, ValueError, "gate_up: expected a number of experts that the 2 ranks can share, got 5"),
        ({"indices": indices[1:]}, ValueError, "indices: expected shape (12, K)"),
        ({"weights": weights[:, 1:]}, ValueError, "weights: expected shape (12, 3)"),
        ({"input": x[None]}, ValueError, "input: expected shape [T, H], got (1, 12, 10)"),
        ({"indices": indices[:, 0]}, ValueError, "indices: expected shape (12, K)"),
        ({"indices": indices - E}, IndexError, "indices: expected experts"),
        ({"indices": indices - E, "exchange": "all_to_all"}, IndexError, "indices: expected experts"),
    ]
    for changed, error, message in cases:
        given = {"input": x, "indices": indices, "weights": weights, **sharded} | changed
        try:
            expert_parallel_moe(**given)
            yield f"{message}: nothing was raised"
        except error as raised:
            if message not in str(raised):
                yield f"expected {message!r}, got {raised}"


def of_transformers(mesh: DeviceMesh, family: str) -> Iterator[str]:
    """A model whose experts are spread, each process with a batch of its own, beside the whole model with all."""
    whole, split = (small_model(family, use_cache=False, experts_implementation="eager") for _ in range(2))
    exact = copy.deepcopy(whole).double()
    expert_parallel(split, mesh)
    batch = tokens(2, 9)
    own = batch[mesh.get_local_rank(), None]
    for model in (whole, exact):
        sum(model(input_ids=ids[None], labels=ids[None]).loss for ids in batch).backward()  # type: ignore[union-attr]
    split(input_ids=own, labels=own).loss.backward()
    of_whole, of_exact = dict(whole.named_parameters()), dict(exact.named_parameters())
    for name, parameter in split.named_parameters():
        found, sharded = parameter.grad, isinstance(parameter, DTensor)
        if sharded != ("experts" in name):
            yield f"{family}, {name}: {'a' if sharded else 'no'} DTensor"
        if sharded:
            found = found.full_tensor()
        else:
            dist.all_reduce(found)
        right, plain = of_exact[name].grad, of_whole[name].grad
        far, allowed = (
            (found - right).norm(),
            1.5 * (plain - right).norm() + torch.finfo(found.dtype).eps * right.norm(),
        )
        if not far <= allowed:
            yield f"{family}, {name}: apart by {far:.1e}, {allowed:.1e} is allowed"
    try:
        expert_parallel(torch.nn.Linear(2, 2), mesh)
        yield "a model without experts was not refused"
    except ValueError as error:
        if "model: Linear has no packed experts" not in str(error):
            raise


def all_are_equal() -> None:
    wrong = list(equal(init_device_mesh("cpu", (dist.get_world_size(),))))
    assert not wrong, "\n".join(wrong)


def checks(rank: int, world: int) -> Mapping[str, Callable[[], None]]:
    return {"equal": all_are_equal}
