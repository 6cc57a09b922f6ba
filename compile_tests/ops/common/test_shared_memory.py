"""Wide rows take other ways where a block has little shared memory, to the same results."""

import pytest
import torch

from compile_tests.helpers.right_calls import require_call
from llmk.ops.common.rows import rows_ahead
from llmk.registry import OPS, Sample, shared_memory
from llmk.registry.devices import SHARED_MEMORY, launches_for

RTX_4090 = 99 * 1024
WIDEST = [
    ("rms_norm", 8192, torch.float32, 1),
    ("add_rms_norm", 8192, torch.float32, 2),
    ("add_rms_norm", 12288, torch.bfloat16, 2),
    ("rms_norm_gated", 8192, torch.bfloat16, 2),
    ("layer_norm", 8192, torch.float32, 1),
    ("layer_norm", 12288, torch.float32, 1),
]


@pytest.mark.kernels
@pytest.mark.parametrize("shared", [RTX_4090, SHARED_MEMORY])
@pytest.mark.parametrize(("name", "columns", "dtype", "tensors"), WIDEST, ids=str)
def test_wide_rows(
    name: str, columns: int, dtype: torch.dtype, tensors: int, shared: int, device: torch.device
) -> None:
    args = [torch.randn(3, columns, device=device, dtype=dtype) for _ in range(tensors)]
    sample = Sample((*args, torch.randn(columns, device=device, dtype=dtype)), why=f"{columns} columns")
    with launches_for(32, shared):
        require_call(OPS[name], sample)


@pytest.mark.kernels
def test_wide_rows_of_softmax(device: torch.device) -> None:
    sample = Sample((torch.randn(5, 32768, device=device).bfloat16(),), why="32,768 columns")
    with launches_for(32, RTX_4090):
        require_call(OPS["softmax"], sample)


def test_rows_ahead_are_those_that_fit() -> None:
    cpu = torch.device("cpu")
    assert shared_memory(cpu) == SHARED_MEMORY
    sizes = [16 * 1024, 48 * 1024, 64 * 1024, 80 * 1024, 96 * 1024, 128 * 1024, 160 * 1024, 192 * 1024]
    assert [rows_ahead(size, cpu) for size in sizes] == [2, 2, 2, 2, 1, 1, 1, 0]
    with launches_for(32, RTX_4090):
        assert [rows_ahead(size, cpu) for size in sizes] == [2, 2, 1, 1, 1, 0, 0, 0]
        assert shared_memory(cpu) == RTX_4090
    with launches_for(64, 64 * 1024):  # AMD's compiler keeps them in registers
        assert rows_ahead(64 * 1024, cpu) == 2
    assert shared_memory(cpu) == SHARED_MEMORY
