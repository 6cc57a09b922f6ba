"""What a graph does besides giving its results: memory that it writes, random numbers, calls that nobody can look into.

All that must stay as it was stays: the backend takes nothing out of a graph but the nodes that an operator replaced.
So here is only told which nodes somebody needs, and which memory is written where.

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

from llmk.compiler.patterns import OVERLOAD, all_arguments, name_of, value_of
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
"""Operators of ATen that write into arguments of which their schemas do not say so, whether they do or not."""

EQUAL_WHEN_REPEATED = frozenset({
    "alias", "chunk", "contiguous", "cos", "expand", "flatten", "narrow", "permute", "repeat_interleave", "reshape",
    "select", "sin", "slice", "split", "split_with_sizes", "squeeze", "sym_size", "t", "to", "transpose", "type_as",
    "unbind", "unflatten", "unsqueeze", "view", "_to_copy", "_unsafe_view",
})  # fmt: skip
"""Views, casts, copies and angles: what is cheap enough that models write it twice."""


def storages(node: Node) -> set[int]:
    """The memory of what a node gives, one tensor or several."""
    value = value_of(node)
    return {storage_of(x) for x in (value if isinstance(value, tuple | list) else [value]) if isinstance(x, Tensor)}


def written(graph: Graph) -> dict[int, list[Node]]:
    """The storages that some node of ATen's operators writes into, and these nodes."""
    found: dict[int, list[Node]] = {}
    for node in graph.nodes:
        for storage in written_by(node):
            found.setdefault(storage, []).append(node)
    return found


def written_by(node: Node, undeclared: Mapping[str, tuple[str, ...]] = UNDECLARED) -> set[int]:
    return set[int]().union(*map(storages, _places(node, undeclared)))


def _places(node: Node, undeclared: Mapping[str, tuple[str, ...]]) -> Iterator[Node]:
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
    return isinstance(node.target, OVERLOAD) and torch.Tag.nondeterministic_seeded in node.target.tags


def needed(graph: Graph) -> set[Node]:
    """The nodes that results or effects come from.

    A write counts where its memory is there after the graph, or is read by a node that is needed. The others compute
    what nobody will ever see, such as a metric that is dropped.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    outside = set[int]().union(
        *(storages(node) for node in graph.nodes if node.op in ("placeholder", "get_attr")),
        *map(storages, graph.output_node().all_input_nodes),
    )
    writers = [(node, places) for node in graph.nodes if (places := written_by(node))]
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
    """True if it must stay whoever reads it: it is known not to only where it is ATen's or llmk's, or a number's."""
    if node.op != "call_function":
        return node.op != "get_attr"
    name = name_of(node)
    if not name:  # arithmetic of sizes, and the choice of one result of several
        return not str(getattr(node.target, "__module__", "")).endswith("operator")
    return is_random(node) or ("::" in name and not name.startswith("llmk::"))


def equal_values(graph: Graph, unsteady: Collection[int]) -> Callable[[Node], Node]:
    """Gives the first of the nodes that are known to have the same values, for calls that models write twice.

    Args:
        graph: A graph of ATen's operators. It is left as it is: two calls are two memories.
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


class Elsewhere:
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
            if _writes_unseen(node):
                for source in node.all_input_nodes:
                    self.left |= dict.fromkeys(map(storage_of, _fake_tensors(source)), float("inf"))

    def after(self, pairs: Collection[tuple[Any, Any]], graph: Graph) -> set[int]:
        """The storages of a traced part that are written in a later one.

        Args:
            pairs: Dynamo's fake tensor and the trace's, for everything that the part takes or gives.
            graph: The part.
        """
        here = Counter(storage for node in graph.nodes for storage in written_by(node, {}))
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
    """What Dynamo saw there; tensors inside `torch.func`, which stand for others, have no memory to ask for."""
    value = node.meta.get("example_value")
    return [x for x in (value if isinstance(value, tuple | list) else [value]) if _is_fake(x)]


def _is_fake(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and hasattr(value, "fake_mode")


def _writes_unseen(node: Node) -> bool:
    """Return True if it may write where Dynamo's fake tensors do not count it."""
    name = str(getattr(node.target, "__name__", node.target))
    if is_higher_order(node.target):
        return "triton" in name or "mutat" in name or "functionalized" in name
    return name.partition(".")[0] in UNDECLARED
