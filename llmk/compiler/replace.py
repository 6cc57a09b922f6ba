"""Puts operators into a graph of ATen's in place of what computes the same. It knows none of them.

At every node, from the last to the first, each operator's patterns are tried, and the one that takes in most is put
there. What replaces it must give the same shapes, dtypes and layout, which is asked of the operator itself.
"""

import operator
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from llmk.compiler.emit import Emit
from llmk.compiler.report import Note, module_of
from llmk.compiler.rules import Rule
from llmk.compiler.writes import storages, written
from llmk.registry.patterns import Found, Left, find, is_cast, name_of

VIEWS = frozenset({
    "view", "reshape", "_unsafe_view", "slice", "select", "unsqueeze", "squeeze", "transpose", "permute", "t", "expand",
    "chunk", "split", "split_with_sizes", "unbind", "flatten", "narrow",
})  # fmt: skip


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


def replace_all(gm: GraphModule, rules: Sequence[Rule], droppable: Collection[Node] = ()) -> list[Note]:
    """Put operators where the rules find them, and say what was replaced and what was left.

    What is `droppable` may be something else where it is returned, if an operator has something to stand in for it.
    """
    return _Replacing(gm, rules, frozenset(droppable)).run()


class _Replacing:
    def __init__(self, gm: GraphModule, rules: Sequence[Rule], droppable: frozenset[Node]) -> None:
        self.graph, self.rules, self.droppable = gm.graph, rules, droppable
        self.erased: set[Node] = set()
        self.reasons: dict[tuple[str, Node], str] = {}
        self.refused: list[tuple[Match, str]] = []
        self.notes: list[Note] = []
        self.written = written(self.graph)

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
                    self.reasons.setdefault((match.rule.name, inner), str(why))
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
        returned = self._require_alone(match)
        last = max(match.inputs, default=next(iter(self.graph.nodes)))
        while last.next.op == "placeholder":
            last = last.next
        self._require_unwritten(match, last)
        readers = [user for result in match.results for user in result.users if user not in match.found.nodes]
        if any(user <= last for user in readers):
            raise Left("one of its results is read before all that it takes is there")
        plain, emit = match.rule.plain, Emit(match.rule, match.results[0], last)
        try:
            new = plain.build(emit, match.found.values) if plain.build else emit(
                match.rule.overload, **match.found.values
            )  # fmt: skip
            news = list(new) if isinstance(new, tuple | list) else [new]
            news = [emit.as_before(result, node) for result, node in zip(match.results, news, strict=True)]
            stand_ins = [plain.stand_in(emit, match.found.values, node) for node in returned if plain.stand_in]
        except Left:
            emit.undo()
            raise
        for node, stand_in in zip(returned, stand_ins, strict=True):
            node.replace_all_uses_with(stand_in, delete_user_cb=lambda user: user.op == "output")
        for result, node in zip(match.results, news, strict=True):
            node.meta["needs_grad"] = result.meta.get("needs_grad", False)
            result.replace_all_uses_with(node)
            for (name, node_of), why in list(self.reasons.items()):
                if node_of is result:
                    self.reasons[name, node] = why
        self.notes.append(Note(match.rule.name, main_module(match)))
        self._erase_unread(match)

    def _require_alone(self, match: Match) -> list[Node]:
        """That nobody else reads or changes what is computed on the way: besides what is returned and need not be."""
        inner, returned = set(match.found.nodes), []
        may_drop = match.rule.plain.stand_in is not None and match.results[0].meta.get("needs_grad", False)
        read: dict[Node, Node] = {}  # nodes that stay, and who reads them
        for node in sorted(inner - set(match.results), reverse=True):
            readers = [user for user in node.users if user not in inner or user in read]
            if readers and may_drop and node in self.droppable and all(user.op == "output" for user in readers):
                returned.append(node)
            elif readers:
                reader = readers[0]
                read[node] = read.get(reader, reader)
                if not is_cheap(node):
                    how = "returned" if read[node].op == "output" else "read elsewhere"
                    raise Left(f"{name_of(node)} on the way is {how} too")
        return returned

    def _require_unwritten(self, match: Match, last: Node) -> None:
        """That memory is the same when it is read where the match reads it, and after `last`."""
        inner = set(match.found.nodes)
        for storage in self.written.keys() & set[int]().union(*map(storages, inner | match.inputs)):
            sharing, writers = [node for node in self.graph.nodes if storage in storages(node)], self.written[storage]
            if inner.issuperset([*sharing, *writers]):  # nobody else has it: what was there before is not read after
                fine = not any(node < writer < user for writer in writers for node in sharing for user in node.users)
            else:
                readers = [node for node in inner if not {node, *node.all_input_nodes}.isdisjoint(sharing)]
                fine = all(writer <= last and writer < reader for writer in writers for reader in readers)
            if not fine:
                raise Left("something that it reads is written in place")

    def _erase_unread(self, match: Match) -> None:
        """What was replaced, though it may draw random numbers, and what only that has read."""
        replaced = set(match.found.nodes)
        for node in sorted(replaced | match.inputs, reverse=True):
            if node in replaced or not node.is_impure():
                self._erase(node)

    def _erase(self, node: Node) -> None:
        if node in self.erased or node.users or node.op == "placeholder":
            return
        inputs = node.all_input_nodes
        self.graph.erase_node(node)
        self.erased.add(node)
        for other in inputs:
            if is_cheap(other) and not other.is_impure():
                self._erase(other)

    def _note_what_is_left(self) -> None:
        noted: set[tuple[str, Node]] = set()
        for match, why in self.refused:
            name, places = match.rule.name, {(match.rule.name, node) for node in match.found.nodes}
            if not self.erased.intersection(match.found.nodes) and not places & noted:
                self.notes.append(Note(name, main_module(match), why))
                noted |= places
        for node in self.graph.nodes:
            for rule in self.rules:
                name, sign = rule.name, name_of(node)
                if sign in rule.plain.signs and (name, node) not in noted:
                    noted.add((name, node))
                    why = self.reasons.get((name, node), "what is computed around it is something else")
                    self.notes.append(Note(name, module_of(node), f"{sign}: {why}"))


def main_module(match: Match) -> str:
    """The module that most of the computation is in."""
    modules = Counter(map(module_of, match.found.nodes))
    return max(modules, key=lambda path: (modules[path], -len(path)))


def is_cheap(node: Node) -> bool:
    """Whether it costs nothing to have besides: a view, a cast, a part of a tuple."""
    return is_cast(node) or name_of(node) in VIEWS or node.target is operator.getitem
