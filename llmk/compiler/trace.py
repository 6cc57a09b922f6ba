"""Traces segments of Dynamo's graph into graphs of ATen's operators before autograd, where a spelling has one name.

The traced graph takes the place of its segment only where something in it was replaced.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, fx
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from llmk.compiler.effects import mutated_by, mutations, storages
from llmk.compiler.patterns import name_of, value_of
from llmk.compiler.segments import SIMPLE, Segment
from llmk.compiler.size_tensors import copy_call, note_calls
from llmk.registry.private.compilers import CHECKPOINT, MODE_CALLS

LITERAL = "lift_fresh_copy"
"""The operator that gives numbers that a program writes, as in `torch.tensor([1, 2])`, `y[0] = 1` and `y[[0, 2]]`."""
KEPT = ("nn_module_stack", "stack_trace", "source_fn_stack", "original_aten", "custom")


class NotTraced(Exception):
    """The reason for which a segment cannot be traced again, in words for the report."""


def checkpoint_body(gm: GraphModule, node: Node) -> GraphModule | None:
    """Return the graph of a region that is computed again in the backward pass, with `made` of its inputs."""
    if node.target is not CHECKPOINT or not isinstance(node.args[0], Node):
        return None
    body = getattr(gm, str(node.args[0].target), None)
    if not isinstance(body, GraphModule):
        return None
    for given, placeholder in zip(node.args[1:], body.graph.find_nodes(op="placeholder"), strict=True):
        if isinstance(given, Node):
            copy_call(given, placeholder, given.meta.get("example_value"))
    return body


class Modes:
    """Follows the graph's changes of the gradient mode and autocast, and restores the modes in the end."""

    def __init__(self) -> None:
        self.entered: dict[Node, Any] = {}

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        enabled = torch.is_grad_enabled()
        try:
            yield
        finally:
            for mode in reversed(self.entered.values()):
                mode.__exit__(None, None, None)
            torch.set_grad_enabled(enabled)

    def follow(self, node: Node) -> None:
        """Change a mode if the node changes it."""
        if node.target not in MODE_CALLS:
            return
        mode = node.target(*map_arg(node.args, self.entered.pop), **node.kwargs)  # type: ignore[operator]
        if mode is not None:
            self.entered[node] = mode


def example_of(gm: GraphModule, node: Node) -> Any:
    """Return the value that Dynamo saw at a node, or the attribute that the node reads."""
    if node.op == "get_attr" and "example_value" not in node.meta:
        value = gm
        for part in str(node.target).split("."):
            value = getattr(value, part)
        return value
    if "example_value" not in node.meta:
        raise NotTraced(f"the graph does not say what {node.name} is")
    return node.meta["example_value"]


def fake_mode_of(values: Iterable[Any]) -> Any:
    """Return the mode of the fake tensors among the values: Dynamo's own, not the one it gives to its backend."""
    return next((value.fake_mode for value in values if hasattr(value, "fake_mode")), None)


def traced(gm: GraphModule, segment: Segment) -> GraphModule:
    """Return the segment as a graph of ATen's operators, with its inputs as placeholders and its outputs as results.

    A node's `meta` has `val`, its value, `needs_grad`, which is True if its gradient may be wanted, and `made` of
    `llmk.compiler.size_tensors`, which the outputs in Dynamo's graph get too.

    Raises:
        NotTraced: It cannot be traced, or the trace gives other tensors.
    """
    examples = [example_of(gm, node) for node in segment.inputs]
    for node, example in zip(segment.inputs, examples, strict=True):
        if not isinstance(example, SIMPLE):
            raise NotTraced(f"it reads {node.name}, which is no tensor or number")
    fake = fake_mode_of([*examples, *(node.meta.get("example_value") for node in segment.nodes)])
    if fake is None:
        raise NotTraced("it has no tensor")
    run = fx.Interpreter(_alone(segment)).run
    before, fake.allow_non_fake_inputs = fake.allow_non_fake_inputs, True
    try:
        with fake, fx_traceback.preserve_node_meta():
            trace = make_fx(run, tracing_mode="real", pre_dispatch=True, _allow_non_fake_inputs=True)
            result = trace(*examples)
    except Exception as error:  # whatever the model's operations raise: Inductor gets them as they are
        raise NotTraced(f"{type(error).__name__}: {error}".splitlines()[0]) from error
    finally:
        fake.allow_non_fake_inputs = before
    _require_same(segment, result)
    _require_whole(result)
    _note_gradients(result, examples)
    _note_calls(segment, result, examples)
    return result


def _alone(segment: Segment) -> GraphModule:
    """Return a copy of the segment as a graph of its own."""
    graph, copies = fx.Graph(), {}
    for node in segment.inputs:
        copies[node] = graph.placeholder(node.name)
    for node in segment.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in segment.outputs))
    return GraphModule(torch.nn.Module(), graph)


def _require_same(segment: Segment, result: GraphModule) -> None:
    """Check that the results of the trace have the shapes and dtypes that Dynamo saw."""
    results = result.graph.output_node().args[0]
    for node, again in zip(segment.outputs, results, strict=True):  # type: ignore[arg-type]
        want, got = node.meta.get("example_value"), again.meta.get("val") if isinstance(again, Node) else again
        if isinstance(want, Tensor) and (
            not isinstance(got, Tensor) or got.dtype != want.dtype or str(got.shape) != str(want.shape)
        ):
            raise NotTraced(f"{node.name} comes out as another tensor when it is traced again")


