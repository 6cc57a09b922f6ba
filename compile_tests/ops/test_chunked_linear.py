"""The products of the losses that are fused with a projection."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llmk.ops.linear_loss.chunked._linear import ALIGNED, ChunkedLinear, LinearGradients


@pytest.mark.parametrize("classes", [1, 37, 64])
def test_rows_of_a_chunk_begin_at_aligned_addresses(device: torch.device, classes: int) -> None:
    """cuBLAS reads and writes matrices whose rows do not one number at a time."""
    x, weight = (torch.randn(n, 8, dtype=torch.bfloat16, device=device) for n in (10, classes))
    found = []
    for rows, logits in ChunkedLinear(x, weight, None, chunk_size=4, on_host=False).chunks():
        assert logits.shape == (rows.stop - rows.start, classes)
        assert logits.stride(0) * logits.element_size() % 16 == 0
        assert logits.data_ptr() % 16 == 0
        found.append(logits.clone())
    torch.testing.assert_close(torch.cat(found), x @ weight.t())


class _Products(TorchDispatchMode):
    """Notes the sizes of every product."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.sizes += [size for matrix in args[-2:] for size in matrix.shape]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("classes", [1, 16, 37, 64])
@pytest.mark.parametrize("bias", [False, True])
def test_no_product_of_many_classes_has_odd_sizes(device: torch.device, classes: int, bias: bool) -> None:
    """cuBLAS takes five times as long for those."""
    x, weight = (torch.randn(n, 32, dtype=torch.float64, device=device) for n in (48, classes))
    linear = ChunkedLinear(x, weight, torch.randn(classes).to(x) if bias else None, chunk_size=16, on_host=False)
    gradients = LinearGradients(linear, (True, True, False), (x.dtype, x.dtype, x.dtype))
    outputs = []
    with _Products() as products:
        for rows, logits in linear.chunks():
            gradients.add(rows, logits)
            outputs.append(logits.clone())
    assert products.sizes
    assert all(size < ALIGNED or size % ALIGNED == 0 for size in products.sizes)
    logits = torch.cat(outputs)
    torch.testing.assert_close(logits, torch.nn.functional.linear(x, weight, linear.bias))
    torch.testing.assert_close(gradients.dx, logits @ weight)
    torch.testing.assert_close(gradients.dw, logits.t() @ x)


def test_after_the_last_chunk_no_logits_are_held() -> None:
    """Although whoever walked over them has a name for the last ones: a sum in float32 is rounded into their memory."""
    x, weight = torch.randn(5, 4), torch.randn(7, 4)
    held = []
    for _, logits in ChunkedLinear(x, weight, None, chunk_size=2, on_host=False).chunks():
        held.append(logits)
        assert logits.untyped_storage().nbytes() > 0
    assert [logits.untyped_storage().nbytes() for logits in held] == [0, 0, 0]
