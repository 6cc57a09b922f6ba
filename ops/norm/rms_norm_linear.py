r"""Root mean square normalization and the linear layers that read it, which do not keep what it gives them.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, https://arxiv.org/abs/1910.07467.

Forward, for x [M, K] and up to three weights W_i [N_i, K]:

    h   = rms_norm(x)
    y_i = h @ W_i^T

Backward, given dy_i:

    h    = rms_norm(x), again
    dW_i = dy_i^T @ h
    dh   = sum over i of dy_i @ W_i, then as `rms_norm`'s

PyTorch's linear layers keep h beside x, which the norm keeps. The sum is cuBLAS's, in the product's epilogue, where
PyTorch adds the layers' gradients in kernels of their own.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from llmk.ops.common.samples import normal_resized
from llmk.ops.norm import _rms_norm_kernels as norm
from llmk.ops.norm.rms_norm import norm_ops, rms_norm_reference
from llmk.registry import (
    REPLICATE,
    Cost,
    KernelOp,
    Sample,
    autocast_dtype,
    check_finite,
    check_not_negative,
    check_parameter,
    check_rows,
    check_same,
    no_gradient,
    public_op,
    row_axes,
)

MOST_LAYERS = 3


def rms_norm_linear_reference(
    input: Tensor, weight: Tensor | None, first: Tensor, second: Tensor | None = None, third: Tensor | None = None,
    eps: float = 1e-6, *, offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    h = rms_norm_reference(input, weight, eps, offset=offset)
    y1, y2, y3 = (h[..., :0] if w is None else torch.nn.functional.linear(h, w) for w in (first, second, third))
    return y1, y2, y3


def _rows(x: Tensor) -> Tensor:
    """`[..., K]` as `[M, K]`: products take any strides."""
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)


def _outputs(normed: Tensor, weights: Sequence[Tensor | None]) -> list[Tensor]:
    sizes = [0 if w is None else w.shape[0] for w in weights]
    return [torch.empty((*normed.shape[:-1], N), dtype=normed.dtype, device=normed.device) for N in sizes]


def _linear_fwd(
    normed: Tensor, input: Tensor, weight: Tensor | None, eps: float, offset: float, first: Tensor,
    second: Tensor | None, third: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The linear layers of `normed`, which is the norm of `input`."""
    weights, h = (first, second, third), _rows(normed)
    outputs = _outputs(normed, weights)
    for w, y in zip(weights, outputs, strict=True):
        if w is not None:
            torch.mm(h, w.t(), out=y.view(h.shape[0], w.shape[0]))
    y1, y2, y3 = outputs
    return y1, y2, y3


