"""Packed rows: the keywords with which a model says which tokens of a row are of one sequence.

transformers' collators make `seq_idx`, the number of each token's sequence, and `cu_seq_lens_q`, where the sequences
begin and the last one ends. Models hand both on to the convolution and the recurrence of their layers, to some of them
the second as `cu_seqlens`. Nothing here looks at values, so that the host does not wait for the device.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

BOUNDARIES = ("cu_seqlens", "cu_seq_lens_q")
PACKING = frozenset({"seq_idx", *BOUNDARIES})


def packing_of(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords that say how a row is packed, where any does."""
    return {name: keywords[name] for name in PACKING if keywords.get(name) is not None}


def ids_from_positions(position_ids: Tensor, batch: int) -> Tensor:
    """Return which sequence each token belongs to `[batch, T]`, int32, counted from 0 in each row.

    As in the masks of transformers' attention, a sequence begins where a position does not follow the one before it.

    Args:
        position_ids: `[T]` or `[1 or batch, T]`; of models with several axes `[4, 1 or batch, T]`, those of text first,
            or `[3, 1 or batch, T]`. The first of these, of time, stands still inside of an image: a sequence begins
            where it goes back.
    """
    if position_ids.dim() == 3:
        in_order, position_ids = position_ids.shape[0] == 4, position_ids[0]
    else:
        in_order, position_ids = True, position_ids.expand(batch, -1)
    steps = position_ids.diff(dim=-1)
    begins = steps != 1 if in_order else steps < 0
    ids = torch.nn.functional.pad(begins, (1, 0)).cumsum(-1, dtype=torch.int32)
    return ids.expand(batch, -1).contiguous()


def sequence_ids(keywords: Mapping[str, Any], batch: int, tokens: int) -> Tensor | None:
    """Return which sequence each token belongs to `[batch, tokens]`, integers; None if the keywords do not say it.

    Args:
        keywords: `seq_idx [batch, S]`, which is preferred; or one of `cu_seqlens` and `cu_seq_lens_q`, `[N + 1]`, from
            0 on in ascending order, for a batch of one row.
        tokens: At least S. What is before the last S tokens are states that the first sequence goes on from.

    Raises:
        TypeError: One of them is no tensor of int32 or int64.
        ValueError: One of them has another shape, or there are boundaries for more than one row.
    """
    given = packing_of(keywords)
    for name, value in given.items():
        if not isinstance(value, Tensor) or value.dtype not in (torch.int32, torch.int64):
            got = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"{name}: expected a tensor of int32 or int64, got {got}")
    if "seq_idx" in given:
        return _of_tokens(given["seq_idx"], batch, tokens)
    for name in BOUNDARIES:
        if name in given:
            return _between(name, given[name], batch, tokens)
    return None


def _of_tokens(seq_idx: Tensor, batch: int, tokens: int) -> Tensor:
    if seq_idx.dim() != 2 or seq_idx.shape[0] != batch or not 1 <= seq_idx.shape[1] <= tokens:
        raise ValueError(f"seq_idx: expected shape {(batch, tokens)}, one for each token, got {tuple(seq_idx.shape)}")
    states = tokens - seq_idx.shape[1]
    return torch.cat([seq_idx[:, :1].expand(-1, states), seq_idx], 1) if states else seq_idx


def _between(name: str, boundaries: Tensor, batch: int, tokens: int) -> Tensor:
    if boundaries.dim() != 1:
        raise ValueError(f"{name}: expected shape [N + 1] for N sequences, got {tuple(boundaries.shape)}")
    if batch != 1:
        raise ValueError(f"{name}: expected one row of packed sequences [1, T], got {batch} rows; seq_idx serves more")
    positions = torch.arange(tokens, dtype=boundaries.dtype, device=boundaries.device)
    return torch.searchsorted(boundaries, positions, right=True, out_int32=True).unsqueeze(0)
