"""The benchmark runs where there is no GPU, and writes what it measured."""

import json
from pathlib import Path

from benchmarks.run import main


def test_one_operator(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    assert main(["swiglu", "--device", "cpu", "--repeats", "1", "--json", str(file)]) == 0
    results = json.loads(file.read_text())
    assert [row["way"] for row in results["rows"]] == ["llmk eager", "llmk compiled", "torch eager", "torch compiled"]
    assert all(row["full_ms"] > 0 for row in results["rows"])
    (host,) = results["host_us"]
    assert host["op"] == "swiglu"
    assert host["ratio"] == [a / b for a, b in zip(host["llmk"], host["bare"], strict=True)]
