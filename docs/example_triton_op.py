r"""Gated squared ReLU, an operator of a package of your own: Triton kernels, and a record for `llmk.opcheck`.

Forward, elementwise, with g = gate and u = up:

    r = max(g, 0)
    y = r^2 * u

Backward, given dy; r is computed again, so that only g and u are kept:

    dg = dy * u * 2 * r
    du = dy * r^2
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from llmk.registry import Op, Sample


@triton.jit
def forward_kernel(g_ptr, u_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    cols = tl.arange(0, BLOCK_N)
    mask = cols < N
    places = tl.program_id(0).to(tl.int64) * N + cols
    g = tl.load(g_ptr + places, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + places, mask=mask, other=0.0).to(tl.float32)
    r = tl.where(g <= 0, 0.0, g)  # NaN stays NaN
    tl.store(y_ptr + places, (r * r * u).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(dy_ptr, g_ptr, u_ptr, dg_ptr, du_ptr, N, BLOCK_N: tl.constexpr):
    cols = tl.arange(0, BLOCK_N)
    mask = cols < N
    places = tl.program_id(0).to(tl.int64) * N + cols
    dy = tl.load(dy_ptr + places, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + places, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + places, mask=mask, other=0.0).to(tl.float32)
    r = tl.where(g <= 0, 0.0, g)
    tl.store(dg_ptr + places, (dy * u * 2.0 * r).to(dg_ptr.dtype.element_ty), mask=mask)
    tl.store(du_ptr + places, (dy * (r * r)).to(du_ptr.dtype.element_ty), mask=mask)


def launch(kernel, columns: int, *tensors: Tensor) -> None:
    """One program for each row."""
    grid = (tensors[0].numel() // max(columns, 1),)
    wrap_triton(kernel)[grid](*tensors, columns, BLOCK_N=triton.next_power_of_2(columns))


def check(gate: Tensor, up: Tensor) -> None:
    if up.shape != gate.shape or up.dtype != gate.dtype:
        expected, got = (f"{tuple(tensor.shape)} of {tensor.dtype}" for tensor in (gate, up))
        raise ValueError(f"up: expected {expected}, as gate, got {got}")


@triton_op("mylib::squared_relu_glu", mutates_args=())
def squared_relu_glu(gate: Tensor, up: Tensor) -> Tensor:
    """relu(gate)**2 * up, computed in float32 with one rounding."""
    check(gate, up)
    g, u = gate.contiguous(), up.contiguous()
    y = torch.empty(g.shape, dtype=g.dtype, device=g.device)
    launch(forward_kernel, g.shape[-1], g, u, y)
    return y


@triton_op("mylib::squared_relu_glu_backward", mutates_args=())
def squared_relu_glu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dy, g, u = grad.contiguous(), gate.contiguous(), up.contiguous()
    dg = torch.empty(g.shape, dtype=g.dtype, device=g.device)
    du = torch.empty(g.shape, dtype=g.dtype, device=g.device)
    launch(backward_kernel, g.shape[-1], dy, g, u, dg, du)
    return dg, du


@squared_relu_glu.register_kernel("cpu")
def _(gate, up):
    check(gate, up)
    return (gate.float().relu().square() * up.float()).to(gate.dtype).contiguous()


@squared_relu_glu_backward.register_kernel("cpu")
def _(grad, gate, up):
    dy, r, u = grad.float(), gate.float().relu(), up.float()
    return (dy * u * 2 * r).to(gate.dtype).contiguous(), (dy * r.square()).to(up.dtype).contiguous()


@squared_relu_glu.register_fake
def _(gate, up):
    check(gate, up)
    return gate.new_empty(gate.shape)


@squared_relu_glu_backward.register_fake
def _(grad, gate, up):
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def backward(ctx, grad):
    grads = squared_relu_glu_backward(grad, *ctx.saved_tensors)
    return tuple(d if needed else None for d, needed in zip(grads, ctx.needs_input_grad, strict=True))


squared_relu_glu.register_autograd(backward, setup_context=setup_context)


def reference(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.relu(gate).square() * up


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    yield Sample((randn(4, 16), randn(4, 16)), why="powers of two")
    yield Sample((randn(2, 3, 37), randn(2, 3, 37)), why="three dimensions, odd width")
    yield Sample((randn(0, 16), randn(0, 16)), why="no rows")
    yield Sample((randn(24, 6).t(), randn(6, 24)), why="a strided gate")
    yield Sample((randn(6, 48)[:, :24], randn(6, 48)[:, 24:]), why="halves of rows")
    yield Sample((randn(3, 20).relu(), randn(3, 20)), why="gates of exactly 0")


def resized(rows: int, device: torch.device, dtype: torch.dtype) -> Sample:
    return Sample(tuple(torch.randn(rows, 48, device=device, dtype=dtype) for _ in range(2)), why="resized")


SQUARED_RELU_GLU = Op(
    name="squared_relu_glu",
    overload=torch.ops.mylib.squared_relu_glu.default,
    reference=reference,
    samples=samples,
    resized=resized,
    differentiable=("gate", "up"),
)
