"""Writes the table of the releases of PyTorch that `tools.matrix` ran llmk on."""

import json
import re
import sys
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # compile_tests/ is not installed

from tools.matrix_checks import CHECKS  # noqa: E402 the path comes first

RESULT = ROOT / "docs" / "versions.json"


def version_table() -> str:
    results: dict[str, Any] = json.loads(RESULT.read_text())
    columns = list(results)
    lines = [f"| | {' | '.join(f'torch {version}' for version in columns)} |", "|---|" + "---|" * len(columns)]
    for name in ("triton", "numpy", "transformers", "trl", "peft", "python"):
        lines.append(_row(name, [row["versions"][name] for row in results.values()]))
    lines += [
        _row(fn.__doc__ or name, [_cell(row["checks"], name) for row in results.values()])
        for name, fn in CHECKS.items()
    ]
    lines.append(_row("commits", [_commits(row["checks"]) for row in results.values()]))
    return "\n".join([":::{container} versions", "", *lines, "", ":::", ""])


def _row(head: str, cells: list[str]) -> str:
    return f"| {head} | {' | '.join(cells)} |"


def _commits(checks: dict[str, Any]) -> str:
    """Each commit once: `docs/versions.json` has that of each check."""
    return ", ".join(dict.fromkeys(check["commit"] for check in checks.values()))


def _cell(checks: dict[str, Any], name: str) -> str:
    """Return what a check that passed has counted and its day, in a few words, so that three columns fit a screen."""
    if name not in checks:
        return "not run"
    check = checks[name]
    day = f"{date.fromisoformat(check['date']):%-d %b %Y}"
    said = check["said"].replace("|", "/")
    if not check["passed"]:
        return f"**failed**: {said}, {day}"
    return f"ok, {day}" if name == "import" else f"ok: {UNCOUNTED.sub('', said)}, {day}"


UNCOUNTED = re.compile(r", 0 broken.*|, \d+ (skipped|warnings?)| in [\d.]+s.*|, eager and compiled|llmk\.")
"""Text that a check adds: that nothing else happened, how long it took, and where operators are."""
