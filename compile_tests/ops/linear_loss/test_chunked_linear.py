"""The products of the losses that have logits, a block at a time: the divergences, and the largest classes."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from llmk.opcheck.calls import call, require_accurate
from llmk.ops.linear_loss.chunked import CompactedTokens, _linear
from llmk.ops.linear_loss.chunked._linear import (
    ALIGNED,
    ChunkedLinear,
    LinearGradients,
    aligned_parts,
)
from llmk.ops.linear_loss.chunked._plan import Plan, Sizes, plan
from llmk.registry import OPS
from llmk.registry.devices import INTERPRET


@pytest.mark.parametrize("classes", [1, 37, 64])
@pytest.mark.parametrize("float32_logits", [False, True])
def test_rows_begin_at_aligned_addresses(device: torch.device, classes: int, float32_logits: bool) -> None:
    """cuBLAS reads and writes matrices whose rows do not one number at a time."""
    x, weight = (torch.randn(n, 8, dtype=torch.bfloat16, device=device) for n in (10, classes))
    block_rows = 2 if float32_logits else 4  # a chunk's gradient overwrites its logits
    linear = ChunkedLinear(x, weight, None, Plan(4, block_rows, True), float32_logits=float32_logits)
    gradients = LinearGradients(linear, (True, True, False), (x.dtype, x.dtype, torch.float32))
    found = []
    for rows, logits, dlogits in gradients.blocks():
        for each in (logits, dlogits):
            assert each.shape == (rows.stop - rows.start, classes)
            assert each.stride(0) * each.element_size() % 16 == 0
        assert logits.data_ptr() % 16 == 0
        found.append(logits.clone())
        dlogits.zero_()
    dtype = torch.float32 if float32_logits else torch.bfloat16
    exact = (x.double() @ weight.double().t()).to(dtype)
    torch.testing.assert_close(torch.cat(found), exact)


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
    bias_tensor = torch.randn(classes).to(x) if bias else None
    linear = ChunkedLinear(x, weight, bias_tensor, Plan(16, 16, True), float32_logits=False)
    linear.class_parts = aligned_parts(classes)  # as on a GPU
    gradients = LinearGradients(linear, (True, True, False), (x.dtype, x.dtype, x.dtype))
    outputs = []
    with _Products() as products:
        for _, logits, _ in gradients.blocks():
            outputs.append(logits.clone())
    assert products.sizes
    assert all(size < ALIGNED or size % ALIGNED == 0 for size in products.sizes)
    logits = torch.cat(outputs)
    torch.testing.assert_close(logits, torch.nn.functional.linear(x, weight, linear.bias))
    torch.testing.assert_close(gradients.dx, logits @ weight)
    torch.testing.assert_close(gradients.dw, logits.t() @ x)


def test_after_the_last_block_no_logits_are_held() -> None:
    """Although whoever walked over them has a name for the last ones: a sum in float32 is rounded into their memory."""
    x, weight = torch.randn(5, 4).bfloat16(), torch.randn(7, 4).bfloat16()
    linear = ChunkedLinear(x, weight, None, Plan(4, 2, True), float32_logits=True)
    held = []
    gradients = LinearGradients(linear, (True, True, False), (x.dtype, x.dtype, torch.float32))
    for _, logits, dlogits in gradients.blocks():
        held += [logits, dlogits]
        dlogits.zero_()
        assert logits.untyped_storage().nbytes() > 0
    assert [each.untyped_storage().nbytes() for each in held] == [0] * 6


@pytest.mark.parametrize("chunk_rows", [2, 4, 100])
@pytest.mark.parametrize("block_rows", [1, 2, 3])
def test_gradients_are_those_of_all_rows(chunk_rows: int, block_rows: int) -> None:
    """Whatever the plan: a block may end a chunk before it is full."""
    x, weight, bias = torch.randn(7, 4).bfloat16(), torch.randn(5, 4).bfloat16(), torch.randn(5).bfloat16()
    linear = ChunkedLinear(x, weight, bias, Plan(chunk_rows, block_rows, False), float32_logits=True)
    gradients = LinearGradients(linear, (True, True, True), (torch.float32, torch.float32, torch.float32))
    grad = torch.randn(7, 5).bfloat16()
    outputs = []
    for rows, logits, dlogits in gradients.blocks():
        outputs.append(logits.clone())
        dlogits.copy_(grad[rows])
    exact = x.double() @ weight.double().t() + bias
    torch.testing.assert_close(torch.cat(outputs), exact.float())
    torch.testing.assert_close(gradients.dx, (grad.double() @ weight.double()).float())
    torch.testing.assert_close(gradients.dw, (grad.double().t() @ x.double()).float())
    torch.testing.assert_close(gradients.db, grad.double().sum(0).float())


@pytest.mark.kernels
@pytest.mark.parametrize("segment", [None, 1, 4, 6, 12, 100])
def test_tokens_compacted_in_segments(device: torch.device, segment: int | None) -> None:
    """The tokens that count come first in each, in their order; the others follow, and what they have is not read."""
    if device.type == "cpu" and not INTERPRET:
        pytest.skip("a kernel orders the tokens")
    mask = torch.tensor([[1, 0, 0, 1, 1], [0, 0, 0, 1, 0], [0, 0, 1, 1, 1]], dtype=torch.bool, device=device)
    compacted, numbers = CompactedTokens.of(mask, on_host=False, segment=segment), torch.arange(15.0, device=device)
    order = compacted.gather(numbers.view(3, 5)).tolist()
    found = torch.full((15,), float("nan"), device=device)
    for start in range(0, 15, segment or 15):
        rows = slice(start, min(start + (segment or 15), 15))
        here, counts = numbers[rows].tolist(), mask.flatten()[rows].tolist()
        first = [number for number, each in zip(here, counts, strict=True) if each]
        assert order[rows][: len(first)] == first
        assert sorted(order[rows]) == here
        assert compacted.count is not None
        assert compacted.count.end(rows).tolist() == [len(first)]
        assert compacted.count.end(slice(rows.stop - 1, rows.stop)).tolist() == [int(all(counts))]
        part = compacted.part(rows)
        assert part.gather(numbers[rows]).tolist() == order[rows]
        found[rows][: len(first)] = torch.tensor(first, device=device)
        own = torch.where(mask.flatten()[rows], numbers[rows], 0.0)
        torch.testing.assert_close(part.scatter(found[rows]), own)
    torch.testing.assert_close(compacted.scatter(found), torch.where(mask, numbers.view(3, 5), 0.0))
    statistics = compacted.scatter_statistics(torch.stack((found, 2 * found)))
    torch.testing.assert_close(statistics[1], torch.where(mask, 2 * numbers.view(3, 5), 0.0))


SHAPES = [
    (8192, 4096, 128256), (8192, 2304, 256000), (8192, 2048, 151936), (4096, 4096, 32000), (65536, 1024, 32000),
    (12000, 3072, 200064), (512, 8192, 262144), (1, 64, 100),
]  # fmt: skip


@pytest.mark.parametrize("float32_logits", [False, True])
@pytest.mark.parametrize("remade", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_plan_is_beaten_in_time_and_memory(shape: tuple[int, int, int], remade: bool, float32_logits: bool) -> None:
    found = plan(*shape, torch.bfloat16, float32_logits=float32_logits, on_host=False, remade=remade)
    sizes = Sizes.of(*shape, torch.bfloat16, float32_logits, remade=remade)
    candidates = list(sizes.candidates())
    assert found in candidates
    assert not any(
        sizes.memory(other) < sizes.memory(found) and sizes.time(other) < sizes.time(found) for other in candidates
    )


def test_a_plan_keeps_to_what_is_given() -> None:
    options = {"float32_logits": True, "on_host": False}
    found = plan(8192, 4096, 128256, torch.bfloat16, chunk_size=1000, **options)
    assert (found.chunk_rows, found.rounded_sums) == (1000, False)
    assert found.block_rows <= 1000
    assert plan(8192, 4096, 128256, torch.float16, **options).rounded_sums is False
    in_place = plan(8192, 4096, 128256, torch.bfloat16, float32_logits=False, on_host=False)
    assert in_place.block_rows == in_place.chunk_rows
    on_host = plan(8192, 4096, 1000, torch.bfloat16, float32_logits=True, on_host=True)
    assert on_host.block_rows == on_host.chunk_rows == 2**20 // 1000


CHUNKED = ["fused_linear_distill", "fused_linear_jsd", "fused_linear_jsd_ce"]


@pytest.fixture
def nan_where_nothing_is_written() -> Iterator[None]:
    """PyTorch fills uninitialized tensors with NaN then."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", CHUNKED)
def test_products_on_a_cpu_read_no_garbage(
    name: str, monkeypatch: pytest.MonkeyPatch, nan_where_nothing_is_written: None
) -> None:
    """oneDNN's products of bfloat16 multiply an element behind each row of odd length by 0, where a CPU has AMX."""
    op, product, looked_at = OPS[name], _linear.add_product, []

    def checked(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
        rows, K = a.shape
        if a.stride(1) == 1 and a.stride(0) > K and rows > 0:
            behind = a.as_strided((rows,), (a.stride(0),), a.storage_offset() + K)
            assert behind.isfinite().all(), f"{tuple(a.shape)}: {behind}"
            looked_at.append(a)
        product(total, a, b, first)

    monkeypatch.setattr(_linear, "add_product", checked)
    for sample in op.samples(torch.device("cpu"), torch.bfloat16):
        require_accurate(op, sample, call(op, sample))
    assert looked_at
