"""The benchmark runs where there is no GPU, compares with peers that compute the same, and writes what it measured."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llmk.bench.timing import Timer
from llmk.registry import OPS, Sample

pytest.importorskip("tqdm")

from benchmarks import chunks, float32_logits, peers
from benchmarks.compositions import COMPOSITIONS
from benchmarks.report import best_peer, op_results
from benchmarks.run import main
from benchmarks.ways import MAX_ERROR, exact_results, relative_error, results

OWN_WAYS = ["llmk eager", "llmk compiled", "torch eager", "torch compiled"]


def run(file: Path, *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--device", "cpu", "--repeats", "1", "--json", str(file)]) == 0
    return json.loads(file.read_text())


@pytest.fixture(autouse=True)
def few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host times are a median over thousands of calls, seconds for a loss; that they are taken is tested here."""
    monkeypatch.setattr("benchmarks.host.CALLS", 2)
    monkeypatch.setattr("benchmarks.host.ROUNDS", 2)


@pytest.fixture
def add_peer(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[..., Any]], None]:
    """Make the only peers those of the test, each one a way to compute swiglu."""
    monkeypatch.setattr(peers, "PEERS", {})

    def add(name: str, function: Callable[..., Any], distribution: str = "torch") -> None:
        peers.PEERS[name] = peers.Peer(name, (distribution,), lambda tune: {"swiglu": lambda *args: function})

    return add


@pytest.mark.usefixtures("no_cpp")
def test_one_operator(tmp_path: Path) -> None:
    results = run(tmp_path / "results.json", "swiglu", "--peers", "none")
    assert [row["way"] for row in results["rows"]] == OWN_WAYS
    assert all(row["full_ms"] > 0 for row in results["rows"])
    assert results["config"]["guess_tangent_strides_as_outputs"]
    (host,) = results["host_us"]
    assert host["op"] == "swiglu"
    assert host["ratio"] == [a / b for a, b in zip(host["llmk"], host["bare"], strict=True)]


