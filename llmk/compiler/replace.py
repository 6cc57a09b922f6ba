"""Puts operators into a graph of ATen's in place of nodes that compute the same. It knows none of the operators.

At every node, from the last to the first, each operator's patterns are tried, and the one that takes in most nodes is
replaced. The replacement must give the same shapes, dtypes and layout, as the operator itself says.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import SymFloat
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from llmk.compiler.effects import bring_before, equal_values, is_random, mutations, needed, storages
from llmk.compiler.graph_builder import NO_CONSTANT, ReplacementBuilder
from llmk.compiler.patterns import Match, NoMatch, cast_of, find, is_narrowing, is_view, name_of, value_of
from llmk.compiler.report import Note, module_of, warn_once
from llmk.compiler.rules import RewriteRule
from llmk.compiler.trial import Untried
from llmk.compiler.trial_cache import cached_difference


@dataclass
class Candidate:
    """A match of a rule that may be replaced, with the node of each of the operator's results."""

    rule: RewriteRule
    match: Match
    results: list[Node]

    @property
    def inputs(self) -> set[Node]:
        inner = set(self.match.nodes)
        nodes: list[Node] = []
        map_arg(tuple(self.match.values.values()), nodes.append)
        return {node for node in nodes if node not in inner}


def replace_all(
    gm: GraphModule,
    rules: Sequence[RewriteRule],
    mutated_later: Collection[int] = (),
    droppable: Collection[Node] = (),
    verify: bool = True,
) -> list[Note]:
    """Put operators where the rules match, and return notes on what was replaced and what was left.

    Args:
        gm: A graph of ATen's operators.
        rules: The rules to try.
        mutated_later: Storages that are written into after the graph has run.
        droppable: Nodes that may be returned as another tensor, if an operator has one to stand in for them.
        verify: Each replacement is tried first.
    """
    return _Replacing(gm, rules, frozenset(mutated_later), frozenset(droppable), verify).run()


