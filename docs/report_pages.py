"""Writes opcheck's reports that are in `benchmarks/results` as the pages that `--html` makes."""

import json
import sys
from pathlib import Path

from llmk.opcheck.report.page import page

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # benchmarks/ is not installed

from benchmarks.opcheck_summary import results_of  # noqa: E402 the path comes first

RESULTS = ROOT / "benchmarks" / "results"


def write_reports(folder: Path) -> None:
    """`folder/opcheck-NAME.html` for every `opcheck-NAME.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(RESULTS.glob("opcheck-*.json")):
        report = results_of(json.loads(file.read_text()))
        (folder / f"{file.stem}.html").write_text(page(report), encoding="utf-8")
