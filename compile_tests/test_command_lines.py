"""`python -m llmk` and `python -m llmk.bench`: what they say, and one line for what is missing."""

import re
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx

import llmk
from llmk import __main__ as about
from llmk.bench import __main__ as bench
from llmk.bench.timing import Timer
from llmk.registry import OPS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Return what is printed by its first word; a line goes on where the next one is indented."""
    printed = capsys.readouterr().out
    assert all(len(line) <= 80 or " " not in line.strip() for line in printed.splitlines())
    lines = re.sub(r"\n +", " ", printed).splitlines()
    assert len(lines) <= 10
    return {name: text for name, text in (line.split(maxsplit=1) for line in lines)}


def test_about_this_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def compiler(*args: Any) -> Any:
        raise AssertionError("made code that nobody asked for")

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compiler)
    assert about.main([]) == 0
    lines = said(capsys)
    assert lines["llmk"].startswith(f"{llmk.__version__}, {len(OPS)} operators")
    assert lines["torch"].startswith(torch.__version__)
    assert lines["compile"] == "traced as one graph; --inductor tries the code, too"
    assert not any("FAILED" in text for text in lines.values())


def test_about_a_missing_compiler(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(about.shutil, "which", lambda name: None)
    assert about.main([]) == 0
    assert re.search(r"no compiler: neither (g\+\+ nor CXX|gcc nor CC) is there", said(capsys)["compile"])


def test_about_inductor(capsys: pytest.CaptureFixture[str]) -> None:
    assert about.main(["--inductor"]) == 0
    assert said(capsys)["compile"] == f"works: torch.compile on {DEVICE}, one graph"


def test_about_what_does_not_work(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: str, backend: str | None = None) -> None:
        if backend == "inductor":
            raise RuntimeError("no C++ compiler was found, and this line goes on past where a terminal ends\nand on")

    monkeypatch.setattr(about, "try_call", broken)
    monkeypatch.setattr(about, "EXTRAS", {"absent": "llmk.something"})
    assert about.main(["--inductor"]) == 1
    lines = said(capsys)
    assert lines["compile"].startswith("FAILED: RuntimeError: no C++ compiler was found")
    assert lines["compile"].endswith("where a terminal ends")
    assert lines["absent"] == "not installed; llmk.something needs it: pip install absent"


def test_about_sees_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llmk.functional, "rms_norm", lambda x, weight, eps: x * weight)
    with pytest.raises(ArithmeticError):
        about.try_call("cpu")


def rows_of(text: str) -> dict[str, list[str]]:
    """The cells of each way."""
    found = re.findall(r"^  (llmk eager|llmk compiled|torch eager|torch compiled) +(.*)$", text, re.MULTILINE)
    return {way: cells.split() for way, cells in found}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed is a sample, and no copy of a size that shows a memory's speed."""
    monkeypatch.setattr(bench, "CPU_BYTES", 0)
    monkeypatch.setattr(bench, "measure_ceilings", lambda *_: {"copy_bytes_per_s": 1e10, "gemm_flops_per_s": 1e10})


@pytest.mark.usefixtures("small")
def test_bench(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["swiglu", "--device", "cpu", "--no-compile", "--repeats", "1"]) == 0
    printed = capsys.readouterr().out
    assert "floor" in printed
    assert all(len(line) <= 80 for line in printed.splitlines() if not line.startswith("swiglu"))
    rows = rows_of(printed)
    assert list(rows) == ["llmk eager", "torch eager"]
    assert all(float(cells[0]) > 0 for cells in rows.values())


@pytest.mark.usefixtures("small")
def test_bench_times_gradients_beside_whole_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """The router's experts have none, its weights do."""
    assert bench.main(["router_topk", "--device", "cpu", "--no-compile", "--repeats", "1"]) == 0
    assert "forward only" not in capsys.readouterr().out


def test_bench_on_a_cpu_takes_what_a_cpu_can_do() -> None:
    op, cpu = OPS["rms_norm"], torch.device("cpu")
    assert op.workloads is not None
    assert op.cost is not None
    (sample,) = bench.calls(op, cpu, torch.bfloat16)
    assert op.cost(*sample.args, **sample.kwargs).bytes_full <= bench.CPU_BYTES
    assert sample.args[0].numel() > 2**20
    (small,) = bench.calls(OPS["fused_linear_ce"], cpu, torch.bfloat16)
    assert small.args[0].numel() < 2**20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_op"], "no operator 'no_such_op'; there are add, "),
        ([], "the following arguments are required: OP"),
        (["add", "--device", "tpu"], "argument --device: expected cpu, cuda or cuda:N, got 'tpu'"),
        (["add", "--device", "cuda:99"], "argument --device: cuda:99: PyTorch sees "),
        (["add", "--dtype", "float8"], "argument --dtype: invalid choice: 'float8'"),
        (["add", "--repeats", "0"], "argument --repeats: expected at least 1, got 0"),
        (["add", "--shape", "8x8x8"], "argument --shape: add has no other sizes; these have: fused_linear_ce, linear_"),
        (["fused_linear_ce", "--shape", "8x0x8"], "argument --shape: expected three positive sizes such as 8192x"),
    ],
)
def test_bench_refuses(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def timing(*args: Any) -> Any:
        raise AssertionError("timed before it was refused")

    monkeypatch.setattr(Timer, "__init__", timing)
    with pytest.raises(SystemExit) as stopped:
        bench.main(arguments)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("bench: ")
    assert message in error
    assert error.count("\n") == 1
