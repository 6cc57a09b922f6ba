r"""A linear layer and its activation, fused where the product is not slowed by more than the traffic that it saves.

Sources: `torch.nn.functional.linear` for the layer, `activations.py` for the activations f and their derivatives f';
the vendor's epilogue, https://docs.nvidia.com/cuda/cublas/ (CUBLASLT_EPILOGUE_GELU_BIAS, the tanh form).

Forward, for x [M, K], W [N, K] and b [N]:

    z = x @ W^T + b
    y = f(z)

Backward, given dy:

    dz = dy * f'(z)
    dx = dz @ W
    dW = dz^T @ x
    db = the column sums of dz, in float32

What is kept of z for the backward pass: nothing for none; y alone for relu, whose derivative it tells, and for
relu_squared, whose derivative is 2 sqrt(y) with half of y's rounding error; z itself for gelu, gelu_tanh and silu,
which cannot be undone, and where float16's range does not hold small squares. Making z again would be a fourth product,
a third more time than forward and backward take together, to save what PyTorch's composition keeps too.

The product is done in one of three ways, by `choose_path`.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from llmk.ops.common.activations import ACTIVATIONS, gelu_reference
from llmk.ops.common.activations import activation as activation_of
from llmk.ops.common.samples import normal_resized
from llmk.ops.linear._linear_act_kernels import (
    activate_product,
    activation_gradient,
    activation_gradient_reference,
    fused_product,
    keeps_z,
    product,
    product_activation,
    suits,
)
from llmk.registry import (
    PARTIAL,
    REPLICATE,
    Cost,
    KernelOp,
    Sample,
    autocast_dtype,
    check_dtype,
    check_option,
    check_same,
    check_shape,
    public_op,
    row_axes,
)


def linear_act_reference(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str = "relu"
) -> Tensor:
    z = torch.nn.functional.linear(input, weight, bias)
    if activation in ("gelu", "gelu_tanh"):
        return gelu_reference(z, "tanh" if activation == "gelu_tanh" else "none")
    if activation in ("relu", "relu_squared"):
        y = torch.nn.functional.relu(z)
        return y if activation == "relu" else y.square()
    return torch.nn.functional.silu(z) if activation == "silu" else z


# cuBLASLt has an epilogue for relu too, but it makes 0 of NaN, which hides what went wrong (H200, torch 2.11).
EPILOGUES = ("gelu_tanh",)
# At 790 TFLOP/s and 4.28 TB/s (an H200's) this K a tensor is the balance for a Triton product that is 18% slower than
# cuBLAS's, which is an estimate. Measured there at 32768x1024x4096, forward: relu 0.436 ms fused, 0.564 as cuBLAS's
# product and PyTorch's activation; silu that keeps z 0.467 and 0.609.
FUSED_K = 1024


def choose_path(x: Tensor, weight: Tensor, activation: str, keep_z: bool) -> str:
    """Return how z and y are made: "epilogue", "fused" or "separate". The size hint of a symbolic M decides.

    - "epilogue": cuBLASLt's product with its own activation. PyTorch offers none that also writes z.
    - "fused": the Triton product. It is slower than cuBLAS's by a share of the product's time, 2 M N K / rate, and
      saves the traffic of z, tensors * M N * size / bandwidth: of the sizes only K is left in the balance. It saves two
      tensors, z written and read, or one where z is wanted anyway.
    - "separate": cuBLAS's product, then one kernel over it. It takes any strides, and float32, whose products are too
      slow for the epilogue to matter; there the bits of z are those of `torch.nn.functional.linear`.
    """
    K = x.shape[1]
    if activation == "none" or x.dtype == torch.float32 or K == 0:  # where K is 0, PyTorch forgets the epilogue
        return "separate"
    # On a CPU, where the interpreter gets here, PyTorch's epilogue is the other GELU.
    if activation in EPILOGUES and not keep_z and x.device.type == "cuda":
        return "epilogue"
    limit = FUSED_K if keep_z else 2 * FUSED_K
    return "fused" if limit >= K and suits(x, weight) else "separate"


def _rows(input: Tensor) -> Tensor:
    """`[..., K]` as `[M, K]`: products take any strides."""
    return input.flatten(0, -2) if input.dim() > 1 else input.unsqueeze(0)


def _linear_act_fwd(
    input: Tensor, weight: Tensor, bias: Tensor | None, activation: str, keep_z: bool
) -> tuple[Tensor, Tensor]:
    x = _rows(input)
    rows = (x.shape[0], weight.shape[0])
    shape = (*input.shape[:-1], weight.shape[0])
    y = torch.empty(shape, dtype=input.dtype, device=input.device)
    z = torch.empty(shape if keep_z else (0,), dtype=input.dtype, device=input.device)
    path = choose_path(x, weight, activation, keep_z)
    if path == "epilogue":
        product_activation(x, weight, bias, y.view(rows), activation)
    elif path == "fused":
        fused_product(x, weight, bias, y, z if keep_z else None, activation)
    else:
        linear = z if keep_z else y
        product(x, weight, bias, linear.view(rows))
        if activation != "none":
            activate_product(linear, y, activation)
    return y, z


def _linear_act_bwd(
    grad: Tensor,
    output: Tensor | None,
    z: Tensor | None,
    input: Tensor | None,
    weight: Tensor | None,
    activation: str,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx where there is a weight, dW where there is an input, db where asked for; an empty tensor for each other.

    Of `output` and `z` at most one is there.
    """
    dz, db, kept = _rows(grad), torch.empty((0,), dtype=grad.dtype, device=grad.device), output if z is None else z
    if kept is not None:
        dz, db = activation_gradient(grad, kept, activation, need_bias)
    elif need_bias:
        db = dz.sum(0)  # in float32, rounded once
    return *_product_gradients(grad, dz, input, weight), db


