"""Puts operators into a graph of ATen's in place of what computes the same. It knows none of them.

At every node, from the last to the first, each operator's patterns are tried, and the one that takes in most is put
there. What replaces it must give the same shapes, dtypes and layout, which is asked of the operator itself.
"""

import contextlib
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from llmk.compiler.private import statically_known_true
from llmk.compiler.report import Note, module_of
from llmk.compiler.trace import fake_mode_of
from llmk.registry.patterns import Found, Left, Plain, find, is_cast, name_of, value_of
from llmk.registry.private import schema_of, storage_of
from llmk.registry.record import Op

VIEWS = frozenset({
    "view", "reshape", "_unsafe_view", "slice", "select", "unsqueeze", "squeeze", "transpose", "permute", "t", "expand",
    "chunk", "split", "split_with_sizes", "unbind", "flatten", "narrow",
})  # fmt: skip
REFUSALS = (TypeError, ValueError, IndexError, NotImplementedError, RuntimeError)


@dataclass(frozen=True)
class Rule:
    """An operator, and one way to write it in plain PyTorch."""

    op: Op
    plain: Plain


@dataclass
class Match:
    """Where a rule was found, and the node of each of the operator's results."""

    rule: Rule
    found: Found
    results: list[Node]

    @property
    def inputs(self) -> set[Node]:
        inner = set(self.found.nodes)
        nodes: list[Node] = []
        map_arg(tuple(self.found.values.values()), nodes.append)
        return {node for node in nodes if node not in inner}


def replace_all(gm: GraphModule, rules: Sequence[Rule]) -> list[Note]:
    """Put operators where the rules find them, and say what was replaced and what was left."""
    return _Replacing(gm, rules).run()


