"""Sums of rows by a kernel of one's own, whose order depends on what has nothing to do with the row."""

from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from compile_tests.helpers.mutants import library
from llmk.registry import Op, Sample


@triton.jit
def row_sums_kernel(x_ptr, y_ptr, N, x_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = 0.0
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(x_ptr + row * x_stride + cols, mask=cols < N, other=0.0), axis=0)
    tl.store(y_ptr + row, total)


Block = Callable[[int, int, bool], int]
"""The columns that are added at a time, from the rows of the batch and of the chunk, and whether it is for training."""


def sound(rows: int, chunk: int, trains: bool) -> int:
    return 256


def widens_with_few_rows(rows: int, chunk: int, trains: bool) -> int:
    """Return a tile of a fixed area, which is wider where it has fewer rows, up to four."""
    return 1024 >> min(2, (rows - 1).bit_length())


def splits_chunks(rows: int, chunk: int, trains: bool) -> int:
    return 256 if chunk == rows else 16


def other_where_it_trains(rows: int, chunk: int, trains: bool) -> int:
    return 256 if trains else 64


BROKEN_ROWS: dict[Block, str] = {
    widens_with_few_rows: "rows is not that of all",
    splits_chunks: "chunk_size=",
    other_where_it_trains: "rows, without gradients, is not that of all",
}
"""Each with words of how it is named."""


def _row_sums(x: Tensor, block: Block, chunk_size: int, trains: bool) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    (M, N), y = x.shape, torch.empty(x.shape[:1], dtype=x.dtype, device=x.device)
    for start in range(0, M, chunk_size or max(M, 1)):
        rows = x[start : start + (chunk_size or M)]
        columns = block(M, len(rows), trains)
        row_sums_kernel[(len(rows),)](rows, y[start:], N, x.stride(0), BLOCK=columns)  # type: ignore[arg-type]
    return y


def row_sums_by(block: Block) -> Op:
    """The sums of rows as an operator that adds columns in such blocks."""
    name = f"row_sums_{block.__name__}"
    kernel_op = torch.library.custom_op(
        f"llmk_test::{name}_kernel",
        lambda input, chunk_size, trains: _row_sums(input, block, chunk_size, trains),
        mutates_args=(),
        schema="(Tensor input, int chunk_size, bool trains) -> Tensor",
    )
    kernel_op.register_fake(lambda input, chunk_size, trains: input.new_empty(input.shape[:1]))
    kernel_op.register_autograd(
        lambda ctx, grad: (grad.unsqueeze(1).expand(ctx.shape).contiguous(), None, None),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "shape", inputs[0].shape),
    )

    def row_sums(input: Tensor, chunk_size: int = 0) -> Tensor:
        return kernel_op(input, chunk_size, torch.is_grad_enabled() and input.requires_grad)

    library.define(f"{name}(Tensor input, int chunk_size=0) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
    library.impl(name, row_sums, "CompositeImplicitAutograd")
    return Op(
        name=name,
        overload=getattr(torch.ops.llmk_test, name).default,
        reference=lambda input, chunk_size=0: input.sum(-1),
        samples=_samples,
        resized=_resized,
        differentiable=("input",),
        dtypes=(torch.float32,),
    )


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample((_rows(4, device, dtype),), why="no power of two")


def _resized(rows: int, device: torch.device, dtype: torch.dtype) -> Sample:
    return Sample((_rows(rows, device, dtype),), why="resized")


def _rows(count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Rows whose sums cancel: another order is another result, whatever the numbers are."""
    half = torch.randn(count, 500, device=device, dtype=dtype)
    return torch.cat([half, 1e-3 - half.flip(-1)], -1)
