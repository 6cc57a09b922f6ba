"""opcheck as a gate: promises chosen and left out, settings in pyproject.toml, JUnit, SARIF, GitHub, and pytest."""

import dataclasses
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from compile_tests.helpers.mutants import record, square
from compile_tests.helpers.own_op import OWN_OP
from llmk.opcheck import __main__ as command
from llmk.opcheck import assert_passes, check
from llmk.opcheck.__main__ import main, parse
from llmk.opcheck.inputs import watched_by
from llmk.opcheck.report.reports import annotations, junit, notes, sarif
from llmk.opcheck.runner import Result, promises_asked, promises_for
from llmk.registry import Sample

CPU = torch.device("cpu")
HELD = dataclasses.replace(record("held", overload=torch.ops.aten.square.default), dtypes=(torch.float32,))
WRONG = dataclasses.replace(HELD, name="wrong", reference=lambda input: 2 * input.square())


def settings(folder: Path, text: str) -> None:
    (folder / "pyproject.toml").write_text(f"[project]\nname = 'mine'\n\n[tool.llmk.opcheck]\n{text}")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def result(**changes: Any) -> Result:
    values = {
        "op": "mine",
        "device": "cpu",
        "dtype": "float32",
        "path": "reference",
        "promise": "no_mutation",
        "passed": True,
        "message": "",
        "seconds": 0.5,
        "calls": 3,
    }
    return Result(**(values | changes))


def test_promises_are_chosen_and_left_out_by_name() -> None:
    named = ["deterministic", "no_alias", "no_mutation"]
    kept = [promise.__name__ for promise in promises_for(CPU, named, ["no_alias"])]
    assert kept == ["no_mutation", "deterministic"]
    everything = {promise.__name__ for promise in promises_for(CPU)}
    assert {promise.__name__ for promise in promises_for(CPU, None, named)} == everything - set(named)
    with pytest.raises(ValueError, match="no promise 'nosuch'"):
        promises_for(CPU, None, ["nosuch"])


def test_a_record_leaves_a_promise_out_with_a_reason() -> None:
    """The promise is left out of that operator alone, and not where it is asked for by name."""
    op = dataclasses.replace(WRONG, unchecked={"values_and_gradients": "known to be wrong"})
    skip = [promise.__name__ for promise in promises_for(CPU, None, ["values_and_gradients", "no_alias"])]
    results = check(op, skip=skip)
    verdicts = {result.promise: result.verdict for result in results if result.promise != "runs"}
    assert verdicts == {"values_and_gradients": "empty", "no_alias": "kept"}
    assert list(notes(results)) == ["wrong (reference): values_and_gradients is left out: known to be wrong"]
    assert "values_and_gradients" not in promises_asked(op, CPU, first_dtype=True)
    assert not check(op, only=["values_and_gradients"])[0].passed
    with pytest.raises(ValueError, match="no promise 'nosuch'; there are "):
        check(dataclasses.replace(WRONG, unchecked={"nosuch": "a mistake"}))


def test_options_take_several_promises(folder: Path) -> None:
    options = parse(
        ["add", "--device", "cpu", "--only", "no_alias,no_mutation", "--only", "compiled", "--skip", "no_alias"]
    )
    assert options.only == ["no_alias", "no_mutation", "compiled"]
    assert options.skip == ["no_alias"]


def test_pyproject_holds_what_the_command_line_leaves_open(folder: Path) -> None:
    settings(folder, 'skip = ["compiled", "no_alias"]\ndtype = "bfloat16"\ndevice = "cpu"\npath = "reference"\n')
    options = parse([])
    assert (options.skip, options.only, options.dtype) == (["compiled", "no_alias"], None, ["bfloat16"])
    assert (options.device, options.path) == (CPU, "reference")
    given = parse(["--dtype", "float32", "--path", "interpreter", "--skip", "no_recompile"])
    assert (given.dtype, given.path, given.skip) == (["float32"], "interpreter", ["no_recompile"])
    assert parse(["--only", "compiled"]).skip is None  # who names a promise wants it
    assert parse(["--search", "1"]).skip is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('skip = ["nosuch"]', "pyproject.toml: argument --skip: no promise 'nosuch'; there are "),
        ('dtype = "float8"', "pyproject.toml: argument --dtype: invalid choice: 'float8'"),
        ("jobs = 3", "pyproject.toml: [tool.llmk.opcheck] has no 'jobs'; it may have only, skip, dtype, device, path"),
        ("path = 3", "pyproject.toml: [tool.llmk.opcheck] path: expected text"),
        ("path = nowhere", "pyproject.toml: Invalid value (at line 5, column 8)"),
    ],
)
def test_a_mistake_in_pyproject_is_said(
    text: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings(folder, text)
    with pytest.raises(SystemExit) as stopped:
        parse([])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"opcheck: {message}")
    assert error.count("\n") == 1


