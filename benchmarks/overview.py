"""`python -m benchmarks.overview [--out FOLDER]`: the chart that opens README and the documentation, light and dark.

Time and memory of a training step, and of a loss that TRL computes too, beside the other ways of the same run: no group
of bars mixes two runs. The same results make the same files, byte for byte.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.plot import STYLE, save

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PICTURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "_static"
STEPS, LOSSES = "train-step-h200.json", "losses-beside-peers-h200.json"
MODEL, LOSS, SHAPE = "llama-3.2-1b", "grpo", "8x1024x4096x128256"
STEP_WAYS = {
    "compiled": "PyTorch, compiled",
    "llmk compiled": "llmk, compiled",
    "liger": "Liger {liger-kernel}, eager",
    "llmk": "llmk, eager",
}
LOSS_WAYS = {
    "torch compiled": "PyTorch, compiled",
    "trl": "TRL {trl}",
    "llmk, bfloat16 logits": "llmk, bfloat16 logits",
    "llmk": "llmk",
}
"""The ways shown, by their names in the results; the text in braces is a version."""


@dataclass(frozen=True)
class Look:
    """The colours of a chart."""

    ink: str
    faint: str
    ours: str
    other: str


LOOKS = {
    "light": Look(ink="#1f2328", faint="#59636e", ours="#0072b2", other="#b8bec6"),
    "dark": Look(ink="#e6edf3", faint="#9198a1", ours="#56b4e9", other="#59636e"),
}


@dataclass(frozen=True)
class Group:
    """Ways to compute the same, in one run, with milliseconds and GiB of each."""

    title: str
    bars: dict[str, tuple[float, float]]


def groups() -> list[Group]:
    steps, losses = (json.loads((RESULTS / name).read_text()) for name in (STEPS, LOSSES))
    rows = {row["variant"]: row for row in steps["rows"] if row["model"] == MODEL}
    first = rows["compiled"]
    step = {name.format(**steps["peers"]): (rows[way]["ms"], rows[way]["peak_gib"]) for way, name in STEP_WAYS.items()}
    (ways,) = [row["ways"] for row in losses["rows"] if row["workload"] == f"{LOSS} {SHAPE}"]
    loss = {
        name.format(**losses["peers"]): (ways[way]["ms"], ways[way]["mib"] / 1024) for way, name in LOSS_WAYS.items()
    }
    tokens, vocabulary = (int(SHAPE.split("x")[i]) for i in (1, 3))
    return [
        Group(f"Training step of Llama-3.2-1B, {first['batch_size']} x {first['seq_len']} tokens", step),
        Group(f"GRPO's loss from hidden states, 8 x {tokens} tokens, vocabulary {vocabulary:,}", loss),
    ]


def picture(look: Look) -> Figure:
    """Two groups, one below the other, of bars of time and of memory beside each other."""
    with mpl.rc_context({**STYLE, "figure.facecolor": "none", "axes.facecolor": "none"}):
        figure = Figure((5.4, 3.8))
        figure.text(0.31, 0.972, "milliseconds", color=look.faint, va="center")
        figure.text(0.68, 0.972, "peak memory, GiB", color=look.faint, va="center")
        for group, bottom in zip(groups(), (0.57, 0.125), strict=True):
            figure.text(0.01, bottom + 0.345, group.title, color=look.ink, weight="bold", va="center")
            for index, (left, text) in enumerate(((0.31, "{:.0f}"), (0.68, "{:.1f}"))):
                axes = figure.add_axes((left, bottom, 0.25, 0.3))
                _bars(axes, {way: values[index] for way, values in group.bars.items()}, text, look, names=not index)
        figure.text(0.01, 0.045, _about(), color=look.faint, size=7, va="center")
    return figure


def _bars(axes: Axes, values: dict[str, float], text: str, look: Look, names: bool) -> None:
    axes.set(xlim=(0, max(values.values())), ylim=(len(values) - 0.4, -0.6), xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set_visible(False)
    for y, (way, value) in enumerate(values.items()):
        ours = way.startswith("llmk")
        weight = "bold" if ours else "normal"
        axes.barh(y, value, height=0.72, color=look.ours if ours else look.other)
        axes.annotate(
            text.format(value),
            (value, y),
            (4, 0),
            textcoords="offset points",
            va="center_baseline",
            color=look.ink,
            weight=weight,
            annotation_clip=False,
        )
        if names:
            axes.annotate(
                way,
                (0, y),
                (-5, 0),
                textcoords="offset points",
                va="center_baseline",
                ha="right",
                color=look.ink if ours else look.faint,
                weight=weight,
            )


def _about() -> str:
    steps, losses = (json.loads((RESULTS / name).read_text()) for name in (STEPS, LOSSES))
    assert (steps["device"], steps["torch"]) == (losses["device"], losses["torch"])
    torch = steps["torch"].partition("+")[0]
    return (
        "Shorter is better. llmk's logits are float32 where nothing is said; those of all others are bfloat16.\n"
        f"One {steps['device']}, torch {torch}, bfloat16, {steps['date'][:7]}."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overview", description="Draw the chart of README.")
    parser.add_argument("--out", type=Path, default=PICTURES, metavar="FOLDER", help="docs/_static by default")
    out = parser.parse_args(arguments).out
    for name, look in LOOKS.items():
        save(picture(look), out / f"overview-{name}.svg", f"{STEPS}, {LOSSES}")
        print(out / f"overview-{name}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
