"""The files that check other packages' operators find what docs/opcheck.md says."""

import importlib.util
from pathlib import Path

import pytest
import torch

from llmk.opcheck import check
from llmk.registry import Op
from llmk.registry.devices import INTERPRET

EXAMPLES = Path(__file__).parents[2] / "examples"
ONLY = ["values_and_gradients", "no_mutation", "no_alias"]


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("name", "package", "interpreted"),
    [("torchao", "torchao", False), ("liger", "liger_kernel", True), ("fla", "fla", True)],
)
def test_values_are_right(name: str, package: str, interpreted: bool) -> None:
    pytest.importorskip(package)
    if interpreted is not INTERPRET:
        pytest.skip("the other run has it")
    file = EXAMPLES / f"opcheck_{name}.py"
    assert len(file.read_text().splitlines()) < 40
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for op in filter(lambda value: isinstance(value, Op), vars(module).values()):
        results = check(op, dtypes=[torch.float32], only=ONLY)
        assert [result for result in results if not result.passed] == []
