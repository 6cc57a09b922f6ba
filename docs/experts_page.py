"""Writes the tables of the page about benchmarks that are of a mixture's experts."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
ALONE, OVER_RANKS = RESULTS / "moe-h200.json", RESULTS / "expert-parallel-h200-x2.json"
SIZES = ("tokens", "experts", "top_k", "hidden", "intermediate")

APART = (["y"], ["dx"], ["dgate_up", "ddown"], ["dweights"])
"""The rows of the table, in their order."""

Row = dict[str, Any]


def experts_table() -> str:
    """A line for each size, a column for each way."""
    results = json.loads(ALONE.read_text())
    ways = list(dict.fromkeys(row["way"] for row in results["rows"]))
    lines = [f"| {', '.join(SIZES).replace('_', ' ')} | {' | '.join(ways)} |", "|---|" + "---|" * len(ways)]
    for size, rows in sorted(_by_size(results["rows"])):
        by_way = {row["way"]: row for row in rows}
        cells = [_cell(by_way.get(way)) for way in ways]
        lines.append(f"| {', '.join(f'{n:,}' for n in size)} | {' | '.join(cells)} |")
    return "\n".join([_about(results, ALONE), "", *lines]) + "\n"


def ranks_table() -> str:
    """A line for each way of each size, beside one GPU that has all."""
    if not OVER_RANKS.exists():
        return "Not measured yet.\n"
    results = json.loads(OVER_RANKS.read_text())
    head = [
        f"{', '.join(SIZES).replace('_', ' ')}",
        "way",
        "ms (MiB)",
        "y",
        "dx",
        "weights of experts",
        "of the router",
    ]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for size, rows in _by_size(results["rows"]):
        for row in rows:
            far = ["" if "error" in row else f"{max(row[name] for name in names):.0e}" for names in APART]
            cells = [", ".join(f"{n:,}" for n in size), row["way"], _cell(row), *far]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([_about(results, OVER_RANKS), "", *lines]) + "\n"


def _by_size(rows: list[Row]) -> Iterator[tuple[tuple[int, ...], list[Row]]]:
    groups: dict[tuple[int, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[size] for size in SIZES), []).append(row)
    yield from groups.items()


def _cell(row: Row | None) -> str:
    if row is None or "error" in row:
        return "" if row is None else row["error"]
    memory = "" if row.get("mib") is None or row["way"] == "products alone" else f" ({row['mib']:,.0f})"
    return f"{row['ms']:.2f}{memory}"


def _about(results: Row, file: Path) -> str:
    measured = f"Measured on {results['date']}, {results['device']}, torch {results['torch']}; `{file.name}`."
    return f"{measured} {results.get('about', '')}".rstrip()
