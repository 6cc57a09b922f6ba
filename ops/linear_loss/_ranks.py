"""What the ranks of a group exchange, by the name of the group; "" is no group but one rank that has everything."""

from torch import Tensor

from llmk.registry.private.processes import collectives, group_named


def group_size(group_name: str) -> int:
    return group_named(group_name).size() if group_name else 1


def gather(parts: Tensor, group_name: str) -> Tensor:
    """The statistics of all ranks, one below the other in the ranks' order; without a group those given."""
    if not group_name:
        return parts
    gathered = collectives.all_gather_into_tensor(parts, group_size(group_name), group_name)
    return collectives.wait_tensor(gathered)


def sum_over(group_name: str, x: Tensor) -> Tensor:
    """The sum of all ranks' x, on each of them; without a group x itself."""
    if not group_name:
        return x
    return collectives.wait_tensor(collectives.all_reduce(x, "sum", group_name))
