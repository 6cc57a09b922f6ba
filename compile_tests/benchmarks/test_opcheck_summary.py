"""The summary of opcheck's report has every result, and the reports that are kept are summaries."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.opcheck_summary import results_of, summary
from llmk.opcheck.runner import Result
from llmk.registry import OPS

ROOT = Path(__file__).resolve().parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("opcheck-*.json"))


def result(op: str, promise: str, seconds: float, calls: int, message: str = "", **details: str) -> dict[str, object]:
    passed = not message
    return asdict(Result(op, "cpu", "float32", "reference", promise, passed, message, seconds, calls, **details))


def test_a_summary_gives_the_results_back() -> None:
    results = [
        result("add", "no_alias", 0.25, 8),
        result("add", "deterministic", 1.5, 0, no_kernel="its code names none"),
        result("tvd", "deterministic", 0.0, 3, 'a "message"\nof two lines', wrong="output 0"),
        result("tvd", "compiled", 2.0, 1, "broken before its first call", accepted="known"),
    ]
    report = {"device": "cpu (x86_64)", "paths": ["reference"], "results": results}
    text = summary(report)
    assert results_of(json.loads(text)) == report
    assert len([line for line in text.splitlines() if line.startswith('{"op":')]) == 2


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_a_kept_report_is_a_summary(file: Path) -> None:
    report = results_of(json.loads(file.read_text()))
    checked = {result["op"] for result in report["results"]}
    assert checked
    assert checked <= set(OPS)
    assert file.read_text() == summary(report)
