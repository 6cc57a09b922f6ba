"""The ranks that share a batch, and what they compute together.

Those of `group` have other sequences, and those of `context_group` other tokens of the same sequences. A sum over
tokens goes over both groups, and one over sequences, whose values all ranks of `context_group` have, over `group`.
"""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from llmk.ops.common.collectives import max_over_group, share_with_group, sum_over_group
from llmk.registry.checks import resolve_group
from llmk.registry.private.compilers import constant_in_graphs
from llmk.registry.private.processes import group_named

Groups = tuple[str, ...]
"""The names of groups over which a value is spread."""


@dataclass(frozen=True)
class Ranks:
    """The groups that share a batch; () is this rank alone."""

    sequences: Groups = ()  # the ranks with other sequences
    context: Groups = ()  # the ranks with other tokens of the same sequences
    tokens: Groups = ()  # both


ALONE = Ranks()


def make_ranks(group: Any, context_group: Any = None) -> Ranks:
    """Check the groups that a caller gives, of which None is none."""
    if group is None and context_group is None:
        return ALONE
    sequences, context = _names("group", group), _names("context_group", context_group)
    if sequences and sequences == context and _num_ranks(context[0]) > 1:
        raise ValueError(f"context_group: expected other ranks than those of group, got {context[0]!r} for both")
    return Ranks(sequences, context, context + sequences)


def _names(argument: str, group: Any) -> Groups:
    if group is None:
        return ()
    if isinstance(group, str):
        return (_checked_name(argument, group),)
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"{argument}: expected a mesh of one dimension, got one of {group.ndim}")
        return (group.get_group().group_name,)
    if isinstance(group, dist.ProcessGroup):
        return (group.group_name,)
    expected = "a process group that this rank belongs to, the name of one or a DeviceMesh"
    raise TypeError(f"{argument}: expected {expected}, got {type(group).__name__}")


@constant_in_graphs
def _checked_name(argument: str, name: str) -> str:
    return resolve_group(argument, name).group_name


@constant_in_graphs
def _num_ranks(name: str) -> int:
    return group_named(name).size()


def sum_over(groups: Groups, values: Tensor) -> Tensor:
    """Sum over ranks; each rank's gradient is that of the one loss which all compute."""
    for name in groups:
        values = sum_over_group.overload(values, name)
    return values


def share_with(groups: Groups, values: Tensor) -> Tensor:
    """Return values that each rank uses in a term of its own, so that their gradient is summed over ranks."""
    for name in groups:
        values = share_with_group.overload(values, name)
    return values


def max_over(groups: Groups, values: Tensor) -> Tensor:
    """Return the maximum over ranks of values without a gradient."""
    for name in groups:
        values = max_over_group.overload(values, name)
    return values
