"""`python -m benchmarks.moe` runs where there is no GPU, and its file makes the documentation's table."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.targets import PRODUCTS

pytest.importorskip("tqdm")

from benchmarks import moe

sys.path.append(str(Path(__file__).parents[2] / "docs"))
import experts_page


def test_every_way_of_every_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "SMALL_SERIES", ([(16, 4, 2, 16, 8), (8, 4, 2, 16, 8)],))
    file = tmp_path / "moe.json"
    assert moe.main(["--device", "cpu", "--no-compile", "--no-liger", "--repeats", "1", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["way"] for row in rows] == ["llmk", "grouped_mm eager", PRODUCTS] * 2
    assert [row["tokens"] for row in rows] == [16] * 3 + [8] * 3
    assert all(row["ms"] > 0 and "error" not in row for row in rows)
    monkeypatch.setattr(experts_page, "ALONE", file)
    lines = experts_page.experts_table().splitlines()
    assert lines[2].endswith(f"| llmk | grouped_mm eager | {PRODUCTS} |")
    assert lines[4].startswith("| 8, 4, 2, 16, 8 | ")


def test_a_wrong_result_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    given = moe.Experts((16, 4, 2, 16, 8), moe.torch.device("cpu"))
    timer = moe.Timer(moe.torch.device("cpu"), repeats=1)
    (row,) = moe.measure(given, {"twice": lambda *args: 2 * moe.moe_experts(*args)}, timer, products=False)
    assert row == {"way": "twice", "error": "ArithmeticError: wrong result"}
