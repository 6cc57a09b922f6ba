r"""SwiGLU and GEGLU: the gated units of Llama's and of Gemma's feed-forward layers.

Source: Shazeer, "GLU Variants Improve Transformer", 2020, https://arxiv.org/abs/2002.05202.

Forward, elementwise, with f the activation, SiLU or GELU; activations.py has them and their derivatives:

    y = f(gate) * up

Backward, given dy; f is computed again, so that only gate and up are kept:

    dgate = dy * up * f'(gate)
    dup   = dy * f(gate)

A packed gate, `[..., 2F]` = gate then up as one projection writes it, gets one packed gradient and no concatenation.
"""

from collections.abc import Iterator
from functools import partial

import torch
import triton.language as tl
from torch import Tensor

from llmk.ops.common.activations import (
    activate,
    activate_with_grad,
    activation,
    activation_with_grad,
    gelu_reference,
)
from llmk.ops.common.rows import as_rows, row_and_columns
from llmk.ops.common.samples import normal_resized
from llmk.ops.pointwise._patterns import GEGLU, SWIGLU
from llmk.registry import (
    Cost,
    KernelOp,
    Sample,
    axes,
    cdiv,
    check_dtype,
    check_like,
    check_option,
    empty,
    jit,
    next_power_of_2,
    no_gradient,
    public_op,
    recomputed_in_backward,
    row_axes,
    wrap_triton,
)


def swiglu_reference(gate: Tensor, up: Tensor | None = None) -> Tensor:
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def geglu_reference(gate: Tensor, up: Tensor | None = None, *, approximate: str = "tanh") -> Tensor:
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    return gelu_reference(gate, approximate) * up


