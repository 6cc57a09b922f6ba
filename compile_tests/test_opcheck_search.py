"""`--search` finds what no sample shows, and says it in few numbers."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compile_tests.planted import record
from compile_tests.planted_search import PLANTED, SharedFormula, elementwise
from compile_tests.test_opcheck_command import OWN_OP
from llmk.opcheck import check
from llmk.opcheck.__main__ import main
from llmk.opcheck.calls import call
from llmk.opcheck.cases import Cases
from llmk.opcheck.judge import judge
from llmk.opcheck.search import search
from llmk.opcheck.shrink import snippet
from llmk.registry import OPS, Op, Sample

CPU = torch.device("cpu")


def tensors(op: Op, sample: Sample) -> list[torch.Tensor]:
    return [value for value in op.bind(sample).values() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("name", PLANTED)
def test_a_fault_that_no_sample_shows_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmk.opcheck.judge.PATIENCE", 0.3)
    kind, make = PLANTED[name]
    op = make(name)
    assert [result.passed for result in check(op, promises=["values_and_gradients"])] == [True]
    (found,) = search(op, "cpu", torch.float32, seconds=30, most=1, shrinking=0.5).found
    assert found.finding.kind == kind, str(found)
    assert f"seed {found.drawn.seed}: " in str(found)
    if kind not in ("does not end", "raises"):
        exec(compile(snippet(op, found.shrunk), name, "exec"), {"print": lambda *results: None})


def test_a_finding_is_made_small() -> None:
    found = search(PLANTED["cancels"][1]("cancels_small"), CPU, torch.float32, 60, most=1, shrinking=30).found[0]
    assert max(tensor.numel() for tensor in tensors(found.op, found.shrunk.sample)) <= 6, str(found)


def test_a_sound_op_is_not_found_wrong() -> None:
    op = record("square", overload=torch.ops.aten.square.default)
    cases = Cases(op, CPU, torch.float32)
    assert [found for found in (judge(op, cases[seed]) for seed in range(60)) if found] == []


@pytest.mark.parametrize("name", ["rms_norm", "cross_entropy", "moe_permute"])
def test_a_seed_is_always_the_same_case(name: str) -> None:
    op = OPS[name]
    for seed in range(12):
        torch.manual_seed(seed)  # whatever was drawn before
        first, second = (Cases(op, CPU, torch.float32)[seed] for _ in range(2))
        assert str(first.sample) == str(second.sample)
        pairs = zip(tensors(op, first.sample), tensors(op, second.sample), strict=True)
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def test_every_pair_of_options_comes() -> None:
    """Defaults too, and what the operator's own error says that an option may be."""
    cases = Cases(OPS["fused_linear_preference"], CPU, torch.float32)
    assert {"exo_pair", "robust", "sigmoid"} <= set(cases.options["loss_type"])
    exo = [pair for pair in cases.pairs if pair.get("loss_type") == "exo_pair" and "label_smoothing" in pair]
    assert {"its default", "0.0", "0.5", "1.0"} <= {repr(pair["label_smoothing"]) for pair in exo}


def test_one_tensor_given_twice_stays_one() -> None:
    x = torch.randn(3, 4, dtype=torch.float32, device="cpu")
    outcome = call(OPS["add"], Sample((x, x)))
    assert outcome.inputs["input"] is outcome.inputs["other"]
    assert outcome.inputs["input"] is not x


def test_a_constant_of_the_reference_stays_one() -> None:
    """A detached term of the reference is no fault of its gradient; a wrong formula is."""

    def reference(input: torch.Tensor) -> torch.Tensor:
        return input * input.detach()

    detached = elementwise("detached", lambda x: x * x, reference)
    cases = Cases(detached, CPU, torch.float32)
    assert not any(judge(detached, cases[seed]) for seed in range(20))
    shared = elementwise("shared_again", SharedFormula.apply, SharedFormula.apply)
    assert any(judge(shared, Cases(shared, CPU, torch.float32)[seed]) for seed in range(20))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--search", "5", "--promise", "no_alias"], "argument --promise: there is none with --search"),
        (["--seed", "5"], "argument --seed: it is for --search"),
        (["--search", "none"], "argument --search: expected a positive whole number, got 'none'"),
        (["--search", "5", "--seed", "-1"], "argument --seed: expected a whole number of at least 0, got '-1'"),
    ],
)
def test_command_line_refuses(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["add", "--device", "cpu", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_command_line_searches_an_op_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "my_op.py"
    file.write_text(OWN_OP.format(divisor=3))
    command = [sys.executable, "-m", "llmk.opcheck", str(file), "--device", "cpu", "--dtype", "float32"]
    command += ["--path", "reference", "--search", "2", "--seed", "3"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 1, process.stdout + process.stderr
    assert "half float32 (reference) breaks search:\n  seeds 3 to " in process.stdout
    assert re.search(r"value: output 0: element \d+ is \S+, right is \S+", process.stdout)
    assert "outputs = torch.ops.mylib.half(input)" in process.stdout