class _Replacing:
    def __init__(self, gm: GraphModule, rules: Sequence[Rule]) -> None:
        self.graph, self.rules = gm.graph, rules
        self.erased: set[Node] = set()
        self.reasons: dict[tuple[str, Node], str] = {}
        self.refused: list[tuple[Match, str]] = []
        self.notes: list[Note] = []
        self.written = _written(self.graph)
        self.fake = fake_mode_of(value_of(node) for node in self.graph.nodes)

    def run(self) -> list[Note]:
        self._merge_views()
        for node in reversed(list(self.graph.nodes)):
            if node not in self.erased and node.op == "call_function":
                self._try_at(node)
        self._note_what_is_left()
        return self.notes

    def _merge_views(self) -> None:
        """One node for the same view of the same tensor, so that it is one thing to a pattern."""
        seen: dict[Any, Node] = {}
        for node in list(self.graph.nodes):
            if name_of(node) in VIEWS - {"reshape", "flatten"}:
                same = seen.setdefault((node.target, str(node.args), str(node.kwargs)), node)
                if same is not node:
                    node.replace_all_uses_with(same)
                    self.graph.erase_node(node)

    def _try_at(self, node: Node) -> None:
        matches = [match for rule in self.rules if (match := self._match(rule, node)) is not None]
        for match in sorted(matches, key=lambda match: -len(set(match.found.nodes))):
            try:
                self._replace(match)
            except Left as why:
                self.refused.append((match, str(why)))
                for inner in match.found.nodes:
                    self.reasons.setdefault((match.rule.op.name, inner), str(why))
            else:
                return

    def _match(self, rule: Rule, node: Node) -> Match | None:
        first, *others = rule.plain.results
        for found in find(first, node, Found()):
            if node not in found.nodes:
                continue
            match: Match | None = Match(rule, found, [node])
            for pattern in others:
                match = self._with_another_result(match, pattern)
                if match is None:
                    break
            else:
                return match
        return None

    def _with_another_result(self, match: Match, pattern: Any) -> Match | None:
        if isinstance(pattern, str):
            return Match(match.rule, match.found, [*match.results, match.found.values[pattern]])
        taken = set(match.found.nodes)
        other = match.results[0].prev
        while other.op != "root":
            if other not in taken:
                for found in find(pattern, other, match.found):
                    if other in found.nodes:
                        return Match(match.rule, found, [*match.results, other])
            other = other.prev
        return None

    def _replace(self, match: Match) -> None:
        self._require_alone(match)
        last = max(match.inputs, default=next(iter(self.graph.nodes)))
        while last.next.op == "placeholder":
            last = last.next
        readers = [user for result in match.results for user in result.users if user not in match.found.nodes]
        if any(user <= last for user in readers):
            raise Left("one of its results is read before all that it takes is there")
        emit = Emit(self, match, last)
        try:
            plain = match.rule.plain
            new = plain.build(emit, match.found.values) if plain.build else emit(
                match.rule.op.overload, **match.found.values
            )  # fmt: skip
            news = list(new) if isinstance(new, tuple | list) else [new]
            news = [emit.as_before(result, node) for result, node in zip(match.results, news, strict=True)]
        except Left:
            emit.undo()
            raise
        for result, node in zip(match.results, news, strict=True):
            node.meta["needs_grad"] = result.meta.get("needs_grad", False)
            result.replace_all_uses_with(node)
            for (name, node_of), why in list(self.reasons.items()):
                if node_of is result:
                    self.reasons[name, node] = why
        self.notes.append(Note(match.rule.op.name, main_module(match)))
        self._erase_unread([*match.found.nodes, *match.inputs])

    def _require_alone(self, match: Match) -> None:
        """That nobody else reads or changes what is computed on the way."""
        inner = set(match.found.nodes)
        read: dict[Node, Node] = {}  # nodes that stay, and who reads them
        for node in sorted(inner - set(match.results), reverse=True):
            reader = next((user for user in node.users if user not in inner or user in read), None)
            if reader is not None:
                read[node] = read.get(reader, reader)
                if not is_cheap(node):
                    how = "returned" if read[node].op == "output" else "read elsewhere"
                    raise Left(f"{name_of(node)} on the way is {how} too")
        for node in inner | match.inputs:
            value = value_of(node)
            if isinstance(value, Tensor) and storage_of(value) in self.written:
                raise Left("something that it reads is written in place")

    def _erase_unread(self, nodes: Sequence[Node]) -> None:
        for node in sorted(set(nodes), reverse=True):
            self._erase(node, certainly=True)

    def _erase(self, node: Node, certainly: bool) -> None:
        if node in self.erased or node.users or node.op == "placeholder" or not (certainly or is_cheap(node)):
            return
        if node.is_impure() or not (is_cheap(node) or certainly):
            return
        inputs = node.all_input_nodes
        self.graph.erase_node(node)
        self.erased.add(node)
        for other in inputs:
            self._erase(other, certainly=False)

    def _note_what_is_left(self) -> None:
        noted: set[tuple[str, Node]] = set()
        for match, why in self.refused:
            name, places = match.rule.op.name, {(match.rule.op.name, node) for node in match.found.nodes}
            if not self.erased.intersection(match.found.nodes) and not places & noted:
                self.notes.append(Note(name, main_module(match), why))
                noted |= places
        for node in self.graph.nodes:
            for rule in self.rules:
                name, sign = rule.op.name, name_of(node)
                if sign in rule.plain.signs and (name, node) not in noted:
                    noted.add((name, node))
                    why = self.reasons.get((name, node), "what is computed around it is something else")
                    self.notes.append(Note(name, module_of(node), f"{sign}: {why}"))


