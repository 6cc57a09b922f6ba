"""opcheck's command line: what it refuses, what it prints, and processes that die."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch

from compile_tests.helpers.mutants import square
from compile_tests.helpers.own_op import OWN_OP
from llmk.opcheck import __main__ as command
from llmk.opcheck import check
from llmk.opcheck.__main__ import main
from llmk.opcheck.processes import Unit, check_in_process, check_in_processes
from llmk.opcheck.report.causes import causes
from llmk.registry import OPS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_op"], "'no_such_op' is no operator (add, "),
        (["no_such_file.py"], "no file no_such_file.py"),
        (["--only", "nosuch"], "argument --only: no promise 'nosuch'; there are "),
        (["--device", "tpu"], "argument --device: expected cpu, cuda or cuda:N, got 'tpu'"),
        (["--device", "cuda:99"], "argument --device: cuda:99: PyTorch sees "),
        (["--dtype", "float8"], "argument --dtype: invalid choice: 'float8' (choose from"),
        (["--path", "eager"], "argument --path: invalid choice: 'eager' (choose from"),
        (["--path", "gpu"], "argument --path: expected all, reference, interpreter on cpu, got gpu"),
        (["--jobs", "0"], "argument --jobs: expected a positive whole number, got '0'"),
        (["--jobs", "-1"], "argument --jobs: expected a positive whole number, got '-1'"),
        (["--jobs", "many"], "argument --jobs: expected a positive whole number, got 'many'"),
        (["--no-such-option"], "unrecognized arguments: --no-such-option"),
        (["--search", "5", "--only", "no_alias"], "argument --only: there is none with --search"),
        (["--search", "none"], "argument --search: expected a positive whole number, got 'none'"),
        (["--search", "5", "--seed", "-1"], "argument --seed: expected a whole number of at least 0, got '-1'"),
        (["--few"], "argument --few: it is for --sanitize"),
        (["--longest", "5"], "argument --longest: it is for --sanitize"),
        (["--sanitize"], "argument --sanitize: it watches a GPU's kernels, and the device is cpu"),
    ],
)
def test_command_line_says_what_is_unknown(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--device", "cpu", *arguments])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("opcheck: ")
    assert message in error
    assert error.count("\n") == 1


def test_command_line_of_a_gpu_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit) as stopped:
        main(["--device", "cuda"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "opcheck: argument --device: cuda: PyTorch sees 0 CUDA devices here\n"


def test_nothing_checked_is_no_success(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "check_all", lambda options: check(OPS["add"], only=options.only))
    with pytest.raises(SystemExit) as stopped:
        main(["add", "--device", "cpu", "--path", "reference", "--only", "cuda_graphs"])
    assert stopped.value.code == 2
    assert "opcheck: nothing was checked" in capsys.readouterr().err


def test_check_knows_its_promises() -> None:
    with pytest.raises(ValueError, match="no promise 'nosuch'; there are "):
        check(OPS["add"], only=["nosuch"])


def test_a_record_without_samples_keeps_nothing() -> None:
    op = dataclasses.replace(square("no_samples"), samples=lambda device, dtype: [])
    (result,) = check(op, only=["deterministic"])
    assert not result.passed
    assert result.message == "the record yields no samples"


def test_a_promise_that_called_nothing_is_not_kept() -> None:
    (result,) = check(dataclasses.replace(square("no_rows"), resized=None), only=["edge_rows"])
    assert result.passed
    assert result.verdict == "empty"


DIES = """
import ctypes, os, signal
import torch
from llmk.registry import Op, Sample

@torch.library.custom_op("mylib::dies", mutates_args=())
def dies(input: torch.Tensor) -> torch.Tensor:
    if input.stride() != (5, 1):
        ctypes.string_at(0)
    if len(input) == 31:
        os.kill(os.getpid(), signal.SIGKILL)
    return input.clone(memory_format=torch.contiguous_format)

dies.register_fake(lambda input: torch.empty_like(input))

def resized(rows, device, dtype):
    return Sample((torch.randn(rows, 5, device=device, dtype=dtype),), why="resized")

DIES = Op(
    name="dies",
    overload=torch.ops.mylib.dies.default,
    reference=lambda input: input.clone(),
    samples=lambda device, dtype: [resized(3, device, dtype)],
    resized=resized,
    differentiable=(),
)
"""


@pytest.mark.usefixtures("forked_checks")
def test_a_process_that_dies_says_where(tmp_path: Path) -> None:
    """And the other promises are checked nevertheless."""
    file = tmp_path / "my_op.py"
    file.write_text(DIES)
    options = ["--dtype", "float32"]
    for promise in ("strided_inputs", "edge_rows", "deterministic"):
        options += ["--only", promise]
    results = check_in_process(Unit((str(file),), "reference"), torch.device("cpu"), options, threads=1)
    assert [(result.promise, result.verdict) for result in results] == [
        ("strided_inputs", "broken"),
        ("edge_rows", "broken"),
        ("deterministic", "kept"),
    ]
    segfault = "the process was killed by SIGSEGV at the sample resized [(3, 5)], in dies (line 9 of "
    killed = "the process was killed by SIGKILL, as when memory runs out at the sample resized [(31, 5)]"
    assert results[0].message.startswith(segfault), results[0].message
    assert results[1].message.startswith(killed), results[1].message


def test_a_file_that_does_not_parse_is_named_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "my_op.py"
    file.write_text("import torch\n\ndef my_op(:\n")
    with pytest.raises(SystemExit) as stopped:
        main(["--device", "cpu", str(file)])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"opcheck: {file}, line 3: ")
    assert error.count("\n") == 1


HANGS = """
import ctypes
import torch
from llmk.registry import Op, Sample

