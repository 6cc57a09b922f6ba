"""Puts operators into a graph of ATen's in place of what computes the same. It knows none of them.

At every node, from the last to the first, each operator's patterns are tried, and the one that takes in most is put
there. What replaces it must give the same shapes, dtypes and layout, which is asked of the operator itself.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from llmk.compiler.effects import equal_values, is_random, needed, storages, written
from llmk.compiler.emit import Emit
from llmk.compiler.patterns import Found, Left, cast_of, find, is_narrowing, name_of
from llmk.compiler.report import Note, module_of, warn_once
from llmk.compiler.rules import Rule
from llmk.compiler.trial import Untried
from llmk.compiler.trials import answer, is_view


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


def replace_all(
    gm: GraphModule,
    rules: Sequence[Rule],
    written_later: Collection[int] = (),
    droppable: Collection[Node] = (),
    verify: bool = True,
) -> list[Note]:
    """Put operators where the rules find them, and say what was replaced and what was left.

    Args:
        gm: A graph of ATen's operators.
        rules: What to look for.
        written_later: Storages that are written into after the graph has run.
        droppable: What may be something else where it is returned, if an operator has something to stand in for it.
        verify: Whether each replacement is tried first.
    """
    return _Replacing(gm, rules, frozenset(written_later), frozenset(droppable), verify).run()


class _Replacing:
    def __init__(
        self,
        gm: GraphModule,
        rules: Sequence[Rule],
        written_later: frozenset[int],
        droppable: frozenset[Node],
        verify: bool,
    ) -> None:
        self.verify = verify
        self.graph, self.rules, self.written_later, self.droppable = gm.graph, rules, written_later, droppable
        self.erased: set[Node] = set()
        self.reasons: dict[tuple[str, Node], str] = {}
        self.refused: list[tuple[Match, str]] = []
        self.notes: list[Note] = []
        self.written, self.needed = written(self.graph), needed(self.graph)
        self.same = equal_values(self.graph, {*self.written, *written_later})

    def run(self) -> list[Note]:
        for node in reversed(list(self.graph.nodes)):
            if node in self.needed and node not in self.erased and node.op == "call_function":
                self._try_at(node)
        self._note_what_is_left()
        return self.notes

    def _try_at(self, node: Node) -> None:
        matches = [match for rule in self.rules if (match := self._looked_for(rule, node)) is not None]
        for match in sorted(matches, key=lambda match: -len(set(match.found.nodes))):
            try:
                self._replace(match)
            except Left as why:
                self._refuse(match, str(why))
            else:
                return

    def _looked_for(self, rule: Rule, node: Node) -> Match | None:
        try:
            return self._match(rule, node)
        except Exception as error:  # a pattern's fault costs its match
            why = _raised(rule, error)
            self.refused.append((Match(rule, Found(nodes=(node,)), [node]), why))
            return None

    def _refuse(self, match: Match, why: str) -> None:
        self.refused.append((match, why))
        for inner in match.found.nodes:
            self.reasons.setdefault((match.rule.name, inner), why)

    def _match(self, rule: Rule, node: Node) -> Match | None:
        if cast_of(node) is not None and not is_narrowing(node):
            return None  # what was computed was rounded before it was widened
        first, *others = rule.plain.results
        for found in find(first, node, Found(same=self.same)):
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
            if other not in taken and other in self.needed:
                for found in find(pattern, other, match.found):
                    if other in found.nodes:
                        return Match(match.rule, found, [*match.results, other])
            other = other.prev
        return None

    def _replace(self, match: Match) -> None:
        returned = self._require_alone(match)
        last = self._place_for(match)
        self._require_order_of_draws(match, last)
        self._require_unwritten(match, last)
        readers = [user for result in match.results for user in result.users if user not in match.found.nodes]
        if any(user <= last for user in readers):
            raise Left("one of its results is read before all that it takes is there")
        plain, emit = match.rule.plain, Emit(match.rule, match.results[0], last, self.same)
        try:
            new = plain.build(emit, match.found.values) if plain.build else emit(
                match.rule.overload, **match.found.values
            )  # fmt: skip
            news = list(new) if isinstance(new, tuple | list) else [new]
            news = [emit.as_before(result, node) for result, node in zip(match.results, news, strict=True)]
            if not set(match.found.nodes).isdisjoint(node for made in emit.made for node in made.all_input_nodes):
                raise Left("something that it computes on the way is one of its inputs too")
            self._require_own_memory(match, news)
            untried = self._tried(match, emit, news)
            stand_ins = [plain.stand_in(emit, match.found.values, node) for node in returned if plain.stand_in]
        except Left:
            emit.undo()
            raise
        except Exception as error:  # and so does a fault of what it puts in
            emit.undo()
            raise Left(_raised(match.rule, error)) from error
        for node, stand_in in zip(returned, stand_ins, strict=True):
            node.replace_all_uses_with(stand_in, delete_user_cb=lambda user: user.op == "output")
        for result, node in zip(match.results, news, strict=True):
            node.meta["needs_grad"] = result.meta.get("needs_grad", False)
            self.needed.add(node)
            result.replace_all_uses_with(node)
            for (name, node_of), why in list(self.reasons.items()):
                if node_of is result:
                    self.reasons[name, node] = why
        self.notes.append(Note(match.rule.name, main_module(match), untried=untried))
        self._erase_unread(match)

    def _require_own_memory(self, match: Match, news: list[Node]) -> None:
        """That a result shares memory with another one, or with what is taken, only where it did before."""
        for i, (old, new) in enumerate(zip(match.results, news, strict=True)):
            if self._leaves_by_another_way(old):
                raise Left("its result shares memory with something else that is returned")
            others = [*zip(match.results[:i], news[:i], strict=True), *((node, node) for node in match.inputs)]
            for old_other, new_other in others:
                if storages(old).isdisjoint(storages(old_other)) and not storages(new).isdisjoint(storages(new_other)):
                    raise Left("its result would share memory that the operator's does not share")

    def _leaves_by_another_way(self, result: Node) -> bool:
        """Return True if a result's memory is returned, seen through the result and through what is no view of it."""
        returned = {
            node for node in self.graph.output_node().all_input_nodes if not storages(node).isdisjoint(storages(result))
        }
        through, queue = set[Node](), [result]
        while queue:
            node = queue.pop()
            if node not in through and not storages(node).isdisjoint(storages(result)):
                through.add(node)
                queue += node.users
        return not returned <= through and not returned.isdisjoint(through)

    def _tried(self, match: Match, emit: Emit, news: list[Node]) -> str:
        """Why it could not be tried whether what was made computes the same, in words for the report.

        Raises:
            Left: It does not.
        """
        if not self.verify:
            return "verify=False"
        try:
            differs = answer(match.rule.plain, match.found, emit.made, match.results, news)
        except Untried as why:
            return str(why)
        if differs is not None:
            raise Left(differs)
        return ""

    def _place_for(self, match: Match) -> Node:
        """The node after which the operator stands: its first result, or later what it takes or draws."""
        random = [node for node in match.found.nodes if is_random(node)]
        last = max([*match.inputs, *random, min(match.results)])
        while last.next.op == "placeholder":
            last = last.next
        return last

    def _require_order_of_draws(self, match: Match, last: Node) -> None:
        """Refuse a match of which a random number is drawn before one that something else draws, and then after it."""
        inner = set(match.found.nodes)
        drawn = [node for node in inner if is_random(node)]
        others = (node for node in self.graph.nodes if is_random(node) and node not in inner)
        if drawn and any(min(drawn) < node <= last for node in others):
            raise Left("something else draws random numbers in its midst")

    def _require_alone(self, match: Match) -> list[Node]:
        """That nobody else reads or changes what is computed on the way: besides what is returned and need not be."""
        inner, returned = set(match.found.nodes), []
        may_drop = match.rule.plain.stand_in is not None and match.results[0].meta.get("needs_grad", False)
        read: dict[Node, Node] = {}  # nodes that stay, and who reads them
        for node in sorted(inner - set(match.results), reverse=True):
            readers = [user for user in node.users if user in self.needed and (user not in inner or user in read)]
            if readers and may_drop and node in self.droppable and all(user.op == "output" for user in readers):
                returned.append(node)
            elif readers:
                reader = readers[0]
                read[node] = read.get(reader, reader)
                if not is_cheap(node):
                    is_returned = read[node].op == "output"
                    hint = " (drop_logits=True gives it up)" if is_returned and match.rule.plain.stand_in else ""
                    how = "returned" if is_returned else "read elsewhere"
                    raise Left(f"{name_of(node)} on the way is {how} too{hint}")
        return returned

    def _require_unwritten(self, match: Match, last: Node) -> None:
        """That memory is the same when it is read where the match reads it, after `last` and in the backward pass."""
        inner = set(match.found.nodes)
        taken = set[int]().union(*map(storages, match.inputs))
        touched = taken.union(*map(storages, inner))
        if match.results[0].meta.get("needs_grad", False) and not touched.isdisjoint(self.written_later):
            raise Left("something that it reads is written in place later")
        for storage in self.written.keys() & touched:
            sharing = [node for node in self.graph.nodes if storage in storages(node)]
            readers = [node for node in inner if not {node, *node.all_input_nodes}.isdisjoint(sharing)]
            # What no node reads any more may still be read in the backward pass, of what a reader saved for it.
            read_later = storage in taken or any(node.meta.get("needs_grad", False) for node in readers)
            writers = [node for node in self.written[storage] if read_later or node in self.needed]
            if inner.issuperset([*sharing, *writers]):  # nobody else has it: what was there before is not read after
                fine = not any(node < writer < user for writer in writers for node in sharing for user in node.users)
            else:
                fine = all(writer <= last and writer < reader for writer in writers for reader in readers)
            if not fine:
                raise Left("something that it reads is written in place")

    def _erase_unread(self, match: Match) -> None:
        """The nodes that were replaced, and nothing else: what is dead besides them is Inductor's to find."""
        for node in sorted(set(match.found.nodes), reverse=True):
            if not node.users and node.op == "call_function":
                self.graph.erase_node(node)
                self.erased.add(node)

    def _note_what_is_left(self) -> None:
        noted: set[tuple[str, Node]] = set()
        for match, why in self.refused:
            name, places = match.rule.name, {(match.rule.name, node) for node in match.found.nodes}
            if not self.erased.intersection(match.found.nodes) and not places & noted:
                self.notes.append(Note(name, main_module(match), why))
                noted |= places
        for node in (node for node in self.graph.nodes if node in self.needed):
            for rule in self.rules:
                name, sign = rule.name, name_of(node)
                if sign not in rule.plain.signs or (name, node) in noted:
                    continue
                why = self.reasons.get((name, node)) or rule.plain.why_left(node)
                if why:
                    noted.add((name, node))
                    self.notes.append(Note(name, module_of(node), f"{sign}: {why}"))


def _raised(rule: Rule, error: Exception) -> str:
    reason = f"its rule raised {type(error).__name__}: {error}".splitlines()[0]
    warn_once(f"torch.compile(backend='llmk') leaves {rule.name} as it is: {reason}. Please report it to llmk.")
    return reason


def main_module(match: Match) -> str:
    """The module that most of the computation is in."""
    modules = Counter(map(module_of, match.found.nodes))
    return max(modules, key=lambda path: (modules[path], -len(path)))


def is_cheap(node: Node) -> bool:
    """Return True if it costs nothing to have besides: a view, a cast, a part of a tuple."""
    return cast_of(node) is not None or is_view(node)
