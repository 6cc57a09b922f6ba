"""Packed rows: what the keywords of a model say, without a look at values."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

pytest.importorskip("transformers")

from llmk.transformers.convolutions import CausalConv1d
from llmk.transformers.packing import ids_from_positions, sequence_ids


def test_boundaries_give_the_same_as_numbers(device: torch.device):
    """A sequence may be empty, and what is after the last boundary is a sequence of its own."""
    for dtype in (torch.int32, torch.int64):
        boundaries = torch.tensor([0, 3, 3, 4], dtype=dtype, device=device)
        for name in ("cu_seqlens", "cu_seq_lens_q"):
            ids = sequence_ids({name: boundaries}, 1, 6)
            assert ids is not None
            assert ids.tolist() == [[1, 1, 1, 3, 4, 4]]
            assert ids.device == boundaries.device
    assert sequence_ids({"seq_idx": None, "cu_seqlens": None, "other": 1}, 1, 6) is None


def test_numbers_count_before_boundaries_and_states_are_of_the_first_sequence(device: torch.device):
    numbers = torch.tensor([[7, 7, 2], [4, 5, 5]], device=device)
    given = {"seq_idx": numbers, "cu_seqlens": torch.tensor([0, 6], device=device)}
    assert sequence_ids(given, 2, 3) is numbers
    longer = sequence_ids(given, 2, 5)
    assert longer is not None
    assert longer.tolist() == [[7, 7, 7, 7, 2], [4, 4, 4, 5, 5]]


@pytest.mark.parametrize("axes", [0, 1, 3, 4])
def test_positions_that_start_again_begin_a_sequence(axes: int, device: torch.device):
    """Also one that goes on elsewhere, as for attention; by the time of images, which stands still, if it goes back."""
    rows = [[0, 1, 2, 0, 0, 1, 7], [3, 4, 5, 6, 0, 1, 2]]
    want = [[0, 0, 0, 1, 2, 2, 3], [0, 0, 0, 0, 1, 1, 1]]
    positions = torch.tensor(rows, device=device)
    if axes == 0:
        assert ids_from_positions(positions[0], 3).tolist() == [want[0]] * 3
        return
    if axes > 1:
        others = torch.zeros_like(positions).expand(axes - 1, -1, -1)
        positions = torch.cat([positions[None], others])
    if axes == 3:
        want[0] = [0, 0, 0, 1, 1, 1, 1]
    found = ids_from_positions(positions, 2)
    assert found.dtype == torch.int32
    assert found.tolist() == want
    assert ids_from_positions(positions[..., :1, :], 2).tolist() == [want[0]] * 2


def test_nothing_waits_for_the_device():
    """A tensor on the device "meta" has no value to wait for."""
    boundaries = torch.tensor([0, 3, 9], device="meta")
    for given in ({"cu_seqlens": boundaries}, {"seq_idx": torch.zeros(1, 7, dtype=torch.int32, device="meta")}):
        ids = sequence_ids(given, 1, 9)
        assert ids is not None
        assert ids.shape == (1, 9)
    assert ids_from_positions(torch.zeros(1, 9, dtype=torch.int64, device="meta"), 2).shape == (2, 9)


@pytest.mark.parametrize("name", ["seq_idx", "cu_seqlens"])
def test_one_graph_serves_rows_of_any_lengths(name: str):
    def function(x: Tensor, weight: Tensor, packing: Tensor) -> Tensor:
        return CausalConv1d().call(x, weight, None, "silu", **{name: packing})

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    weight = torch.randn(6, 4)
    for lengths in ((5, 1, 9), (4, 3), (2, 2, 2, 2, 30)):
        x = torch.randn(1, 6, sum(lengths))
        want = torch.cat([CausalConv1d().call(part, weight, None, "silu") for part in x.split(lengths, 2)], 2)
        numbers = torch.repeat_interleave(torch.tensor(lengths))[None]
        boundaries = torch.tensor([0, *lengths]).cumsum(0)
        torch.testing.assert_close(compiled(x, weight, numbers if name == "seq_idx" else boundaries), want)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"seq_idx": [[0, 1]]}, TypeError, "seq_idx: expected a tensor of int32 or int64, got list"),
        ({"cu_seqlens": torch.ones(2)}, TypeError, "cu_seqlens: expected .* got torch.float32"),
        ({"seq_idx": torch.ones(2, 5).int()}, ValueError, r"seq_idx: expected shape \(2, 4\), .* got \(2, 5\)"),
        ({"seq_idx": torch.ones(1, 4).int()}, ValueError, r"seq_idx: expected shape \(2, 4\), .* got \(1, 4\)"),
        ({"cu_seq_lens_q": torch.ones(1, 2).int()}, ValueError, r"cu_seq_lens_q: expected shape \[N \+ 1\]"),
        ({"cu_seq_lens_q": torch.ones(2).int()}, ValueError, r"cu_seq_lens_q: expected one row .* got 2 rows"),
    ],
)
def test_wrong_keywords_are_refused(given: dict[str, Any], error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        sequence_ids(given, 2, 4)
