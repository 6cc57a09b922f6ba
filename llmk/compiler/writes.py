"""What a graph of ATen's operators writes in place, and what of it and of its results nobody reads."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from llmk.registry.patterns import arguments_of, name_of, value_of
from llmk.registry.private.operators import schema_of
from llmk.registry.private.tensors import storage_of


def storages(node: Node) -> set[int]:
    """Of what a node gives, one tensor or several."""
    value = value_of(node)
    return {storage_of(x) for x in (value if isinstance(value, tuple | list) else [value]) if isinstance(x, Tensor)}


def written(graph: Graph) -> dict[int, list[Node]]:
    """The storages that some node writes into, and these nodes."""
    found: dict[int, list[Node]] = {}
    for node in graph.nodes:
        for storage in _written_by(node):
            found.setdefault(storage, []).append(node)
    return found


def drop_unread(graph: Graph) -> None:
    """Take out results and writes into the graph's own memory that no node reads, and what only they have read.

    A model computes a metric and drops it, or brings indices within bounds where a bias may want them, and then there
    is none. Such a reader of a pattern's tensors would be in its way.
    """
    graph.eliminate_dead_code()
    if not written(graph):
        return
    read = set[int]().union(*(storages(node) for node in graph.nodes if node.op in ("placeholder", "get_attr")))
    loose: set[Node] = set()
    for node in reversed(list(graph.nodes)):
        if not node.users and (node in loose or _only_writes(node, read)):
            loose.update(x for x in node.all_input_nodes if x.op == "call_function" and not x.is_impure())
            graph.erase_node(node)
        else:
            read.update(*map(storages, node.all_input_nodes))


def _only_writes(node: Node, read: set[int]) -> bool:
    """Whether all that it does is to write into memory that is not read."""
    places = _written_by(node)
    random = places and torch.Tag.nondeterministic_seeded in node.target.tags  # type: ignore[union-attr]
    return bool(places) and places.isdisjoint(read) and not random and name_of(node).endswith("_")


def _written_by(node: Node) -> set[int]:
    return set[int]().union(*map(storages, _places(node)))


def _places(node: Node) -> Iterator[Node]:
    if not name_of(node):
        return
    given = arguments_of(node)
    for argument in schema_of(node.target).arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            places: list[Node] = []
            map_arg(given[argument.name], places.append)
            yield from places
