"""Puts calls into a graph of ATen's operators, and compares their results with those of the nodes they replace."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from llmk.compiler.patterns import NoMatch, constant_of, same, same_shape, value_of
from llmk.compiler.rules import RewriteRule
from llmk.registry.private.operators import schema_of

REFUSALS = (TypeError, ValueError, IndexError, NotImplementedError, RuntimeError)


class ReplacementBuilder:
    """Puts calls into the graph after a node, and runs each with the graph's fake tensors."""

    def __init__(self, rule: RewriteRule, result: Node, after: Node, same: Callable[[Node], Node]) -> None:
        """Begin after a node, for a match of the rule with the first result `result`."""
        self.rule, self.last, self.same = rule, after, same
        self.result, self.wanted = result, value_of(result)
        self.made: list[Node] = []

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Put in a call, and return a node, or one for each result.

        Raises:
            NoMatch: The operator refuses these arguments.
        """
        if target is self.rule.overload:
            self._require_gradients(target, args, kwargs)
            args, kwargs = map_arg(args, _as_constant), map_arg(kwargs, _as_constant)
        values = map_arg(args, value_of), map_arg(kwargs, value_of)
        with self.wanted.fake_mode:  # type: ignore[attr-defined]
            try:
                result = target(*values[0], **values[1])  # type: ignore[index]
            except REFUSALS as error:
                raise NoMatch(str(error).splitlines()[0]) from error
        node = self._put(target, args, kwargs, result)
        if isinstance(result, tuple | list):
            return tuple(self._put(operator.getitem, (node, i), {}, value) for i, value in enumerate(result))
        return node

    def are_same(self, a: Node, b: Node) -> bool:
        return self.same(a) is self.same(b)

    def _put(self, target: Any, args: Any, kwargs: Any, value: Any) -> Node:
        graph = self.result.graph
        with graph.inserting_after(self.last):
            node = graph.call_function(target, args, kwargs)
        of = self.result.meta
        node.meta = {key: of[key] for key in ("nn_module_stack", "stack_trace", "custom") if key in of} | {"val": value}
        node.meta["needs_grad"] = not _is_whole(value) and any(wants_gradient(x) for x in node.all_input_nodes)
        self.last = node
        self.made.append(node)
        return node

    def _require_gradients(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        names = (argument.name for argument in schema_of(target).arguments)
        for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
            if name not in self.rule.differentiable and wants_gradient(value):
                raise NoMatch(f"{name} wants a gradient, which the operator does not give")

    def as_before(self, old: Node, new: Node) -> Node:
        """Return the new node in the old one's layout in memory; it must have the old one's shape, dtype and device."""
        _require_same(value_of(old), value_of(new))
        if _same_layout(value_of(old), value_of(new)):
            return new
        if not value_of(old).is_contiguous():
            raise NoMatch("its result lies in memory otherwise than the operator's")
        return self(torch.ops.aten.clone.default, new, memory_format=torch.contiguous_format)

    def undo(self) -> None:
        for node in reversed(self.made):
            node.graph.erase_node(node)


NO_CONSTANT = "a number that it reads changes between calls or depends on data, and the operator takes a constant"


def _as_constant(argument: Node) -> Any:
    """Return an operator's argument, for a number the constant that the operator takes."""
    if isinstance(value_of(argument), Tensor):
        return argument
    number = constant_of(argument)
    if number is None:
        raise NoMatch(NO_CONSTANT)
    return number


def wants_gradient(value: Any) -> bool:
    return isinstance(value, Node) and value.meta.get("needs_grad", False)


def _is_whole(value: Any) -> bool:
    """Return True for whole numbers, which have no gradient."""
    if isinstance(value, Tensor):
        return not value.is_floating_point() and not value.is_complex()
    return isinstance(value, int | torch.SymInt)


def _require_same(old: Tensor, new: Tensor) -> None:
    """Check that a result has the shape, dtype and device of the one that it replaces."""
    if old.dtype != new.dtype:
        raise NoMatch(f"its result is {_name(old.dtype)}, and the operator's {_name(new.dtype)}")
    if not same_shape(old.shape, new.shape):
        raise NoMatch(f"its result has shape {tuple(old.shape)}, and the operator's {tuple(new.shape)}")
    if old.device != new.device:
        raise NoMatch(f"its result is on {old.device}, and the operator's on {new.device}")


def _same_layout(old: Tensor, new: Tensor) -> bool:
    layouts = zip(old.shape, old.stride(), new.stride(), strict=True)
    return all(same(size, 1) or same(a, b) for size, a, b in layouts)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
