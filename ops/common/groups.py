"""Rows that lie group after group, where a tensor on the device says where each group ends."""

import torch
from torch import Tensor


def in_range(offsets: Tensor, N: int) -> Tensor:
    """Ends within the rows, none before the last: what a kernel may follow without looking."""
    return offsets.clamp(0, N).cummax(0).values.to(torch.int32)


def groups_of(offsets: Tensor) -> list[tuple[int, int]]:
    """First row and end of each group's rows, on a CPU."""
    ends = offsets.tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def checked_groups(name: str, offsets: Tensor, N: int) -> list[tuple[int, int]]:
    """`groups_of` offsets on a CPU, which must be ends within N rows, none before the last."""
    groups = groups_of(offsets)
    if groups and (groups[0][1] < 0 or groups[-1][1] > N or any(begin > end for begin, end in groups)):
        raise IndexError(f"{name}: expected ends of groups from 0 to {N}, none before the last")
    return groups
