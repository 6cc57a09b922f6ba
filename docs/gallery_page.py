"""Draws what the backend made of twenty models' graphs, and one graph before and after, for the gallery's page."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import networkx
import torch
from graph_picture import rewritten_graphs, tutorial_model
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch.fx import Graph, Node

from llmk.compiler.patterns import name_of

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # benchmarks/ is not installed

from benchmarks.plot import FAINT, INK, STYLE  # noqa: E402 the path comes first

FOUND = Path(__file__).parent / "gallery.json"
COLOURS = {
    "rms_norm": "#56b4e9",
    "add_rms_norm": "#0072b2",
    "layer_norm": "#003f5c",
    "rope": "#e69f00",
    "swiglu": "#009e73",
    "geglu": "#009e73",
    "moe_experts": "#cc79a7",
    "fused_linear_ce": "#d55e00",
}
"""The colours by operator; others are black. Okabe and Ito's palette, which colour-blind readers tell apart."""
OTHER = "#c9ced4"
OURS_BOX, OTHERS_BOX = {"facecolor": "#d5e8f5", "edgecolor": "#0072b2"}, {"facecolor": "#f2f3f5", "edgecolor": OTHER}


def draw_gallery(folder: Path) -> None:
    """Write `folder/gallery.svg` and `folder/graph.svg`."""
    folder.mkdir(exist_ok=True)
    with mpl.rc_context(STYLE):
        for name, figure in (("gallery", _gallery()), ("graph", _graph())):
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": "docs/gallery_page.py"})


def gallery_table() -> str:
    """Every model: how many operations its graph had, how many it has, and which are llmk's."""
    found = json.loads(FOUND.read_text())
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines = [f"{versions}:", "", "| model | before | after | llmk's |", "|---|---|---|---|"]
    for model, graphs in found["models"].items():
        ours = [name for name in graphs["after"] if isinstance(name, str)]
        counts = ", ".join(f"{ours.count(name)} `{name}`" for name in dict.fromkeys(ours))
        lines.append(f"| {model} | {graphs['before']} | {_length(graphs['after'])} | {counts} |")
    return "\n".join(lines) + "\n"


def _length(after: Sequence[str | int]) -> int:
    return sum(1 if isinstance(run, str) else run for run in after)


def _gallery() -> Figure:
    """Draw two bars for each model, an operation as wide as another: before, and after with llmk's in colour."""
    models: dict[str, Any] = json.loads(FOUND.read_text())["models"]
    figure = Figure((6.4, 0.36 * len(models) + 1.0))
    axes = figure.add_axes((0.16, 0.55 / figure.get_figheight(), 0.82, 1 - 1.0 / figure.get_figheight()))
    for y, graphs in enumerate(models.values()):
        axes.barh(y - 0.2, graphs["before"], height=0.26, color=OTHER)
        left = 0
        for run in graphs["after"]:
            width = 1 if isinstance(run, str) else run
            colour = COLOURS.get(run, INK) if isinstance(run, str) else OTHER
            edge = 0.8 if isinstance(run, str) else 0  # an operation is thin
            axes.barh(y + 0.14, width, left=left, height=0.36, color=colour, edgecolor=colour, linewidth=edge)
            left += width
    axes.set(ylim=(len(models) - 0.4, -0.6), yticks=range(len(models)), yticklabels=models)
    axes.tick_params(colors=INK, length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("operations in the graph: before, and below it after", color=FAINT)
    used = {run for graphs in models.values() for run in graphs["after"]}
    shown = {colour: name for name, colour in COLOURS.items() if name in used}
    names = {"swiglu": "swiglu, geglu", "geglu": "swiglu, geglu"}
    handles = [Patch(color=colour, label=names.get(name, name)) for colour, name in shown.items()]
    figure.legend(handles=handles, loc="upper left", ncols=4, frameon=False, handlelength=1.0)
    return figure


def _graph() -> Figure:
    """The graph of the tutorial's model before and after: a box an operation, an arrow a tensor."""
    layouts = [_placed(graph) for graph in rewritten_graphs(tutorial_model())]
    tallest = max(y for nodes, _ in layouts for _, y in nodes.values()) + 1
    height = 0.34 * tallest + 0.4
    figure = Figure((6.4, height))
    for title, left, (places, edges) in zip(("before", "after"), (0.0, 0.5), layouts, strict=True):
        axes = figure.add_axes((left, 0, 0.5, 1 - 0.35 / height))
        axes.set(xlim=(-1.6, 1.6), ylim=(tallest - 0.4, -0.6))
        axes.axis("off")
        title = f"{title}: {len(places)} operations"
        figure.text(left + 0.25, 1 - 0.2 / height, title, ha="center", weight="bold")
        for source, target in edges:
            arrow = {"arrowstyle": "->", "color": FAINT, "linewidth": 0.7, "shrinkA": 8, "shrinkB": 8}
            axes.annotate("", places[target], places[source], arrowprops=arrow)
        for node, place in places.items():
            ours = name_of(node).startswith("llmk::")
            box = {"boxstyle": "round,pad=0.25"} | (OURS_BOX if ours else OTHERS_BOX)
            text = name_of(node).removeprefix("llmk::")
            axes.text(*place, text, ha="center", va="center", size=8, bbox=box, weight="bold" if ours else "normal")
    return figure


def _placed(graph: Graph) -> tuple[dict[Node, tuple[float, float]], list[tuple[Node, Node]]]:
    """Place each operation one row above the highest that reads it, and return which reads which."""
    reads = networkx.DiGraph()
    for node in graph.nodes:
        if name_of(node):
            reads.add_node(node)
            reads.add_edges_from((source, node) for source in _sources(node))
    places: dict[Node, tuple[float, float]] = {}
    rows = [sorted(row, key=list(graph.nodes).index) for row in networkx.topological_generations(reads.reverse())]
    for y, row in enumerate(reversed(rows)):
        places |= {node: (1.3 * (x - (len(row) - 1) / 2), float(y)) for x, node in enumerate(row)}
    return places, list(reads.edges)


def _sources(node: Node) -> set[Node]:
    """The operations that a node reads, through what only takes a part of a result."""
    found = set[Node]()
    for source in node.all_input_nodes:
        found |= {source} if name_of(source) else _sources(source)
    return found


if __name__ == "__main__":
    torch.manual_seed(0)
    draw_gallery(Path(sys.argv[1]))
