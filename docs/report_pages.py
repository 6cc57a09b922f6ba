"""Writes opcheck's reports that are in `benchmarks/results` as the pages that `--html` makes."""

import json
from pathlib import Path

from llmk.opcheck.page import page

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"


def write_reports(folder: Path) -> None:
    """`folder/opcheck-NAME.html` for every `opcheck-NAME.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(RESULTS.glob("opcheck-*.json")):
        (folder / f"{file.stem}.html").write_text(page(json.loads(file.read_text())), encoding="utf-8")
