"""The output of a benchmark run: a table on the terminal, and a JSON file that several runs may fill."""

import datetime
import json
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from tqdm import tqdm

import llmk
from benchmarks.compositions import COMPOSITIONS
from llmk.bench.measure import figure
from llmk.registry import OPS

COLUMNS = ("forward", "full", "replayed", "sustained", "x floor", "x peer", "MiB")
SAME = ("llmk", "torch", "triton", "python", "device", "dtype", "config")
"""The fields that must agree for rows to share a file."""


def header(device: torch.device, dtype: torch.dtype, peers: dict[str, str], config: dict[str, Any]) -> dict[str, Any]:
    return {
        "llmk": llmk.__version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "dtype": str(dtype),
        "peers": peers,
        "config": config,
    }


class Results:
    """The JSON file of a run; with `append` it keeps the rows that are not measured anew.

    Args:
        file: Where it is, if anywhere.
        about: The file's first entries, as `header` gives them.
        append: Whether to keep what the file has.
        key: What a row is the measurement of.
        order: The keys, in the order of the file.
        kinds: The lists of rows.
    """

    def __init__(
        self,
        file: Path | None,
        about: dict[str, Any],
        append: bool,
        key: Callable[[dict[str, Any]], Any],
        order: Sequence[Any],
        kinds: Sequence[str] = ("rows",),
    ) -> None:
        self.file, self.key, self.order = file, key, list(order)
        self.content: dict[str, Any] = {**about, **{kind: [] for kind in kinds}}
        if append and file is not None and file.exists():
            old = json.loads(file.read_text())
            self._require_same(old)
            self.content["peers"] = old["peers"] | about["peers"]
            self.content |= {kind: old[kind] for kind in kinds}

    def _require_same(self, old: dict[str, Any]) -> None:
        new = self.content
        different = [key for key in SAME if old.get(key) != new[key]]
        known = old.get("peers", {})
        different += [name for name in new["peers"] if known.get(name, new["peers"][name]) != new["peers"][name]]
        if "peers" not in old or different:
            raise ValueError(f"--append: {self.file} was measured with another {', '.join(different) or 'schema'}")

    def replace(self, kind: str, key: Any, rows: Sequence[dict[str, Any]]) -> None:
        """Put the rows of `key` in place of older ones, and write the file: a run may be cut short."""
        kept = [row for row in self.content[kind] if self.key(row) != key]
        self.content[kind] = sorted([*kept, *rows], key=lambda row: self.order.index(self.key(row)))
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps(self.content, indent=1) + "\n")


def op_results(file: Path | None, about: dict[str, Any], ceilings: dict[str, float], append: bool) -> Results:
    """The file of `benchmarks.run`, by operator."""
    about = {**about, "ceilings": ceilings}
    return Results(file, about, append, lambda row: row["op"], [*OPS, *COMPOSITIONS], ("rows", "host_us"))


def best_peer(rows: Sequence[dict[str, Any]]) -> float | None:
    """The figure of the fastest way that is not llmk's: a peer's or compiled PyTorch's."""
    others = [row for row in rows if not row["way"].startswith(("llmk", "torch eager", "products"))]
    return min((ms for row in others if "error" not in row and (ms := figure(row))), default=None)


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """One workload: a line for each way to compute it."""
    tqdm.write(f"\n{rows[0]['op']}, {rows[0]['workload']}: floor {rows[0]['floor_full_ms']:.3f} ms")
    width = max(20, *(len(row["way"]) for row in rows))
    tqdm.write(f"  {'':<{width}}" + "".join(f"{column:>10}" for column in COLUMNS))
    best = best_peer(rows)
    for row in rows:
        ms, floor = figure(row), row["floor_full_ms"]
        cells = [row.get(f"{key}_ms") for key in ("forward", "full", "replayed", "full_sustained")]
        texts = ["" if cell is None else f"{cell:.3f}" for cell in cells]
        texts += [f"{ms / other:.2f}" if ms and other else "" for other in (floor, best)]
        texts += ["" if row.get("peak_mib") is None else f"{row['peak_mib']:.0f}"]
        notes = [row["error"]] if "error" in row else []
        notes += [f"not captured: {row['not_captured']}"] if "not_captured" in row else []
        tqdm.write(f"  {row['way']:<{width}}" + "".join(f"{text:>10}" for text in texts) + "  " + "; ".join(notes))
