r"""A gated unit and the linear layer after it, which keep gate and up for the backward pass and not their product.

Source: Shazeer, "GLU Variants Improve Transformer", 2020, https://arxiv.org/abs/2002.05202.

Forward, for gate and up [M, F], W [N, F] and b [N], with f SiLU or GELU:

    h = f(gate) * up
    y = h @ W^T + b

Backward, given dy:

    dh    = dy @ W
    dgate = dh * up * f'(gate)
    dup   = dh * f(gate)
    dW    = dy^T @ h
    db    = the column sums of dy, in float32

PyTorch's linear layer keeps h for dW. Here the kernel that reads dh, gate and up for dgate and dup writes h over dh.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from llmk.ops.common.samples import normal_resized
from llmk.ops.linear._linear_act_kernels import product
from llmk.ops.pointwise.gated_units import (
    check_gate,
    gated_unit,
    gated_unit_gradients,
    gated_unit_gradients_plain,
    gated_unit_plain,
    geglu_reference,
    swiglu_reference,
)
from llmk.registry import (
    PARTIAL,
    REPLICATE,
    Cost,
    KernelOp,
    Sample,
    autocast_dtype,
    check_option,
    check_same,
    check_shape,
    no_gradient,
    or_no_gradient,
    public_op,
    row_axes,
)

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def gated_linear_reference(
    gate: Tensor, up: Tensor | None, weight: Tensor, bias: Tensor | None = None, *, activation: str = "silu"
) -> Tensor:
    if activation == "silu":
        h = swiglu_reference(gate, up)
    else:
        h = geglu_reference(gate, up, approximate="tanh" if activation == "gelu_tanh" else "none")
    return torch.nn.functional.linear(h, weight, bias)


def _rows(x: Tensor) -> Tensor:
    """`[..., K]` as `[M, K]`: products take any strides."""
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)


def _gated_linear_fwd(gate: Tensor, up: Tensor | None, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    h = _rows(gated_unit(gate, up, activation))
    y = torch.empty((*gate.shape[:-1], weight.shape[0]), dtype=gate.dtype, device=gate.device)
    product(h, weight, bias, y.view(h.shape[0], weight.shape[0]))
    return y


def _gated_linear_bwd(
    grad: Tensor, gate: Tensor, up: Tensor | None, weight: Tensor | None, activation: str, need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dgate and dup where there is a weight, dW and db where asked for."""
    dy, h, dgate, dup, dw = _rows(grad), None, None, None, None
    if weight is not None:
        h = torch.empty((dy.shape[0], weight.shape[1]), dtype=dy.dtype, device=dy.device)
        torch.mm(dy, weight, out=h)
        dgate, dup = gated_unit_gradients(h, gate, up, activation, write_y=need_weight)
    elif need_weight:
        h = _rows(gated_unit(gate, up, activation))
    if need_weight and h is not None:
        dw = torch.empty((dy.shape[1], h.shape[1]), dtype=dy.dtype, device=dy.device)
        torch.mm(dy.t(), h, out=dw)
    db = dy.sum(0) if need_bias else None  # in float32, rounded once
    return or_no_gradient(dgate, grad), or_no_gradient(dup, grad), or_no_gradient(dw, grad), or_no_gradient(db, grad)


gated_linear_fwd = KernelOp(_gated_linear_fwd, decomposed=lambda gate, up, *_: up is not None)
gated_linear_bwd = KernelOp(_gated_linear_bwd, decomposed=lambda grad, gate, up, *_: up is not None)