def test_a_right_and_a_wrong_peer(tmp_path: Path, add_peer: Any) -> None:
    def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(gate) * up

    def wrong_gradient(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return swiglu(gate, up.detach()) + 0 * up

    def broken(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such kernel\nand more")

    add_peer("right", swiglu)
    add_peer("wrong", wrong_gradient)
    add_peer("broken", broken)
    results = run(tmp_path / "results.json", "swiglu", "--no-compile")
    rows = {row["way"]: row for row in results["rows"]}
    assert results["peers"] == dict.fromkeys(("right", "wrong", "broken"), peers.PEERS["right"].version())
    assert list(rows) == ["llmk eager", "torch eager", "right", "wrong", "broken"]
    assert rows["right"]["full_ms"] > 0
    assert 0 < rows["right"]["check_error"] < 2e-2
    assert rows["wrong"]["error"] == "wrong result (1)"
    assert rows["broken"]["error"] == "RuntimeError: no such kernel"
    assert "full_ms" not in rows["wrong"]
    assert best_peer(results["rows"]) == rows["right"]["full_ms"]


def test_a_peer_that_overwrites_its_inputs_spoils_no_one_elses(tmp_path: Path, add_peer: Any) -> None:
    seen: list[bool] = []

    def careless(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        result = torch.nn.functional.silu(gate.clone()) * up  # right in its check, and on what it has left itself not
        gate.data.fill_(float("nan"))
        return result

    def watching(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        seen.append(bool(gate.isnan().any()))
        return torch.nn.functional.silu(gate) * up

    add_peer("careless", careless)
    add_peer("watching", watching)
    results = run(tmp_path / "results.json", "swiglu", "--no-compile")
    assert all("error" not in row for row in results["rows"])
    assert len(seen) > 3
    assert not any(seen)


def test_a_peer_without_a_backward_pass_is_timed_forward(tmp_path: Path, add_peer: Any) -> None:
    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.silu(gate) * up

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("not on this GPU")

    add_peer("forward", Forward.apply)
    (row,) = [
        row for row in run(tmp_path / "results.json", "swiglu", "--no-compile")["rows"] if row["way"] == "forward"
    ]
    assert (row["error"], row["backward_error"]) == ("forward only", "RuntimeError: not on this GPU")
    assert row["check_error"] < MAX_ERROR
    assert row["forward_ms"] > 0
    assert "full_ms" not in row


def test_a_missing_peer_is_skipped_with_a_word(
    tmp_path: Path, add_peer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    add_peer("absent", lambda gate, up: gate, distribution="no-such-distribution")
    results = run(tmp_path / "results.json", "swiglu", "--no-compile")
    assert results["peers"] == {}
    assert "absent: missing" in capsys.readouterr().out


def test_a_call_that_fails_leaves_the_others() -> None:
    def fail() -> None:
        raise ValueError("too long\nfor a row")

    times, failed = Timer(torch.device("cpu"), repeats=2).in_turns({"good": lambda: None, "bad": fail})
    assert set(times) == {"good"}
    assert failed == {"bad": "ValueError: too long"}


def test_append_merges_operators_and_refuses_another_machine(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    first = run(file, "swiglu", "--no-compile", "--peers", "none")
    both = run(file, "add", "--no-compile", "--peers", "none", "--append")
    assert {row["op"] for row in both["rows"]} == {"add", "swiglu"}
    assert [row for row in both["rows"] if row["op"] == "swiglu"] == first["rows"]
    again = run(file, "swiglu", "--no-compile", "--peers", "none", "--append")
    assert len(again["rows"]) == len(both["rows"])
    about = {key: value for key, value in again.items() if key not in ("rows", "host_us", "ceilings")}
    with pytest.raises(ValueError, match="another device"):
        op_results(file, {**about, "device": "another"}, {}, append=True)


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_a_composition_computes_what_plain_pytorch_does(name: str) -> None:
    torch.manual_seed(0)
    op = COMPOSITIONS[name](False)
    (sample,) = op.samples(torch.device("cpu"), torch.bfloat16)
    found = results(op, sample, op.overload)
    assert len(found) == 1 + len(op.differentiable)
    assert relative_error(found, exact_results(op, sample)) < MAX_ERROR


LINEAR_CE = "torch linear_cross_entropy", "torch linear_cross_entropy chunked"


@pytest.mark.skipif(not hasattr(torch.nn.functional, "linear_cross_entropy"), reason="needs torch 2.13 or newer")
def test_pytorchs_own_fused_loss_is_a_way_of_fused_linear_ce(tmp_path: Path) -> None:
    rows = run(tmp_path / "results.json", "fused_linear_ce", "--no-compile", "--peers", ",".join(LINEAR_CE))["rows"]
    assert [row["way"] for row in rows] == ["llmk eager", "torch eager", *LINEAR_CE, "products alone"]
    assert all("error" not in row and row["full_ms"] > 0 for row in rows)
    assert all(0 < row["check_error"] < MAX_ERROR for row in rows[2:4])


@pytest.mark.skipif(not hasattr(torch.nn.functional, "linear_cross_entropy"), reason="needs torch 2.13 or newer")
def test_pytorchs_own_fused_loss_gets_the_options_that_it_has() -> None:
    torch.manual_seed(0)
    op, V = OPS["fused_linear_ce"], 37
    tensors = torch.randn(11, 16).bfloat16(), torch.randn(V, 16).bfloat16(), torch.randint(V, (11,))
    both = {"linear_bias": torch.randn(V).bfloat16(), "weight": torch.rand(V).bfloat16() + 0.5, "ignore_index": 3}
    for peer, more in zip(peers.find_peers(LINEAR_CE), ({"label_smoothing": 0.1}, {}), strict=True):
        for reduction in ("none", "mean", "sum"):
            sample = Sample(tensors, {**both, **more, "reduction": reduction}, why=reduction)
            function = peer.function(op.name, sample.args, sample.kwargs)
            assert function is not None
            assert relative_error(results(op, sample, function), exact_results(op, sample)) < MAX_ERROR
        assert peer.function(op.name, tensors, {"softcap": 4.0}) is None
    assert peer.function(op.name, tensors, {"label_smoothing": 0.1}) is None  # PyTorch's chunks have none


def test_chunks(tmp_path: Path) -> None:
    file = tmp_path / "chunks.json"
    assert chunks.main(["--device", "cpu", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["chunk_size"] for row in rows] == list(chunks.SMALL_CHUNK_SIZES)
    assert all(row["ms"] > 0 and row["products_ms"] > 0 for row in rows)


@pytest.mark.usefixtures("no_cpp")
def test_float32_logits(tmp_path: Path) -> None:
    file = tmp_path / "float32_logits.json"
    assert float32_logits.main(["--device", "cpu", "--json", str(file)]) == 0
    results = json.loads(file.read_text())
    assert {way for row in results["rows"] for way in row["ways"]} == {
        *("float32", "input's dtype", "compiled PyTorch"),
        *("products alone", "three products", "four products"),
    }
    near = {row["logits"]: row["relative"] for row in results["errors"] if row["of"] == "dx, teacher at 0.001"}
    assert near["None"] < 0.01 < near["torch.bfloat16"]
