"""`--sanitize`: what it refuses, and what it reports of what compute-sanitizer says (a script stands in for it)."""

import json
import sys
from pathlib import Path

import pytest
import torch

from llmk.opcheck.__main__ import main
from llmk.opcheck.sanitizer import few_of
from llmk.registry import OPS

WATCHES = """#!{python}
# memcheck runs the command on a CPU and finds something in the second sample; racecheck has a warning.
import subprocess, sys
print("========= COMPUTE-SANITIZER")
if sys.argv[2] == "racecheck":
    print("opcheck calls add float16 a sample")
    print("========= Warning: Race reported")
    sys.exit()
command = ["cpu" if word == "cuda" else word for word in sys.argv[11:]]
out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines(keepends=True)
second = [i for i, line in enumerate(out) if line.startswith("opcheck calls ")][1]
print("".join(out[: second + 1]), end="")
print("========= Invalid __global__ write of size 2 bytes")
print("=========     at add_kernel+0x1f0")
print("".join(out[second + 1 :]), end="")
print("========= ERROR SUMMARY")
sys.exit(86)
"""


@pytest.fixture
def sanitizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script in PATH, and a GPU that PyTorch sees but that nothing uses: the samples are the CPU's."""
    script = tmp_path / "compute-sanitizer"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    return script


def write(script: Path, text: str) -> None:
    script.write_text(text)
    script.chmod(0o755)


def test_what_is_found_has_its_operator_and_sample(sanitizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(sanitizer, WATCHES.format(python=sys.executable))
    assert main(["add", "--device", "cuda", "--sanitize", "--dtype", "float16"]) == 1
    out = capsys.readouterr().out
    (report,) = [line for line in out.splitlines() if "Invalid" in line]
    assert report.startswith("  add float16 three dimensions"), out
    assert report.endswith("]: Invalid __global__ write of size 2 bytes"), out
    assert "add float16 (GPU kernel) breaks memcheck:" in out
    assert "breaks racecheck" not in out
    assert "1 promises kept, 1 broken" in out


def test_nothing_found_is_kept(sanitizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(sanitizer, "#!/bin/sh\necho 'opcheck calls add float16 a sample'\necho '========= ERROR SUMMARY: 0 errors'\n")
    assert main(["add", "--device", "cuda", "--sanitize"]) == 0
    assert "2 promises kept, 0 broken" in capsys.readouterr().out


def test_a_tool_that_cannot_run_is_no_success(sanitizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(sanitizer, "#!/bin/sh\necho '========= Error: Device not supported'\nexit 1\n")
    assert main(["add", "--device", "cuda", "--sanitize"]) == 1
    assert "before the first sample: Error: Device not supported" in capsys.readouterr().out
    write(sanitizer, "#!/bin/sh\necho Killed\nexit 137\n")
    assert main(["add", "--device", "cuda", "--sanitize"]) == 1
    assert "before the first sample: the process ended with exit code 137: Killed" in capsys.readouterr().out
    write(sanitizer, "#!/bin/sh\nexit 0\n")
    with pytest.raises(SystemExit) as stopped:
        main(["add", "--device", "cuda", "--sanitize"])
    assert stopped.value.code == 2
    assert "nothing was checked" in capsys.readouterr().err


def test_a_tool_that_takes_too_long_is_stopped(sanitizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(sanitizer, "#!/bin/sh\necho 'opcheck calls add float16 a sample'\nexec sleep 60\n")
    assert main(["add", "--device", "cuda", "--sanitize", "--longest", "1"]) == 1
    assert "add float16 a sample: not done after 1 seconds" in capsys.readouterr().out


def test_the_slow_tool_gets_few_samples(sanitizer: Path, tmp_path: Path) -> None:
    write(sanitizer, f"#!/bin/sh\necho \"$@\" >> {tmp_path}/calls\necho 'opcheck calls add float16 a sample'\n")
    assert main(["add", "--device", "cuda", "--sanitize", "--jobs", "1"]) == 0
    assert main(["add", "--device", "cuda", "--sanitize", "--jobs", "1", "--few"]) == 0
    calls = [call.split() for call in (tmp_path / "calls").read_text().splitlines()]
    assert [(call[1], call[-1]) for call in calls] == [
        ("memcheck", "all"),
        ("racecheck", "few"),
        ("memcheck", "few"),
        ("racecheck", "few"),
    ]
    for op in OPS.values():
        samples = list(op.samples(torch.device("cpu"), torch.float32))
        assert 0 < len(few_of(op, samples)) <= 8


def test_so_many_at_a_time(sanitizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each waits until all four have begun, and the table is in the order that they were asked for."""
    wait = f"while [ $(ls {tmp_path}/began | wc -l) -lt 4 ]; do sleep 0.05; done"
    (tmp_path / "began").mkdir()
    script = f"#!/bin/sh\ntouch {tmp_path}/began/$$\n{wait}\necho 'opcheck calls add float16 a sample'\n"
    write(sanitizer, script)
    arguments = ["swiglu", "add", "--device", "cuda", "--sanitize", "--longest", "30", "--json", f"{tmp_path}/found"]
    assert main([*arguments, "--jobs", "4"]) == 0
    table = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "GPU kernel" in line]
    assert table == ["swiglu", "add"]
    assert len(json.loads((tmp_path / "found").read_text())["results"]) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cuda"], "argument --sanitize: compute-sanitizer is neither in PATH nor in /usr/local/cuda/bin"),
        (["--device", "cuda", "--only", "compiled"], "argument --only: there is none with --sanitize"),
        (["--device", "cuda", "--seed", "5"], "argument --seed: there is none with --sanitize"),
    ],
)
def test_what_cannot_be_sanitized(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("shutil.which", lambda *names, **options: None)
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--sanitize"])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"opcheck: {message}")
    assert error.count("\n") == 1
