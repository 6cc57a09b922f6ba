"""What a graph computes twice becomes one node, so that a pattern finds the same tensor in both places.

Models turn queries and keys each by angles that they bring into shape each time.
"""

from collections.abc import Collection
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from llmk.registry.patterns import name_of, value_of
from llmk.registry.private.tensors import storage_of

MERGED = frozenset({
    "alias", "contiguous", "cos", "expand", "flatten", "permute", "repeat_interleave", "reshape", "select", "sin",
    "slice", "squeeze", "t", "to", "transpose", "type_as", "unflatten", "unsqueeze", "view", "_to_copy",
    "_unsafe_view",
})  # fmt: skip
"""Views, casts, copies and angles: what is cheap enough that models write it twice."""


def merge_equal(graph: Graph, written: Collection[int]) -> None:
    """Have readers of the second of two equal calls read the first, where no memory is written.

    Args:
        graph: Of ATen's operators.
        written: The storages that the graph writes into.
    """
    seen: dict[Any, Node] = {}
    for node in list(graph.nodes):
        if name_of(node) not in MERGED or any(user.op == "output" for user in node.users):
            continue
        if any(_is_written(x, written) for x in (node, *node.all_input_nodes)):
            continue
        first = seen.setdefault((node.target, _key(node.args), _key(tuple(sorted(node.kwargs.items())))), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _is_written(node: Node, written: Collection[int]) -> bool:
    value = value_of(node)
    return isinstance(value, Tensor) and storage_of(value) in written


def _key(argument: Any) -> Any:
    """Equal for the same nodes and constants: 1, 1.0 and True are not the same."""
    if isinstance(argument, list | tuple):
        return tuple(map(_key, argument))
    return argument if isinstance(argument, Node) else (type(argument), argument)
