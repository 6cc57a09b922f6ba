"""Draws the graph of the tutorial's model before and after operators were put into it, as boxes of HTML."""

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from llmk.compiler.backend import Backend
from llmk.compiler.patterns import name_of
from llmk.compiler.report import Report
from llmk.compiler.rules import chosen
from llmk.compiler.segments import Segment, segments
from llmk.compiler.trace import traced

TUTORIAL = Path(__file__).parent / "tutorial.md"


def graph_picture() -> str:
    before, after = (_calls(graph) for graph in rewritten_graphs(tutorial_model()))
    boxes = _column(f"Before: {len(before)}", before) + _column(f"After: {len(after)}", after)
    return f'<div class="graphs">{boxes}</div>\n'


def tutorial_model() -> torch.nn.Module:
    """The class in the tutorial's first block."""
    (code, *_) = re.findall(r"^```python\n(.*?)^```$", TUTORIAL.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    return names["Plain"]()


def rewritten_graphs(model: torch.nn.Module) -> tuple[Graph, Graph]:
    """The graph of a model of tokens and targets before and after."""
    graphs: list[Graph] = []

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        (segment,) = (part for part in segments(gm) if isinstance(part, Segment))
        graphs.append(traced(gm, segment).graph)
        Backend(chosen(None, None), (), Report()).rewrite(gm)
        graphs.append(gm.graph)
        return gm

    tokens = torch.zeros(2, 8, dtype=torch.int64, device="cpu")
    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True)(tokens, tokens)
    before, after = graphs
    return before, after


def _calls(graph: Graph) -> list[str]:
    """The names of the operations, in order."""
    return [name for node in graph.nodes if (name := name_of(node))]


def _column(title: str, names: list[str]) -> str:
    boxes = "".join(
        f'<li class="{"ours" if name.startswith("llmk::") else "aten"}">{escape(name.removeprefix("llmk::"))}</li>'
        for name in names
    )
    return f"<div><p>{escape(title)}</p><ol>{boxes}</ol></div>"
