"""The training example, run as a user runs it: in processes of its own, on a small text."""

import importlib
import json
import os
import subprocess
from pathlib import Path

import pytest

from compile_tests.helpers.scripts import run_script

pytest.importorskip("tokenizers")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the example runs without interpreter"
)

TRAIN = Path(__file__).parents[2] / "examples" / "train.py"
SMALL = ["--preset", "nano", "--device", "cpu"]


def run_train(*args: object) -> subprocess.CompletedProcess[str]:
    """Run it with one thread: several add to the embedding's gradient in any order, and a loss's last bits follow."""
    return run_script(TRAIN, *args)


def record_of(out: Path) -> dict:
    return json.loads((out / "run.json").read_text())


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("text") / "squares.txt"
    file.write_text("".join(f"The square of {n} is {n * n}.\n" for n in range(2000)))
    return file


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory) -> tuple[Path, str]:
    """A run of 6 steps with the baseline: its output folder and what it printed."""
    out = tmp_path_factory.mktemp("trained")
    done = run_train(*SMALL, "--text", text, "--steps", 6, "--out", out)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def test_llmk_and_plain_agree(trained):
    out, printed = trained
    record = record_of(out)
    ours, plain = record["runs"]["llmk"], record["runs"]["plain"]
    assert len(ours["losses"]) == 6
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert record["largest_relative_difference"]["largest"] <= 1e-5
    assert "\nequal within" in printed


def test_no_graph_break_and_no_recompile(trained):
    for run in record_of(trained[0])["runs"].values():
        measured = run["measured"]
        assert (measured["graphs"], measured["graph_breaks"], measured["recompiles"]) == (1, 0, 0)
        assert measured["tokens_per_second"] > 0
        assert measured["peak_memory"] > 2**20


def test_what_a_run_leaves(trained):
    out, printed = trained
    assert {"llmk.pt", "plain.pt", "loss.png", "run.json"} <= {file.name for file in out.iterdir()}
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert {"torch", "triton", "python", "llmk"} <= set(record_of(out)["versions"])
    assert max(map(len, printed.replace(str(out), "runs").splitlines())) <= 80


def test_resumed_run_equals_uninterrupted(trained, text: Path, tmp_path: Path):
    for args in (["--steps", 3], ["--steps", 6, "--resume"]):
        done = run_train(*SMALL, "--text", text, "--out", tmp_path, "--no-baseline", *args)
        assert done.returncode == 0, done.stderr
    uninterrupted, _ = trained
    assert record_of(tmp_path)["runs"]["llmk"]["losses"] == record_of(uninterrupted)["runs"]["llmk"]["losses"]


BAD_INPUT = {
    "missing text": (["--text", "no_such_file"], "no such file"),
    "empty text": (["--text", "empty.txt"], "no text"),
    "empty folder": (["--text", "folder"], "no text"),
    "short text": (["--text", "short.txt"], "too few for one batch"),
    "binary text": (["--text", "binary.txt"], "not UTF-8"),
    "unknown preset": (["--preset", "huge"], "--preset"),
    "no steps": (["--steps", "0"], "--steps"),
    "words for a number": (["--lr", "fast"], "--lr"),
    "infinite learning rate": (["--lr", "inf"], "--lr"),
    "small vocabulary": (["--vocab-size", "10"], "--vocab-size"),
    "negative seed": (["--seed", "-1"], "--seed"),
    "unknown device": (["--device", "toaster"], "--device"),
    "missing device": (["--device", "cuda:99"], "--device"),
    "output folder is a file": (["--out", "short.txt"], "--out"),
    "no checkpoint": (["--resume", "--out", "fresh"], "no checkpoint"),
    "unreadable checkpoint": (["--resume", "--out", "spoilt"], "cannot read the checkpoint"),
    "checkpoint of another preset": (["--resume", "--preset", "tiny", "--seq-len", "32"], "--preset nano"),
    "checkpoint of another seed": (["--resume", "--seed", "1"], "--seed 0"),
    "checkpoint past the steps": (["--resume", "--steps", "5"], "past --steps 5"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    """The current folder, with the files that the bad inputs name."""
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "spoilt").mkdir()
    (tmp_path / "spoilt" / "llmk.pt").write_text("no checkpoint")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_one_line_and_exit_code_2(name: str, trained, text: Path, folder: Path, monkeypatch, capsys):
    """The program runs in this process, which has imported torch already."""
    monkeypatch.syspath_prepend(TRAIN.parent)
    out = trained[0] if "--resume" in BAD_INPUT[name][0] else "out"
    args, message = BAD_INPUT[name]
    with pytest.raises(SystemExit) as stopped:  # of two equal options the last one counts
        importlib.import_module("train").main([*SMALL, "--text", str(text), "--out", str(out), *args])
    assert stopped.value.code == 2
    errors = capsys.readouterr().err
    assert len(errors.splitlines()) == 1
    assert message in errors


def test_bad_input_shows_no_traceback(folder: Path):
    done = run_train(*SMALL, "--text", folder / "no_such_file", "--out", folder / "out")
    assert done.returncode == 2
    assert done.stderr.startswith("train.py: ")
    assert len(done.stderr.splitlines()) == 1
