"""The caches of AOTAutograd and Inductor tell programs apart that differ in a constant alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.fx import GraphModule

from compile_tests.helpers.backend_checks import require_same, rewritten
from compile_tests.helpers.breadth import some_of
from compile_tests.helpers.scripts import run_script
from compile_tests.helpers.without_cpp import WITHOUT_CPP
from llmk.compiler import Report

SCRIPT = Path(__file__).resolve().parents[1] / "helpers" / "scaled_norm.py"


class Scaled(nn.Module):
    """Its scale is an attribute."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return y * torch.tensor([self.scale, 2.0, 3.0, 4.0])


def written(x: Tensor, y: Tensor, number: float) -> Tensor:
    z = y.clone()
    z[0] = number
    return z


def masked(x: Tensor, y: Tensor, number: int) -> Tensor:
    return torch.where(torch.tensor([number == 2, True, False, False]), y, -y)


CONSTANTS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "a float in a list": lambda x, y, n: y * torch.tensor([n + 0.5, 2.0, 3.0, 4.0]),
    "an int in a list": lambda x, y, n: y * torch.tensor([n, 2, 3, 4]),
    "bools": masked,
    "lists in lists": lambda x, y, n: y * torch.tensor([[1.0, n, 3, 4], [4, 5, 6, 7], [1, 1, 1, 1]]),
    "a scalar": lambda x, y, n: y * torch.tensor(n / 7),
    "infinity": lambda x, y, n: torch.maximum(y, torch.tensor(-float("inf") if n == 2 else float("inf"))),
    "an int64 past float64": lambda x, y, n: y * (torch.tensor([2**53 + n]) - 2**53),
    "of a dtype": lambda x, y, n: y * torch.tensor([n / 7, 2.0, 3.0, 4.0], dtype=torch.float64),
    "in 16 bits": lambda x, y, n: y * torch.tensor([n / 7, 2.0, 3.0, 4.0], dtype=torch.bfloat16),
    "on a device": lambda x, y, n: y * torch.tensor([n, 2.0, 3.0, 4.0], device=x.device),
    "cast": lambda x, y, n: y * torch.tensor([n, 2, 3, 4]).to(torch.float16),
    "as_tensor": lambda x, y, n: y * torch.as_tensor([n, 2.0, 3.0, 4.0]),
    "new_tensor": lambda x, y, n: y * x.new_tensor([n, 2.0, 3.0, 4.0]),
    "a legacy constructor": lambda x, y, n: y * torch.FloatTensor([n, 2.0, 3.0, 4.0]),
    "an array of NumPy's": lambda x, y, n: y * torch.from_numpy(np.array([n, 2.0, 3.0, 4.0], dtype=np.float32)),
    "a number of NumPy's": lambda x, y, n: y * torch.tensor(np.float32(n)),
    "rows by a list": lambda x, y, n: y[[0, n]],
    "rows by a tensor": lambda x, y, n: y[torch.tensor([0, n])],
    "a number that is written": written,
    "written afterwards": lambda x, y, n: y * torch.tensor([n, 2.0, 3.0, 4.0]).add_(1),
}


def programs(kind: str) -> list[Any]:
    """Two that differ in the constant."""
    if kind == "of a module":
        return [scaled_norm(Scaled(1.0)), scaled_norm(Scaled(9.0))]
    return [scaled_norm(lambda x, y, n=n: CONSTANTS[kind](x, y, n)) for n in (1, 2)]


def scaled_norm(then: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, w: then(x, F.rms_norm(x, (4,), w, 1e-6))


def args() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(3, 4), torch.randn(4, requires_grad=True)


KINDS = [*CONSTANTS, "of a module"]
FEW = "a float in a list", "of a module"


@pytest.mark.parametrize("kind", some_of(KINDS, FEW))
def test_another_constant_is_another_entry(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients, and the first program again, which the cache has."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    counters.clear()
    first, second = programs(kind)
    for fn in (first, second, first):
        torch._dynamo.reset()
        require_same(torch.compile(fn, backend="llmk", options=WITHOUT_CPP), fn, args())
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1, counters["aot_autograd"]


def test_another_process_with_another_constant(tmp_path: Path) -> None:
    for scale, hits in ((1.0, 0), (9.0, 0), (1.0, 1)):
        ended = run_script(SCRIPT, scale, tmp_path)
        assert ended.stdout.splitlines() == [f"{[scale, 2.0, 3.0, scale]} {hits} {1 - hits}"], ended.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_a_rewritten_graph_holds_no_tensor(kind: str) -> None:
    """A key has an attribute's shape and dtype, not its numbers."""
    held, found = [], Report()

    def look(gm: GraphModule) -> None:
        held.extend(gm.graph.find_nodes(op="get_attr"))

    for fn in programs(kind):
        rewritten(fn, found, look=look)(*args())
    assert (held, found.replaced) == ([], {"rms_norm": 2}), str(found)
