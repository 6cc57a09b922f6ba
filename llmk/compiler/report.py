"""The report: places that the backend replaced in the graphs it compiled, those it left, and the reasons."""

import functools
import re
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.fx import Node

from llmk.registry.private.compilers import as_compiled

WIDTH = 80


@dataclass(frozen=True)
class Note:
    """One place of a graph.

    Attributes:
        operator: The operator that is there now, or that the place looks like.
        module: The module it is in.
        reason: The reason for which the place was left, or nothing.
        untried: The reason for which the replacement could not be tried first, or nothing.
    """

    operator: str
    module: str
    reason: str = ""
    untried: str = ""


@dataclass(frozen=True, eq=False)
class GraphNotes:
    """The notes on one graph."""

    notes: tuple[Note, ...]


@dataclass
class Report:
    """Notes on all graphs that were compiled or run with it.

    Attributes:
        graphs: The number of graphs. A graph that is compiled again, for other sizes, counts again.
        notes: Each note, and the number of times it was made.
        entered: The compiled graphs whose notes are there.
    """

    graphs: int = 0
    notes: Counter[Note] = field(default_factory=Counter)
    entered: set[GraphNotes] = field(default_factory=set, repr=False, compare=False)

    @property
    def replaced(self) -> dict[str, int]:
        """The number of times that each operator was put in."""
        found: Counter[str] = Counter()
        for note, count in self.notes.items():
            if not note.reason:
                found[note.operator] += count
        return dict(sorted(found.items()))

    @property
    def left(self) -> list[Note]:
        """The notes on what was left."""
        return [note for note in self.notes if note.reason]

    def add(self, notes: Iterable[Note]) -> None:
        self.graphs += 1
        self.notes.update(notes)

    def enter(self, graph: GraphNotes) -> None:
        """Add the notes on a compiled graph, once."""
        if graph not in self.entered:
            self.entered.add(graph)
            self.add(graph.notes)

    def clear(self) -> None:
        """Forget all that was noted. A compiled graph that runs again is noted again."""
        self.graphs = 0
        self.notes.clear()
        self.entered.clear()

    def __str__(self) -> str:
        rows = Counter[tuple[str, str, str]]()
        for note, count in self.notes.items():
            rows[(note.operator, _any_layer(note.module), note.reason)] += count
        replaced = [(row, count) for row, count in sorted(rows.items()) if not row[2]]
        left = [(row, count) for row, count in sorted(rows.items()) if row[2]]
        graphs = f"{self.graphs} graph{'' if self.graphs == 1 else 's'}"
        lines = [f"llmk in {graphs}: {sum(count for _, count in replaced)} places replaced"]
        if replaced:
            width = max(len(name) for (name, _, _), _ in replaced)
            lines += [f"  {'operator':{width}}  count  module"]
            lines += [_cut(f"  {name:{width}}  {count:5}  {module}") for (name, module, _), count in replaced]
        untried = Counter({note: count for note, count in self.notes.items() if note.untried})
        if untried:
            lines.append("replaced without a trial:")
            for note, count in untried.items():
                lines += [_cut(f"  {note.operator}  {count} in {_any_layer(note.module)}"), *_wrapped(note.untried)]
        if left:
            lines += ["left as they were:"]
            for (name, module, reason), count in left:
                lines += [_cut(f"  {name}  {count} in {module}"), *_wrapped(reason)]
        return "\n".join(lines)


@functools.cache
def warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def module_of(node: Node) -> str:
    """Return the path of the module whose code made the node, or nothing where the graph does not tell."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    return re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path.removeprefix("L['self']").removeprefix("L['fn']")).strip(".")


def _any_layer(path: str) -> str:
    """Return a path with a star in place of a layer's number."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path) or "-"


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..."


def _wrapped(text: str, indent: str = "      ") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent)


EVERYTHING = Report()
"""The report that `llmk.compile_report()` returns."""
_asked: ContextVar[Report | None] = ContextVar("_asked", default=None)
"""The report of the `llmk.compile` whose function runs."""


def noted(compiled: Callable[..., Any], notes: Iterable[Note], report: Report) -> Callable[..., Any]:
    """Enter the notes on a compiled graph into a report, and into those with which the graph runs.

    Dynamo runs a graph for every function with the same code and settings, whoever had it compiled.
    """
    graph = GraphNotes(tuple(notes))
    report.enter(graph)

    @functools.wraps(compiled)
    def run(*args: Any) -> Any:
        (_asked.get() or report).enter(graph)
        return compiled(*args)

    return run


def with_report(compiled: Any, report: Report) -> Any:
    """Return what `torch.compile` has given, such that graphs that run in it are entered into this report."""
    if isinstance(compiled, nn.Module):
        compiled.forward = _asking(compiled.forward, report)
        return compiled
    return compiled if isinstance(compiled, type) else as_compiled(_asking(compiled, report))


def _asking(call: Callable[..., Any], report: Report) -> Callable[..., Any]:
    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        token = _asked.set(report)
        try:
            return call(*args, **kwargs)
        finally:
            _asked.reset(token)

    return run
