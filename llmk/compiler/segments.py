"""Segments of Dynamo's graph: the nodes between those that stay.

A segment ends where a setting changes (the gradient mode, autocast, attention's kernels), and at nodes that a trace
would take apart and get wrong: a higher-order node (a checkpointed region, an `autograd.Function`, flex
attention), a function allowed in the graph that has a gradient of its own, the inside of a transform of `torch.func`,
`Tensor.data`, tensors of a subclass such as DTensor.
"""

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.fx import GraphModule, Node

from llmk.registry.private.compilers import (
    DATA_OF_TENSOR,
    LOG_API_USAGE,
    functorch_nesting,
    is_higher_order,
    is_operator,
    of_functorch,
)

SIMPLE = Tensor | torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool
"""The types of values that a trace follows."""


@dataclass
class Segment:
    """Nodes of Dynamo's graph in a row, with the nodes that they read from outside and those that are read there."""

    nodes: list[Node]

    @property
    def inputs(self) -> list[Node]:
        inside, found = set(self.nodes), {}
        for node in self.nodes:
            found |= dict.fromkeys(n for n in node.all_input_nodes if n not in inside)
        return list(found)

    @property
    def has_tensors(self) -> bool:
        return any(isinstance(n.meta.get("example_value"), Tensor) for n in (*self.inputs, *self.nodes))

    @property
    def outputs(self) -> list[Node]:
        inside = set(self.nodes)
        return [node for node in self.nodes if any(user not in inside for user in node.users)]


def segments(gm: GraphModule) -> Iterator[Segment | Node]:
    """Yield the graph in order: segments, and between them the nodes that stay; inside `torch.func` only settings."""
    nodes: list[Node] = []
    nesting = 0
    for node in list(gm.graph.nodes):
        if node.op in ("placeholder", "get_attr") or node.target is LOG_API_USAGE or _is_part(node):
            continue
        inside, nesting = nesting > 0, nesting + functorch_nesting(node.target)
        if inside or node.op in ("output", "call_module") or _stays(node):
            if nodes:
                yield Segment(nodes)
            nodes = []
            if node.op != "output" and (not inside or _is_setting(node)):
                yield node
        else:
            nodes.append(node)


def _stays(node: Node) -> bool:
    return (
        node.target is DATA_OF_TENSOR
        or of_functorch(node.target)
        or _is_opaque(node)
        or _is_setting(node)
        or _not_followed(node) is not None
    )


def why_it_stays(node: Node) -> str | None:
    """Return the reason for which a node stays, in words for the report; None if no operator could be found in it."""
    if _is_opaque(node):
        return f"what is inside {getattr(node.target, '__name__', node.target)} stays as it is"
    if functorch_nesting(node.target) > 0:
        return "what is inside torch.func stays as it is"
    kind = _not_followed(node)
    return None if kind is None or _is_setting(node) else f"what takes or gives a {kind} stays as it is"


def _is_setting(node: Node) -> bool:
    """Return True if the node takes and gives no tensor and no number: then it is there for its effect."""
    if node.op != "call_function" or is_operator(node.target):
        return False
    return not any(isinstance(x, SIMPLE) for given in (node, *node.all_input_nodes) for x in _values_of(given))


def _not_followed(node: Node) -> str | None:
    """Return the kind of a value that the node takes or gives and no trace follows, such as a tensor of a subclass."""
    for x in itertools.chain.from_iterable(map(_values_of, (node, *node.all_input_nodes))):
        is_followed = hasattr(x, "fake_mode") if isinstance(x, Tensor) else x is None or isinstance(x, SIMPLE)
        if not is_followed:
            return "tensor inside torch.func" if type(x) is Tensor else type(x).__name__
    return None


def _is_opaque(node: Node) -> bool:
    """Return True if the node holds graphs of its own, or an `autograd.Function`."""
    if node.op != "call_function":
        return False
    return is_higher_order(node.target) or (not is_operator(node.target) and _has_own_gradient(node))


def _has_own_gradient(node: Node) -> bool:
    """Return True if Python code makes the gradient, as in a function that `torch.compiler.allow_in_graph` allowed."""
    known = {x.grad_fn for given in node.all_input_nodes for x in _values_of(given) if isinstance(x, Tensor)} | {None}
    found = {x.grad_fn for x in _values_of(node) if isinstance(x, Tensor)}
    while found - known:
        functions = found - known
        if any(isinstance(function, BackwardCFunction) for function in functions):
            return True
        known |= functions
        found = {before for function in functions if function is not None for before, _ in function.next_functions}
    return False


def _values_of(node: Node) -> Sequence[Any]:
    """Return the values that a node gives: one, those of a tuple, or None alone."""
    value = node.meta.get("example_value")
    return value if isinstance(value, tuple | list) else [value]


def _is_part(node: Node) -> bool:
    """Return True if the node is one of the results of a node that stays."""
    return node.target is operator.getitem and isinstance(node.args[0], Node) and _stays(node.args[0])
