"""opcheck on a folder in the layout of Hugging Face's kernel repositories: functions and layers."""

import inspect
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from llmk.opcheck import check
from llmk.opcheck.foreign.loading import NotLoaded, find_ops
from llmk.opcheck.foreign.signatures import Unrecorded
from llmk.opcheck.report.causes import causes
from llmk.opcheck.report.reports import notes

PACKAGE = """
import torch

from . import layers

__all__ = ["layers", "relu", "silu_and_mul", "takes_anything"]


def relu(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.empty_like(x) if out is None else out
    return out.copy_(x.clamp(min=0))


def silu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    out.copy_(torch.nn.functional.silu(x) * x)


def takes_anything(*args):
    return args[0] * 2
"""

LAYERS = '''
import torch
from torch import nn


def normalized(x, weight, eps):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


class RMSNorm(nn.Module):
    """What it claims is so."""

    can_torch_compile: bool = True
    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return normalized(hidden_states, self.weight, self.variance_epsilon)


class Inference(nn.Module):
    has_backward = False
    can_torch_compile = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x.detach().tanh()


class NoBackward(Inference):
    has_backward = True


class NoGraph(nn.Module):
    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x.tanh()


class Modest(nn.Module):
    has_backward = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh()
'''

FEW = ["has_backward", "can_torch_compile", "compiled_samples", "no_mutation", "no_alias"]


def write(package: Path) -> None:
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(PACKAGE)
    (package / "layers.py").write_text(LAYERS)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    write(folder / "torch-ext" / "my_kernels")
    return folder


def test_functions_and_layers_are_found(repository: Path) -> None:
    names = ["relu", "silu_and_mul", "takes_anything", "RMSNorm", "Inference", "NoBackward", "NoGraph", "Modest"]
    ops = {op.name: op for op in find_ops([f"hub:{repository}"])}
    assert [*ops] == names
    arguments = inspect.signature(ops["RMSNorm"].overload).parameters
    assert [*arguments] == ["hidden_states", "weight", "variance_epsilon"]


@pytest.mark.parametrize(
    ("name", "found", "note"),
    [
        ("relu", "", "samples made from its signature, tensors of one shape"),
        ("silu_and_mul", "", "samples made from its signature, tensors of one shape"),
        ("takes_anything", "", "no samples: overload: .* takes .args or ..kwargs"),
        ("RMSNorm", "", "gradients of hidden_states, weight"),
        ("Inference", "", "no gradients"),
        ("NoBackward", "wrong gradients: .* breaks has_backward:\n  has_backward is True, .* no argument gets", ""),
        ("NoGraph", "compile: .* breaks can_torch_compile:\n  can_torch_compile is True, and torch.compile raises", ""),
        ("Modest", "", "has_backward is False, and it has a backward pass"),
        ("Modest", "", "can_torch_compile is False, its default, and torch.compile takes it"),
    ],
)
def test_what_is_declared_is_held_against_what_is_so(repository: Path, name: str, found: str, note: str) -> None:
    (op,) = (op for op in find_ops([f"hub:{repository}"]) if op.name == name)
    results = check(op, only=FEW if name != "Inference" else FEW[:2])
    paragraphs = "\n".join(map(str, causes(results)))
    assert (paragraphs == "") is (found == ""), paragraphs
    assert re.search(found, paragraphs), paragraphs
    assert re.search(note, "\n".join(notes(results))), list(notes(results))


def test_a_function_is_not_asked_what_a_layer_declares(repository: Path) -> None:
    (relu,) = (op for op in find_ops([f"hub:{repository}"]) if op.name == "relu")
    assert not {*FEW[:2]} & {result.promise for result in check(relu, skip=["compiled"])}


def origins(folder: Path) -> set[str]:
    ops = find_ops([f"hub:{folder}"])
    return {op.origin.partition(".")[0] for op in ops if isinstance(op, Unrecorded)}


def test_a_build_for_this_torch_comes_before_the_source(tmp_path: Path) -> None:
    """The package is found in both layouts, in the variant's folder or below it."""
    major, minor = torch.__version__.split(".")[:2]
    for variant in ("torch11-cxx11-cpu-x86_64-linux", f"torch{major}{minor}-cxx11-cpu-x86_64-linux/built"):
        write(tmp_path / "build" / variant)
    assert origins(tmp_path) == {"built"}
    write(tmp_path / "build" / "torch-cpu")
    assert origins(tmp_path) == {"torch-cpu"}


def test_a_repository_is_loaded_by_kernels(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the network, or of a publisher whom it does not trust, is one line."""

    def get_kernel(name: str, *, revision: str) -> ModuleType:
        if name != "somebody/kernel":
            raise RuntimeError(f"{name} is not trusted\nset trust_remote_code")
        find_ops([f"hub:{repository}"])
        return sys.modules["my_kernels"]

    monkeypatch.setitem(sys.modules, "kernels", SimpleNamespace(get_kernel=get_kernel))
    assert len(find_ops(["hub:somebody/kernel"])) == 8
    with pytest.raises(NotLoaded, match=r"^hub:nobody/kernel: RuntimeError: nobody/kernel is not trusted$"):
        find_ops(["hub:nobody/kernel"])


def test_what_is_no_repository_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotLoaded, match=r"hub:\S+: no package in build/ for torch .* nor in torch-ext/"):
        find_ops([f"hub:{tmp_path}"])
    monkeypatch.setitem(sys.modules, "kernels", None)
    with pytest.raises(
        NotLoaded, match=r"hub:somebody/kernel: there is no such folder, and `kernels`, .* not installed"
    ):
        find_ops(["hub:somebody/kernel"])
    (tmp_path / "torch-ext").mkdir()
    (tmp_path / "torch-ext" / "__init__.py").write_text("import no_such_package\n")
    with pytest.raises(NotLoaded, match=r"__init__.py, line 1: ModuleNotFoundError: No module named 'no_such_package'"):
        find_ops([f"hub:{tmp_path}"])
    (tmp_path / "torch-ext" / "__init__.py").write_text("")
    with pytest.raises(NotLoaded, match="the package exports no function, and has no layers"):
        find_ops([f"hub:{tmp_path}"])
