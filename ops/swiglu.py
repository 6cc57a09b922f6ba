r"""SwiGLU: the gated unit of Llama's feed-forward layer.

Source: Shazeer, "GLU Variants Improve Transformer", 2020, https://arxiv.org/abs/2002.05202.

Forward, elementwise, with s = sigmoid(gate):

    y = gate * s * up, with gate * s computed as gate / (1 + exp(-gate)): one rounding less

Backward, given dy; s is computed again, so that only gate and up are kept:

    dgate = dy * up * s * (1 + gate * (1 - s))
    dup   = dy * gate * s

A packed gate, `[..., 2I]` = gate then up as one projection writes it, gets one packed gradient and no concatenation.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmk.ops._rows import as_rows
from llmk.registry import (
    Cost,
    KernelOp,
    Sample,
    cdiv,
    check_dtype,
    check_same,
    check_shape,
    next_power_of_2,
    public_op,
    wrap_triton,
)


def swiglu_reference(gate: Tensor, up: Tensor | None = None) -> Tensor:
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@triton.jit
def swiglu_kernel(gate_ptr, up_ptr, y_ptr, N, gate_stride, up_stride, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = cols < N
    gate_ptr += row * gate_stride
    up_ptr = gate_ptr + N if up_ptr is None else up_ptr + row * up_stride
    gate = tl.load(gate_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y_ptr + row * N + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_backward_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, N, dy_stride, gate_stride, up_stride, grad_stride,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = cols < N
    gate_ptr += row * gate_stride
    up_ptr = gate_ptr + N if up_ptr is None else up_ptr + row * up_stride
    dgate_ptr += row * grad_stride
    dup_ptr = dgate_ptr + N if dup_ptr is None else dup_ptr + row * grad_stride
    dy = tl.load(dy_ptr + row * dy_stride + cols, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    silu = gate * s
    dgate = dy * up * (s * (1.0 + gate * (1.0 - s)))
    tl.store(dgate_ptr + cols, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
    tl.store(dup_ptr + cols, (dy * silu).to(dup_ptr.dtype.element_ty), mask=mask)


def _block(N: int) -> dict[str, int]:
    """Two thousand columns a program keep registers few and every access 16 bytes wide."""
    # H200, bf16, 8192x14336, times the floor: 1.05 forward and backward; 512 to 4096 columns differ by 0.02.
    return {"BLOCK_N": min(2048, next_power_of_2(N)), "num_warps": 4}


def _rows(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor | None, int, int, int]:
    """Gate and up as rows, their number, their width I, and the stride of up's rows."""
    gate = as_rows(gate)
    M, N = gate.shape
    if up is None:
        return gate, None, M, N // 2, 0
    up = as_rows(up)
    return gate, up, M, N, up.stride(0)


def _swiglu_fwd(gate: Tensor, up: Tensor | None) -> Tensor:
    gate_rows, up_rows, M, N, up_stride = _rows(gate, up)
    y = torch.empty((*gate.shape[:-1], N), dtype=gate.dtype, device=gate.device)
    block = _block(N)
    wrap_triton(swiglu_kernel)[(M, cdiv(N, block["BLOCK_N"]))](
        gate_rows, up_rows, y, N, gate_rows.stride(0), up_stride, **block
    )
    return y


