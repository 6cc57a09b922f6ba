"""opcheck finds what only a GPU shows, with `pytest --device cuda`; parts of it are tested anywhere."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compile_tests.helpers.mutants_gpu import BROKEN_ON_A_GPU
from llmk.opcheck import check
from llmk.opcheck import runner as opcheck_runner
from llmk.opcheck.__main__ import not_interpretable, paths
from llmk.opcheck.inputs import BrokenPromise
from llmk.opcheck.processes import Unit, check_in_process
from llmk.opcheck.promises import gpu as gpu_promises
from llmk.opcheck.promises.gpu import counted_replays, generator_kept, late, overwrite, require_captured, reversed_rows
from llmk.opcheck.promises.kernels import in_bounds
from llmk.opcheck.promises.table import GPU_PROMISES, INTERPRETER_PROMISES, OF_KERNELS
from llmk.opcheck.promises.values import has_index_past_the_end
from llmk.opcheck.runner import DeviceLost, promises_for
from llmk.registry import OPS, Sample

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("name", BROKEN_ON_A_GPU)
def test_a_broken_op_is_caught_under_its_name(name: str, device: torch.device) -> None:
    promise, make = BROKEN_ON_A_GPU[name]
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    if promise == "other_device" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    results = check(make(name), device=device, only=[promise.__name__ for promise in GPU_PROMISES])
    broken = [result for result in results if not result.passed]
    assert broken, results
    assert broken[0].promise == promise, broken[0]


def test_late_numbers_are_not_there_before(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    waited: list[int] = []
    x = torch.randn(4, 6, device=device)[:, ::2]
    copy = late(x, waited.append)
    assert torch.equal(copy, x)
    assert copy.stride() == x.stride()
    assert waited == [gpu_promises._DELAY]
    monkeypatch.setattr(gpu_promises, "copy_into", lambda copy, tensor: copy)
    assert late(x, waited.append).isnan().all()
    assert not late(torch.arange(1, 4, device=device), waited.append).any()


def test_a_capture_that_did_not_happen_is_named() -> None:
    with counted_replays() as count:
        pass
    with pytest.raises(BrokenPromise, match="no CUDA graph was replayed"):
        require_captured(Sample((torch.ones(2),), why="any"), count)


def test_a_capture_that_fails_leaves_the_generator_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[str] = []
    generator = SimpleNamespace(clone_state=lambda: "before", graphsafe_set_state=states.append)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with generator_kept():
        pass
    assert states == []
    with pytest.raises(RuntimeError, match="not permitted"), generator_kept():
        raise RuntimeError("operation not permitted when stream is capturing")
    assert states == ["before"]


def test_replays_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: None)
    with counted_replays() as count:
        torch.cuda.CUDAGraph.replay(None)  # type: ignore[arg-type]
    assert count == [1]
    require_captured(Sample((torch.ones(2),), why="any"), count)


def test_other_inputs_are_the_same_rows() -> None:
    ends = torch.tensor([0, 2, 2])
    sample = reversed_rows(Sample((torch.arange(6).view(3, 2), 0.5, ends), {"weight": torch.tensor([0.5, 1.0])}))
    assert sample.args[0].tolist() == [[4, 5], [2, 3], [0, 1]]
    assert sample.args[1] == 0.5
    assert sample.args[2].tolist() == [0, 2, 2]  # ends of groups: in another order they are none
    assert sample.kwargs["weight"].tolist() == [1.0, 0.5]


def test_a_gpus_kernels_are_interpreted_for_what_is_asked_of_their_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(name: str = "my_ops.py", path: str | None = None, **asked: Any) -> list[str]:
        given = {"device": CUDA, "search": None, "only": None, "skip": None} | asked
        return paths(SimpleNamespace(path=path, **given), name)  # type: ignore[arg-type]

    assert promises_for(CUDA, path="interpreter") == list(OF_KERNELS)
    assert promises_for(CUDA, ["in_bounds", "no_alias", "compiled_shapes"], path="interpreter") == [in_bounds]
    assert not {*promises_for(CUDA, path="GPU kernel")} & {*INTERPRETER_PROMISES}
    both = ["GPU kernel", "interpreter"]
    assert chosen() == chosen(path="all") == chosen(only=["in_bounds"]) == chosen("add", "all") == both
    assert chosen("add") == chosen(search=9) == chosen(only=["no_alias"]) == chosen(path="gpu") == both[:1]
    assert chosen(path="interpreter") == chosen(path="interpreter", search=9) == both[1:]
    assert chosen(device=CPU, only=["no_alias"]) == ["reference", "interpreter"]
    monkeypatch.setattr("llmk.opcheck.__main__.TRITON", (3, 6))
    monkeypatch.setattr("importlib.metadata.version", lambda package: "2.4.0")
    assert chosen() == both[:1]
    assert "expects numpy<2.4, got numpy 2.4.0" in not_interpretable()


@pytest.mark.usefixtures("forked_checks")
def test_a_lost_gpu_ends_the_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every later call would fail: the promise is broken, and another process goes on."""

    def synchronize(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    opcheck_runner._require_usable(CPU, "mine float32 far_rows: a row")
    with pytest.raises(DeviceLost, match=r"^mine float32 far_rows: a row: an error$"):
        opcheck_runner._require_usable(CUDA, "mine float32 far_rows: a row: an error\nof several lines")
    file = tmp_path / "lost.py"
    file.write_text(LOSES_THE_DEVICE)
    (result,) = check_in_process(Unit((str(file),), "reference"), CPU, ["--only", "no_alias"], threads=1)
    assert (result.promise, result.message) == ("import", "the process ended with exit code 1: mine: an error")


LOSES_THE_DEVICE = """
import torch
from llmk.opcheck.promises.values import has_index_past_the_end
from llmk.opcheck.runner import DeviceLost
from llmk.registry import Op

def samples(device, dtype):
    raise DeviceLost("mine: an error")

OP = Op(
    name="mine", overload=torch.ops.aten.square.default, reference=torch.square, samples=samples, differentiable=()
)
"""


def test_a_label_past_the_last_class_is_seen_on_a_cpu() -> None:
    """`other_sizes` makes such labels where it takes classes away; a GPU ends the process instead of raising."""
    op, logits, target = OPS["cross_entropy"], torch.randn(3, 9), torch.tensor([1, 8, -100])
    assert not has_index_past_the_end(op, Sample((logits, target), why="three labels"))
    assert has_index_past_the_end(op, Sample((logits[:, :8], target), why="a class less"))
    assert not has_index_past_the_end(op, Sample((logits, target[:2]), why="too few labels"))


def test_an_expanded_axis_is_written_once() -> None:
    tensor, numbers = (make(3, 1, 2, dtype=torch.float32).expand(3, 4, 2) for make in (torch.zeros, torch.randn))
    overwrite(tensor, numbers)
    assert torch.equal(tensor, numbers)
