"""`python -m benchmarks.plot RESULTS.json ... [--out FOLDER]`: draw what was measured, as SVG files.

Of `benchmarks.run`'s results: for each operator, `NAME.svg` has a bar for every way to compute each workload, as a
multiple of its floor, and `NAME-memory.svg` has a fused loss's peak memory. Of `benchmarks.growth`'s
and `benchmarks.moe`'s results: `NAME-SIZE.svg` has time and memory against one size. Of `benchmarks.plans`' results:
`fused_linear_ce-plans.svg` has a point for each plan beside the chosen one. Of `benchmarks.train_step`'s results:
`train-step.svg` and `train-step-memory.svg` have a bar for every variant of each model. The same results make the same
files, byte for byte.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from benchmarks.plans import BEATEN
from benchmarks.step_report import losses_are_wrong
from benchmarks.targets import PRODUCTS, measured_ms

COLOURS = {
    "llmk eager": "#0072b2",
    "llmk compiled": "#56b4e9",
    "llmk backend": "#003f5c",
    "llmk skip_ignored": "#56b4e9",
    "llmk linear_logprobs skip_ignored": "#003f5c",
    PRODUCTS: "#d8d8d8",
    "torch compiled": "#8c8c8c",
    "torch eager": "#b8b8b8",
    "torch linear_cross_entropy": "#4d4d4d",
    "torch linear_cross_entropy chunked": "#f0e442",
    "grouped_mm compiled": "#8c8c8c",
    "grouped_mm eager": "#b8b8b8",
    "quack-kernels": "#009e73",
    "quack-kernels linear": "#009e73",
    "liger-kernel": "#d55e00",
    "liger-kernel cute": "#e69f00",
    "liger compiled": "#e69f00",
    "cut-cross-entropy": "#cc79a7",
    "fla-core": "#b3a534",
}
"""The colours of ways, in bars' order: Okabe and Ito's palette, which colour-blind readers tell apart, and greys."""

OTHER_NAMES = {"eager": "torch eager", "compiled": "torch compiled", "llmk": "llmk eager", "liger": "liger-kernel"}
"""The names in charts of ways that `benchmarks.train_step` and `benchmarks.ignored` call otherwise."""

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "llmk",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#555555",
    "figure.facecolor": "white",  # pages in dark mode show a white card
}
WIDTH = 6.4  # inches; a page shows 96 pixels to each, a phone about 70
LINE = 0.17  # inches from one bar to the next
LIMIT = 3.0  # bars end here, so that 1.05 and 1.15 can be told apart
LAUNCH_MS = 0.01  # a floor below what a launch takes says nothing
INK, FAINT = "#222222", "#666666"
LEGEND: dict[str, Any] = {"loc": "lower right", "ncols": 2, "frameon": False, "columnspacing": 1.4, "handlelength": 1.5}


@dataclass(frozen=True)
class Bar:
    way: str
    value: float | None  # None: there is only the text
    text: str


@dataclass(frozen=True)
class Bars:
    """A chart: bars in titled groups, up to `limit`, with a line at `line` where there is one."""

    title: str
    unit: str
    groups: dict[str, list[Bar]]
    limit: float
    line: float | None = None


def charts(results: dict[str, Any]) -> dict[str, Figure]:
    """Every chart of a file of results, by name.

    Args:
        results: As `benchmarks.run`, `growth`, `ignored`, `moe`, `plans` or `train_step` writes it.

    Raises:
        ValueError: It is none of them, or has a way that has no colour.
    """
    rows = results.get("rows")
    if not rows:
        raise ValueError("results: expected rows as benchmarks.run, growth and train_step write them, got none")
    about = (
        f"{results['device']}, torch {results['torch']}, {results['dtype'].removeprefix('torch.')}, {results['date']}"
    )
    if "plans" in rows[0]:
        with mpl.rc_context(STYLE):
            return {"fused_linear_ce-plans": _plans(rows, about)}
    if {"variant", "share", "top_k"} & rows[0].keys():
        rows = [
            row | {"way": OTHER_NAMES.get(name, name)} for row in rows for name in [row.get("variant", row.get("way"))]
        ]
    unknown = {row["way"] for row in rows} - set(COLOURS)
    if unknown:
        raise ValueError(f"results: expected ways among {', '.join(COLOURS)}, got {', '.join(sorted(unknown))}")
    with mpl.rc_context(STYLE):
        if "against" in rows[0]:
            return {_growth_name(*key): _growth(same, about) for key, same in _by(rows, "op", "against")}
        if "top_k" in rows[0]:
            return {name: _growth(same, about, PRODUCTS) for name, same in _experts(rows)}
        if "share" in rows[0]:
            return {_ignored_name(*key): _ignored(same, about) for key, same in _by(rows, "shape")}
        if "variant" in rows[0]:
            return {name: _draw_bars(chart, about) for name, chart in _steps(rows)}
        figures = {}
        for (op,), same in _by(rows, "op"):
            figures[op] = _draw_bars(_times(op, same), about)
            weighed = [row for row in same if re.fullmatch(r"\d+x\d+x\d+", row["workload"])]
            if op.startswith("fused_linear") and any(row.get("peak_mib") for row in weighed):
                figures[f"{op}-memory"] = _draw_bars(_memory(op, weighed), about)
        return figures


def save(figure: Figure, path: Path, source: str) -> None:
    """Write an SVG that is the same for the same figure; its metadata name the file that it was drawn from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        figure.savefig(path, metadata={"Date": None, "Creator": "benchmarks.plot", "Source": source})


