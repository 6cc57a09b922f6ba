"""opcheck's page: every result is on it, escaped, and it needs nothing but itself."""

import json
from pathlib import Path

import pytest
import torch

from compile_tests.helpers.mutants import square
from compile_tests.helpers.report_pages import Outline, report, result
from llmk.opcheck import __main__ as command
from llmk.opcheck import check
from llmk.opcheck.promises.table import PROMISES
from llmk.opcheck.report.page import page, promises_in, verdict_of_all


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


def test_evidence_is_behind_each_cell() -> None:
    rows = [
        result(),
        result(dtype="bfloat16", passed=False, message="a row is wrong"),
        result(calls=0, path="GPU kernel"),
    ]
    outline = Outline(page(report(*rows)))
    assert [text for text in outline.text["td"]] == [
        "reference",
        "float32",
        "kept",
        "3",
        "0.50",
        "reference",
        "bfloat16",
        "broken",
        "3",
        "0.50",
        "GPU kernel",
        "float32",
        "nothing to check",
        "0",
        "0.50",
    ]
    assert outline.text["div"].count("a row is wrong") == 2  # in front, and behind its cell
    (promise,) = (promise for promise in PROMISES if promise.__name__ == "no_mutation")
    assert promise.__doc__ in outline.text["p"]


def test_one_broken_dtype_breaks_the_cell() -> None:
    assert verdict_of_all([result(), result(passed=False)]) == "broken"
    assert verdict_of_all([result(), result(calls=0)]) == "kept"
    assert verdict_of_all([result(calls=0)]) == "empty"
    assert verdict_of_all([]) == "unasked"


def test_promises_are_in_opchecks_order() -> None:
    asked = [result(promise=name) for name in ("memcheck", "compiled", "values_and_gradients")]
    assert list(promises_in(asked)) == ["values_and_gradients", "compiled", "memcheck"]


def test_command_line_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = check(square("mutant_page"), dtypes=[torch.float32], only=["no_mutation", "deterministic"])
    monkeypatch.setattr(command, "check_all", lambda options: results)
    file, data = tmp_path / "new" / "report.html", tmp_path / "report.json"
    assert command.main(["add", "--device", "cpu", "--html", str(file), "--json", str(data)]) == 0
    assert file.read_text() == page(json.loads(data.read_text()))
    assert "mutant_page" in file.read_text()
