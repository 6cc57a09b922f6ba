"""`pytest --device DEVICE` runs the same suite anywhere; with TRITON_INTERPRET=1 only tests marked `kernels` run."""

import os

# To find out which vectors a processor has, Inductor builds five programs: 14 seconds, and 2 of each later process.
# Code without vectors is compiled in half the time.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
if "PYTEST_XDIST_WORKER" in os.environ:  # tests run side by side, one on each core, and so do the processes they start
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # OpenMP's threads wait for one another after each loop: where there are more than cores, 5 to 40 times as long.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

import llmk  # noqa: F401 registers the operators
from compile_tests.helpers.garbage import collect_seldom
from llmk.registry.devices import INTERPRET


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where the operators run: cpu (default), or a GPU")
    parser.addoption("--breadth", action="store_true", help="also tests marked `breadth`: more of the same kind")
    parser.addoption(
        "--build",
        choices=("few", "many", "every"),
        default="few",
        help="what is compiled ahead: each kernel once for one target of each vendor (few, default); what all "
        "samples launch, and the largest blocks that sizes can lead to (many); every configuration, found at more "
        "sizes (every: hours)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "kernels: also worth running with the kernels in Triton's interpreter")
    config.addinivalue_line("markers", "breadth: one more of a kind that is tested; `--breadth` runs it")
    if INTERPRET:
        _refuse_masks_of_numbers()
        from llmk.opcheck.interpreted.interpreter import interpreter, patching_once

        interpreter._patch_lang = patching_once(interpreter._patch_lang)


def _refuse_masks_of_numbers() -> None:
    """Refuse masks of numbers as Triton 3.9 does; one truth value made a block is a number to all interpreters."""
    for name, position in (("create_masked_load", 1), ("create_masked_store", 2)):
        original = getattr(InterpreterBuilder, name)

        def strict(self: Any, *args: Any, original: Any = original, position: int = position, **named: Any) -> Any:
            if numpy.asarray(args[position].data).dtype != bool:  # a descriptor's is a plain array
                raise ValueError("mask has unsupported dtype")
            return original(self, *args, **named)

        setattr(InterpreterBuilder, name, strict)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Interpreted, files in which no test depends on the kernels' code are not imported."""
    tests = INTERPRET and collection_path.is_file()
    return True if tests and "mark.kernels" not in collection_path.read_text() else None


def pytest_collectstart(collector: pytest.Collector) -> None:
    """The tensors that a module makes when it is imported are the same in every run."""
    if isinstance(collector, pytest.Module):
        torch.manual_seed(0)


def pytest_collection_finish() -> None:
    collect_seldom()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--breadth"):
        skip = pytest.mark.skip(reason="one more of its kind: `--breadth` runs it")
        for item in items:
            if item.get_closest_marker("breadth") is not None:
                item.add_marker(skip)
    if INTERPRET:
        skip = pytest.mark.skip(reason="does not depend on the kernels' code")
        for item in items:
            if item.get_closest_marker("kernels") is None:
                item.add_marker(skip)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.config.getoption("--device"))


@pytest.fixture
def build(request: pytest.FixtureRequest) -> str:
    return request.config.getoption("--build")


@pytest.fixture
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A run compiles each kernel ahead once, for all its processes; the home directory stays as it was."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # each process has a folder of its own in the run's
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))
        yield


@pytest.fixture
def no_cpp(device: torch.device) -> Iterator[None]:
    """Inductor compiles no C++: nothing is tested here that only its code would show."""
    from torch._inductor import config

    from compile_tests.helpers.without_cpp import WITHOUT_CPP

    with config.patch(WITHOUT_CPP if device.type == "cpu" else {}):
        yield


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random numbers, whatever ran before."""
    torch.manual_seed(0)