def _by(rows: Iterable[dict[str, Any]], *keys: str) -> Iterator[tuple[tuple[Any, ...], list[dict[str, Any]]]]:
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(tuple(row[key]) if key == "shape" else row[key] for key in keys), []).append(row)
    yield from groups.items()


def _times(op: str, rows: list[dict[str, Any]]) -> Bars:
    if max(row["floor_full_ms"] for row in rows) < LAUNCH_MS:
        return _microseconds(op, rows)
    groups = {}
    for (workload,), same in _by(rows, "workload"):
        bars = [
            _bar(row, measured_ms, row["floor_full_ms"], "{:.2f}*" if _as_called(row, same) else "{:.2f}")
            for row in same
        ]
        groups[f"{workload}: floor {same[0]['floor_full_ms']:.3g} ms"] = bars
    sustained = ", sustained" if rows[0]["bound"] == "matrix" else ""
    called = "  (* no CUDA graph)" if any(bar.text.endswith("*") for bars in groups.values() for bar in bars) else ""
    unit = f"time as a multiple of the floor{sustained}; shorter is better{called}"
    return Bars(f"{op}, forward and backward", unit, groups, _limit(groups, LIMIT), line=1.0)


def _as_called(row: dict[str, Any], same: list[dict[str, Any]]) -> bool:
    """Return True if others ran as CUDA graphs and this one could not: the host's time is in its."""
    replayed = any("replayed_ms" in other for other in same)
    return replayed and "error" not in row and measured_ms(row) == row.get("full_ms")


def _microseconds(op: str, rows: list[dict[str, Any]]) -> Bars:
    groups = {
        str(workload): [_bar(row, measured_ms, 1e-3, "{:.0f}*" if _as_called(row, same) else "{:.0f}") for row in same]
        for (workload,), same in _by(rows, "workload")
    }
    least = min(bar.value for bars in groups.values() for bar in bars if bar.value is not None)
    unit = "microseconds on the device; shorter is better"
    return Bars(f"{op}, forward and backward", unit, groups, _limit(groups, 8 * least))


def _memory(op: str, rows: list[dict[str, Any]]) -> Bars:
    """Peak memory by vocabulary: workloads are named after tokens, hidden size and vocabulary."""
    groups = {}
    for (workload,), same in sorted(_by(rows, "workload"), key=lambda group: int(group[0][0].split("x")[2])):
        N, H, V = (int(size) for size in workload.split("x"))
        measured = [row for row in same if "error" in row or row.get("peak_mib")]
        bars = [_bar(row, lambda row: row["peak_mib"], 1.0, "{:,.0f}") for row in measured if row["way"] != PRODUCTS]
        groups[f"vocabulary {V:,}: {N:,} tokens, hidden size {H:,}"] = bars
    largest = max(bar.value or 0 for bars in groups.values() for bar in bars if bar.way.startswith("llmk"))
    unit = "peak memory above the inputs, MiB; shorter is better"
    return Bars(f"{op}, memory of forward and backward", unit, groups, _limit(groups, 3 * largest))


