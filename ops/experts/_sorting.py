"""The order of the rows of experts: all pairs of a token and one of its K experts, sorted by expert.

Of T tokens there are N = T * K pairs; pair t * K + k is token t with its k-th expert. Row r of the sorted rows is pair
`order[r]`, pair p is row `positions[p]`, and the rows of expert e end before row `offsets[e]`. Pairs whose index is no
expert come last, in rows that no expert has: expert parallelism marks so what another rank's experts do.
"""

import torch
from torch import Tensor

from llmk.registry import check_dtype, check_same


def sort_by_expert(indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """`order [N]` int64 and `offsets [E]` int32 of `indices [T, K]`, on their device, without waiting for it.

    A stable sort of N small integers: on a GPU it takes a few hundredths of a millisecond for 131,072.
    """
    flat = indices.reshape(-1)
    keys = flat.masked_fill((flat < 0) | (flat >= num_experts), num_experts).to(torch.int32)
    ordered, order = torch.sort(keys, stable=True)
    experts = torch.arange(num_experts, dtype=torch.int32, device=indices.device)
    return order, torch.searchsorted(ordered, experts, right=True, out_int32=True)


def positions_of(order: Tensor, shape: torch.Size) -> Tensor:
    """`positions` int32 in the shape of the indices: the inverse of `order`."""
    positions = torch.empty((order.shape[0],), dtype=torch.int32, device=order.device)
    rows = torch.arange(order.shape[0], dtype=torch.int32, device=order.device)
    return positions.scatter_(0, order, rows).view(shape)


def raise_out_of_range(indices: Tensor, num_experts: int) -> None:
    """Raise for an index on a CPU that is no expert and not the number of experts, which stands for none."""
    if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) <= num_experts:
        raise IndexError(
            f"indices: expected experts from 0 to {num_experts - 1}, or {num_experts} for none, "
            f"got {int(indices.min())} to {int(indices.max())}"
        )


def check_tokens(input: Tensor) -> None:
    check_dtype("input", input)
    if input.dim() != 2:
        raise ValueError(f"input: expected shape [T, H], got {tuple(input.shape)}")


def check_indices(indices: Tensor, input: Tensor) -> None:
    check_dtype("indices", indices, (torch.int64, torch.int32))
    if indices.dim() != 2 or indices.shape[0] != input.shape[0] or indices.shape[1] == 0:
        raise ValueError(
            f"indices: expected shape ({input.shape[0]}, K), K of at least 1 for each token of input, "
            f"got {tuple(indices.shape)}"
        )
    check_same("indices", indices, "input", input)


def check_weights(weights: Tensor, pairs: Tensor, name: str, like: Tensor, like_name: str) -> None:
    """Routing weights: float32 or the dtype of `like`, in the shape of `pairs`."""
    check_dtype("weights", weights, (torch.float32, like.dtype))
    if weights.shape != pairs.shape:
        raise ValueError(
            f"weights: expected shape {tuple(pairs.shape)} (the shape of {name}), got {tuple(weights.shape)}"
        )
    check_same("weights", weights, like_name, like)