def _gradients_plain(
    products_in: torch.dtype, grad: Tensor, gate: Tensor, up: Tensor | None, weight: Tensor | None, activation: str,
    need_weight: bool, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dtype, dy, dgate, dup = grad.dtype, _rows(grad).to(products_in), no_gradient(grad), no_gradient(grad)
    if weight is not None:
        dh = (dy @ weight.to(products_in)).view(*grad.shape[:-1], weight.shape[1])
        dgate, dup = gated_unit_gradients_plain(dh, gate, up, activation)
    dw = (dy.t() @ _rows(gated_unit_plain(gate, up, activation)).to(products_in)).to(dtype) if need_weight else None
    db = dy.float().sum(0).to(dtype) if need_bias else None
    return dgate, dup, or_no_gradient(dw, grad), or_no_gradient(db, grad)


@gated_linear_fwd.register_decomposition
def _(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """The product as it is; of the gated unit Inductor makes one kernel with what comes before it."""
    h = _rows(gated_unit_plain(gate, up, activation))
    y = torch.empty((*gate.shape[:-1], weight.shape[0]), dtype=gate.dtype, device=gate.device)
    product(h, weight, bias, y.view(h.shape[0], weight.shape[0]))
    return y


@gated_linear_bwd.register_decomposition
def _(grad, *rest) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _gradients_plain(grad.dtype, grad, *rest)


@gated_linear_fwd.register_kernel("cpu")
def _(gate: Tensor, up: Tensor | None, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    h = gated_unit_plain(gate, up, activation).float()
    y = torch.nn.functional.linear(h, weight.float(), None if bias is None else bias.float())
    return y.to(gate.dtype).contiguous()


@gated_linear_bwd.register_kernel("cpu")
def _(grad, *rest) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _gradients_plain(torch.float32, grad, *rest)


@gated_linear_fwd.register_fake
def _(gate, weight):
    return gate.new_empty((*gate.shape[:-1], weight.shape[0]))


@gated_linear_bwd.register_fake
def _(grad, gate, up, weight, need_weight, need_bias):
    def wanted(needed: bool, shape: tuple[int, ...]) -> Tensor:
        return grad.new_empty(shape if needed else (0,))

    F = gate.shape[-1] if up is not None else gate.shape[-1] // 2
    return (
        wanted(weight is not None, gate.shape),
        wanted(weight is not None and up is not None, gate.shape),
        wanted(need_weight, (grad.shape[-1], F)),
        wanted(need_bias, grad.shape[-1:]),
    )


@gated_linear_fwd.register_flop_formula
def _(gate: Tensor, up: Tensor | None, weight: Tensor, *args, out_val=None) -> int:
    return 2 * (gate.numel() // max(1, gate.shape[-1])) * weight.numel()


@gated_linear_bwd.register_flop_formula
def _(grad, gate, up, weight, activation, need_weight, need_bias, out_val=None) -> int:
    F = gate.shape[-1] if up is not None else gate.shape[-1] // 2
    return 2 * grad.numel() * F * ((weight is not None) + need_weight)


@gated_linear_fwd.register_sharding
def _(gate, up, bias):
    rows = [([axis], [axis, axis, REPLICATE, REPLICATE]) for axis in row_axes(gate)]
    last = gate.ndim - 1
    columns = ([last], [REPLICATE, REPLICATE, 0, 0])
    if up is None or bias is not None:  # each process would take parts of both halves, or add the bias again
        return [*rows, columns]
    return [*rows, columns, ([PARTIAL], [last, last, 1, REPLICATE])]


gated_linear_fwd.register_backward(
    gated_linear_bwd, saved_if={"weight": lambda need_gate, need_up: need_gate or need_up}
)


def gated_linear_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    randn = partial(torch.randn, device=device, dtype=dtype)
    yield Sample((randn(4, 16), randn(4, 16), randn(8, 16)), why="powers of two")
    yield Sample(
        (randn(2, 3, 37), randn(2, 3, 37), randn(23, 37), randn(23)),
        {"activation": "gelu"},
        why="three dimensions, odd sizes, bias",
    )
    yield Sample((randn(5, 74), None, randn(9, 37)), {"activation": "gelu_tanh"}, why="packed, odd half")
    yield Sample((randn(40), None, randn(7, 20), randn(7)), why="packed, one dimension")
    # A positive gate: where the derivative crosses zero, one element's rounding is luck.
    yield Sample((randn(1, 1).abs(), randn(1, 1), randn(1, 1)), why="one element")
    yield Sample((randn(0, 16), randn(0, 16), randn(8, 16), randn(8)), why="no rows")
    yield Sample((randn(24, 6).t(), randn(6, 24), randn(24, 10).t()), why="gate and weight strided, up not")
    yield Sample((randn(6, 80)[:, :32], randn(6, 80)[:, 40:72], randn(5, 32)), why="slices of wider rows")
    yield Sample((randn(1, 16).expand(5, 16), randn(5, 16), randn(8, 16), randn(16)[::2]), why="gate expanded")
    yield Sample((randn(70, 1100), randn(70, 1100), randn(3, 1100) / 32), why="several blocks")


def gated_linear_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for M, F, N in [(16384, 8192, 2048), (8192, 14336, 4096)]:
        gate, up = (torch.randn(M, F, device=device, dtype=dtype) for _ in range(2))
        yield Sample((gate, up, torch.randn(N, F, device=device, dtype=dtype) / F**0.5), why=f"{M}x{F}x{N}")


def gated_linear_cost(
    gate: Tensor, up: Tensor | None, weight: Tensor, bias: Tensor | None = None, *, activation: str = "silu"
) -> Cost:
    size, M = gate.element_size(), gate.numel() // max(1, gate.shape[-1])
    N, F = weight.shape
    inputs, w, y, flops = 2 * M * F * size, weight.numel() * size, M * N * size, 2 * M * N * F
    # Backward it reads gate, up, W and dy, and writes dgate, dup and dW.
    return Cost(inputs + w + y, 3 * inputs + 3 * w + 2 * y, flops, 3 * flops)


@public_op(
    reference=gated_linear_reference,
    differentiable=("gate", "up", "weight", "bias"),
    kernel_ops=(gated_linear_fwd, gated_linear_bwd),
    samples=gated_linear_samples,
    resized=normal_resized(lambda rows: ((rows, 48), (rows, 48), (40, 48), (40,))),
    workloads=gated_linear_workloads,
    cost=gated_linear_cost,
    batch_dependent={
        "output 0": "h @ W^T is cuBLAS's, which chooses by the number of rows",
        **{f"gradient of {name}": "dy @ W is cuBLAS's, which may split the sum of few rows" for name in ("gate", "up")},
    },
    choices=(
        "the product with the gate is made again backward, by the kernel that reads gate and up anyway: 16,384 "
        "bytes of each token less are kept in a Llama layer of intermediate size 8192",
        "compiled, all but the products is plain aten, which Inductor fuses with its neighbours, as `swiglu`'s is",
    ),
)
def gated_linear(
    gate: Tensor, up: Tensor | None, weight: Tensor, bias: Tensor | None = None, *, activation: str = "silu"
) -> Tensor:
    """`linear(activation(gate) * up, weight, bias)`, the end of a gated feed-forward layer.

    It keeps gate and up for the backward pass, which makes their product again. Under autocast it runs in autocast's
    dtype.

    Args:
        gate: `[..., F]`, float32, float16 or bfloat16, any strides; or packed `[..., 2F]`, gate then up, when `up` is
            None.
        up: `[..., F]`, shape and dtype of `gate`, or None.
        weight: `[N, F]`, as in `torch.nn.Linear`, dtype of `gate`, any strides.
        bias: `[N]`, dtype of `gate`.
        activation: "silu", "gelu" or "gelu_tanh".

    Returns:
        `[..., N]`, contiguous, in the dtype of `gate`.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape or a device does not fit, a packed last axis is odd, or the activation is not one of these.

    Source: Shazeer, 2020, https://arxiv.org/abs/2002.05202.
    """
    dtype = autocast_dtype(gate.device)
    if dtype is not None:
        gate, weight = gate.to(dtype), weight.to(dtype)
        up, bias = (x if x is None else x.to(dtype) for x in (up, bias))
    check_gate(gate, up)
    F = gate.shape[-1] if up is not None else gate.shape[-1] // 2
    if weight.dim() != 2 or weight.shape[1] != F:
        raise ValueError(f"weight: expected shape [N, {F}] to fit gate, got {tuple(weight.shape)}")
    check_same("weight", weight, "gate", gate, dtype=True)
    if bias is not None:
        check_shape("bias", bias, weight.shape[:1], "one for each row of weight")
        check_same("bias", bias, "gate", gate, dtype=True)
    check_option("activation", activation, ACTIVATIONS)
    return gated_linear_fwd(gate, up, weight, bias, activation)