class Emit:
    """Puts calls into the graph after a node, and asks of each what it gives."""

    def __init__(self, replacing: _Replacing, match: Match, after: Node) -> None:
        self.replacing, self.match, self.last = replacing, match, after
        self.wanted: Tensor = value_of(match.results[0])
        self.made: list[Node] = []

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """A node, or one for each result.

        Raises:
            Left: The operator refuses these arguments.
        """
        if target is self.match.rule.op.overload:
            self._require_gradients(target, args, kwargs)
        values = map_arg(args, value_of), map_arg(kwargs, value_of)
        fake = self.replacing.fake
        with fake if fake is not None else contextlib.nullcontext():
            try:
                result = target(*values[0], **values[1])  # type: ignore[index]
            except REFUSALS as error:
                raise Left(str(error).splitlines()[0]) from error
        node = self._put(target, args, kwargs, result)
        if isinstance(result, tuple | list):
            return tuple(self._put(operator.getitem, (node, i), {}, value) for i, value in enumerate(result))
        return node

    def _put(self, target: Any, args: Any, kwargs: Any, value: Any) -> Node:
        graph = self.replacing.graph
        with graph.inserting_after(self.last):
            node = graph.call_function(target, args, kwargs)
        of = self.match.results[0].meta
        node.meta = {key: of[key] for key in ("nn_module_stack", "stack_trace") if key in of} | {"val": value}
        node.meta["needs_grad"] = any(wants_gradient(x) for x in node.all_input_nodes)
        self.last = node
        self.made.append(node)
        return node

    def _require_gradients(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        names = (argument.name for argument in schema_of(target).arguments)
        for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
            if name not in self.match.rule.op.differentiable and wants_gradient(value):
                raise Left(f"{name} wants a gradient, which the operator does not give")

    def as_before(self, old: Node, new: Node) -> Node:
        """The new node, which must have the old one's shape and dtype, in the old one's layout in memory."""
        _require_same(value_of(old), value_of(new))
        if _same_layout(value_of(old), value_of(new)):
            return new
        if not value_of(old).is_contiguous():
            raise Left("its result lies in memory otherwise than the operator's")
        return self(torch.ops.aten.clone.default, new, memory_format=torch.contiguous_format)

    def undo(self) -> None:
        for node in reversed(self.made):
            self.replacing.graph.erase_node(node)
            self.replacing.erased.add(node)


def main_module(match: Match) -> str:
    """The module that most of the computation is in."""
    modules = Counter(map(module_of, match.found.nodes))
    return max(modules, key=lambda path: (modules[path], -len(path)))


def wants_gradient(value: Any) -> bool:
    return isinstance(value, Node) and value.meta.get("needs_grad", False)


def is_cheap(node: Node) -> bool:
    """Whether it costs nothing to have besides: a view, a cast, a part of a tuple."""
    return is_cast(node) or name_of(node) in VIEWS or node.target is operator.getitem


def _written(graph: torch.fx.Graph) -> set[int]:
    """The storages that some node writes into."""
    return set(_storages_written(graph))


def _storages_written(graph: torch.fx.Graph) -> Iterator[int]:
    for node in graph.nodes:
        if not name_of(node):
            continue
        for argument, value in zip(schema_of(node.target).arguments, node.args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                tensors: list[Node] = []
                map_arg(value, tensors.append)
                yield from (storage_of(v) for n in tensors if isinstance(v := value_of(n), Tensor))


def _require_same(old: Tensor, new: Tensor) -> None:
    """That what is put there has the shape, dtype and device of what was there."""
    if old.dtype != new.dtype:
        raise Left(f"its result is {_name(old.dtype)}, and the operator's {_name(new.dtype)}")
    if old.dim() != new.dim() or not all(_equal(a, b) for a, b in zip(old.shape, new.shape, strict=True)):
        raise Left(f"its result has shape {tuple(old.shape)}, and the operator's {tuple(new.shape)}")
    if old.device != new.device:
        raise Left(f"its result is on {old.device}, and the operator's on {new.device}")


def _same_layout(old: Tensor, new: Tensor) -> bool:
    layouts = zip(old.shape, old.stride(), new.stride(), strict=True)
    return all(_equal(size, 1) or _equal(a, b) for size, a, b in layouts)


def _equal(a: Any, b: Any) -> bool:
    return statically_known_true(a == b)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
