"""Sums of matrix products: each product is added to the ones before it while it is computed.

The gradient of what several linear layers read is such a sum: `dq @ Wq + dk @ Wk + dv @ Wv`. Inductor computes each
product, and a kernel of its own reads them all and writes their sum. Here a product is added to the sum so far, where
that lies in memory: the sum is written once less and read once less, and only one tensor of its size is there at a
time. In 16 bits it is rounded once for each product, where PyTorch rounds every product and every sum.

This happens in the graphs that AOTAutograd makes, where gradients are made of matrix products. Where everything that
reads the sum is pointwise it is left: Inductor adds up there for nothing.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from llmk.compiler.patterns import OVERLOAD, name_of, same_shape, value_of

NAME = "sum_of_products"
VIEWS = frozenset({"view", "reshape", "_unsafe_view"})

_library = torch.library.Library("llmk", "FRAGMENT")
_library.define("_add_product_(Tensor(a!) total, Tensor a, Tensor b) -> ()", tags=(torch.Tag.flexible_layout,))


@torch.library.impl(_library, "_add_product_", "CompositeExplicitAutograd")
def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a `[M, K]` times b `[K, N]` to the total `[M, N]`."""
    total.addmm_(a, b)


add_product: Callable[..., Any] = torch.ops.llmk._add_product_.default


def accumulate(graph: Graph) -> None:
    """Add up every sum of products in its first product, in a graph of ATen's operators that mutates nothing yet."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node in reversed(place):
        products = sorted(products_of(node), key=place.__getitem__)
        if len(products) > 1 and not all(map(is_pointwise, node.users)):
            _replace(graph, node, products)


def products_of(node: Node) -> list[Node]:
    """Return the matrix products that a node is the sum of, if nothing else reads them or the nodes between.

    A product is an `mm`, or an `addmm`, in which Inductor has put a product and what is added to it.
    """
    terms = {"mm": [], "add": node.args, "addmm": node.args[:1]}.get(name_of(node))
    if terms is None or node.kwargs or len(set(terms)) < len(terms):
        return []
    found = [] if name_of(node) == "add" else [node]
    for term in terms:
        inner = _without_views(term, node) if isinstance(term, Node) and _alike(term, node) else None
        products = [] if inner is None else products_of(inner)
        if not products or not _alike(products[0], (found or products)[0]):
            return []
        found += products
    return found


def _alike(a: Node, b: Node) -> bool:
    """Return True if they have the same dtype and shape, for any sizes."""
    x, y = value_of(a), value_of(b)
    return x.dtype == y.dtype and same_shape(x.shape, y.shape)


def _without_views(node: Node, reader: Node) -> Node | None:
    """Return the tensor that a node views in another shape; None where somebody besides the reader reads it."""
    while list(node.users) == [reader]:
        if name_of(node) not in VIEWS:
            return node
        node, reader = node.all_input_nodes[0], node
    return None


def is_pointwise(node: Node) -> bool:
    """Return True if Inductor computes it, or all that reads the view that it is, element by element."""
    if name_of(node) in VIEWS:
        return all(map(is_pointwise, node.users))
    return isinstance(node.target, OVERLOAD) and torch.Tag.pointwise in node.target.tags


def _replace(graph: Graph, total: Node, products: list[Node]) -> None:
    """Have the products, which come in the graph in this order, added up in the first."""
    first, shaped = products[0], total
    while name_of(shaped) in ("add", "addmm"):
        shaped = shaped.all_input_nodes[0]
    for product in products[1:]:
        with graph.inserting_before(product):
            graph.call_function(add_product, (first, *product.args[-2:]))
    result = first
    if name_of(shaped) in VIEWS:
        with graph.inserting_before(total):  # after the last product, as a view from before would be of the first alone
            result = graph.call_function(torch.ops.aten.reshape.default, (first, shaped.args[1]))
        result.meta = dict(total.meta)
    total.replace_all_uses_with(result)
    _erase(total)


def _erase(node: Node) -> None:
    """Erase a node that nothing reads any more, and the sums, products and views that only it has read."""
    if not node.users and name_of(node) in VIEWS | {"add", "addmm", "mm"}:
        inputs = node.all_input_nodes
        node.graph.erase_node(node)
        for other in inputs:
            _erase(other)