def test_processes_are_told_what_was_chosen(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """And read no table of their own."""
    settings(folder, 'skip = ["compiled"]\n')
    words: list[str] = []

    def note(units: Any, device: torch.device, options: list[str], *limits: Any) -> list[Any]:
        words.extend(options)
        return [(unit, [result(op="add")]) for unit in units]

    monkeypatch.setattr(command, "check_in_processes", note)
    arguments = ["add", "--device", "cpu", "--path", "reference"]
    assert main([*arguments, "--seed", "7"]) == 0
    assert words[:2] == ["--skip", "compiled"]
    assert words[-2:] == ["--seed", "7"]
    assert parse([*arguments, "--journal", "journal.jsonl"]).skip is None


@pytest.mark.parametrize(
    ("names", "jobs", "parts"),
    [
        (["add", "dyt", "jsd"], 2, [("add",), ("dyt",), ("jsd",)]),
        (
            ["add", "mine.py", "dyt", "jsd", "add", "dyt", "jsd"],
            1,
            [("add",), ("mine.py",), ("dyt", "jsd", "add", "dyt"), ("jsd",)],
        ),
        (["add"] * 13, 1, [("add",) * 7, ("add",) * 6]),
        (["add"] * 13, 8, [("add",)] * 13),
        (["mine.py"] * 13, 1, [("mine.py",)] * 13),
    ],
)
def test_operators_of_llmk_share_processes(names: list[str], jobs: int, parts: list[tuple[str, ...]]) -> None:
    assert command.names_of_each_process(names, jobs) == parts


def test_junit_has_a_case_for_each_promise() -> None:
    message = "a row [(3, 5)]: gradient of input: 1 is not < 2 & so on\x00"
    broken = result(promise="no_alias", passed=False, message=message)
    root = ElementTree.fromstring(junit([result(), broken, result(dtype="bfloat16", calls=0)]))
    suites = root.findall("testsuite")
    assert [suite.get("name") for suite in suites] == ["mine float32 (reference)", "mine bfloat16 (reference)"]
    assert (suites[0].get("tests"), suites[0].get("failures"), suites[0].get("time")) == ("2", "1", "1.000")
    cases = [(case.get("classname"), case.get("name")) for case in root.iter("testcase")]
    assert cases[0] == ("mine.reference.float32", "no_mutation")
    (failure,) = root.iter("failure")
    assert failure.text == message.removesuffix("\x00")
    assert [skipped.get("message") for skipped in root.iter("skipped")] == ["nothing to check"]


def test_sarif_has_a_result_for_each_cause() -> None:
    """Its rule is the promise, and its place the file and line where the operator's reference begins."""
    broken = [result(promise=name, passed=False, message=f"{name} is so") for name in ("no_alias", "edge_rows")]
    elsewhere = result(op="another", promise="no_alias", passed=False, message="shares memory")
    accepted = result(op="another", passed=False, accepted="known")
    log = json.loads(json.dumps(sarif([result(), *broken, elsewhere, accepted], {"mine": ("my kernels/op.py", 12)})))
    assert (log["version"], log["$schema"].endswith("sarif-2.1.0.json")) == ("2.1.0", True)
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    assert (driver["name"], driver["rules"]) == ("llmk.opcheck", [{"id": "edge_rows"}, {"id": "no_alias"}])
    assert [(found["ruleId"], found["level"]) for found in run["results"]] == [
        ("edge_rows", "error"),
        ("no_alias", "error"),
        ("no_alias", "error"),
    ]
    text = "wrong values: mine float32 (reference) breaks edge_rows:\n  edge_rows is so"
    assert run["results"][0]["message"] == {"text": text}
    (place,) = run["results"][0]["locations"]
    artifact = {"uri": "my%20kernels/op.py"}
    assert place == {"physicalLocation": {"artifactLocation": artifact, "region": {"startLine": 12}}}
    assert "locations" not in run["results"][2]
    assert sarif([result()], {})["runs"][0]["results"] == []


def test_annotations_are_workflow_commands() -> None:
    broken = result(promise="no_alias", passed=False, message="100% wrong\nin two lines")
    (line,) = annotations([result(), broken], {"mine": ("kernels/my_op.py", 12)})
    assert line.startswith("::error file=kernels/my_op.py,line=12,title=")
    assert line.endswith("breaks no_alias::100%25 wrong%0Ain two lines")
    (line,) = annotations([broken], {})
    assert line.startswith("::error title=")


def test_github_gets_annotations_with_the_line_of_the_reference(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "my_op.py").write_text(
        "import torch\nfrom llmk.registry import Op\n\n\ndef reference(input):\n    return input\n\n\n"
        "MINE = Op(name='mine', overload=torch.ops.aten.square.default, reference=reference, samples=lambda *_: [],\n"
        "          differentiable=())\n"
    )
    monkeypatch.setattr(command, "check_all", lambda options: [result(passed=False, message="wrong")])
    arguments = ["my_op.py", "--device", "cpu", "--junit", "new/junit.xml", "--json", "report.json"]
    arguments += ["--sarif", "report.sarif"]
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    assert main(arguments) == 1
    assert "::error" not in capsys.readouterr().out
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert main(arguments) == 1
    assert "::error file=my_op.py,line=5,title=memory%3A mine float32" in capsys.readouterr().out
    assert ElementTree.parse(folder / "new" / "junit.xml").getroot().tag == "testsuites"
    assert len(json.loads((folder / "report.json").read_text())["results"]) == 1
    (found,) = json.loads((folder / "report.sarif").read_text())["runs"][0]["results"]
    assert found["locations"][0]["physicalLocation"]["region"] == {"startLine": 5}


def test_a_baseline_accepts_with_a_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says which entries can go; an entry without a reason is refused."""
    accepted = '[[accepted]]\nop = "held"\npromise = "no_alias"\n'
    Path("baseline.toml").write_text(accepted)
    arguments = ["add", "--device", "cpu", "--baseline", "baseline.toml", "--json", "report.json"]
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "baseline.toml: entry 0 has no reason" in capsys.readouterr().err
    more = '[[accepted]]\nop = "held"\npromise = "no_mutation"\nreason = "later"\n'
    Path("baseline.toml").write_text(f'{accepted}reason = "a view by design"\n{more}')
    found = [result(op="held", promise="no_alias", passed=False, message="shares"), result(op="held")]
    monkeypatch.setattr(command, "check_all", lambda options: found)
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "baseline: held keeps no_mutation: the entry can go" in printed
    assert "1 promises kept, 0 broken and 1 accepted, 0 with" in printed
    report = json.loads(Path("report.json").read_text())
    assert (report["version"], report["causes"]) == (1, [])
    assert report["results"][0]["accepted"] == "a view by design"


def test_the_report_has_causes_with_their_places(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "my_op.py").write_text(OWN_OP.format(divisor=3))
    monkeypatch.setattr(command, "check_all", lambda options: [result(op="half", promise="no_alias", passed=False)])
    assert main(["my_op.py", "--device", "cpu", "--json", "report.json"]) == 1
    (cause,) = json.loads(Path("report.json").read_text())["causes"]
    assert (cause["kind"], cause["op"], cause["promises"]) == ("memory", "half", ["no_alias"])
    assert (cause["file"], cause["line"]) == ("my_op.py", 14)


def test_samples_may_be_given() -> None:
    """The samples are taken in every dtype, whatever they were made in, and as tuples of arguments."""
    called: list[Sample] = []
    sample = Sample((torch.rand(2, 3, dtype=torch.float64),), why="a few")
    with watched_by(called.append):
        results = check(HELD, [sample, (torch.rand(4),)], dtypes=[torch.float16], only=["values_and_gradients"])
    assert [(r.passed, r.calls >= 2) for r in results] == [(True, True)]
    assert {tuple(sample.args[0].shape) for sample in called} == {(2, 3), (4,)}
    assert {sample.args[0].dtype for sample in called} == {torch.float16}


def test_pytest_gets_one_error_with_the_report() -> None:
    only = ["no_mutation", "values_and_gradients"]
    assert [result.promise for result in assert_passes(HELD, only=only, skip=["no_mutation"])] == [only[1]]
    with pytest.raises(AssertionError) as raised:
        assert_passes(WRONG, only=only)
    text = str(raised.value)
    assert "wrong" in text
    assert "values_and_gradients" in text
    assert "0/1" not in text
    assert "1/2" in text
    with pytest.raises(AssertionError, match="nothing was checked"):
        assert_passes(square("no_rows"), only=["edge_rows"], samples=[(torch.rand(3),)], skip=["edge_rows"])
