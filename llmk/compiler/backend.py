"""The backend: Dynamo's graph, with llmk's operators in it, for Inductor."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from llmk.compiler import sums
from llmk.compiler.replace import replace_all
from llmk.compiler.report import EVERYTHING, Note, Report, module_of
from llmk.compiler.rules import Rule, all_rules, chosen
from llmk.compiler.stretches import Stretch, stretches, why_it_stays
from llmk.compiler.trace import Modes, NotTraced, checkpoint_body, put_back, returned_alone, traced
from llmk.registry.private import compilers


@dataclass(frozen=True)
class Backend:
    """A backend for `torch.compile`.

    Two with the same settings are equal, so that Dynamo does not compile again for the second.
    """

    operators: frozenset[str]
    config: tuple[tuple[str, Any], ...]
    report: Report = field(compare=False)
    drop_logits: bool = False

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.report.add(self.rewrite(gm))
        config = dict(self.config)
        if sums.NAME in self.operators:
            config = compilers.with_graph_pass(config, sums.accumulate, f"llmk {sums.NAME}")
        return compilers.compile_fx(gm, example_inputs, config_patches=config)

    @property
    def rules(self) -> list[Rule]:
        return [rule for rule in all_rules() if rule.name in self.operators]

    def rewrite(self, gm: GraphModule) -> list[Note]:
        """Put operators into Dynamo's graph, in place, and say what was replaced and what was left."""
        return self._rewrite(gm, self.drop_logits)

    def _rewrite(self, gm: GraphModule, may_drop: bool) -> list[Note]:
        modes, notes = Modes(), []
        with modes.kept():
            for part in stretches(gm):
                if isinstance(part, Stretch):
                    notes += self._rewrite_stretch(gm, part, may_drop)
                else:
                    modes.follow(part)
                    notes += self._rewrite_inside(gm, part)
        for node in gm.graph.nodes:
            node.meta.pop("formula", None)  # what comes next may want to store the graph
        gm.graph.lint()
        gm.recompile()
        return notes

    def _rewrite_stretch(self, gm: GraphModule, stretch: Stretch, may_drop: bool) -> list[Note]:
        if not stretch.has_tensors:
            return []
        try:
            result = traced(gm, stretch)
        except NotTraced as why:
            return [Note("all", module_of(stretch.nodes[0]), str(why))]
        notes = replace_all(result, self.rules, returned_alone(stretch, result) if may_drop else ())
        if any(not note.reason for note in notes):
            put_back(gm, stretch, result)
        return notes

    def _rewrite_inside(self, gm: GraphModule, node: Node) -> list[Note]:
        body = checkpoint_body(gm, node)
        if body is not None:
            return self._rewrite(body, may_drop=False)
        why = why_it_stays(node)
        return [] if why is None else [Note("all", module_of(node), why)]


def llmk(
    gm: GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """What `torch.compile(backend="llmk")` calls, with its `mode` and `options` as Inductor takes them."""
    config = tuple(sorted(compilers.config_of(mode, options, None).items()))
    return Backend(chosen(None, None), config, EVERYTHING)(gm, example_inputs)


def compile(
    model: Any,
    *,
    only: Collection[str] | None = None,
    without: Collection[str] | None = None,
    report: Report | None = None,
    drop_logits: bool = False,
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
        report: What is found is noted there instead of in `llmk.compile_report()`.
        drop_logits: Logits that are returned beside their loss do not hinder `fused_linear_ce`: while gradients are
            wanted, a tensor without classes, `[..., 0]`, is returned in their place.
        mode: As for `torch.compile`, and so are the three below.
        dynamic: Whether sizes are symbolic from the start.
        fullgraph: Whether a graph break is an error.
        options: Settings of Inductor.

    Returns:
        What `torch.compile` returns.

    Raises:
        ValueError: An operator is not one that the backend finds.
        TypeError: `only` or `without` is a string.
    """
    config = tuple(sorted(compilers.config_of(mode, options, dynamic).items()))
    backend = Backend(chosen(only, without), config, EVERYTHING if report is None else report, drop_logits)
    return torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=fullgraph)


def compile_report() -> Report:
    """What was replaced in the graphs compiled so far, what was left and why; its text is a table."""
    return EVERYTHING
