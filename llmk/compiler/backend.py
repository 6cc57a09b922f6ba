"""The backend: Dynamo's graph, with llmk's operators in it, for Inductor."""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from llmk.compiler.effects import MutationsElsewhere
from llmk.compiler.replace import replace_all
from llmk.compiler.report import EVERYTHING, Note, Report, module_of, noted, warn_once, with_report
from llmk.compiler.rules import RewriteRule, all_rules, chosen
from llmk.compiler.segments import Segment, segments, why_it_stays
from llmk.compiler.trace import Modes, NotTraced, checkpoint_body, pairs_of, put_back, returned_alone, traced
from llmk.registry import check_flag
from llmk.registry.private import compilers
from llmk.registry.private.modes import saved_tensors_unhooked


@dataclass(frozen=True)
class Backend:
    """A backend for `torch.compile`.

    Two with the same settings are equal, so that Dynamo does not compile again for the second: the graphs of the first
    are entered into the second's report when they run.
    """

    operators: frozenset[str]
    config: tuple[tuple[str, Any], ...]
    report: Report = field(compare=False)
    drop_logits: bool = False
    verify: bool = True

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        before, notes = _graphs_of(gm), self.rewrite(gm)
        compiled = self._through_inductor(gm, example_inputs)
        if isinstance(compiled, Exception):  # whatever raised, the replacements must not be the reason
            error, put_in = compiled, sorted({note.operator for note in notes if not note.reason})
            if not put_in:
                raise error
            compiled, notes = self._without_some(gm, example_inputs, before, put_in)
            notes = [*notes, _failure("Inductor on what was put in", error)]
        compilers.forget_specialized_floats()
        return noted(compiled, notes, self.report)

    def _through_inductor(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any] | Exception:
        try:
            return compilers.compile_fx(gm, example_inputs, config_patches=dict(self.config))
        except compilers.restart_exception():  # Dynamo begins again
            raise
        except Exception as error:
            return error

    def _without_some(
        self, gm: GraphModule, example_inputs: Sequence[Any], before: Mapping[GraphModule, Graph], put_in: Sequence[str]
    ) -> tuple[Callable[..., Any], list[Note]]:
        """Compile the graph without the one operator that Inductor fails on, or as it was where there are several."""
        for name in put_in if len(put_in) > 1 else ():
            _restore(before)
            fewer = replace(self, operators=self.operators - {name})
            notes = fewer.rewrite(gm)
            compiled = fewer._through_inductor(gm, example_inputs)
            if not isinstance(compiled, Exception):
                return compiled, notes
        _restore(before)
        return compilers.compile_fx(gm, example_inputs, config_patches=dict(self.config)), []

    @property
    def rules(self) -> list[RewriteRule]:
        return [rule for rule in all_rules() if rule.name in self.operators]

    def rewrite(self, gm: GraphModule) -> list[Note]:
        """Put operators into Dynamo's graph, in place, and return notes on what was replaced and what was left.

        A graph on which anything raises is as it was before. Dynamo calls a backend in none of the caller's modes, but
        under its hooks on saved tensors.
        """
        may_drop = self.drop_logits and compilers.computes_a_whole_call(gm)
        with saved_tensors_unhooked():
            return self._guarded(gm, lambda: MutationsElsewhere(gm), may_drop)

    def _guarded(self, gm: GraphModule, elsewhere: Callable[[], MutationsElsewhere], may_drop: bool) -> list[Note]:
        before = _copy_of(gm.graph)
        try:
            return self._rewrite(gm, elsewhere(), may_drop)
        except Exception as error:  # a fault of ours must cost speed alone
            for node in before.nodes:
                node.meta.pop("made", None)
            gm.graph = before
            return [_failure("the backend", error)]

    def _rewrite(self, gm: GraphModule, elsewhere: MutationsElsewhere, may_drop: bool) -> list[Note]:
        modes, notes = Modes(), []
        with modes.kept():
            for part in segments(gm):
                if isinstance(part, Segment):
                    notes += self._rewrite_segment(gm, part, elsewhere, may_drop)
                else:
                    modes.follow(part)
                    notes += self._rewrite_inside(gm, part, elsewhere)
        for node in gm.graph.nodes:
            node.meta.pop("made", None)  # what comes next may want to store the graph
        gm.graph.lint()
        gm.recompile()
        return notes

    def _rewrite_segment(
        self, gm: GraphModule, segment: Segment, elsewhere: MutationsElsewhere, may_drop: bool
    ) -> list[Note]:
        if not segment.has_tensors:
            return []
        try:
            result = traced(gm, segment)
        except NotTraced as why:
            return [Note("all", module_of(segment.nodes[0]), str(why))]
        mutated_later = elsewhere.after(pairs_of(segment, result), result.graph)
        droppable = returned_alone(segment, result) if may_drop else ()
        notes = replace_all(result, self.rules, mutated_later, droppable, self.verify)
        if any(not note.reason for note in notes):
            put_back(gm, segment, result)
        return notes

    def _rewrite_inside(self, gm: GraphModule, node: Node, elsewhere: MutationsElsewhere) -> list[Note]:
        body = checkpoint_body(gm, node)
        if body is not None:
            return self._guarded(body, lambda: elsewhere, may_drop=False)
        why = why_it_stays(node)
        return [] if why is None else [Note("all", module_of(node), why)]


