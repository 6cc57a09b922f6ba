"""The experts of a mixture spread over ranks, each of which has tokens of its own."""

from typing import Any

import torch
from torch import Tensor

from llmk import functional
from llmk.ops.common.collectives import exchange_with_ranks, gather_from_ranks, sum_over_ranks
from llmk.registry import check_option, check_shape, is_sharded

EXCHANGES = ("all_gather", "all_to_all")


def expert_parallel_moe(
    input: Tensor,
    gate_up: Tensor,
    down: Tensor,
    indices: Tensor,
    weights: Tensor,
    *,
    exchange: str = "all_gather",
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    **gate: Any,
) -> Tensor:
    """`moe_experts` where each of R ranks has E / R of the experts, and tokens of its own.

    Every rank makes the call. Results are those of one process with all experts and all tokens, gradients those of the
    sum of the ranks' losses; no token is dropped, however many take one expert. What several ranks make of a token is
    added up in float32, in the order of the ranks.

    With "all_gather" every rank gets all tokens and hands each back what its own experts make of it. Nothing waits for
    the device: CUDA graphs and `torch.compile(fullgraph=True)` work. Each token goes to R - 1 ranks, and as many
    results come back; rows of experts take the memory that they need if one rank's experts have all of them, R times
    that of `moe_experts`. All ranks have the same number of tokens T; where one has fewer, add some whose indices are
    E.

    With "all_to_all" each pair of a token and an expert goes to that expert's rank, and its result comes back: of each
    token K (R - 1) / R on average. Rows take the memory of the pairs that came. Ranks may have any numbers of tokens.
    The host waits once in the forward pass, for the numbers of pairs, and a graph breaks there.

    Args:
        input: This rank's tokens `[T, H]`, float32, float16 or bfloat16, any strides.
        gate_up: The first layers `[E, 2F, H]`, `[E, H, 2F]` where `transposed`: a DTensor of a mesh of one dimension,
            placed `Shard(0)`, dtype of `input`. E is a multiple of R.
        down: The second layers `[E, H, F]` or `[E, F, H]`, likewise.
        indices: Each token's experts `[T, K]` among all E, int64 or int32. E is none.
        weights: Their weights `[T, K]`, float32 or the dtype of `input`.
        exchange: "all_gather" or "all_to_all", the same on all ranks.
        gate_up_bias: `[E, 2F]`, likewise a DTensor.
        down_bias: `[E, H]`, likewise a DTensor.
        **gate: `activation`, `interleaved`, `transposed`, `limit`, `alpha` and `up_offset` of `moe_experts`.

    Returns:
        What all experts make of this rank's tokens, `[T, H]`, contiguous, in the dtype of `input`.

    Raises:
        TypeError: A dtype does not fit, or layers are not DTensors.
        ValueError: A shape, a device, a placement or an option does not fit.
        IndexError: On the CPU, an index is neither an expert nor E. On a GPU it counts as none.

    Source: GShard, https://arxiv.org/abs/2006.16668, without its limit on the tokens of an expert.
    """
    check_option("exchange", exchange, EXCHANGES)
    layers = {"gate_up": gate_up, "down": down, "gate_up_bias": gate_up_bias, "down_bias": down_bias}
    local = {name: None if layer is None else _own(name, layer, gate_up) for name, layer in layers.items()}
    if input.dim() != 2:
        raise ValueError(f"input: expected shape [T, H], got {tuple(input.shape)}")
    if indices.dim() != 2 or indices.shape[0] != input.shape[0]:
        raise ValueError(f"indices: expected shape ({input.shape[0]}, K) to fit input, got {tuple(indices.shape)}")
    check_shape("weights", weights, tuple(indices.shape), "the shape of indices")
    kind = input.device.type
    tokens = input.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else input  # before it is sent
    way = _by_all_gather if exchange == "all_gather" else _by_all_to_all
    return way(tokens, indices, weights, _Ranks(gate_up), local | gate)


def _own(name: str, layer: Tensor, gate_up: Tensor) -> Tensor:
    """This rank's part of a DTensor of experts."""
    if not is_sharded(layer):
        raise TypeError(f"{name}: expected a DTensor placed Shard(0), got a plain tensor")
    sharded: Any = layer
    mesh, placements = sharded.device_mesh, sharded.placements
    if mesh.ndim != 1 or not placements[0].is_shard(0):
        raise ValueError(f"{name}: expected Shard(0) on a mesh of one dimension, got {placements} on {mesh}")
    if mesh != gate_up.device_mesh:  # type: ignore[attr-defined]
        raise ValueError(f"{name}: expected the mesh of gate_up, got {mesh}")
    if layer.shape[0] % mesh.size():
        raise ValueError(
            f"{name}: expected a number of experts that the {mesh.size()} ranks can share, got {layer.shape[0]}"
        )
    return sharded.to_local()


class _Ranks:
    """The ranks that share experts."""

    def __init__(self, gate_up: Any) -> None:
        mesh = gate_up.device_mesh
        self.group_name = mesh.get_group().group_name
        self.count, self.rank = mesh.size(), mesh.get_local_rank()
        self.experts = gate_up.shape[0]
        self.own_experts = self.experts // self.count


def _by_all_gather(input: Tensor, indices: Tensor, weights: Tensor, ranks: _Ranks, layers: dict[str, Any]) -> Tensor:
    group = ranks.count, ranks.group_name
    tokens, experts, weights = (gather_from_ranks.overload(each, *group) for each in (input, indices, weights))
    others = (experts >= 0) & (experts <= ranks.experts) & (experts // ranks.own_experts != ranks.rank)
    experts = torch.where(others, ranks.own_experts, experts - ranks.rank * ranks.own_experts)
    return sum_over_ranks.overload(functional.moe_experts(tokens, indices=experts, weights=weights, **layers), *group)


def _by_all_to_all(input: Tensor, indices: Tensor, weights: Tensor, ranks: _Ranks, layers: dict[str, Any]) -> Tensor:
    rows, positions, offsets = functional.moe_permute(input, indices, ranks.experts)
    of_rows = torch.zeros_like(weights).flatten().scatter(0, positions.flatten().long(), weights.flatten())
    leaving = offsets.diff(prepend=offsets.new_zeros(1))  # the pairs of each expert, those of a rank side by side
    equal = [ranks.own_experts] * ranks.count
    coming = exchange_with_ranks.overload(leaving, equal, equal, ranks.group_name)
    of_ranks = torch.stack((leaving, coming)).unflatten(1, (ranks.count, -1)).sum(2)
    sends, receives = of_ranks.tolist()  # the host waits
    there, back = (sends, receives, ranks.group_name), (receives, sends, ranks.group_name)
    own, own_weights = (exchange_with_ranks.overload(each[: sum(sends)], *there) for each in (rows, of_rows))
    experts = torch.arange(ranks.own_experts, dtype=torch.int64, device=input.device).repeat(ranks.count)
    experts = experts.repeat_interleave(coming, output_size=sum(receives))
    outputs = functional.moe_experts(own, indices=experts[:, None], weights=own_weights[:, None], **layers)
    returned = exchange_with_ranks.overload(outputs, *back)
    of_none = returned.new_zeros((rows.shape[0] - sum(sends), returned.shape[1]))
    return functional.moe_unpermute(torch.cat((returned, of_none)), positions)
