"""The plan of a loss over a vocabulary whose logits are in no memory."""

import pytest
import torch

from llmk.ops.linear_loss.chunked.plan import (
    FREE_MEMORY,
    GROUP_BUDGET,
    MOST_CHUNKS,
    ROUNDED_CHUNKS,
    ROW_MULTIPLE,
    Plan,
    described,
    fits,
    memory,
    plan,
)
from llmk.ops.linear_loss.kernels.tiles import GRADIENT_TILES, gradient_cost, saves_time
from llmk.registry import cdiv

SHAPES = [
    (8192, 4096, 128256), (8192, 2304, 256000), (8192, 2048, 151936), (4096, 4096, 32000), (65536, 1024, 32000),
    (12000, 3072, 200064), (512, 8192, 262144), (1, 64, 100),
]  # fmt: skip


def chosen(*shape: int, dtype: torch.dtype = torch.bfloat16, **options: int) -> Plan:
    return plan(shape, dtype, on_host=False, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_plan_is_whole_tiles_and_rounds_few_sums(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    found = chosen(*shape, dtype=dtype)
    chunks = cdiv(shape[0], found.chunk_rows)
    assert found.chunk_rows % ROW_MULTIPLE == 0
    assert chunks <= MOST_CHUNKS
    assert found.rounded_sums == (dtype != torch.float16 and chunks <= ROUNDED_CHUNKS)
    in_one = chosen(*shape, dtype=dtype, chunk_size=cdiv(shape[0], ROW_MULTIPLE) * ROW_MULTIPLE)
    assert memory(*shape, dtype, found) <= memory(*shape, dtype, in_one)


def test_a_gradient_that_leaves_multiprocessors_idle_costs_more() -> None:
    largest = next(iter(GRADIENT_TILES))
    whole = 132 * largest.rows, largest.columns
    assert gradient_cost(*whole, 132) == 1.0
    assert gradient_cost(whole[0] + largest.rows, whole[1], 132) > 1.1  # a second wave for one tile more
    assert 1.0 < gradient_cost(66 * largest.rows, largest.columns, 132) < 1.2  # two smaller tiles for each


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((4096, 2048, 151936), True),
        ((1024, 2048, 50257), False),
        ((6016, 3072, 200064), True),
        ((128, 4096, 128256), False),
    ],
    ids=["a last wave", "half a wave", "five waves", "few tiles, which take longer than all others together"],
)
def test_both_gradients_are_one_launch_where_that_fills_waves(sizes: tuple[int, int, int], expected: bool) -> None:
    assert saves_time(*sizes, 132) == expected


def test_chunks_fill_waves_of_tiles() -> None:
    """896 features are four tiles: 4096 rows fill 128 of 132 multiprocessors, and 2816 only 88."""
    assert chosen(16384, 896, 151936).chunk_rows == 4096


def test_memory_that_is_free_is_taken_for_time() -> None:
    """Of plans within it the fastest is chosen; beyond it memory has its price."""
    for N, H in ((20000, 768), (8192, 4096)):
        shape = N, H, N
        in_one = chosen(*shape, chunk_size=cdiv(N, ROW_MULTIPLE) * ROW_MULTIPLE)
        assert memory(*shape, torch.bfloat16, in_one) < FREE_MEMORY
        assert chosen(*shape, free=FREE_MEMORY) == in_one
        assert chosen(*shape) != in_one
    largest = 131072, 1024, 131072
    assert memory(*largest, torch.bfloat16, chosen(*largest, free=FREE_MEMORY)) < 2 * FREE_MEMORY


def test_a_plan_keeps_to_what_is_given() -> None:
    shape = 8192, 4096, 128256
    assert chosen(*shape, chunk_size=1000) == Plan(1000, False)
    assert chosen(*shape, chunk_size=4096) == Plan(4096, True)
    assert chosen(*shape, chunk_size=4096, dtype=torch.float16) == Plan(4096, False)
    assert plan((8192, 4096, 1000), torch.bfloat16, on_host=True).chunk_rows == 2**20 // 1000
    assert plan((8192, 4096, 128256), torch.bfloat16, on_host=True).chunk_rows == 64


@pytest.mark.parametrize("chunk_size", [0, 3000])
@pytest.mark.parametrize("group", [512, 1000])
def test_a_chunk_is_of_whole_groups(group: int, chunk_size: int) -> None:
    found = chosen(8 * group, 2048, 128256, group=group, chunk_size=chunk_size)
    assert found.chunk_rows % group == 0
    assert not chunk_size or found.chunk_rows == chunk_size // group * group


def test_a_group_larger_than_a_chunk_is_one() -> None:
    assert chosen(4096, 2048, 128256, group=1024, chunk_size=100).chunk_rows == 1024
    assert fits(GROUP_BUDGET // (2 * 128256), 128256, 2)
    assert not fits(GROUP_BUDGET // (2 * 128256) + 1, 128256, 2)


@pytest.mark.parametrize("shape", [(0, 64, 100), (5, 64, 0), (5, 0, 100)])
def test_without_rows_classes_or_features_there_is_one_chunk(shape: tuple[int, int, int]) -> None:
    found = chosen(*shape)
    assert found.chunk_rows == max(shape[0], 1)
    assert found.rounded_sums


def test_a_plan_is_described() -> None:
    words = described((8192, 4096, 128256), torch.bfloat16, on_host=False, chunk_size=1000)
    assert words.startswith("1000 tokens a chunk, no logits in memory but 16-bit exponentials, the gradient of the")
    assert "summed in 32 bits: " in words