def _graphs_of(gm: GraphModule) -> dict[GraphModule, Graph]:
    """Return copies of a module's graph and of the graphs inside it, which a rewriting may change."""
    return {module: _copy_of(module.graph) for module in gm.modules() if isinstance(module, GraphModule)}


def _restore(before: Mapping[GraphModule, Graph]) -> None:
    for module, graph in before.items():
        module.graph = _copy_of(graph)


def _copy_of(graph: Graph) -> Graph:
    """Return a copy with the attributes that Dynamo sets on nodes besides `meta`, such as a placeholder's origin."""
    copied = copy.deepcopy(graph)
    for node, again in zip(graph.nodes, copied.nodes, strict=True):
        vars(again).update({name: value for name, value in vars(node).items() if name not in vars(again)})
    return copied


def _failure(what: str, error: Exception) -> Note:
    reason = f"{what} raised {type(error).__name__}: {error}".splitlines()[0]
    warn_once(f"{reason}: it compiles without. Please report it to llmk.")
    return Note("all", "", reason)


def llmk(
    gm: GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile a graph for `torch.compile(backend="llmk")`, with `mode` and `options` as Inductor takes them.

    Those of `OWN` in `options` are the arguments of `compile`: `Module.compile` and a trainer hand on nothing else.
    """
    given = options or {}
    own = {name: value for name, value in given.items() if name in OWN}
    config = _config_of(mode, {name: value for name, value in given.items() if name not in OWN}, None)
    operators = chosen(own.pop("only", None), own.pop("without", None))
    for name, value in own.items():
        check_flag(f"options[{name!r}]", value)
    return Backend(operators, config, EVERYTHING, **own)(gm, example_inputs)


OWN = ("only", "without", "drop_logits", "verify")
"""The options of `torch.compile(backend="llmk", options=...)` besides settings of Inductor."""


def _config_of(mode: str | None, options: dict[str, Any] | None, dynamic: bool | None) -> tuple[tuple[str, Any], ...]:
    try:
        return tuple(sorted(compilers.config_of(mode, options, dynamic).items()))
    except RuntimeError as error:  # Inductor's, which lists its hundreds of settings
        what = str(error).partition(", known ")[0]
        ours = f"{', '.join(OWN)} are arguments of llmk.compile, and options of backend='llmk'"
        raise ValueError(f"options: expected settings of Inductor: {what}; {ours}") from error


def compile(
    model: Any,
    *,
    only: Collection[str] | None = None,
    without: Collection[str] | None = None,
    report: Report | None = None,
    drop_logits: bool = False,
    verify: bool = True,
    mode: str | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    options: dict[str, Any] | None = None,
) -> Any:
    """`torch.compile(model)` with llmk's operators where the model's graph computes what they compute.

    Args:
        model: A module or a function, as for `torch.compile`.
        only: The operators to look for, by name; all that the backend knows without it.
        without: Operators not to look for.
        report: It gets the notes in place of `llmk.compile_report()`.
        drop_logits: Logits that are returned beside their loss do not hinder `fused_linear_ce`: while gradients are
            wanted, a tensor without classes, `[..., 0]`, is returned in their place. A model whose graph breaks keeps
            them, as what one of its graphs gives another may read.
        verify: Each replacement is tried on small inputs on the CPU first, and left where it does not compute the same.
        mode: As for `torch.compile`, and so are the three below.
        dynamic: Sizes are symbolic from the start.
        fullgraph: A graph break is an error.
        options: Settings of Inductor.

    Returns:
        The compiled model, as from `torch.compile`.

    Raises:
        ValueError: An operator is not one that the backend finds, or an option is none of Inductor's.
        TypeError: `only` or `without` is a string.
    """
    config = _config_of(mode, options, dynamic)
    backend = Backend(chosen(only, without), config, EVERYTHING if report is None else report, drop_logits, verify)
    compiled = torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=fullgraph)
    return with_report(compiled, backend.report)


def compile_report() -> Report:
    """Return the report on all graphs so far: replaced places, those left and the reasons. Its text is a table."""
    return EVERYTHING