def _steps(rows: list[dict[str, Any]]) -> Iterator[tuple[str, Bars]]:
    """Time and memory of a training step, by model."""
    measures = [("train-step", "ms", "milliseconds", "Training step of Hugging Face models", "{:.0f}")]
    if any(row.get("peak_gib") for row in rows):  # not on a CPU
        measures.append(("train-step-memory", "peak_gib", "peak memory in GiB", "Memory of a training step", "{:.1f}"))
    for name, key, unit, title, text in measures:
        groups = {}
        for (model, batch, length), same in _by(rows, "model", "batch_size", "seq_len"):
            bars = [
                _bar(row, itemgetter(key), 1.0, f"{text}, wrong loss" if losses_are_wrong(row, same) else text)
                for row in same
            ]
            groups[f"{model}: {batch} x {length} tokens"] = bars
        longest = 1.12 * max(bar.value or 0 for bars in groups.values() for bar in bars)  # room for the text
        yield name, Bars(title, f"{unit}; shorter is better", groups, longest or 1.0)


def _bar(row: dict[str, Any], measured: Callable[[dict[str, Any]], float], unit: float, text: str) -> Bar:
    if "error" in row:
        first = row["error"].strip().splitlines()[0]
        return Bar(row["way"], None, first if len(first) <= 60 else f"{first[:57]}...")
    value = measured(row) / unit
    return Bar(row["way"], value, text.format(value))


def _limit(groups: dict[str, list[Bar]], most: float) -> float:
    return min(most, max(bar.value or 0 for bars in groups.values() for bar in bars)) or most


def _draw_bars(chart: Bars, about: str) -> Figure:
    count = sum(len(bars) + 1.6 for bars in chart.groups.values())
    top, bottom, left, right = 0.32, 0.62, 1.42, 0.5  # inches
    height = top + LINE * count + bottom
    figure = Figure((WIDTH, height))
    box = (left / WIDTH, bottom / height, 1 - (left + right) / WIDTH, LINE * count / height)
    axes = figure.add_axes(box)
    axes.set(xlim=(0, chart.limit), ylim=(count, 0), yticks=[])
    axes.spines["left"].set_visible(False)
    y = 0.0
    for title, bars in chart.groups.items():
        y += 1.1
        start = (0.08 - left) / (WIDTH - left - right)
        axes.text(start, y, title, transform=axes.get_yaxis_transform(), va="center", color=INK, weight="bold")
        if chart.line is not None:
            axes.vlines(chart.line, y + 0.5, y + 0.5 + len(bars), color=INK, linewidth=0.9, linestyle=(0, (2, 2)))
        for bar in sorted(bars, key=lambda bar: list(COLOURS).index(bar.way)):
            y += 1
            _draw_bar(axes, bar, y, chart.limit)
        y += 0.5
    axes.tick_params(colors=FAINT)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set_xlabel(chart.unit, color=INK)
    _caption(figure, chart.title, about)
    return figure


def _draw_bar(axes: Axes, bar: Bar, y: float, limit: float) -> None:
    ours = bar.way.startswith("llmk")
    axes.text(
        -0.01,
        y,
        bar.way,
        transform=axes.get_yaxis_transform(),
        ha="right",
        va="center",
        color=INK if ours else FAINT,
        weight="bold" if ours else "normal",
    )
    if bar.value is None:
        axes.text(
            0.01 * limit,
            y,
            bar.text,
            va="center",
            color="#a00000",
            style="italic",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0},
        )
        return
    shown = min(bar.value, limit)
    axes.barh(y, shown, height=0.78, color=COLOURS[bar.way])
    if bar.value > limit:  # cut: a gap near the end says so
        axes.plot([0.955 * limit, 0.965 * limit], [y + 0.5, y - 0.5], color="white", linewidth=2.5)
    axes.text(shown + 0.01 * limit, y, bar.text, va="center", color=INK, weight="bold" if ours else "normal")


