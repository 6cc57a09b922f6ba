"""The shard of the vocabulary on a rank, and the collectives of its group."""

from typing import NamedTuple

from torch import Tensor

from llmk.registry import cdiv
from llmk.registry.private.processes import collectives, group_named


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
        return cdiv(self.num_classes, self.ranks)

    def gather(self, parts: Tensor) -> Tensor:
        """Gather the statistics of all ranks, concatenated in the ranks' order."""
        if not self.group_name:
            return parts
        return collectives.wait_tensor(collectives.all_gather_into_tensor(parts, self.ranks, self.group_name))

    def sum_input_gradient(self, dx: Tensor) -> Tensor:
        if not self.dx_group_name:
            return dx
        return collectives.wait_tensor(collectives.all_reduce(dx, "sum", self.dx_group_name))


NOT_SHARDED = VocabShard(first_class=0, num_classes=0, group_name="", dx_group_name="")
"""The arguments of a kernel op for a shard of None: the weight has all classes."""
