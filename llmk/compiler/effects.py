"""Effects of a graph besides its results: memory that it writes, random numbers, calls that nobody can look into.

Effects stay as they were: the backend takes nothing out of a graph but the nodes that an operator replaced. This module
tells it which nodes somebody needs, and where memory is written.

Writes are followed and not functionalized away. `FunctionalTensorMode(pre_dispatch=True, export=True)` was tried around
the trace, on torch 2.13, with a `copy_` into each input that was written. Composite operators stayed whole, and values
were right in most programs; the rest was lost, because this graph is differentiated and run after it was rewritten:

- a write without gradients becomes a value without one, so that the gradient of what was written vanishes in silence;
- errors of eager mode vanish, as no version counter moves: a value saved for backward may be written;
- `copy_` into a slice becomes `aten.copy`, which has no derivative, and `batch_norm` another operator and copies of its
  statistics, for which the backward pass raises;
- an output that was a view of a written input is no longer one, and writes through `Tensor.data` are not seen;
- casts become `_to_copy` behind a check of metadata: 30 of 199 spellings and models were found less often or changed.

`torch.export` has the same reason: since its graphs are for training they keep `add_`, and its decompositions
functionalize them once autograd is done.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from llmk.compiler.patterns import CASTS, OVERLOAD, VIEWS, all_arguments, name_of, tensors_of, value_of
from llmk.registry.private.compilers import is_higher_order
from llmk.registry.private.operators import schema_of
from llmk.registry.private.tensors import storage_of, version_of

UNDECLARED = {
    "batch_norm": ("running_mean", "running_var"),
    "native_batch_norm": ("running_mean", "running_var"),
    "cudnn_batch_norm": ("running_mean", "running_var"),
    "miopen_batch_norm": ("running_mean", "running_var"),
    "_batch_norm_impl_index": ("running_mean", "running_var"),
    "instance_norm": ("running_mean", "running_var"),
    "batch_norm_update_stats": ("running_mean", "running_var"),
    "batch_norm_gather_stats": ("running_mean", "running_var"),
    "batch_norm_gather_stats_with_counts": ("running_mean", "running_var"),
    "embedding_renorm_": ("self",),
}
"""Operators of ATen that may write into arguments that their schemas do not mark, and the names of these arguments."""

EQUAL_WHEN_REPEATED = VIEWS | CASTS | {"cos", "repeat_interleave", "sin", "sym_size"}
"""Views, casts, copies and angles: operators so cheap that models call them twice with the same arguments."""


def storages(node: Node) -> set[int]:
    """Return the storages of the tensors that a node gives."""
    return {storage_of(x) for x in tensors_of(value_of(node))}


def mutations(graph: Graph) -> dict[int, list[Node]]:
    """Return the storages that are written into, each with the nodes that do so, in a graph of ATen's operators."""
    found: dict[int, list[Node]] = {}
    for node in graph.nodes:
        for storage in mutated_by(node):
            found.setdefault(storage, []).append(node)
    return found


def mutated_by(node: Node, undeclared: Mapping[str, tuple[str, ...]] = UNDECLARED) -> set[int]:
    """Return the storages that a node writes into, by its schema and by the list of undeclared writes."""
    return set[int]().union(*map(storages, _mutated_arguments(node, undeclared)))


def _mutated_arguments(node: Node, undeclared: Mapping[str, tuple[str, ...]]) -> Iterator[Node]:
    if not name_of(node):
        return
    given, hidden = all_arguments(node), undeclared.get(name_of(node), ())
    for argument in schema_of(node.target).arguments:
        declared = argument.alias_info is not None and argument.alias_info.is_write
        if declared or argument.name in hidden:
            places: list[Node] = []
            map_arg(given[argument.name], places.append)
            yield from places


def is_random(node: Node) -> bool:
    """Return True if the node draws from the random generator."""
    return isinstance(node.target, OVERLOAD) and torch.Tag.nondeterministic_seeded in node.target.tags