def _experts(rows: list[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Charts of `benchmarks.moe`: the tokens or the experts grow; the floor is the time of the products alone."""
    sizes = itemgetter("tokens", "experts", "top_k", "hidden", "intermediate")
    alone = {sizes(row): row["ms"] for row in rows if row["way"] == PRODUCTS and "error" not in row}
    for against, other in (("tokens", "experts"), ("experts", "tokens")):
        for (count, K, H, F), same in _by(rows, other, "top_k", "hidden", "intermediate"):
            if len({row[against] for row in same}) > 2:
                about = {"op": "moe_experts", "against": against, "fixed": f"{count} {other}, {K} a token, {H} x {F}"}
                yield (
                    _growth_name("moe_experts", against),
                    [
                        row
                        | about
                        | {"size": row[against], "full_ms": row.get("ms"), "floor_full_ms": alone[sizes(row)]}
                        | {"peak_mib": row.get("mib")}
                        for row in same
                        if row["way"] != PRODUCTS
                    ],
                )


def _growth(rows: list[dict[str, Any]], about: str, unit: str = "the floor") -> Figure:
    """Time as a multiple of a unit, and peak memory where it was measured, against one size."""
    figure = Figure((WIDTH, 2.9 + 1.3 * LINE * ((len({row["way"] for row in rows}) - 1) // 2)))  # two ways in a line
    time = _panel(figure, 0.075, f"time as a multiple of {unit}", rows[0]["against"])
    for (way,), same in _by(rows, "way"):
        _line(time, way, {row["size"]: _multiple(row) for row in same}, LIMIT)
    time.axhline(1.0, color=INK, linewidth=0.9, linestyle=(0, (2, 2)))
    time.set_ylim(0.8, LIMIT * 1.15)  # room for the values above it
    for (size,), same in _by([row for row in rows if (_multiple(row) or 0) > LIMIT], "size"):
        above = ", ".join(f"{_multiple(row):.1f}" for row in same)  # in one text: ways do not hide one another's
        time.annotate(above, (size, LIMIT), (0, 5), textcoords="offset points", ha="center", color=FAINT)
    weighed = [row for row in rows if "error" in row or row["peak_mib"] is not None]
    if weighed:  # not on a CPU
        memory = _panel(figure, 0.595, "peak memory above the inputs, MiB", rows[0]["against"])
        for (way,), same in _by(weighed, "way"):
            _line(memory, way, {row["size"]: row.get("peak_mib") for row in same})
        _memory_axis(memory, [row["peak_mib"] for row in weighed if "error" not in row])
    figure.legend(*time.get_legend_handles_labels(), **LEGEND, borderaxespad=0.2)
    _caption(figure, f"{rows[0]['op']}: {rows[0]['fixed']}", about)
    return figure


def _ignored(rows: list[dict[str, Any]], about: str) -> Figure:
    """Milliseconds against the share of the tokens that count."""
    figure = Figure((WIDTH, 3.6))
    axes = figure.add_axes((0.075, 0.4, 0.9, 0.48))
    for (way,), same in _by(rows, "way"):
        _line(axes, way, {100 * row["share"]: row.get("ms") for row in same})
    axes.set_ylim(bottom=0)
    axes.set_xlabel("% of the tokens count", color=INK)
    axes.tick_params(colors=FAINT)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    figure.legend(*axes.get_legend_handles_labels(), **LEGEND, borderaxespad=2.0)
    _caption(figure, f"fused_linear_ce, {_shape(rows[0]['shape'])}: ms of forward and backward", about)
    return figure


def _plans(rows: list[dict[str, Any]], about: str) -> Figure:
    """Time and memory of the other plans of each size, as multiples of the chosen plan's."""
    figure = Figure((WIDTH, 4.1))
    axes = figure.add_axes((0.1, 0.17, 0.86, 0.72))
    points = [
        (plan["ms"] / chosen["ms"], plan["mib"] / chosen["mib"])
        for chosen, *others in (row["plans"] for row in rows)
        for plan in others
    ]
    axes.fill_between([0, BEATEN], 0, BEATEN, color="#f3d9d9", linewidth=0)
    axes.plot(*zip(*points, strict=True), "o", markersize=3.5, alpha=0.7, color=COLOURS["llmk eager"])
    axes.plot(1, 1, "P", markersize=8, color=INK)
    axes.annotate("chosen", (1, 1), (7, 7), textcoords="offset points", color=INK, weight="bold")
    for scaled, axis, limits in (("x", axes.xaxis, axes.set_xlim), ("y", axes.yaxis, axes.set_ylim)):
        getattr(axes, f"set_{scaled}scale")("log", base=2)
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        values = [point[scaled == "y"] for point in points]
        limits(min(0.5, *values) / 1.1, max(2.0, *values) * 1.1)
    axes.set_xlabel("time as a multiple of the chosen plan's", color=INK)
    axes.set_ylabel("peak memory as a multiple of the chosen plan's", color=INK)
    axes.tick_params(colors=FAINT)
    beaten = sum(ms < BEATEN and mib < BEATEN for ms, mib in points)
    axes.text(
        0.015,
        0.02,
        f"3% less of both: {beaten} of {len(points)}",
        transform=axes.transAxes,
        color="#a00000",
        va="bottom",
    )
    _caption(figure, f"fused_linear_ce: other plans, at {len(rows)} sizes", about)
    return figure


def _shape(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))


def _ignored_name(sizes: Sequence[int]) -> str:
    return f"fused_linear_ce-ignored-tokens-{_shape(sizes)}"


def _panel(figure: Figure, left: float, title: str, against: str) -> Axes:
    height = figure.get_figheight()
    axes = figure.add_axes((left, 1 - 2.175 / height, 0.385, 1.624 / height))
    axes.set_title(title, fontsize=9, color=INK, loc="left")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(against, color=INK)
    axes.tick_params(colors=FAINT)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    return axes


def _growth_name(op: str, against: str) -> str:
    return f"{op}-{against.replace(' ', '-')}"


def _multiple(row: dict[str, Any]) -> float | None:
    return None if "error" in row else (row.get("replayed_ms") or row["full_ms"]) / row["floor_full_ms"]


def _line(axes: Axes, way: str, points: dict[int, float | None], top: float = float("inf")) -> None:
    """A way's points by size; triangles are above `top`; crosses at the top failed."""
    known = {size: value for size, value in sorted(points.items()) if value is not None}
    look: dict[str, Any] = {"color": COLOURS[way], "clip_on": False}
    inside = [min(value, top) for value in known.values()]
    width, order = (2.0, 3) if way.startswith("llmk") else (1.3, 2)
    axes.plot(list(known), inside, marker="o", markersize=3.5, linewidth=width, zorder=order, label=way, **look)
    for size, value in known.items():
        if value > top:
            axes.plot(size, top, marker="^", markersize=6, zorder=order, **look)
    for size in points.keys() - known.keys():
        axes.plot(size, 0.96, marker="x", markersize=6, transform=axes.get_xaxis_transform(), **look)


def _memory_axis(axes: Axes, values: list[float]) -> None:
    """Logarithmic where the values are far apart."""
    if values and max(values) > 10 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(0, 1.15 * max(values, default=1.0))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _caption(figure: Figure, title: str, about: str) -> None:
    height = figure.get_figheight()
    figure.text(0.08 / WIDTH, 1 - 0.08 / height, title, va="top", size=10.5, weight="bold", color=INK)
    figure.text(0.08 / WIDTH, 0.07 / height, about, va="bottom", size=7.5, color=FAINT)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description="Draw benchmark results as SVG.")
    written = "what benchmarks.run, growth, ignored, moe, plans or train_step wrote"
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS.json", help=written)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write here; beside the results by default")
    parser.add_argument("--charts", nargs="+", metavar="NAME", help="only these, such as rms_norm; all by default")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    drawn: dict[str, tuple[Figure, Path]] = {}
    for file in options.results:
        for name, figure in charts(json.loads(file.read_text())).items():
            if name in drawn:
                sys.exit(f"{drawn[name][1]} and {file} both have a chart {name}: draw them into two folders")
            drawn[name] = figure, file
    missing = set(options.charts or ()) - set(drawn)
    if missing:
        sys.exit(f"no chart {', '.join(sorted(missing))}; there are {', '.join(drawn)}")
    for name in options.charts or drawn:
        figure, file = drawn[name]
        path = (options.out or file.parent) / f"{name}.svg"
        save(figure, path, file.name)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