def _gradient_of_z(grad: Tensor, output: Tensor | None, z: Tensor | None, activation: str) -> Tensor:
    kept = output if z is None else z
    return activation_gradient_reference(_rows(grad), None if kept is None else _rows(kept), activation)


def _product_gradients(grad: Tensor, dz: Tensor, input: Tensor | None, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    dx_shape = (0,) if weight is None else (*grad.shape[:-1], weight.shape[1])
    dx = torch.empty(dx_shape, dtype=dz.dtype, device=dz.device)
    if weight is not None:
        torch.mm(dz, weight, out=dx.view(dz.shape[0], weight.shape[1]))
    dw = torch.empty((0,) if input is None else (dz.shape[1], input.shape[-1]), dtype=dz.dtype, device=dz.device)
    if input is not None:
        torch.mm(dz.t(), _rows(input), out=dw)
    return dx, dw


def _is_separate(input: Tensor, weight: Tensor, bias: Tensor | None, activation: str, keep_z: bool) -> bool:
    return activation != "none" and choose_path(_rows(input), weight, activation, keep_z) == "separate"


def _is_pointwise(grad, output, z, input, weight, activation, need_bias) -> bool:
    return activation != "none" and not need_bias


linear_act_fwd = KernelOp(_linear_act_fwd, decomposed=_is_separate)
linear_act_bwd = KernelOp(_linear_act_bwd, decomposed=_is_pointwise)


@linear_act_fwd.register_decomposition
def _(input: Tensor, weight: Tensor, bias: Tensor | None, activation: str, keep_z: bool) -> tuple[Tensor, Tensor]:
    """The product as it is; of the activation Inductor makes one kernel with what follows it."""
    x, N = _rows(input), weight.shape[0]
    z = torch.empty((*input.shape[:-1], N), dtype=input.dtype, device=input.device)
    product(x, weight, bias, z.view(x.shape[0], N))
    y = activation_of(z.float(), activation).to(input.dtype)
    return y, z if keep_z else torch.empty((0,), dtype=input.dtype, device=input.device)


@linear_act_bwd.register_decomposition
def _(grad, output, z, input, weight, activation, need_bias) -> tuple[Tensor, Tensor, Tensor]:
    dz = _gradient_of_z(grad, output, z, activation)
    db = dz.sum(0).to(grad.dtype) if need_bias else torch.empty((0,), dtype=grad.dtype, device=grad.device)
    return *_product_gradients(grad, dz.to(grad.dtype), input, weight), db


@linear_act_fwd.register_kernel("cpu")
def _(input: Tensor, weight: Tensor, bias: Tensor | None, activation: str, keep_z: bool) -> tuple[Tensor, Tensor]:
    z = torch.nn.functional.linear(input.float(), weight.float(), None if bias is None else bias.float())
    y = activation_of(z, activation).to(input.dtype).contiguous()
    return y, z.to(input.dtype).contiguous() if keep_z else torch.empty((0,), dtype=input.dtype, device=input.device)


@linear_act_bwd.register_kernel("cpu")
def _(grad, output, z, input, weight, activation, need_bias) -> tuple[Tensor, Tensor, Tensor]:
    dtype, dz = grad.dtype, _gradient_of_z(grad, output, z, activation)
    empty = torch.empty((0,), dtype=dtype, device=grad.device)
    dx, dw = _product_gradients(
        grad, dz, None if input is None else input.float(), None if weight is None else weight.float()
    )
    return dx.to(dtype), dw.to(dtype), dz.sum(0).to(dtype) if need_bias else empty


@linear_act_fwd.register_fake
def _(input, weight, keep_z):
    shape = (*input.shape[:-1], weight.shape[0])
    return input.new_empty(shape), input.new_empty(shape if keep_z else (0,))


@linear_act_bwd.register_fake
def _(grad, input, weight, need_bias):
    dx_shape = (0,) if weight is None else (*grad.shape[:-1], weight.shape[1])
    dw_shape = (0,) if input is None else (grad.shape[-1], input.shape[-1])
    return grad.new_empty(dx_shape), grad.new_empty(dw_shape), grad.new_empty(grad.shape[-1:] if need_bias else (0,))


@linear_act_fwd.register_flop_formula
def _(input: Tensor, weight: Tensor, *args, out_val=None) -> int:
    return 2 * input.numel() * weight.shape[0]


@linear_act_bwd.register_flop_formula
def _(grad, output, z, input, weight, *args, out_val=None) -> int:
    return sum(2 * grad.numel() * t.shape[-1] for t in (input, weight) if t is not None)


@linear_act_fwd.register_sharding
def _(input, keep_z):
    def outputs(axis: int) -> list[int | str]:
        return [axis, axis if keep_z else REPLICATE]

    rows = [(outputs(axis), [axis, REPLICATE, REPLICATE]) for axis in row_axes(input)]
    return [*rows, (outputs(input.ndim - 1), [REPLICATE, 0, 0])]


@linear_act_bwd.register_sharding
def _(grad, input, weight, need_bias):
    def outputs(dx: int | str, dw: int | str, db: int | str) -> list[int | str]:
        wanted = (dx, weight is not None), (dw, input is not None), (db, need_bias)
        return [split if needed else REPLICATE for split, needed in wanted]

    rows = [(outputs(axis, PARTIAL, PARTIAL), [axis, axis, axis, axis, REPLICATE]) for axis in row_axes(grad)]
    last = grad.ndim - 1
    return [*rows, (outputs(PARTIAL, 0, 0), [last, last, last, REPLICATE, 0])]


def _keeps(needs_input_grad, args):
    input, _, _, activation, *_ = args
    return (any(needs_input_grad) and keeps_z(activation, input.dtype),)


linear_act_fwd.register_backward(
    linear_act_bwd,
    outputs=("output", "z"),
    saved_if={
        "output": lambda activation, keep_z: activation != "none" and not keep_z,
        "z": lambda keep_z: keep_z,
        "input": lambda need_weight: need_weight,
        "weight": lambda need_input: need_input,
    },
    keeps=_keeps,
)


def linear_act_error_bound(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str = "relu"
) -> Tensor | None:
    """Bound the error of the epilogue's GELU, z / 2 * (1 + tanh(u)) in float32, a sum that cancels where z is negative.

    Next to -1 values of float32 are eps / 2 apart, and tanh is good to two of these units, as CUDA's is; the sum is at
    most 2 and rounds by at most eps / 2: 1.5 eps together, of |z| / 2. Where 1 + tanh(u) is less than half a unit, tanh
    is -1, and all of it is lost. Our own kernels have no such sum.
    """
    wanted = any(tensor is not None and tensor.requires_grad for tensor in (input, weight, bias))
    if choose_path(_rows(input), weight, activation, wanted and keeps_z(activation, input.dtype)) != "epilogue":
        return None
    bias = bias if bias is None else bias.detach().double()
    z = torch.nn.functional.linear(input.detach().double(), weight.detach().double(), bias)
    eps = torch.finfo(torch.float32).eps
    total = 2 * torch.sigmoid(z * (1.5957691216057308 + 0.07135481627260025 * z * z))  # 1 + tanh(u)
    return z.abs() / 2 * torch.where(total < eps / 4, total, 1.5 * eps)


def linear_act_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    randn = partial(torch.randn, device=device, dtype=dtype)

    def sample(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, why: str) -> Sample:
        return Sample((x, weight) if bias is None else (x, weight, bias), {"activation": activation}, why=why)

    yield sample(randn(4, 16), randn(32, 16), None, "relu", "powers of two")
    yield sample(randn(2, 3, 37), randn(23, 37), randn(23), "relu", "three dimensions, odd sizes, bias")
    yield sample(randn(130, 80), randn(150, 80) / 4, randn(150), "gelu", "several tiles, parts of tiles, blocks of K")
    yield sample(randn(260, 32), randn(40, 32) / 4, None, "silu", "more tiles than programs")
    yield sample(randn(9, 40), randn(21, 40) / 4, randn(21), "gelu_tanh", "the other GELU")
    yield sample(randn(130, 48), randn(33, 48) / 4, randn(33), "relu_squared", "the square, from its root in bfloat16")
    yield sample(randn(33), randn(7, 33), randn(7), "none", "one dimension, no activation")
    yield sample(randn(1, 1), randn(1, 1), None, "relu_squared", "one element")
    yield sample(randn(0, 16), randn(8, 16), randn(8), "silu", "no rows")
    yield sample(randn(3, 0), randn(5, 0), randn(5), "relu", "no features: the bias alone")
    yield sample(randn(12, 9).t(), randn(12, 20).t(), randn(40)[::2], "silu", "everything strided")
    yield sample(randn(1, 16).expand(5, 16), randn(8, 16), None, "gelu", "one row expanded")
    yield sample(1e4 * randn(3, 8), randn(6, 8) / 64, randn(6), "gelu_tanh", "large values")
    yield sample(randn(2, 2), randn(100_003, 2), None, "relu", "100,003 columns")
    special = randn(4, 16)
    special[1, 2], special[2, 3] = float("nan"), float("inf")
    for activation in ("relu", "gelu_tanh"):
        yield sample(special, randn(8, 16), randn(8), activation, f"NaN and infinity, {activation}")


def linear_act_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for M, K, N, activation in [
        (8192, 4096, 14336, "relu"),
        (8192, 8192, 8192, "relu"),
        (32768, 1024, 4096, "relu"),
        (8192, 4096, 14336, "gelu_tanh"),
        (8192, 4096, 14336, "relu_squared"),
        (32768, 1024, 4096, "silu"),
    ]:
        x = torch.randn(M, K, device=device, dtype=dtype)
        weight = torch.randn(N, K, device=device, dtype=dtype) / K**0.5
        yield Sample((x, weight), {"activation": activation}, why=f"{M}x{K}x{N} {activation}")


def linear_act_cost(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str = "relu") -> Cost:
    inputs = (input.numel() + weight.numel()) * input.element_size()
    output = input.numel() // max(1, input.shape[-1]) * weight.shape[0] * input.element_size()
    flops = 2 * input.numel() * weight.shape[0]
    # Backward it reads x, W, dy and what was kept, and writes dx and dW.
    kept = output if activation != "none" else 0
    return Cost(inputs + output, 3 * inputs + 2 * output + kept, flops, 3 * flops)


@public_op(
    reference=linear_act_reference,
    differentiable=("input", "weight", "bias"),
    kernel_ops=(linear_act_fwd, linear_act_bwd),
    samples=linear_act_samples,
    resized=normal_resized(lambda rows: ((rows, 48), (40, 48), (40,)), activation="silu"),
    workloads=linear_act_workloads,
    cost=linear_act_cost,
    error_bound=linear_act_error_bound,
    batch_dependent={
        "output 0": "the number of rows decides between the Triton product and cuBLAS's, which round z apart",
        "gradient of input": "dz @ W is cuBLAS's, which may split the sum of few rows",
    },
    choices=(
        "gelu_tanh without gradients is cuBLASLt's epilogue in 16-bit dtypes, whose 1 + tanh cancels, as in PyTorch's "
        "own GELU: at -5 it may give -0 where -1.4e-7 is right; relu is not, as that loses NaN",
        f"other activations are the Triton product up to K = {FUSED_K} for each tensor whose traffic it saves, where "
        "its slower product costs less than that: on an H200 0.436 ms against 0.564 at 32768x1024x4096, relu, forward",
        "compiled, a separate activation, and its gradient where there is no bias, is plain aten, for Inductor to fuse "
        "with its neighbours",
        "z is kept for gelu, gelu_tanh and silu: making it again is a fourth product",
        "not for relu_squared outside of float16: y, which the next layer keeps anyway, saves a tensor; its root is 0 "
        "where z is below 1e-19, so that a gradient of at most 2e-19 of the incoming one is lost",
    ),
)
def linear_act(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str = "relu") -> Tensor:
    """`activation(linear(input, weight, bias))`, with the activation fused where that is faster.

    Small K takes a product with the activation in its epilogue. Under autocast the layer runs in autocast's dtype.

    Args:
        input: `[..., K]`, float32, float16 or bfloat16, any strides.
        weight: `[N, K]`, as in `torch.nn.Linear`, dtype of `input`, any strides.
        bias: `[N]`, dtype of `input`.
        activation: "none", "relu", "relu_squared", "gelu", "gelu_tanh" or "silu".

    Returns:
        `[..., N]`, contiguous, in the dtype of `input`.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape or a device does not fit, or the activation is not one of these.

    Source: `torch.nn.functional.linear` and the activations there.
    """
    dtype = autocast_dtype(input.device)
    if dtype is not None:
        input, weight = input.to(dtype), weight.to(dtype)
        bias = bias if bias is None else bias.to(dtype)
    check_dtype("input", input)
    if input.dim() == 0:
        raise ValueError(f"input: expected shape [..., K], got {tuple(input.shape)}")
    if weight.dim() != 2 or weight.shape[1] != input.shape[-1]:
        raise ValueError(f"weight: expected shape [N, {input.shape[-1]}] to fit input, got {tuple(weight.shape)}")
    check_same("weight", weight, "input", input, dtype=True)
    if bias is not None:
        check_shape("bias", bias, weight.shape[:1], "one for each row of weight")
        check_same("bias", bias, "input", input, dtype=True)
    check_option("activation", activation, ACTIVATIONS)
    y, _ = linear_act_fwd(input, weight, bias, activation)
    return y