def needed(graph: Graph) -> set[Node]:
    """Return the nodes that results or effects come from.

    A write is an effect where its memory outlives the graph, or where a needed node reads the memory. The other nodes
    compute values that nobody sees, such as a metric that is dropped.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    outside = set[int]().union(
        *(storages(node) for node in graph.nodes if node.op in ("placeholder", "get_attr")),
        *map(storages, graph.output_node().all_input_nodes),
    )
    writers = [(node, places) for node in graph.nodes if (places := mutated_by(node))]
    found: set[Node] = set()
    queue = [node for node in graph.nodes if _has_effect(node)]
    while queue:
        while queue:
            node = queue.pop()
            if node not in found:
                found.add(node)
                queue += node.all_input_nodes
        for node, places in writers:
            if node not in found and (not places.isdisjoint(outside) or _is_read_after(node, places, found, order)):
                queue.append(node)
    return found


def _is_read_after(writer: Node, places: set[int], readers: Collection[Node], order: dict[Node, int]) -> bool:
    return any(
        order[reader] > order[writer] and any(not places.isdisjoint(storages(x)) for x in reader.all_input_nodes)
        for reader in readers
    )


def _has_effect(node: Node) -> bool:
    """Return True if a node must stay though nobody reads it: all but those of ATen, llmk and numbers may."""
    if node.op != "call_function":
        return node.op != "get_attr"
    name = name_of(node)
    if not name:  # arithmetic of sizes, and the choice of one result of several
        return not str(getattr(node.target, "__module__", "")).endswith("operator")
    return is_random(node) or ("::" in name and not name.startswith("llmk::"))


def bring_before(place: Node, wanted: Collection[Node], unread: Collection[Node]) -> bool:
    """Move wanted nodes that stand after a place before it, with what they are made of, if that changes no value.

    Args:
        place: The node before which they are wanted.
        wanted: The nodes that are wanted there.
        unread: Nodes that must not be moved nor read by what is moved.

    Returns:
        True if the nodes are there now. Otherwise the graph is as it was.
    """
    late, queue = set[Node](), list(wanted)
    while queue:
        node = queue.pop()
        if node >= place and node not in late:
            late.add(node)
            queue += node.all_input_nodes
    read = {*late, *(source for node in late for source in node.all_input_nodes)}
    if place in late or not read.isdisjoint(unread):
        return False
    if any(is_random(node) or _has_effect(node) or mutated_by(node) for node in late):
        return False
    touched = set[int]().union(*map(storages, read))
    between = (node for node in place.graph.nodes if place <= node <= max(late, default=place))
    if any(not mutated_by(node).isdisjoint(touched) for node in between):
        return False
    for node in sorted(late):
        place.prepend(node)
    return True


def equal_values(graph: Graph, unsteady: Collection[int]) -> Callable[[Node], Node]:
    """Return a function that gives the first of all nodes that are known to have the same values as a node.

    Args:
        graph: A graph of ATen's operators. It is left as it is, since two calls have two memories.
        unsteady: Storages that somebody writes into.
    """
    first: dict[Node, Node] = {}
    seen: dict[Any, Node] = {}

    def key(argument: Any) -> Any:
        if isinstance(argument, list | tuple):
            return tuple(map(key, argument))
        return first.get(argument, argument) if isinstance(argument, Node) else (type(argument), argument)

    for node in graph.nodes:
        is_item = str(getattr(node.target, "__name__", "")) == "getitem"
        if not is_item and name_of(node) not in EQUAL_WHEN_REPEATED:
            continue
        if any(not storages(x).isdisjoint(unsteady) for x in (node, *node.all_input_nodes)):
            continue
        call = node.target, key(node.args), key(tuple(sorted(node.kwargs.items())))
        first[node] = seen.setdefault(call, node)
    return lambda node: first.get(node, node)


class MutationsElsewhere:
    """Writes that one part of Dynamo's graph cannot see, because another part makes them.

    The fake tensors that Dynamo traced with count every write in place, over the whole graph and the graphs inside it,
    such as the bodies of checkpointed regions.
    """

    def __init__(self, gm: GraphModule) -> None:
        self.left: dict[int, float] = {}
        for node in (node for inner in gm.modules() if isinstance(inner, GraphModule) for node in inner.graph.nodes):
            for x in _fake_tensors(node):
                if not x.is_inference():
                    self.left[storage_of(x)] = max(version_of(x) or 0, self.left.get(storage_of(x), 0))
            if _mutates_unseen(node):
                for source in node.all_input_nodes:
                    self.left |= dict.fromkeys(map(storage_of, _fake_tensors(source)), float("inf"))

    def after(self, pairs: Collection[tuple[Any, Any]], graph: Graph) -> set[int]:
        """Return the storages of a traced part that are written after it.

        Args:
            pairs: Dynamo's fake tensor and the trace's, for everything that the part takes or gives.
            graph: The part.
        """
        here = Counter(storage for node in graph.nodes for storage in mutated_by(node, {}))
        found: set[int] = set()
        theirs: dict[int, int] = {}
        for before, again in pairs:
            if _is_fake(before) and _is_fake(again):
                theirs[storage_of(again)] = storage_of(before)
        for mine, dynamo in theirs.items():
            self.left[dynamo] = self.left.get(dynamo, 0) - here[mine]
            if self.left[dynamo] > 0:
                found.add(mine)
        return found


def _fake_tensors(node: Node) -> list[Tensor]:
    """Return the fake tensors that Dynamo saw at a node, without those inside `torch.func`, which have no storage."""
    return [x for x in tensors_of(node.meta.get("example_value")) if _is_fake(x)]


def _is_fake(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and hasattr(value, "fake_mode")


def _mutates_unseen(node: Node) -> bool:
    """Return True if the node may write into memory and the versions of Dynamo's fake tensors do not show it."""
    name = str(getattr(node.target, "__name__", node.target))
    if is_higher_order(node.target):
        return "triton" in name or "mutat" in name or "functionalized" in name
    return name.partition(".")[0] in UNDECLARED
