"""The embedding: rows out of range, padding, and the module."""

import pytest
import torch
from torch import nn

import llmk


@pytest.mark.parametrize("row", [-1, 5])
def test_a_row_out_of_range(row: int, device: torch.device) -> None:
    weight = torch.randn(5, 8, device=device, requires_grad=True)
    places = torch.tensor([0, row, 2], device=device)
    if device.type == "cpu":
        with pytest.raises(IndexError, match=f"input: expected rows from 0 to 4, got .*{row}"):
            llmk.functional.embedding(places, weight)
        return
    y = llmk.functional.embedding(places, weight)
    assert y.isnan().any(1).tolist() == [False, True, False]
    y.sum().backward()
    assert weight.grad is not None
    assert weight.grad.sum(1).tolist() == [8, 0, 8, 0, 0]


@pytest.mark.parametrize("padding_idx", [None, 2, -1])
def test_module_is_torchs(padding_idx: int | None, device: torch.device) -> None:
    theirs, ours = (make(6, 16, padding_idx, device=device) for make in (nn.Embedding, llmk.nn.Embedding))
    if padding_idx is not None:
        assert not ours.weight[padding_idx].any()
    ours.load_state_dict(theirs.state_dict())
    assert repr(ours) == repr(theirs)
    places = torch.randint(0, 6, (3, 40), device=device)
    assert torch.equal(ours(places), theirs(places))
    grad = torch.randn(3, 40, 16, device=device)
    ours(places).backward(grad)
    theirs(places).backward(grad)
    assert ours.weight.grad is not None
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)
    assert padding_idx is None or not ours.weight.grad[padding_idx].any()


def test_module_refuses_padding_that_is_no_row() -> None:
    with pytest.raises(ValueError, match="padding_idx: expected -6 to 5, got 6"):
        llmk.nn.Embedding(6, 16, 6)