class _Replacing:
    def __init__(
        self,
        gm: GraphModule,
        rules: Sequence[RewriteRule],
        mutated_later: frozenset[int],
        droppable: frozenset[Node],
        verify: bool,
    ) -> None:
        self.verify = verify
        self.graph, self.rules, self.mutated_later, self.droppable = gm.graph, rules, mutated_later, droppable
        self.erased: set[Node] = set()
        self.reasons: dict[tuple[str, Node], str] = {}
        self.refused: list[tuple[Candidate, str]] = []
        self.notes: list[Note] = []
        self.mutations, self.needed = mutations(self.graph), needed(self.graph)
        self.same = equal_values(self.graph, {*self.mutations, *mutated_later})

    def run(self) -> list[Note]:
        for node in reversed(list(self.graph.nodes)):
            if node in self.needed and node not in self.erased and node.op == "call_function":
                self._try_at(node)
        self._note_what_is_left()
        return self.notes

    def _try_at(self, node: Node) -> None:
        candidates = [candidate for rule in self.rules if (candidate := self._looked_for(rule, node)) is not None]
        for candidate in sorted(candidates, key=lambda candidate: -len(set(candidate.match.nodes))):
            try:
                self._replace(candidate)
            except NoMatch as why:
                self._refuse(candidate, str(why))
            else:
                return

    def _looked_for(self, rule: RewriteRule, node: Node) -> Candidate | None:
        try:
            return self._match(rule, node)
        except Exception as error:  # a pattern's fault costs its match
            why = _raised(rule, error)
            self.refused.append((Candidate(rule, Match(nodes=(node,)), [node]), why))
            return None

    def _refuse(self, candidate: Candidate, why: str) -> None:
        self.refused.append((candidate, why))
        for inner in candidate.match.nodes:
            self.reasons.setdefault((candidate.rule.name, inner), why)

    def _match(self, rule: RewriteRule, node: Node) -> Candidate | None:
        if cast_of(node) is not None and not is_narrowing(node):
            return None  # what was computed was rounded before it was widened
        first, *others = rule.pattern.results
        for match in find(first, node, Match(same=self.same)):
            if node not in match.nodes:
                continue
            candidate: Candidate | None = Candidate(rule, match, [node])
            for pattern in others:
                candidate = self._with_another_result(candidate, pattern)
                if candidate is None:
                    break
            else:
                return candidate
        return None

    def _with_another_result(self, candidate: Candidate, pattern: Any) -> Candidate | None:
        if isinstance(pattern, str):
            return Candidate(candidate.rule, candidate.match, [*candidate.results, candidate.match.values[pattern]])
        taken = set(candidate.match.nodes)
        other = candidate.results[0].prev
        while other.op != "root":
            if other not in taken and other in self.needed:
                for match in find(pattern, other, candidate.match):
                    if other in match.nodes:
                        return Candidate(candidate.rule, match, [*candidate.results, other])
            other = other.prev
        return None

    def _replace(self, candidate: Candidate) -> None:
        returned = self._require_alone(candidate)
        last = self._place_for(candidate)
        self._require_order_of_draws(candidate, last)
        self._require_unmutated(candidate, last)
        pattern, builder = (
            candidate.rule.pattern,
            ReplacementBuilder(candidate.rule, candidate.results[0], last, self.same),
        )
        try:
            new = (
                pattern.build(builder, candidate.match.values)
                if pattern.build
                else builder(candidate.rule.overload, **candidate.match.values)
            )
            news = list(new) if isinstance(new, tuple | list) else [new]
            news = [builder.as_before(result, node) for result, node in zip(candidate.results, news, strict=True)]
            if not set(candidate.match.nodes).isdisjoint(
                node for made in builder.made for node in made.all_input_nodes
            ):
                raise NoMatch("something that it computes on the way is one of its inputs too")
            self._require_own_memory(candidate, news)
            untried = self._tried(candidate, builder, news)
            stand_ins = [
                pattern.stand_in(builder, candidate.match.values, node) for node in returned if pattern.stand_in
            ]
        except NoMatch:
            builder.undo()
            raise
        except Exception as error:  # a fault of the replacement costs the match too
            builder.undo()
            raise NoMatch(_raised(candidate.rule, error)) from error
        for node, stand_in in zip(returned, stand_ins, strict=True):
            node.replace_all_uses_with(stand_in, delete_user_cb=lambda user: user.op == "output")
        self.needed.update(builder.made)
        for result, node in zip(candidate.results, news, strict=True):
            node.meta["needs_grad"] = result.meta.get("needs_grad", False)
            result.replace_all_uses_with(node)
            for (name, node_of), why in list(self.reasons.items()):
                if node_of is result:
                    self.reasons[name, node] = why
        self.notes.append(Note(candidate.rule.name, main_module(candidate), untried=untried))
        self._erase_unread(candidate)

    def _require_own_memory(self, candidate: Candidate, news: list[Node]) -> None:
        """Check that a result shares memory with another result or an input only where it did before."""
        for i, (old, new) in enumerate(zip(candidate.results, news, strict=True)):
            if self._leaves_by_another_way(old):
                raise NoMatch("its result shares memory with something else that is returned")
            others = [*zip(candidate.results[:i], news[:i], strict=True), *((node, node) for node in candidate.inputs)]
            for old_other, new_other in others:
                if storages(old).isdisjoint(storages(old_other)) and not storages(new).isdisjoint(storages(new_other)):
                    raise NoMatch("its result would share memory that the operator's does not share")

    def _leaves_by_another_way(self, result: Node) -> bool:
        """Return True if a result's memory is returned through the result and through a node that is no view of it."""
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

    def _tried(self, candidate: Candidate, builder: ReplacementBuilder, news: list[Node]) -> str:
        """Try if the replacement computes the same, and return the reason if it could not be tried.

        Raises:
            NoMatch: It computes something else.
        """
        if not self.verify:
            return "verify=False"
        try:
            differs = cached_difference(candidate.rule.pattern, candidate.match, builder.made, candidate.results, news)
        except Untried as why:
            return str(why)
        if differs is not None:
            raise NoMatch(differs)
        return ""

    def _place_for(self, candidate: Candidate) -> Node:
        """Return the node after which the operator stands, and before which nobody reads its results.

        Raises:
            NoMatch: A result is read before all that the operator takes is there.
        """
        last, inner = self._last_needed(candidate), set(candidate.match.nodes)
        first = min((user for result in candidate.results for user in result.users if user not in inner), default=None)
        if first is not None and first <= last:
            if not bring_before(first, {last, *candidate.inputs}, candidate.results):
                raise NoMatch("one of its results is read before all that it takes is there")
            last = self._last_needed(candidate)
        return last

    @staticmethod
    def _last_needed(candidate: Candidate) -> Node:
        """Return the operator's first result, or a later input or random draw."""
        random = [node for node in candidate.match.nodes if is_random(node)]
        last = max([*candidate.inputs, *random, min(candidate.results)])
        while last.next.op == "placeholder":
            last = last.next
        return last

    def _require_order_of_draws(self, candidate: Candidate, last: Node) -> None:
        """Check that no other node draws random numbers between those of the match and the operator."""
        inner = set(candidate.match.nodes)
        drawn = [node for node in inner if is_random(node)]
        others = (node for node in self.graph.nodes if is_random(node) and node not in inner)
        if drawn and any(min(drawn) < node <= last for node in others):
            raise NoMatch("something else draws random numbers in its midst")

    def _require_alone(self, candidate: Candidate) -> list[Node]:
        """Check that nobody else reads the nodes on the way, and return those that are returned and need not be."""
        inner, returned = set(candidate.match.nodes), []
        may_drop = candidate.rule.pattern.stand_in is not None and candidate.results[0].meta.get("needs_grad", False)
        read: dict[Node, Node] = {}  # nodes that stay, and who reads them
        for node in sorted(inner - set(candidate.results), reverse=True):
            readers = [user for user in node.users if user in self.needed and (user not in inner or user in read)]
            if readers and may_drop and node in self.droppable and all(user.op == "output" for user in readers):
                returned.append(node)
            elif readers:
                reader = readers[0]
                read[node] = read.get(reader, reader)
                if not is_cheap(node):
                    is_returned = read[node].op == "output"
                    hint = DROPPED if is_returned and candidate.rule.pattern.stand_in else ""
                    how = "returned" if is_returned else "read elsewhere"
                    raise NoMatch(f"{name_of(node)} on the way is {how} too{hint}")
        return returned

    def _require_unmutated(self, candidate: Candidate, last: Node) -> None:
        """Check that memory holds the same where the match reads it, after `last` and in the backward pass."""
        inner = set(candidate.match.nodes)
        taken = set[int]().union(*map(storages, candidate.inputs))
        touched = taken.union(*map(storages, inner))
        if candidate.results[0].meta.get("needs_grad", False) and not touched.isdisjoint(self.mutated_later):
            raise NoMatch("something that it reads is written in place later")
        for storage in self.mutations.keys() & touched:
            sharing = [node for node in self.graph.nodes if storage in storages(node)]
            readers = [node for node in inner if not {node, *node.all_input_nodes}.isdisjoint(sharing)]
            # Memory that no node reads any more may be read in the backward pass, if a reader has saved it.
            read_later = storage in taken or any(node.meta.get("needs_grad", False) for node in readers)
            writers = [node for node in self.mutations[storage] if read_later or node in self.needed]
            if inner.issuperset([*sharing, *writers]):  # nobody else has it: no old value is read after a write
                fine = not any(node < writer < user for writer in writers for node in sharing for user in node.users)
            else:
                fine = all(writer <= last and writer < reader for writer in writers for reader in readers)
            if not fine:
                raise NoMatch("something that it reads is written in place")

    def _erase_unread(self, candidate: Candidate) -> None:
        """Erase the nodes that were replaced and nothing else: other dead nodes are for Inductor to find."""
        for node in sorted(set(candidate.match.nodes), reverse=True):
            if not node.users and node.op == "call_function":
                self.graph.erase_node(node)
                self.erased.add(node)

    def _note_what_is_left(self) -> None:
        noted: set[tuple[str, Node]] = set()
        for candidate, why in self.refused:
            name, places = candidate.rule.name, {(candidate.rule.name, node) for node in candidate.match.nodes}
            if not self.erased.intersection(candidate.match.nodes) and not places & noted:
                self.notes.append(Note(name, main_module(candidate), why))
                noted |= places
        for node in (node for node in self.graph.nodes if node in self.needed):
            for rule in self.rules:
                name, sign = rule.name, name_of(node)
                if sign not in rule.pattern.anchor_ops or (name, node) in noted:
                    continue
                why = self.reasons.get((name, node)) or rule.pattern.why_left(node)
                if why:
                    why = NO_CONSTANT if reads_symbolic_float(node) else why
                    noted.add((name, node))
                    self.notes.append(Note(name, module_of(node), f"{sign}: {why}"))


DROPPED = " (drop_logits=True gives it up, where the model is one graph)"


def reads_symbolic_float(node: Node, steps: int = 3) -> bool:
    """Return True if a node, or one so many steps from it, reads a number that is no constant."""
    near = {node}
    for _ in range(steps):
        near |= {x for y in near if y.op == "call_function" for x in (*y.all_input_nodes, *y.users)}
    return any(isinstance(value_of(x), SymFloat) for x in near)


def _raised(rule: RewriteRule, error: Exception) -> str:
    reason = f"its rule raised {type(error).__name__}: {error}".splitlines()[0]
    warn_once(f"torch.compile(backend='llmk') leaves {rule.name} as it is: {reason}. Please report it to llmk.")
    return reason


def main_module(candidate: Candidate) -> str:
    """Return the module that most of the computation is in."""
    modules = Counter(map(module_of, candidate.match.nodes))
    return max(modules, key=lambda path: (modules[path], -len(path)))


def is_cheap(node: Node) -> bool:
    """Return True if it costs nothing to compute the node twice: a view, a cast, an item of a tuple."""
    return cast_of(node) is not None or is_view(node)