@jit
def gated_unit_kernel(
    gate_ptr, up_ptr, y_ptr, N, gate_stride, up_stride, ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr
):
    row, cols = row_and_columns(N, BLOCK_N)
    mask = cols < N
    gate_ptr += row * gate_stride
    up_ptr = gate_ptr + N if up_ptr is None else up_ptr + row * up_stride
    gate = tl.load(gate_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    y = activate(gate, ACTIVATION) * up
    tl.store(y_ptr + row * N + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@jit
def gated_unit_backward_kernel(
    dy_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    N,
    dy_stride,
    gate_stride,
    up_stride,
    grad_stride,
    ACTIVATION: tl.constexpr,
    WRITE_Y: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The gradients; with WRITE_Y y too, in the place of dy."""
    row, cols = row_and_columns(N, BLOCK_N)
    mask = cols < N
    gate_ptr += row * gate_stride
    up_ptr = gate_ptr + N if up_ptr is None else up_ptr + row * up_stride
    dgate_ptr += row * grad_stride
    dup_ptr = dgate_ptr + N if dup_ptr is None else dup_ptr + row * grad_stride
    dy = tl.load(dy_ptr + row * dy_stride + cols, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    activated, derivative = activate_with_grad(gate, ACTIVATION)
    tl.store(dgate_ptr + cols, (dy * up * derivative).to(dgate_ptr.dtype.element_ty), mask=mask)
    tl.store(dup_ptr + cols, (dy * activated).to(dup_ptr.dtype.element_ty), mask=mask)
    if WRITE_Y:
        tl.store(dy_ptr + row * dy_stride + cols, (activated * up).to(dy_ptr.dtype.element_ty), mask=mask)


def _block(N: int) -> dict[str, int]:
    """A thousand columns a program keep registers few and every access 16 bytes wide."""
    # H200, bf16, SwiGLU 8192x14336, times the floor: 0.99 forward and backward; 512 columns 1.01, 4096 1.00.
    return {"BLOCK_N": min(1024, next_power_of_2(max(N, 1))), "num_warps": 4}


def _rows(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor | None, int, int, int]:
    """Gate and up as rows, their number, their width F, and the stride of up's rows."""
    gate = as_rows(gate)
    M, N = gate.shape
    if up is None:
        return gate, None, M, N // 2, 0
    up = as_rows(up)
    return gate, up, M, N, up.stride(0)


def gated_unit(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    """Launch the forward pass."""
    gate_rows, up_rows, M, N, up_stride = _rows(gate, up)
    y = empty((*gate.shape[:-1], N), gate.dtype, gate.device)
    block = _block(N)
    wrap_triton(gated_unit_kernel)[(M * cdiv(N, block["BLOCK_N"]),)](
        gate_rows, up_rows, y, N, gate_rows.stride(0), up_stride, ACTIVATION=activation, **block
    )
    return y


def gated_unit_gradients(
    dy: Tensor, gate: Tensor, up: Tensor | None, activation: str, write_y: bool
) -> tuple[Tensor, Tensor]:
    """Launch the backward pass for dy `[M, F]`, in which y is found afterwards if `write_y`."""
    gate_rows, up_rows, M, N, up_stride = _rows(gate, up)
    dgate = empty(gate.shape, gate.dtype, gate.device)
    dup = no_gradient(dy) if up is None else empty(up.shape, gate.dtype, gate.device)
    block = _block(N)
    # A packed gradient is handed over once: two views of one buffer would be copied under functionalization.
    strides = dy.stride(0), gate_rows.stride(0), up_stride, gate_rows.shape[1]
    wrap_triton(gated_unit_backward_kernel)[(M * cdiv(N, block["BLOCK_N"]),)](
        dy, gate_rows, up_rows, dgate, None if up is None else dup, N, *strides,
        ACTIVATION=activation, WRITE_Y=write_y, **block,
    )  # fmt: skip
    return dgate, dup


def _gated_unit_bwd(grad: Tensor, gate: Tensor, up: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    return gated_unit_gradients(as_rows(grad), gate, up, activation, write_y=False)


def gated_unit_plain(gate: Tensor, up: Tensor | None, name: str) -> Tensor:
    """`gated_unit` in plain PyTorch."""
    dtype = gate.dtype
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    with recomputed_in_backward(gate):
        return (activation(gate.float(), name) * up.float()).to(dtype).contiguous()


def gated_unit_gradients_plain(grad: Tensor, gate: Tensor, up: Tensor | None, name: str) -> tuple[Tensor, Tensor]:
    """The gradients in plain PyTorch."""
    packed, dtype = up is None, gate.dtype
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    dy = grad.float()
    activated, derivative = activation_with_grad(gate.float(), name)
    dgate, dup = (dy * up.float() * derivative).to(dtype), (dy * activated).to(dtype)
    if packed:
        return torch.cat([dgate, dup], dim=-1), no_gradient(grad)
    return dgate.contiguous(), dup.contiguous()


# In a graph both are PyTorch's own operations: y need not be kept, as what Inductor makes of the backward pass
# computes it again, from what it reads anyway. Inductor writes a packed gradient twice, so there the kernels stay.
swiglu_fwd, geglu_fwd = (
    KernelOp(gated_unit, name=name, launch_cached=True, decomposed=lambda gate, up, _: up is not None)
    for name in ("_swiglu_fwd", "_geglu_fwd")
)
swiglu_bwd, geglu_bwd = (
    KernelOp(_gated_unit_bwd, name=name, launch_cached=True, decomposed=lambda grad, gate, up, _: up is not None)
    for name in ("_swiglu_bwd", "_geglu_bwd")
)


swiglu_fwd.register_kernel("cpu")(gated_unit_plain)
geglu_fwd.register_kernel("cpu")(gated_unit_plain)
swiglu_bwd.register_kernel("cpu")(gated_unit_gradients_plain)
geglu_bwd.register_kernel("cpu")(gated_unit_gradients_plain)


@swiglu_fwd.register_fake
@geglu_fwd.register_fake
def _(gate, up):
    return gate.new_empty(gate.shape if up is not None else (*gate.shape[:-1], gate.shape[-1] // 2))


swiglu_fwd.register_backward(swiglu_bwd)
geglu_fwd.register_backward(geglu_bwd)


@swiglu_fwd.register_sharding
@geglu_fwd.register_sharding
def _(gate, up):
    return [([axis], [axis, axis]) for axis in (row_axes(gate) if up is None else axes(gate))]


def swiglu_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    randn = partial(torch.randn, device=device, dtype=dtype)
    yield Sample((randn(4, 16), randn(4, 16)), why="powers of two")
    yield Sample((randn(2, 3, 37), randn(2, 3, 37)), why="three dimensions, odd width")
    yield Sample((randn(2, 3, 74),), why="packed, odd half")
    yield Sample((randn(40),), why="packed, one dimension")
    # A positive gate: where the derivative crosses zero, one element's rounding is luck.
    yield Sample((randn(1, 1).abs(), randn(1, 1)), why="one element")
    yield Sample((randn(0, 16), randn(0, 16)), why="no rows")
    yield Sample((randn(0, 16),), why="packed, no rows")
    yield Sample((randn(24, 6).t(), randn(6, 24)), why="gate strided, up not")
    yield Sample((randn(6, 80)[:, :32], randn(6, 80)[:, 40:72]), why="slices of wider rows")
    yield Sample((randn(1, 16).expand(5, 16), randn(5, 16)), why="gate expanded")
    yield Sample((randn(3, 64) * 1e4, randn(3, 64)), why="large gate")
    yield Sample((randn(2, 100_003), randn(2, 100_003)), why="100,003 columns")


def geglu_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for i, sample in enumerate(swiglu_samples(device, dtype)):
        if i % 2:
            sample = Sample(sample.args, {"approximate": "none"}, why=f"{sample.why}, exact form")
        yield sample
    below = torch.linspace(-6, -2, 96, device=device, dtype=torch.float32).to(dtype).view(2, 48)
    yield Sample((below, torch.ones_like(below)), why="far below zero, where 1 + tanh cancels")
    huge = torch.tensor([[-1.0, 1.0]], device=device, dtype=torch.float64) * min(1e15, torch.finfo(dtype).max)
    yield Sample((huge.to(dtype), torch.ones(1, 2, device=device, dtype=dtype)), why="a gate whose cube overflows")
    yield Sample((below, torch.ones_like(below)), {"approximate": "none"}, why="far below zero, where 1 + erf cancels")


def gated_unit_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for rows, columns in [(8192, 14336), (32768, 14336)]:
        gate = torch.randn(rows, columns, device=device, dtype=dtype)
        up = torch.randn(rows, columns, device=device, dtype=dtype)
        yield Sample((gate, up), why=f"{rows}x{columns}")
    yield Sample((torch.randn(8192, 2 * 14336, device=device, dtype=dtype),), why="8192x14336 packed")


def gated_unit_cost(gate: Tensor, up: Tensor | None = None, *, approximate: str = "") -> Cost:
    tensor = gate.numel() * gate.element_size() // (2 if up is None else 1)
    return Cost(bytes_forward=3 * tensor, bytes_full=8 * tensor)


def check_gate(gate: Tensor, up: Tensor | None) -> None:
    """
    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape does not fit.
    """
    check_dtype("gate", gate)
    if up is not None:
        check_like("up", up, "gate", gate)
    if gate.dim() == 0 or (up is None and gate.shape[-1] % 2 == 1):
        expected = "[..., F]" if up is not None else "[..., 2F], gate then up, when up is None"
        raise ValueError(f"gate: expected shape {expected}, got {tuple(gate.shape)}")


GATED_UNIT_CHOICES = (
    "under Inductor PyTorch's own operations: as fast alone on an H200 (0.97 to 1.00 times the floor, both ways), and "
    "in a Llama layer of hidden size 2048 and intermediate size 8192 they keep 16,384 bytes of each token less for the "
    "backward pass (63,624, not 80,008), which computes the output again in the kernel of the gradients. A packed "
    "gate stays with the kernels: 0.99 times the floor, where Inductor's code takes 1.40 (SwiGLU) and 1.70 (GEGLU)",
)


@public_op(
    reference=swiglu_reference,
    differentiable=("gate", "up"),
    kernel_ops=(swiglu_fwd, swiglu_bwd),
    samples=swiglu_samples,
    resized=normal_resized(lambda rows: ((rows, 48), (rows, 48))),
    workloads=gated_unit_workloads,
    cost=gated_unit_cost,
    patterns=SWIGLU,
    choices=GATED_UNIT_CHOICES,
)
def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """The gated unit `silu(gate) * up`, computed in float32 with one rounding.

    Args:
        gate: `[..., F]`, float32, float16 or bfloat16, any strides; or packed `[..., 2F]`, gate then up, when `up` is
            None.
        up: `[..., F]`, shape and dtype of `gate`.

    Returns:
        `[..., F]`, contiguous, in the dtype of `gate`.

    Raises:
        TypeError: A dtype is not one of these, or the two differ.
        ValueError: The shapes differ, or a packed last axis is odd.

    Source: Shazeer, 2020, https://arxiv.org/abs/2002.05202.
    """
    check_gate(gate, up)
    return swiglu_fwd(gate, up, "silu")


@public_op(
    reference=geglu_reference,
    differentiable=("gate", "up"),
    kernel_ops=(geglu_fwd, geglu_bwd),
    samples=geglu_samples,
    resized=normal_resized(lambda rows: ((rows, 48), (rows, 48))),
    workloads=gated_unit_workloads,
    cost=gated_unit_cost,
    patterns=GEGLU,
    choices=GATED_UNIT_CHOICES,
)
def geglu(gate: Tensor, up: Tensor | None = None, *, approximate: str = "tanh") -> Tensor:
    """The gated unit `gelu(gate) * up`, computed in float32 with one rounding.

    Args:
        gate: `[..., F]`, float32, float16 or bfloat16, any strides; or packed `[..., 2F]`, gate then up, when `up` is
            None.
        up: `[..., F]`, shape and dtype of `gate`.
        approximate: "tanh" for GELU's tanh form, "none" for the exact one, as in `torch.nn.functional.gelu`; Gemma's is
            "tanh".

    Returns:
        `[..., F]`, contiguous, in the dtype of `gate`.

    Raises:
        TypeError: A dtype is not one of these, or the two differ.
        ValueError: The shapes differ, a packed last axis is odd, or `approximate` is neither.

    Source: Shazeer, 2020, https://arxiv.org/abs/2002.05202.
    """
    check_gate(gate, up)
    check_option("approximate", approximate, ("tanh", "none"))
    return geglu_fwd(gate, up, "gelu_tanh" if approximate == "tanh" else "gelu")
