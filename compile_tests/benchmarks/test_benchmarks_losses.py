"""The benchmark of losses runs where there is no GPU, and its ways compute the same: values and gradients."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from llmk.bench.timing import Timer
from llmk.registry.devices import INTERPRET

pytest.importorskip("tqdm")

from benchmarks import losses
from benchmarks.losses import LABELS, Batch, Loss

pytestmark = pytest.mark.skipif(INTERPRET, reason="TRITON_INTERPRET=1: what is compared is on the CPU")

ROOT, CPU = Path(__file__).resolve().parents[2], torch.device("cpu")
ALL_COUNT = {"logprobs", "distill", "distill_two"}


def batch(name: str) -> Batch:
    torch.manual_seed(0)
    return losses.make_batch((4, 6, 16, 64), 0.0 if name in ALL_COUNT else 0.3, CPU, torch.float32)


def exact(b: Batch) -> Batch:
    """The same in float64."""
    tensors = {field.name: getattr(b, field.name).detach() for field in dataclasses.fields(b)}
    doubles = {name: value.double() if value.is_floating_point() else value for name, value in tensors.items()}
    return Batch(**doubles | {name: doubles[name].requires_grad_() for name in ("x", "weight")})


def results(loss: Loss, b: Batch) -> list[torch.Tensor]:
    value = loss()
    return [value.detach(), *torch.autograd.grad(value, (b.x, b.weight))]


def assert_same(loss: Loss, name: str, b: Batch) -> None:
    other = exact(b)
    expected = [value.float() for value in results(losses.torch_loss(name, other), other)]
    torch.testing.assert_close(results(loss, b), expected)


@pytest.mark.parametrize("name", LABELS)
def test_llmk_computes_what_plain_pytorch_does(name: str) -> None:
    b = batch(name)
    assert_same(losses.llmk_loss(name, b), name, b)


@pytest.mark.parametrize("name", LABELS)
def test_trl_computes_what_plain_pytorch_does(name: str) -> None:
    pytest.importorskip("trl")
    pytest.importorskip("datasets", reason="TRL's trainers need datasets")
    b = batch(name)
    assert_same(losses.trl_loss(name, b), name, b)


@pytest.mark.usefixtures("no_cpp")
def test_every_way_of_a_workload(tmp_path: Path) -> None:
    file = tmp_path / "losses.json"
    options = ["--device", "cpu", "--peers", "none", "--json", str(file)]
    assert losses.main(["grpo", "--shapes", "ignored", *options]) == 0
    content = json.loads(file.read_text())
    (row,) = content["rows"]
    assert content["config"]["rounds"] == losses.ROUNDS
    assert row["workload"] == "grpo 4x6x16x64, 40% ignored tokens"
    values = {way: found.get("value") for way, found in row["ways"].items()}
    assert list(values) == [
        *("products of tokens that count", "products of all"),
        *("llmk", "llmk, skip_ignored=False", "torch compiled"),
    ]
    assert [values.pop(way) for way in list(values)[:2]] == [None, None]
    assert list(values.values()) == [pytest.approx(values["llmk"], rel=1e-5)] * 3
    assert all(found["ms"] > 0 for found in row["ways"].values())


def test_every_loss_has_products_alone(tmp_path: Path) -> None:
    file = tmp_path / "losses.json"
    options = ["--device", "cpu", "--peers", "none", "--no-compile", "--json", str(file)]
    assert losses.main(["--shapes", "2x5x16x32", *options]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["workload"] for row in rows] == [f"{name} 2x5x16x32" for name in LABELS]
    assert all(list(row["ways"]) == ["products alone", "llmk", "llmk, float32 logits"] for row in rows)
    assert all("error" not in found for row in rows for found in row["ways"].values())


def test_a_way_that_fails_leaves_the_others() -> None:
    calls: list[int] = []

    def fails_later() -> torch.Tensor:
        calls.append(1)
        if len(calls) > 5:
            raise RuntimeError("no memory left\nand more")
        return torch.ones(())

    def fails() -> torch.Tensor:
        raise ValueError("not supported")

    ways = {"fails": fails, "fails later": fails_later, "works": lambda: torch.ones(())}
    found = losses.measure(Timer(CPU, repeats=1), ways, 0.001)
    assert found["fails"] == {"error": "ValueError: not supported"}
    assert found["fails later"] == {"error": "RuntimeError: no memory left"}
    assert found["works"]["ms"] > 0
    assert found["works"]["value"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"), [(["no_loss"], "there are"), (["--shapes", "1x2x3"], "BxSxHxV or ignored, got '1x2x3'")]
)
def test_an_unknown_name_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        losses.main([*arguments, "--device", "cpu"])
    assert message in capsys.readouterr().err
