"""The products of the losses that are fused with a projection."""

import pytest
import torch

from llmk.ops._chunked_linear import ChunkedLinear


@pytest.mark.parametrize("classes", [1, 37, 64])
def test_rows_of_a_chunk_begin_at_aligned_addresses(device: torch.device, classes: int) -> None:
    """cuBLAS reads and writes matrices whose rows do not one number at a time."""
    x, weight = (torch.randn(n, 8, dtype=torch.bfloat16, device=device) for n in (10, classes))
    found = []
    for rows, logits in ChunkedLinear(x, weight, None, chunk_size=4).chunks():
        assert logits.shape == (rows.stop - rows.start, classes)
        assert logits.stride(0) * logits.element_size() % 16 == 0
        assert logits.data_ptr() % 16 == 0
        found.append(logits.clone())
    torch.testing.assert_close(torch.cat(found), x @ weight.t())
