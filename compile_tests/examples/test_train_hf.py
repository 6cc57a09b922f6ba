"""The Hugging Face training example, in one process and in several: all ways to spread a model train the same one."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the example runs without interpreter"
)

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
SAME = 1e-5  # relative; of losses that differ by the order of sums
STEPS = 4


class Runs:
    """Runs of the example, each with an output folder named after it."""

    def __init__(self, root: Path) -> None:
        self.root, self.text = root, root / "squares.txt"
        self.text.write_text("".join(f"The square of {n} is {n * n}.\n" for n in range(2000)))

    def arguments(self, name: str, *args: object) -> list[str]:
        """The last of two equal options counts."""
        common = ["--device", "cpu", "--text", self.text, "--steps", STEPS, "--batch-size", 8, "--no-compile"]
        return [str(arg) for arg in (*common, "--out", self.root / name, *args)]

    def alone(self, name: str, *args: object) -> None:
        """Run it in this process alone."""
        importlib.import_module("train_hf").main(self.arguments(name, *args))

    def launch(self, count: int, runs: dict[str, list[object]], failure: str = "") -> dict:
        """Return for `outcomes` the runs in `count` processes. Those with the same name before a "|" share a folder."""
        arguments = [self.arguments(name.partition("|")[0], *args) for name, args in runs.items()]
        return {"count": count, "runs": arguments, "failure": failure}

    def together(self, *launches: dict) -> None:
        for outcome in outcomes(*launches):
            assert not any(outcome["codes"]), "\n".join(outcome["errors"])[-4000:]

    def record(self, name: str) -> dict:
        return json.loads((self.root / name / "run.json").read_text())

    def losses(self, name: str) -> list[float]:
        (run,) = self.record(name)["runs"].values()
        return run["losses"]

    def check_losses(self, want: list[float], *names: str) -> None:
        losses = {name: self.losses(name) for name in names}
        assert losses == {name: pytest.approx(want, rel=SAME) for name in names}


def outcomes(*launches: dict) -> list[dict]:
    """Exit codes and errors of processes launched one after another."""
    command = [sys.executable, "-m", "compile_tests.helpers.train_hf_driver", json.dumps(launches)]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch) -> Runs:
    monkeypatch.syspath_prepend(EXAMPLES)
    return Runs(tmp_path)


def require_same_training(runs: Runs, models: tuple[str, ...], more: dict[str, list[object]]) -> None:
    """Models train alike in one process, without llmk, spread over two processes in each way, and in `more` ways."""
    ways = {f"{model} {way}": ["--model", model, "--parallel", way] for model in models for way in ("fsdp", "tp")}
    runs.together(runs.launch(2, ways | more))
    for model in models:
        runs.alone(model, "--model", model)
        runs.alone(f"{model} plain", "--model", model, "--plain")
        names = (name for name in ways | more if name.startswith(model))
        runs.check_losses(runs.losses(model), f"{model} plain", *names)
    for name in (name for name in more if "compiled" in name):
        assert runs.record(name)["runs"]["llmk"]["measured"]["graph_breaks"] == 0
        assert runs.record(name)["runs"]["llmk"]["measured"]["recompiles"] == 0


def test_two_processes_train_what_one_does(runs: Runs):
    clipped = {f"clipped {way}": ["--clip", 0.5, "--parallel", way] for way in ("fsdp", "tp")}
    more = {"llama-nano ddp": ["--parallel", "ddp"], "llama-nano plain tp": ["--plain", "--parallel", "tp"]}
    more |= {f"llama-nano compiled {way}": ["--compile", "--parallel", way] for way in ("fsdp", "tp")}
    require_same_training(runs, ("llama-nano", "qwen3-nano"), more | clipped)
    runs.alone("clipped", "--clip", 0.5)
    runs.check_losses(runs.losses("clipped"), *clipped)
    assert runs.losses("clipped") != runs.losses("llama-nano")


@pytest.mark.breadth
def test_two_processes_train_more_models(runs: Runs):
    compiled = {"qwen3-nano compiled ddp": ["--compile", "--model", "qwen3-nano", "--parallel", "ddp"]}
    compiled |= {"qwen3-nano compiled tp": ["--compile", "--model", "qwen3-nano", "--parallel", "tp"]}
    require_same_training(runs, ("gemma2-nano", "qwen3-nano"), compiled)


@pytest.mark.breadth
def test_any_number_of_processes_continues_a_run(runs: Runs):
    qwen = ["--model", "qwen3-nano", "--checkpoint-every", 2]
    half = [*qwen, "--parallel", "fsdp", "--steps", 3]
    begun = {f"half {i}|begun": half for i in (1, 2, 3, 4)}
    by_two = begun | {"half 1|continued": [*qwen, "--parallel", "fsdp", "--resume"]}
    by_four = {f"four {way}": [*qwen, "--parallel", way] for way in ("ddp", "fsdp", "tp")}
    by_four |= {f"half {i}": [*qwen, "--parallel", way, "--resume"] for i, way in ((2, "fsdp"), (3, "tp"))}
    runs.together(runs.launch(2, by_two), runs.launch(4, by_four))
    runs.alone("half 4", *qwen, "--resume")
    runs.alone("one", *qwen)
    names = ["four ddp", "four fsdp", "four tp", *(f"half {i}" for i in (1, 2, 3, 4))]
    runs.check_losses(runs.losses("one"), *names)
    for name in names:
        (checkpoint,) = (runs.root / name / "checkpoints").iterdir()
        assert checkpoint.name == f"step-{STEPS}"
    assert runs.record("four tp")["config"]["tokens_per_second_of_each_device"] > 0


def test_what_a_run_leaves(runs: Runs, capsys):
    runs.alone("one", "--steps", 3, "--checkpoint-every", 0)
    printed = capsys.readouterr().out
    assert {file.name for file in (runs.root / "one").iterdir() if "text" not in file.name} == {"loss.png", "run.json"}
    assert max(map(len, printed.replace(str(runs.root), "").splitlines())) <= 80


def test_resumed_equals_uninterrupted(runs: Runs):
    runs.alone("one")
    runs.alone("half", "--steps", 3)
    runs.alone("half", "--resume")
    assert runs.losses("half") == runs.losses("one")


# ---- what goes wrong


def test_what_fails_in_one_process_ends_all(runs: Runs):
    fsdp = {"two": ["--parallel", "fsdp"]}
    no_text = {"two": ["--parallel", "tp", "--text", "no_such_file"]}
    heads = {"three": ["--parallel", "tp"]}
    memory, surprise, text, shared = outcomes(
        runs.launch(2, fsdp, "memory"), runs.launch(2, fsdp, "surprise"), runs.launch(2, no_text), runs.launch(3, heads)
    )
    assert memory["codes"] == surprise["codes"] == [1, 1]
    assert [lines_of(errors) for errors in memory["errors"]] == [0, 1]
    assert "out of memory on cpu" in memory["errors"][1]
    assert [errors.count("Traceback") for errors in surprise["errors"]] == [0, 1]
    assert "ArithmeticError: the last process stumbled" in surprise["errors"][1]
    assert text["codes"] == [2, 2]
    assert text["errors"] == ["train_hf_driver.py: no such file or folder: no_such_file\n", ""]
    assert shared["codes"] == [2, 2, 2]
    assert [lines_of(errors) for errors in shared["errors"]] == [1, 0, 0]
    assert "3 processes cannot share the 8 heads of model.layers.0.self_attn.q_proj" in shared["errors"][0]


def lines_of(errors: str) -> int:
    """Count the lines that are no progress bars."""
    return sum(line.strip() != "" and not re.search(r"llmk .* \d+/\d+ ", line) for line in errors.splitlines())


@pytest.mark.breadth
def test_torchrun(runs: Runs):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, EXAMPLES / "train_hf.py", *runs.arguments("two", "--steps", 2)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    config = runs.record("two")["config"]
    assert (config["parallel"], config["devices"]) == ("fsdp", 2)
    assert done.stdout.count("reading") == 1


BAD_INPUT = {
    "missing text": (["--text", "no_such_file"], "no such file"),
    "short text": (["--text", "short.txt"], "too few for one batch"),
    "unknown model": (["--model", "huge"], "--model"),
    "no steps": (["--steps", "0"], "--steps"),
    "words for a number": (["--lr", "fast"], "--lr"),
    "negative seed": (["--seed", "-1"], "--seed"),
    "negative checkpoints": (["--checkpoint-every", "-1"], "--checkpoint-every"),
    "missing device": (["--device", "cuda"], "--device"),
    "output folder is a file": (["--out", "short.txt"], "--out"),
    "no checkpoint": (["--resume"], "no checkpoint"),
    "unreadable checkpoint": (["--resume", "--out", "spoilt"], "cannot read the checkpoint"),
    "one way for two processes": (["--parallel", "none"], "--parallel", "2"),
    "odd batch for two processes": (["--batch-size", "7"], "--batch-size", "2"),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_one_line_and_exit_code_2(name: str, runs: Runs, monkeypatch, capsys):
    args, message, *count = BAD_INPUT[name]
    monkeypatch.chdir(runs.root)
    Path("short.txt").write_text("short")
    (runs.root / "spoilt" / "checkpoints" / "step-3").mkdir(parents=True)
    monkeypatch.setenv("WORLD_SIZE", *count or ["1"])
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    if not count:
        monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(SystemExit) as stopped:
        runs.alone("out", *args)
    assert stopped.value.code == 2
    errors = capsys.readouterr().err
    assert len(errors.splitlines()) == 1
    assert message in errors


def test_a_checkpoint_is_continued_with_the_same_settings(runs: Runs, capsys):
    runs.alone("one", "--steps", 3)
    for args, message in (
        (["--seed", 1], "--seed 0"),
        (["--clip", 1.0], "--clip None"),
        (["--model", "qwen3-nano"], "--model llama-nano"),
        (["--steps", 2], "past --steps 2"),
    ):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            runs.alone("one", "--resume", *args)
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err
