"""Divergences of rows of two tensors: the kernels, and the kernel ops that `jsd` and `tvd` are made of.

A row's divergence is the sum over its classes of what `divergence_math.py` gives for each. Forward, a program walks one
row of both tensors and leaves one number; backward each reads a block of both and writes a block of the gradient. A row
whose label is `ignore_index` is read in neither direction.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmk.ops.common.rows import as_rows
from llmk.ops.common.sums import mean_of_rows, sum_to_scalar
from llmk.ops.loss.divergence_math import Mixture, divergence_of, divergence_of_cpu
from llmk.registry import (
    PARTIAL,
    REPLICATE,
    KernelOp,
    cdiv,
    check_dtype,
    check_same,
    check_shape,
    empty,
    next_power_of_2,
    replicate_only,
    row_axes,
    wrap_triton,
)


@triton.jit
def divergence_kernel(
    x_ptr, y_ptr, label_ptr, loss_ptr, count_ptr, N, x_stride, y_stride, ignore_index,
    BETA: tl.constexpr, LOG_BETA: tl.constexpr, LOG_REST: tl.constexpr, EXACT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    counts = tl.full((), 1, dtype=tl.int32)
    if label_ptr is not None:
        counts = (tl.load(label_ptr + row).to(tl.int64) != ignore_index).to(tl.int32)
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    x_ptr += row * x_stride
    y_ptr += row * y_stride
    for start in range(0, N * counts, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = cols < N
        x = tl.load(x_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        f, _ = divergence_of(x, y, BETA, LOG_BETA, LOG_REST, EXACT)  # type: ignore[misc]
        total += tl.where(mask, f, 0.0)
    tl.store(loss_ptr + row, tl.sum(total, axis=0))
    tl.store(count_ptr + row, counts.to(tl.float32))


@triton.jit
def divergence_backward_kernel(
    grad_ptr, divisor_ptr, x_ptr, y_ptr, label_ptr, dx_ptr, N, grad_stride, x_stride, y_stride, ignore_index,
    BETA: tl.constexpr, LOG_BETA: tl.constexpr, LOG_REST: tl.constexpr, EXACT: tl.constexpr, BLOCK_N: tl.constexpr,
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
    if divisor_ptr is not None:
        g = tl.div_rn(g, tl.load(divisor_ptr))
    x = tl.load(x_ptr + row * x_stride + cols, mask=read, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + row * y_stride + cols, mask=read, other=0.0).to(tl.float32)
    _, slope = divergence_of(x, y, BETA, LOG_BETA, LOG_REST, EXACT)  # type: ignore[misc]
    dx = tl.where(read, g * slope, 0.0)
    tl.store(dx_ptr + row * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)


def _block(N: int) -> dict[str, int]:
    # A guess after the row kernels of cross entropy: 16 elements of each tensor in a thread.
    if N <= 8192:
        return {"BLOCK_N": min(1024, next_power_of_2(max(N, 1))), "num_warps": 2}
    return {"BLOCK_N": 2048, "num_warps": 4}


class Call(NamedTuple):
    """Two tensors `[..., V]`, of which token each row is, and which divergence."""

    input: Tensor
    target: Tensor
    labels: Tensor | None
    mixture: Mixture
    ignore_index: int


class Rows(NamedTuple):
    """Of each row its divergence and whether it counts, and the gradient of the input."""

    losses: Callable[[Call], tuple[Tensor, Tensor]]
    gradients: Callable[[Tensor, Tensor | None, Call], Tensor]
    sum: Callable[[Tensor], Tensor]
    mean: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _losses(call: Call) -> tuple[Tensor, Tensor]:
    x, y = as_rows(call.input), as_rows(call.target)
    M, N = x.shape
    loss, count = (empty(call.input.shape[:-1], torch.float32, x.device) for _ in range(2))
    wrap_triton(divergence_kernel)[(M,)](
        x, y, None if call.labels is None else call.labels.contiguous(), loss, count,
        N, x.stride(0), y.stride(0), call.ignore_index,
        **call.mixture.constants(), EXACT=x.dtype == torch.float32, **_block(N),
    )  # fmt: skip
    return loss, count


def _gradients(grad: Tensor, divisor: Tensor | None, call: Call) -> Tensor:
    x, y = as_rows(call.input), as_rows(call.target)
    M, N = x.shape
    grad = grad.reshape(-1) if grad.dim() else grad
    dx, block = empty(call.input.shape, x.dtype, x.device), _block(N)
    wrap_triton(divergence_backward_kernel)[(M * cdiv(N, block["BLOCK_N"]),)](
        grad, divisor, x, y, None if call.labels is None else call.labels.contiguous(), dx,
        N, grad.stride(0) if grad.dim() else 0, x.stride(0), y.stride(0), call.ignore_index,
        **call.mixture.constants(), EXACT=x.dtype == torch.float32, **block,
    )  # fmt: skip
    return dx


def _counts(call: Call) -> Tensor:
    if call.labels is None:
        return torch.ones(call.input.shape[:-1], dtype=torch.bool, device=call.input.device)
    return call.labels.long() != call.ignore_index  # int32 would wrap an index that it does not hold


def _losses_cpu(call: Call) -> tuple[Tensor, Tensor]:
    f, _ = divergence_of_cpu(call.input.float(), call.target.float(), call.mixture.beta)
    counts = _counts(call)
    return torch.where(counts, f.sum(-1), 0.0), counts.float()


def _gradients_cpu(grad: Tensor, divisor: Tensor | None, call: Call) -> Tensor:
    _, slope = divergence_of_cpu(call.input.float(), call.target.float(), call.mixture.beta)
    grad = grad if divisor is None else grad / divisor
    dx = (grad.unsqueeze(-1) if grad.dim() else grad) * slope
    return torch.where(_counts(call).unsqueeze(-1), dx, 0.0).to(call.input.dtype).contiguous()


def _mean_cpu(loss: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    divisor = count.sum()
    return loss.sum() / divisor, divisor


KERNELS = Rows(_losses, _gradients, sum_to_scalar, mean_of_rows)
CPU = Rows(_losses_cpu, _gradients_cpu, torch.sum, _mean_cpu)


def _reduced(rows: Rows, call: Call, reduction: str) -> tuple[Tensor, Tensor]:
    """The loss `[...]` or `[]`, and the divisor of a mean, `[]`, or else nothing, `[0]`.

    "total" is the sum, with the divisor of the mean: what processes with some rows each add up first.
    """
    loss, count = rows.losses(call)
    if reduction == "mean":
        return rows.mean(loss, count)
    if reduction == "total":
        return rows.sum(loss), rows.sum(count)
    nothing = empty((0,), torch.float32, call.input.device)
    return loss if reduction == "none" else rows.sum(loss), nothing


def _forward_on(rows: Rows) -> Callable[..., tuple[Tensor, Tensor]]:
    def forward(
        input: Tensor, target: Tensor, labels: Tensor | None, beta: float, ignore_index: int, reduction: str
    ) -> tuple[Tensor, Tensor]:
        return _reduced(rows, Call(input, target, labels, Mixture(beta), ignore_index), reduction)

    return forward


def _backward_on(rows: Rows) -> Callable[..., Tensor]:
    def backward(
        grad: Tensor, divisor: Tensor | None, input: Tensor, target: Tensor, labels: Tensor | None,
        beta: float, ignore_index: int,
    ) -> Tensor:  # fmt: skip
        return rows.gradients(grad, divisor, Call(input, target, labels, Mixture(beta), ignore_index))

    return backward


class DivergenceOps:
    """The kernel ops of one public operator, forward and backward: `_NAME_fwd` and `_NAME_bwd`."""

    def __init__(self, name: str) -> None:
        self.forward = KernelOp(_forward_on(KERNELS), name=f"_{name}_fwd", replayed=True)
        self.backward = KernelOp(_backward_on(KERNELS), name=f"_{name}_bwd", replayed=True)
        self.forward.register_kernel("cpu")(_forward_on(CPU))
        self.backward.register_kernel("cpu")(_backward_on(CPU))
        self.forward.register_fake(_fake_forward)
        self.forward.register_sharding(_forward_sharding)
        self.backward.register_sharding(
            lambda grad, input: [
                ([axis], [axis if grad.ndim else REPLICATE, REPLICATE, axis, axis, axis]) for axis in row_axes(input)
            ]
        )
        self.forward.register_backward(
            self.backward,
            outputs=("loss", "divisor"),
            depends_on=[["input"]],
            saved_if={"divisor": lambda reduction: reduction == "mean"},
        )

    @property
    def kernel_ops(self) -> tuple[KernelOp, KernelOp]:
        return self.forward, self.backward

    def __call__(
        self, input: Tensor, target: Tensor, labels: Tensor | None, beta: float, ignore_index: int, reduction: str,
        sharded: bool,
    ) -> Tensor:  # fmt: skip
        """The loss, once the tensors fit; `sharded` if one of them is a DTensor."""
        check_dtype("input", input)
        if input.dim() == 0 or input.shape[-1] == 0:
            raise ValueError(f"input: expected shape [..., V] with V at least 1, got {tuple(input.shape)}")
        check_shape("target", target, input.shape, "the shape of input")
        check_same("target", target, "input", input, dtype=True)
        if labels is not None:
            check_dtype("labels", labels, (torch.int64, torch.int32))
            check_shape("labels", labels, input.shape[:-1], "the shape of input without its last axis")
            check_same("labels", labels, "input", input)
        if reduction == "mean" and sharded:
            total, divisor = self.forward(input, target, labels, beta, ignore_index, "total")
            return total / divisor.detach()
        loss, _ = self.forward(input, target, labels, beta, ignore_index, reduction)
        return loss


def _fake_forward(input: Tensor, reduction: str) -> tuple[Tensor, Tensor]:
    loss = input.new_empty(input.shape[:-1] if reduction == "none" else (), dtype=torch.float32)
    return loss, input.new_empty(() if reduction in ("mean", "total") else (0,), dtype=torch.float32)


def _forward_sharding(input: Any, reduction: str) -> Any:
    if reduction == "mean":
        return replicate_only()
    outputs = {"none": lambda axis: [axis, REPLICATE], "sum": lambda axis: [PARTIAL, REPLICATE]}
    of = outputs.get(reduction, lambda axis: [PARTIAL, PARTIAL])
    return [(of(axis), [axis, axis, axis]) for axis in row_axes(input)]