def _sum_of_products(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    total = torch.empty((grads[0].shape[0], weights[0].shape[1]), dtype=grads[0].dtype, device=grads[0].device)
    torch.mm(grads[0], weights[0], out=total)
    for dy, w in zip(grads[1:], weights[1:], strict=True):
        torch.addmm(total, dy, w, out=total)
    return total


def _product(dy: Tensor, h: Tensor) -> Tensor:
    dw = torch.empty((dy.shape[1], h.shape[1]), dtype=dy.dtype, device=dy.device)
    torch.mm(dy.t(), h, out=dw)
    return dw


def _linear_bwd(
    grad_first: Tensor, grad_second: Tensor, grad_third: Tensor, input: Tensor, weight: Tensor | None, eps: float,
    offset: float, first: Tensor | None, second: Tensor | None, third: Tensor | None, need_normed: bool,
    need_first: bool, need_second: bool, need_third: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dh where there are weights, and dW_i where asked for."""
    grads, needs = [_rows(dy) for dy in (grad_first, grad_second, grad_third)], (need_first, need_second, need_third)
    dh, dws = no_gradient(grad_first), [no_gradient(grad_first) for _ in needs]
    if need_normed:
        pairs = [(dy, w) for dy, w in zip(grads, (first, second, third), strict=True) if w is not None]
        dh = _sum_of_products(*zip(*pairs, strict=True)).view(input.shape)
    if any(needs):
        h = _rows(norm.forward(input, None, weight, eps, offset)[0]).to(grad_first.dtype)
        dws = [_product(dy, h) if need else dw for dy, need, dw in zip(grads, needs, dws, strict=True)]
    return dh, dws[0], dws[1], dws[2]


norm_fwd, norm_bwd = norm_ops("rms_norm_linear_norm", launch_cached=False)  # of a call that has products too
rms_norm_linear_fwd = KernelOp(_linear_fwd, name="_rms_norm_linear_fwd")
rms_norm_linear_bwd = KernelOp(_linear_bwd, name="_rms_norm_linear_bwd")


@rms_norm_linear_fwd.register_kernel("cpu")
def _(normed, input, weight, eps, offset, *weights) -> tuple[Tensor, Tensor, Tensor]:
    h, outputs = _rows(normed).float(), _outputs(normed, weights)
    for w, y in zip(weights, outputs, strict=True):
        if w is not None:
            y.view(h.shape[0], w.shape[0]).copy_(h @ w.float().t())
    y1, y2, y3 = outputs
    return y1, y2, y3


@rms_norm_linear_bwd.register_kernel("cpu")
def _(
    grad_first, grad_second, grad_third, input, weight, eps, offset, first, second, third, need_normed, *needs
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype, grads = grad_first.dtype, [_rows(dy).float() for dy in (grad_first, grad_second, grad_third)]
    dh = no_gradient(grad_first)
    if need_normed:
        products = [dy @ w.float() for dy, w in zip(grads, (first, second, third), strict=True) if w is not None]
        dh = sum(products[1:], products[0]).to(dtype).view(input.shape)
    h = _rows(norm.forward_plain(input, None, weight, eps, offset)[0]).to(dtype).float()
    dws = [(dy.t() @ h).to(dtype) if need else no_gradient(grad_first) for dy, need in zip(grads, needs, strict=True)]
    return dh, dws[0], dws[1], dws[2]


@rms_norm_linear_fwd.register_fake
def _(normed, first, second, third):
    sizes = (0 if w is None else w.shape[0] for w in (first, second, third))
    y1, y2, y3 = (normed.new_empty((*normed.shape[:-1], N)) for N in sizes)
    return y1, y2, y3


@rms_norm_linear_bwd.register_fake
def _(grad_first, grad_second, grad_third, input, need_normed, need_first, need_second, need_third):
    def gradient(dy: Tensor, needed: bool) -> Tensor:
        return dy.new_empty((dy.shape[-1], input.shape[-1]) if needed else (0,))

    return (
        grad_first.new_empty(input.shape if need_normed else (0,)),
        gradient(grad_first, need_first),
        gradient(grad_second, need_second),
        gradient(grad_third, need_third),
    )


@rms_norm_linear_fwd.register_flop_formula
def _(normed, input, weight, eps, offset, *weights, out_val=None) -> int:
    return sum(2 * normed.numel() * w.shape[0] for w in weights if w is not None)


@rms_norm_linear_bwd.register_flop_formula
def _(
    grad_first, grad_second, grad_third, input, weight, eps, offset, first, second, third, need_normed, *needs,
    out_val=None,
) -> int:  # fmt: skip
    grads = grad_first, grad_second, grad_third
    return sum(2 * dy.numel() * input.shape[-1] * (need_normed + need) for dy, need in zip(grads, needs, strict=True))


@rms_norm_linear_fwd.register_sharding
def _(input, second, third):
    last = input.ndim - 1
    rows = [([axis] * 3, [axis, axis, *[REPLICATE] * 4]) for axis in row_axes(input)]
    columns = [last, *(REPLICATE if w is None else last for w in (second, third))]
    return [*rows, (columns, [*[REPLICATE] * 3, 0, 0, 0])]


rms_norm_linear_fwd.register_backward(
    rms_norm_linear_bwd,
    outputs=("output_first", "output_second", "output_third"),
    depends_on=[["normed", "first"], ["normed", "second"], ["normed", "third"]],
    saved_if={name: lambda need_normed: need_normed for name in ("first", "second", "third")},
)


def rms_norm_linear_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    randn = partial(torch.randn, device=device, dtype=dtype)
    yield Sample((randn(4, 16), randn(16), randn(24, 16), randn(8, 16), randn(8, 16)), why="queries, keys and values")
    yield Sample(
        (randn(2, 3, 37), randn(37), randn(23, 37), randn(5, 37), None, 1e-5),
        {"offset": 1.0},
        why="two layers, three dimensions, odd sizes, Gemma's offset",
    )
    yield Sample((randn(5, 40), None, randn(7, 40)), why="one layer, no weight of the norm")
    yield Sample((randn(33), randn(33), randn(7, 33), None, randn(9, 33)), why="one dimension, a layer left out")
    yield Sample((randn(0, 16), randn(16), randn(8, 16), randn(8, 16)), why="no rows")
    yield Sample((randn(24, 6).t(), randn(48)[::2], randn(24, 10).t(), randn(5, 24)), why="strided")
    yield Sample((randn(6, 80)[:, 16:48], randn(32), randn(8, 32)), why="slices of wider rows")
    yield Sample((1e4 * randn(3, 64), randn(64), randn(8, 64) / 8, randn(8, 64) / 8), why="large values")


def rms_norm_linear_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    randn = partial(torch.randn, device=device, dtype=dtype)
    for M, K, sizes, why in [
        (16384, 2048, (2048, 512, 512), "16384x2048, queries, keys and values"),
        (16384, 2048, (8192, 8192), "16384x2048, gate and up of 8192"),
    ]:
        yield Sample((randn(M, K), randn(K), *(randn(N, K) / K**0.5 for N in sizes)), why=why)


def rms_norm_linear_cost(
    input: Tensor, weight: Tensor | None, first: Tensor, second: Tensor | None = None, third: Tensor | None = None,
    eps: float = 1e-6, *, offset: float = 0.0,
) -> Cost:  # fmt: skip
    size, (M, K) = input.element_size(), _rows(input).shape
    N = sum(w.shape[0] for w in (first, second, third) if w is not None)
    x, w, y, flops = M * K * size, N * K * size, M * N * size, 2 * M * N * K
    # Backward it reads x, the weights and dy, and writes dx and the weights' gradients.
    return Cost(x + w + y, 3 * x + 3 * w + 2 * y, flops, 3 * flops)


@public_op(
    reference=rms_norm_linear_reference,
    differentiable=("input", "weight", "first", "second", "third"),
    kernel_ops=(norm_fwd, norm_bwd, rms_norm_linear_fwd, rms_norm_linear_bwd),
    samples=rms_norm_linear_samples,
    resized=normal_resized(lambda rows: ((rows, 48), (48,), (40, 48), (24, 48), (24, 48))),
    workloads=rms_norm_linear_workloads,
    cost=rms_norm_linear_cost,
    batch_dependent={
        **{f"output {i}": "the products are cuBLAS's, which chooses by the number of rows" for i in range(3)},
        "gradient of input": "dy @ W is cuBLAS's, which may split the sum of few rows",
    },
    choices=(
        "the norm is made again backward, by the kernel that made it: 8,192 bytes of each token less are kept in a "
        "Llama layer of hidden size 2048, whose two norms five linear layers read",
        "one call for all layers that read a norm: it is made again once, and their gradients are summed by cuBLAS",
        "no bias: adding it is the caller's",
    ),
)
def rms_norm_linear(
    input: Tensor,
    weight: Tensor | None,
    first: Tensor,
    second: Tensor | None = None,
    third: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Up to three linear layers of `rms_norm(input, weight, eps, offset=offset)`, which is not kept for them.

    The backward pass makes the norm again. Under autocast the layers run in autocast's dtype.

    Args:
        input: `[..., K]`, float32, float16 or bfloat16, any strides.
        weight: `[K]`, the norm's, any of these dtypes; None for no scale.
        first: `[N, K]`, as in `torch.nn.Linear`, dtype of `input`, any strides.
        second: Another weight of this kind, or None.
        third: Another, or None.
        eps: Added to the mean square, at least 0.
        offset: Added to the norm's weight: 1.0 for Gemma's, which is stored minus one.

    Returns:
        `[..., N]` for each weight, `[..., 0]` where it is None, contiguous, in the dtype of `input`.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape or a device does not fit, or a number is out of range.

    Source: Zhang and Sennrich, 2019, https://arxiv.org/abs/1910.07467.
    """
    check_rows("input", input, "K")
    check_parameter("weight", weight, input.shape[-1:], "the last axis of input", "input", input)
    check_not_negative("eps", eps)
    check_finite("offset", offset)
    normed, _ = norm_fwd(input, weight, eps, offset)
    return linear_of_norm(normed, input, weight, eps, offset, first, second, third)


def linear_of_norm(
    normed: Tensor, input: Tensor, weight: Tensor | None, eps: float, offset: float, first: Tensor,
    second: Tensor | None, third: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Linear layers of `normed`, which is the norm of `input` and is made of it again in the backward pass.

    Gradients come to input and weight through the norm. To autograd they are constants here: who cuts a graph between
    inputs and weights, as schedules of pipelines do, would take this use for a way to the norm's weight.
    """
    input, weight = input.detach(), weight if weight is None else weight.detach()
    dtype = autocast_dtype(input.device)
    if dtype is not None:
        normed, first = normed.to(dtype), first.to(dtype)
        second, third = (w if w is None else w.to(dtype) for w in (second, third))
    for name, w in (("first", first), ("second", second), ("third", third)):
        if w is None:
            continue
        if w.dim() != 2 or w.shape[1] != input.shape[-1]:
            raise ValueError(f"{name}: expected shape [N, {input.shape[-1]}] to fit input, got {tuple(w.shape)}")
        check_same(name, w, "input", normed, dtype=True)
    return rms_norm_linear_fwd(normed, input, weight, eps, offset, first, second, third)