def _swiglu_bwd(grad: Tensor, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    dy = as_rows(grad)
    gate_rows, up_rows, M, N, up_stride = _rows(gate, up)
    dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    dup = torch.empty((0,) if up is None else up.shape, dtype=gate.dtype, device=gate.device)
    block = _block(N)
    # A packed gradient is handed over once: two views of one buffer would be copied under functionalization.
    wrap_triton(swiglu_backward_kernel)[(M, cdiv(N, block["BLOCK_N"]))](
        dy, gate_rows, up_rows, dgate, None if up is None else dup, N,
        dy.stride(0), gate_rows.stride(0), up_stride, gate_rows.shape[1], **block,
    )  # fmt: skip
    return dgate, dup


swiglu_fwd = KernelOp(_swiglu_fwd)
swiglu_bwd = KernelOp(_swiglu_bwd)


@swiglu_fwd.register_kernel("cpu")
def _(gate: Tensor, up: Tensor | None) -> Tensor:
    dtype = gate.dtype
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(dtype).contiguous()


@swiglu_bwd.register_kernel("cpu")
def _(grad: Tensor, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    packed, dtype = up is None, gate.dtype
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    dy, gate, up = grad.float(), gate.float(), up.float()
    s = torch.sigmoid(gate)
    dgate = (dy * up * (s * (1 + gate * (1 - s)))).to(dtype)
    dup = (dy * torch.nn.functional.silu(gate)).to(dtype)
    if packed:
        return torch.cat([dgate, dup], dim=-1), torch.empty((0,), dtype=dtype, device=gate.device)
    return dgate.contiguous(), dup.contiguous()


@swiglu_fwd.register_fake
def _(gate: Tensor, up: Tensor | None) -> Tensor:
    return gate.new_empty(gate.shape if up is not None else (*gate.shape[:-1], gate.shape[-1] // 2))


@swiglu_bwd.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty((0,) if up is None else up.shape)


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):
    gate, up = ctx.saved_tensors
    dgate, dup = swiglu_bwd(grad, gate, up)
    return dgate, None if up is None else dup


swiglu_fwd.register_autograd(_backward, setup_context=_setup_context)


def swiglu_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    yield Sample((randn(4, 16), randn(4, 16)), why="powers of two")
    yield Sample((randn(2, 3, 37), randn(2, 3, 37)), why="three dimensions, odd width")
    yield Sample((randn(2, 3, 74),), why="packed, odd half")
    yield Sample((randn(40),), why="packed, one dimension")
    yield Sample((randn(1, 1), randn(1, 1)), why="one element")
    yield Sample((randn(0, 16), randn(0, 16)), why="no rows")
    yield Sample((randn(0, 16),), why="packed, no rows")
    yield Sample((randn(24, 6).t(), randn(6, 24)), why="gate strided, up not")
    yield Sample((randn(6, 80)[:, :32], randn(6, 80)[:, 40:72]), why="slices of wider rows")
    yield Sample((randn(1, 16).expand(5, 16), randn(5, 16)), why="gate expanded")
    yield Sample((randn(3, 64) * 1e4, randn(3, 64)), why="large gate")
    yield Sample((randn(2, 70_001), randn(2, 70_001)), why="a row past 65,536 columns")


def swiglu_resized(rows: int, device: torch.device, dtype: torch.dtype) -> Sample:
    return Sample(
        (torch.randn(rows, 48, device=device, dtype=dtype), torch.randn(rows, 48, device=device, dtype=dtype)),
        why="resized",
    )


def swiglu_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for rows, columns in [(8192, 14336), (32768, 14336)]:
        gate = torch.randn(rows, columns, device=device, dtype=dtype)
        up = torch.randn(rows, columns, device=device, dtype=dtype)
        yield Sample((gate, up), why=f"{rows}x{columns}")
    yield Sample((torch.randn(8192, 2 * 14336, device=device, dtype=dtype),), why="8192x14336 packed")


def swiglu_cost(gate: Tensor, up: Tensor | None = None) -> Cost:
    tensor = gate.numel() * gate.element_size() // (2 if up is None else 1)
    return Cost(bytes_forward=3 * tensor, bytes_full=8 * tensor)


@public_op(
    "swiglu(Tensor gate, Tensor? up=None) -> Tensor",
    reference=swiglu_reference,
    differentiable=("gate", "up"),
    kernel_ops=(swiglu_fwd, swiglu_bwd),
    samples=swiglu_samples,
    resized=swiglu_resized,
    workloads=swiglu_workloads,
    cost=swiglu_cost,
)
def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """The gated unit `silu(gate) * up`, computed in float32 with one rounding.

    Args:
        gate: `[..., I]`, float32, float16 or bfloat16, any strides; or packed `[..., 2I]`, gate then up, when `up` is
            None.
        up: `[..., I]`, shape and dtype of `gate`.

    Returns:
        `[..., I]`, contiguous, in the dtype of `gate`.

    Raises:
        TypeError: A dtype is not one of these, or the two differ.
        ValueError: The shapes differ, or a packed last axis is odd.

    Source: Shazeer, 2020, https://arxiv.org/abs/2002.05202.
    """
    check_dtype("gate", gate)
    if up is not None:
        check_shape("up", up, gate.shape, "the shape of gate")
        check_same("up", up, "gate", gate, dtype=True)
    if gate.dim() == 0 or (up is None and gate.shape[-1] % 2 == 1):
        expected = "[..., I]" if up is not None else "[..., 2I], gate then up, when up is None"
        raise ValueError(f"gate: expected shape {expected}, got {tuple(gate.shape)}")
    return swiglu_fwd(gate, up)
