"""The shard of the vocabulary on a rank, and the collectives of its group.

A DTensor says itself which classes a rank has. With plain tensors the caller says it, by three arguments of an
operator that `vocab_slice` makes of a process group. They are found outside of the operator, so that they are part of
a traced graph: the caches of compiled graphs then tell the ranks apart.
"""

from typing import TYPE_CHECKING, NamedTuple, TypedDict

import torch
from torch import Tensor

from llmk.registry import cdiv, is_sharded
from llmk.registry.checks import resolve_group
from llmk.registry.private.compilers import constant_in_graphs
from llmk.registry.private.processes import collectives, group_named

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class VocabShard(NamedTuple):
    """A rank has the classes from `first_class` on, as many as its weight has rows; together the ranks have all.

    The group's name is "" where it is one rank that has all classes. Over `dx_group_name` the gradient of the input
    is summed; it is "" where the caller sums it.
    """

    first_class: int
    num_classes: int
    group_name: str
    dx_group_name: str

    @property
    def ranks(self) -> int:
        return group_named(self.group_name).size() if self.group_name else 1

    @property
    def mean_classes(self) -> int:
        """The mean number of classes on a rank, rounded up: all ranks choose the same chunks by it."""
        return cdiv(self.num_classes, self.ranks) if self.group_name else self.num_classes

    def gather(self, parts: Tensor) -> Tensor:
        """Gather the statistics `[...]` of all ranks, `[ranks, ...]`."""
        if not self.group_name:
            return parts.unsqueeze(0)
        every = collectives.all_gather_into_tensor(parts.contiguous(), self.ranks, self.group_name)
        return collectives.wait_tensor(every).view(self.ranks, *parts.shape)

    def sum_input_gradient(self, dx: Tensor) -> Tensor:
        if not self.dx_group_name:
            return dx
        return collectives.wait_tensor(collectives.all_reduce(dx, "sum", self.dx_group_name))


class VocabSlice(TypedDict):
    """The arguments of an operator for a weight of which each rank of a process group has some rows."""

    vocab_start: int
    num_classes: int
    group_name: str


def vocab_slice(
    linear_weight: Tensor,
    vocab_group: "ProcessGroup | str",
    *,
    vocab_start: int | None = None,
    num_classes: int | None = None,
) -> VocabSlice:
    """Say which classes this rank of a process group has, as the operators' arguments of these names.

        linear_logprobs(input, linear_weight, target, **vocab_slice(linear_weight, group))

    Args:
        linear_weight: `[V, H]`, this rank's rows of the weight, in a plain tensor.
        vocab_group: The process group whose ranks have all classes together, or its `group_name`.
        vocab_start: The class of the first row of `linear_weight`. If None, the ranks have equally many, in their
            order.
        num_classes: Number of classes of all ranks together; given with `vocab_start`.

    Raises:
        TypeError: `vocab_group` is neither a process group nor a name.
        ValueError: There is no group of that name, one of `vocab_start` and `num_classes` is missing, or the weight is
            a DTensor.
    """
    if is_sharded(linear_weight):
        raise ValueError("vocab_group: expected None for a DTensor, which says who has which classes")
    if (vocab_start is None) != (num_classes is None):
        missing, other = ("vocab_start", "num_classes") if vocab_start is None else ("num_classes", "vocab_start")
        raise ValueError(f"{missing}: expected a number with {other}, got None")
    own, (rank, size, name) = linear_weight.shape[0], _rank_size_and_name(vocab_group)
    return VocabSlice(
        vocab_start=rank * own if vocab_start is None else vocab_start,
        num_classes=size * own if num_classes is None else num_classes,
        group_name=name,
    )


@constant_in_graphs
def _rank_size_and_name(group: "ProcessGroup | str") -> tuple[int, int, str]:
    """Return this rank in the group, its size and its name."""
    if isinstance(group, str):
        group = resolve_group("vocab_group", group)
    elif not isinstance(group, torch.distributed.ProcessGroup):
        kind = type(group).__name__
        raise TypeError(f"vocab_group: expected a torch.distributed.ProcessGroup or its name, got {kind}")
    return group.rank(), group.size(), group.group_name