def hangs(input):
    while len(input) == 31:
        ctypes.CDLL(None).sleep(1000)
    return input.clone()

def resized(rows, device, dtype):
    return Sample((torch.randn(rows, 5, device=device, dtype=dtype),), why="resized")

HANGS = Op(name="hangs", overload=hangs, reference=lambda input: input.clone(), differentiable=(),
           samples=lambda device, dtype: [resized(3, device, dtype)], resized=resized)
"""


@pytest.mark.usefixtures("forked_checks")
def test_a_call_that_does_not_end_is_broken_with_its_stack(tmp_path: Path) -> None:
    """Wherever it is held up; and the other promises are checked nevertheless."""
    file = tmp_path / "my_op.py"
    file.write_text(HANGS)
    options = ["--dtype", "float32", "--timeout", "3", "--only", "edge_rows", "--only", "deterministic"]
    results = check_in_process(Unit((str(file),), "reference"), torch.device("cpu"), options, threads=1)
    assert [(result.promise, result.verdict) for result in results] == [
        ("edge_rows", "broken"),
        ("deterministic", "kept"),
    ]
    words = f"it did not end in 0:00:03 at the sample resized [(31, 5)], in hangs (line 8 of {file})"
    assert results[0].message.startswith(words), results[0].message


def test_the_whole_run_may_have_a_limit(tmp_path: Path) -> None:
    file = tmp_path / "my_op.py"
    file.write_text(OWN_OP.format(divisor=2))
    (found,) = check_in_processes([Unit((str(file),), "reference")], torch.device("cpu"), [], 1, longest=0)
    ((result,),) = [found[1]]
    assert result.message == "the time of the whole run was over before it began"
    (cause,) = causes([result])
    assert cause.headline.startswith("time: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import torch\n\nimport no_such_package\n", "line 3: ModuleNotFoundError: No module named 'no_such_package'"),
        ("x = 1 / 0\n", "line 1: ZeroDivisionError: division by zero"),
    ],
)
def test_a_file_that_raises_is_named_with_its_line(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my_op.py"
    file.write_text(text)
    with pytest.raises(SystemExit) as stopped:
        main(["--device", "cpu", str(file)])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"opcheck: {file}, {message}\n"


@pytest.mark.usefixtures("forked_checks")
def test_operators_of_one_name_are_rows_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run of two files of one's own, and what it writes."""
    monkeypatch.chdir(tmp_path)
    for name, divisor in (("a.py", 2), ("b.py", 3)):
        Path(name).write_text(OWN_OP.format(divisor=divisor).replace("mylib", f"mylib_{name[0]}"))
    options = ["--device", "cpu", "--dtype", "float32", "--path", "reference", "--only", "values_and_gradients"]
    assert main(["a.py", "b.py", *options, "--json", "results.json"]) == 1
    printed = capsys.readouterr().out
    assert [line.split()[:4] for line in printed.splitlines()[1:3]] == [
        ["a.py:half", "reference", "float32", "1/1"],
        ["b.py:half", "reference", "float32", "0/1"],
    ]
    assert "wrong values: b.py:half float32 (reference) breaks values_and_gradients" in printed
    report = json.loads(Path("results.json").read_text())
    assert report["torch"] == torch.__version__
    assert {result["path"] for result in report["results"]} == {"reference"}


@pytest.mark.usefixtures("forked_checks")
def test_numbers_of_a_failure_are_replayed_by_their_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "my_op.py"
    cached = "CACHE.setdefault(input.shape, input / 2).clone()"
    file.write_text("CACHE = {}\n" + OWN_OP.format(divisor=2).replace("return input / 2", f"return {cached}"))
    options = [str(file), "--device", "cpu", "--dtype", "float32", "--path", "reference", "--only", "fresh_numbers"]
    printed = []
    for seed in ([], ["--seed"]):
        assert main([*options, *seed, *re.findall(r"of seed (\d+)", "".join(printed))]) == 1
        printed += [line for line in capsys.readouterr().out.splitlines() if "in the same memory, of seed" in line]
    assert len(printed) == 2
    assert printed[0] == printed[1]


def test_a_record_that_leaves_out_what_there_is_not_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my_op.py"
    file.write_text(
        OWN_OP.format(divisor=2).replace("differentiable=()", "differentiable=(), unchecked={'nosuch': 'why'}")
    )
    with pytest.raises(SystemExit) as stopped:
        main([str(file), "--device", "cpu"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("opcheck: the record half: unchecked: no promise 'nosuch'; there are ")