def _require_whole(result: GraphModule) -> None:
    """Check that the trace saw where each tensor comes from: what it holds by itself are copies of literals."""
    for node in result.graph.find_nodes(op="get_attr"):
        value = getattr(result, str(node.target))
        is_known = isinstance(value, Tensor) and fake_mode_of([value]) is None and 0 not in value.shape[:-1]
        if not is_known or any(name_of(user) != LITERAL for user in node.users):
            raise NotTraced("it reads a tensor that comes from where a trace does not look")


def _note_gradients(result: GraphModule, examples: list[Any]) -> None:
    """Set `needs_grad` of every node, also where a gradient comes through memory that was written."""
    placeholders = result.graph.find_nodes(op="placeholder")
    wanted = {n for n, x in zip(placeholders, examples, strict=True) if isinstance(x, Tensor) and x.requires_grad}
    memory: set[int] = set()  # storages into which something that wants a gradient was written
    for node in result.graph.nodes:
        passes = name_of(node) not in ("detach", "detach_") and not _is_integer(node.meta.get("val"))
        reads = any(n in wanted or not memory.isdisjoint(storages(n)) for n in node.all_input_nodes)
        if torch.is_grad_enabled() and passes and reads:
            wanted.add(node)
            memory |= mutated_by(node)
        node.meta["needs_grad"] = node in wanted or (passes and not memory.isdisjoint(storages(node)))


def _note_calls(segment: Segment, result: GraphModule, examples: list[Any]) -> None:
    """Take what made the inputs through the traced graph to the outputs in Dynamo's graph."""
    for node, placeholder, value in zip(
        segment.inputs, result.graph.find_nodes(op="placeholder"), examples, strict=True
    ):
        copy_call(node, placeholder, value)
    note_calls(result, mutations(result.graph))
    for node, again in zip(segment.outputs, result.graph.output_node().args[0], strict=True):  # type: ignore[arg-type]
        if isinstance(again, Node):
            copy_call(again, node, node.meta.get("example_value"))


def _is_integer(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point() and not value.is_complex()


def pairs_of(segment: Segment, result: GraphModule) -> list[tuple[Any, Any]]:
    """Return the value that Dynamo saw and the value that the trace saw, for every input and output of the segment."""
    placeholders = result.graph.find_nodes(op="placeholder")
    traced_nodes = [*placeholders, *result.graph.output_node().args[0]]  # type: ignore[misc]
    nodes = [*segment.inputs, *segment.outputs]
    return [(node.meta.get("example_value"), value_of(again)) for node, again in zip(nodes, traced_nodes, strict=True)]


def returned_alone(segment: Segment, result: GraphModule) -> set[Node]:
    """Return the traced nodes that nothing reads but the end of Dynamo's graph."""
    inside = set(segment.nodes)
    results: Any = result.graph.output_node().args[0]
    outputs = list(zip(segment.outputs, results, strict=True))
    read = {again for node, again in outputs if any(user not in inside and user.op != "output" for user in node.users)}
    return {again for _, again in outputs if isinstance(again, Node)} - read


def put_back(gm: GraphModule, segment: Segment, result: GraphModule) -> None:
    """Put the traced graph in the place of the segment."""
    outputs, copies = segment.outputs, {}
    for placeholder, node in zip(result.graph.find_nodes(op="placeholder"), segment.inputs, strict=True):
        copies[placeholder] = node
    with gm.graph.inserting_after(segment.nodes[-1]):
        anchor = gm.graph.call_function(tuple)
    with gm.graph.inserting_before(anchor):
        for node in result.graph.nodes:
            if node.op == "call_function":
                held = [x for x in node.all_input_nodes if x.op == "get_attr"]
                value = getattr(result, str(held[0].target)) if held else None
                copies[node] = gm.graph.node_copy(node, copies.__getitem__) if value is None else _literal(gm, value)
                copies[node].meta = {key: node.meta[key] for key in KEPT if key in node.meta}
    gm.graph.erase_node(anchor)
    for node, again in zip(outputs, result.graph.output_node().args[0], strict=True):  # type: ignore[arg-type]
        new = map_arg(again, copies.__getitem__)
        if isinstance(new, Node) and new.op != "placeholder":
            new.meta.setdefault("example_value", node.meta.get("example_value"))
            copy_call(node, new, node.meta.get("example_value"))
        for user in list(node.users):
            if user not in set(segment.nodes):
                user.args = map_arg(user.args, lambda n, node=node, new=new: new if n is node else n)
                user.kwargs = map_arg(user.kwargs, lambda n, node=node, new=new: new if n is node else n)
    for node in reversed(segment.nodes):
        gm.graph.erase_node(node)


def _literal(gm: GraphModule, value: Tensor) -> Node:
    """Put numbers into a graph as a program writes them: as arguments of a call.

    The caches of AOTAutograd and Inductor tell two graphs apart by the arguments of their calls. Of a tensor that is an
    attribute of the graph's module they know the shape and dtype alone.
    """
    return gm.graph.call_function(torch.tensor, (value.tolist(),), {"dtype": value.dtype, "device": value.device})
