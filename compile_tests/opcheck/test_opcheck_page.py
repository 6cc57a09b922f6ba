"""opcheck's page: every result is on it, escaped, and it needs nothing but itself."""

import json
from pathlib import Path

import pytest
import torch

from compile_tests.helpers.mutants import square
from compile_tests.helpers.report_pages import Outline, report, result
from llmk.opcheck import __main__ as command
from llmk.opcheck import check
from llmk.opcheck.report.page import page


def test_every_element_is_closed_and_nothing_comes_from_elsewhere() -> None:
    text = page(report(result(), result(passed=False, message="wrong"), result(calls=0)))
    outline = Outline(text)
    assert outline.open == []
    assert not {"href", "src", "onclick"} & {name for name, _ in outline.attributes}
    assert not {"script", "link", "img"} & set(outline.text)
    assert "://" not in text
    assert "prefers-color-scheme: dark" in text
    assert ("name", "viewport") in outline.attributes


def test_what_operators_say_is_text() -> None:
    evil = '<script>alert("x")</script>&'
    names = {"op": f"op{evil}", "promise": f"promise{evil}", "dtype": f"dtype{evil}", "path": f"path{evil}"}
    outline = Outline(page(report(result(**names, passed=False, message=f"message{evil}")) | {"device": f"on{evil}"}))
    assert "script" not in outline.text
    everything = "".join(text for texts in outline.text.values() for text in texts)
    for word in (*names, "message", "on"):
        assert f"{word}{evil}" in everything


def test_command_line_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = check(square("mutant_page"), dtypes=[torch.float32], only=["no_mutation", "deterministic"])
    monkeypatch.setattr(command, "check_all", lambda options: results)
    file, data = tmp_path / "new" / "report.html", tmp_path / "report.json"
    assert command.main(["add", "--device", "cpu", "--html", str(file), "--json", str(data)]) == 0
    assert file.read_text() == page(json.loads(data.read_text()))
    assert "mutant_page" in file.read_text()
