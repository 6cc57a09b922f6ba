"""Divergences of rows of two tensors: the kernels, and the kernel ops that `jsd` and `tvd` are made of.

A row's divergence is the sum over its classes of what `divergence_math.py` gives for each, and the gradient of a class
depends on that class alone. So one pass over both tensors makes the divergence and, where it is wanted, the gradient of
the sum or mean, which the backward pass scales. Of one number a token, whose incoming gradients are not known yet, the
backward pass makes the gradient, from the two tensors once more; so it does in float16, which has no range for what is
still to be scaled. A row whose label is `ignore_index` is never read.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.rows import as_rows, contiguous
from llmk.ops.common.scaling import SavedGradients, mean_of_all, save_gradients, scale_op
from llmk.ops.common.sums import mean_of_rows, sum_to_scalar
from llmk.ops.loss._cross_entropy_cpu import mean_of_rows_cpu
from llmk.ops.loss.cross_entropy_options import check_classes
from llmk.ops.loss.divergence_math import Mixture, divergence_of, divergence_of_cpu
from llmk.registry import (
    PARTIAL,
    REPLICATE,
    KernelOp,
    Sample,
    cdiv,
    check_like,
    check_rows,
    empty,
    jit,
    next_power_of_2,
    replicate_only,
    row_axes,
    size_hint,
    wrap_triton,
)


@jit
def divergence_kernel(
    x_ptr, y_ptr, label_ptr, loss_ptr, count_ptr, dx_ptr, denominator_ptr,
    N, slices, x_stride, y_stride, ignore_index, rows, beta, rest,
    FORM: tl.constexpr, EXACT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A slice of a row: what it adds to the loss, and its gradient, divided by `denominator` or by `rows`."""
    program, part = tl.program_id(0) // slices, tl.program_id(0) % slices
    row = program.to(tl.int64)
    counts = tl.full((), 1, dtype=tl.int32)
    if label_ptr is not None:
        counts = (tl.load(label_ptr + row).to(tl.int64) != ignore_index).to(tl.int32)
    inverse = tl.div_rn(1.0, tl.cast(rows, tl.float32))
    if denominator_ptr is not None:
        inverse = tl.div_rn(1.0, tl.load(denominator_ptr))
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    x_ptr += row * x_stride
    y_ptr += row * y_stride
    if dx_ptr is not None:
        dx_ptr += row * N
    size = tl.cdiv(tl.cdiv(N, BLOCK_N), slices) * BLOCK_N
    for start in range(part * size, tl.minimum(part * size + size, N), BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = cols < N
        read = cols < N * counts
        x = tl.load(x_ptr + cols, mask=read, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + cols, mask=read, other=0.0).to(tl.float32)
        f, df = divergence_of(x, y, beta, rest, FORM, EXACT)
        total += tl.where(read, f, 0.0)
        if dx_ptr is not None:
            dx = tl.where(read, df * inverse, 0.0)
            tl.store(dx_ptr + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(loss_ptr + tl.program_id(0), tl.sum(total, axis=0))
    tl.store(count_ptr + tl.program_id(0), tl.where(part == 0, counts, 0).to(tl.float32))


@jit
def divergence_backward_kernel(
    grad_ptr, x_ptr, y_ptr, label_ptr, dx_ptr, N, grad_stride, x_stride, y_stride, ignore_index,
    beta, rest, FORM: tl.constexpr, EXACT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    program, blocks = tl.program_id(0), tl.cdiv(N, BLOCK_N)
    row, block = (program // blocks).to(tl.int64), program % blocks
    cols = block * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = cols < N
    read = mask
    counts = tl.full((), 1, dtype=tl.int32)
    if label_ptr is not None:
        counts = (tl.load(label_ptr + row).to(tl.int64) != ignore_index).to(tl.int32)
        read = cols < N * counts
    g = tl.load(grad_ptr + row * grad_stride)
    x = tl.load(x_ptr + row * x_stride + cols, mask=read, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + row * y_stride + cols, mask=read, other=0.0).to(tl.float32)
    _, df = divergence_of(x, y, beta, rest, FORM, EXACT)
    dx = tl.where(read, g * df, 0.0)
    tl.store(dx_ptr + row * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)


def _block(N: int) -> dict[str, int]:
    # H200, bf16, times the floor of two reads and a write, at 4096x32000 and 4096x128256: 1.23 and 1.12; with 4 warps
    # 1.29 and 1.16, blocks of 4096 and 8 warps 1.27 and 1.18, of 1024 and 4 warps 1.27 and 1.16.
    if N <= 8192:
        return {"BLOCK_N": min(1024, next_power_of_2(max(N, 1))), "num_warps": 2}
    return {"BLOCK_N": 2048, "num_warps": 8}


def _in_forward(reduction: str, dtype: torch.dtype) -> bool:
    """Return True if the forward pass makes the gradients; those of a mean are then divided at once.

    float16 loses digits of what an incoming gradient, such as a loss scale, is still to be multiplied with. There the
    backward pass reads both tensors instead of reading and writing the gradient, which takes no longer.
    """
    return reduction != "none" and dtype != torch.float16


PROGRAMS = 8192
"""Enough to fill a GPU several times over: fewer rows are cut into slices."""


class DivergenceArguments(NamedTuple):
    """Two tensors `[..., V]`, of which token each row is, and which divergence."""

    input: Tensor
    target: Tensor
    labels: Tensor | None
    mixture: Mixture
    ignore_index: int

    def counts(self) -> Tensor:
        if self.labels is None:
            return torch.ones(self.input.shape[:-1], dtype=torch.bool, device=self.input.device)
        return self.labels.long() != self.ignore_index  # int32 would wrap an index that it does not hold

    def options(self) -> dict[str, int]:
        exact = self.input.dtype == torch.float32
        return {"FORM": self.mixture.form(), "EXACT": exact, **_block(self.input.shape[-1])}


class RowFunctions(NamedTuple):
    """Functions for one number a row, its gradient for an incoming one, the sum over all rows with the number
    of them that count, and the gradient of the mean over these or, not divided, of the sum."""

    each: Callable[[DivergenceArguments], Tensor]
    gradients: Callable[[Tensor, DivergenceArguments], Tensor]
    parts: Callable[[DivergenceArguments, bool, bool], tuple[Tensor, Tensor, Tensor]]
    sum: Callable[[Tensor], Tensor]
    mean: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _launch(
    call: DivergenceArguments, slices: int, dx: Tensor | None, denominator: Tensor | None, rows: int
) -> tuple[Tensor, Tensor]:
    x, y = as_rows(call.input), as_rows(call.target)
    M, N = x.shape
    loss, count = (empty((M, slices), torch.float32, x.device) for _ in range(2))
    sizes = N, slices, x.stride(0), y.stride(0), call.ignore_index, rows
    wrap_triton(divergence_kernel)[(M * slices,)](
        x, y, contiguous(call.labels), loss, count, dx, denominator, *sizes, *call.mixture.numbers(), **call.options()
    )
    return loss, count


def _each(call: DivergenceArguments) -> Tensor:
    loss, _ = _launch(call, 1, None, None, 1)
    return loss.view(call.input.shape[:-1])


def _parts(call: DivergenceArguments, need_dx: bool, divided: bool) -> tuple[Tensor, Tensor, Tensor]:
    x = call.input
    N = x.shape[-1]
    M = x.numel() // N
    denominator = call.counts().sum(dtype=torch.float32) if need_dx and divided and call.labels is not None else None
    dx = empty(x.shape if need_dx else (0,), x.dtype, x.device)
    slices = min(cdiv(size_hint(N), _block(N)["BLOCK_N"]), max(1, PROGRAMS // max(size_hint(M), 1)))
    loss, count = _launch(call, slices, dx if need_dx else None, denominator, M if divided else 1)
    return loss, count, dx


def _gradients(grad: Tensor, call: DivergenceArguments) -> Tensor:
    x, y = as_rows(call.input), as_rows(call.target)
    M, N = x.shape
    grad = grad.reshape(-1)
    dx, options = empty(call.input.shape, x.dtype, x.device), call.options()
    sizes = N, grad.stride(0), x.stride(0), y.stride(0), call.ignore_index
    wrap_triton(divergence_backward_kernel)[(M * cdiv(N, options["BLOCK_N"]),)](
        grad, x, y, contiguous(call.labels), dx, *sizes, *call.mixture.numbers(), **options
    )
    return dx


def _each_cpu(call: DivergenceArguments) -> Tensor:
    f, _ = divergence_of_cpu(call.input.float(), call.target.float(), call.mixture.beta)
    return torch.where(call.counts(), f.sum(-1), 0.0)


def _parts_cpu(call: DivergenceArguments, need_dx: bool, divided: bool) -> tuple[Tensor, Tensor, Tensor]:
    x, counts = call.input, call.counts()
    f, df = divergence_of_cpu(x.float(), call.target.float(), call.mixture.beta)
    dx = empty((0,), x.dtype, x.device)
    if need_dx:
        df = df / counts.sum() if divided else df
        dx = torch.where(counts.unsqueeze(-1), df, 0.0).to(x.dtype).contiguous()
    return torch.where(counts, f.sum(-1), 0.0), counts.float(), dx


def _gradients_cpu(grad: Tensor, call: DivergenceArguments) -> Tensor:
    _, df = divergence_of_cpu(call.input.float(), call.target.float(), call.mixture.beta)
    dx = torch.where(call.counts().unsqueeze(-1), grad.unsqueeze(-1) * df, 0.0)
    return dx.to(call.input.dtype).contiguous()


KERNELS = RowFunctions(_each, _gradients, _parts, sum_to_scalar, mean_of_rows)
CPU = RowFunctions(_each_cpu, _gradients_cpu, _parts_cpu, torch.sum, mean_of_rows_cpu)


def _reduced(
    rows: RowFunctions, call: DivergenceArguments, reduction: str, need_dx: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss `[...]` or `[]`; what its gradient is still to be divided by, `[]`, or else `[0]`; that gradient.

    "total" is the sum, with the denominator of the mean: what processes with some rows each add up first.
    """
    nothing = empty((0,), torch.float32, call.input.device)
    if reduction == "none":
        return rows.each(call), nothing, empty((0,), call.input.dtype, call.input.device)
    divided = reduction == "mean" and _in_forward(reduction, call.input.dtype)
    loss, count, dx = rows.parts(call, need_dx, divided)
    if reduction == "mean":
        mean, denominator = rows.mean(loss, count)
        return mean, nothing if divided else denominator, dx
    return rows.sum(loss), rows.sum(count) if reduction == "total" else nothing, dx


def _forward_on(rows: RowFunctions) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    def forward(
        input: Tensor,
        target: Tensor,
        labels: Tensor | None,
        beta: float,
        ignore_index: int,
        reduction: str,
        need_dx: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _reduced(
            rows, DivergenceArguments(input, target, labels, Mixture(beta), ignore_index), reduction, need_dx
        )

    return forward


def _backward_on(rows: RowFunctions) -> Callable[..., Tensor]:
    def backward(
        grad: Tensor, input: Tensor, target: Tensor, labels: Tensor | None, beta: float, ignore_index: int
    ) -> Tensor:
        return rows.gradients(grad, DivergenceArguments(input, target, labels, Mixture(beta), ignore_index))

    return backward


def _row_by_row_op(name: str) -> KernelOp:
    backward = KernelOp(_backward_on(KERNELS), name=f"_{name}_bwd", launch_cached=True)
    backward.register_kernel("cpu")(_backward_on(CPU))
    backward.register_fake(lambda grad, input: input.new_empty(input.shape))
    backward.register_sharding(lambda input: [([axis], [axis] * 4) for axis in row_axes(input)])
    return backward


class DivergenceOps:
    """The kernel ops of one public operator: `_NAME_fwd`, `_NAME_scale` of its gradients, `_NAME_bwd` row by row."""

    def __init__(self, name: str) -> None:
        self.forward = KernelOp(_forward_on(KERNELS), name=f"_{name}_fwd", launch_cached=True)
        self.scale = scale_op(f"_{name}_scale")
        self.forward.register_kernel("cpu")(_forward_on(CPU))
        self.forward.register_fake(_fake_forward)
        self.forward.register_sharding(_forward_sharding)
        self.backward = _row_by_row_op(name)
        self.forward.register_autograd(
            self._gradients,
            setup_context=_keep,
            depends_on=[["input"]],
            keeps=lambda needs_input_grad, args: (needs_input_grad[0] and _in_forward(args[5], args[0].dtype),),
        )

    @property
    def kernel_ops(self) -> tuple[KernelOp, ...]:
        return self.forward, self.scale, self.backward

    def _gradients(self, ctx: Any, grad: Tensor) -> Any:
        if ctx.in_forward:
            dx = SavedGradients(ctx, grad, self.scale).times(0)
        else:
            input, target, labels, denominator = ctx.saved_tensors
            grad = grad if denominator is None else grad / denominator
            dx = self.backward(grad.expand(input.shape[:-1]), input, target, labels, ctx.beta, ctx.ignore_index)
        return dx, *[None] * 6

    def __call__(
        self,
        input: Tensor,
        target: Tensor,
        labels: Tensor | None,
        beta: float,
        ignore_index: int,
        reduction: str,
        sharded: bool,
    ) -> Tensor:
        """The loss, once the tensors fit; `sharded` if one of them is a DTensor."""
        check_rows("input", input, "V")
        check_like("target", target, "input", input)
        if labels is not None:
            check_classes("labels", labels, input)
        if reduction == "mean" and sharded:
            total, denominator, _ = self.forward(input, target, labels, beta, ignore_index, "total")
            return mean_of_all(total, denominator.detach(), weighted=False)
        loss, *_ = self.forward(input, target, labels, beta, ignore_index, reduction)
        return loss


def divergence_resized(activation: Callable[..., Tensor]) -> Callable[..., Sample]:
    """`Op.resized` of rows that `activation` makes of normal numbers."""

    def resized(rows: int, device: torch.device, dtype: torch.dtype, classes: int = 48, why: str = "resized") -> Sample:
        x, y = (activation(torch.randn(rows, classes, device=device, dtype=dtype), -1) for _ in range(2))
        return Sample((x, y), why=why)

    return resized


def divergence_workloads(activation: Callable[..., Tensor]) -> Callable[..., Iterator[Sample]]:
    """`Op.workloads` likewise."""

    def workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        for rows, classes in [(4096, 32000), (4096, 128256)]:
            yield divergence_resized(activation)(rows, device, dtype, classes, f"{rows}x{classes}")

    return workloads


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    input, target, labels, ctx.beta, ctx.ignore_index, reduction, _ = inputs
    _, denominator, dx = output
    ctx.in_forward = _in_forward(reduction, input.dtype)
    if ctx.in_forward:
        save_gradients(ctx, dx)
    else:
        ctx.save_for_backward(input, target, labels, denominator if reduction == "mean" else None)


def _fake_forward(input: Tensor, reduction: str, need_dx: bool) -> tuple[Tensor, Tensor, Tensor]:
    loss = input.new_empty(input.shape[:-1] if reduction == "none" else (), dtype=torch.float32)
    left = reduction == "total" or (reduction == "mean" and not _in_forward(reduction, input.dtype))
    denominator = input.new_empty(() if left else (0,), dtype=torch.float32)
    return loss, denominator, input.new_empty(input.shape if need_dx else (0,))


def _forward_sharding(input: Any, reduction: str, need_dx: bool) -> Any:
    if reduction == "mean":
        return replicate_only()
    outputs = {"none": lambda axis: [axis, REPLICATE], "sum": lambda axis: [PARTIAL, REPLICATE]}
    of = outputs.get(reduction, lambda axis: [PARTIAL, PARTIAL])
    return [([*of(axis), axis if need_dx else REPLICATE], [axis, axis, axis]) for axis in row_axes(input)]
