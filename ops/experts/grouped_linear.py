r"""A linear layer for each group of rows: the experts' products of a mixture.

Source: `torch.nn.functional.grouped_mm`; the reference is a loop of `torch.nn.functional.linear` over the groups.

Forward, for x [N, H], W [E, D, H] and b [E, D], row r of expert e:

    y[r] = W[e] @ x[r] + b[e]

Backward, given dy, with X_e and dY_e the rows of expert e:

    dx[r] = W[e]^T @ dy[r]
    dW[e] = dY_e^T @ X_e                      zeros where an expert has no rows
    db[e] = the column sums of dY_e, in float32

The device alone knows where groups end: nothing waits for it, and a graph is one for any split.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from llmk.ops.common.groups import checked_groups, groups_of, in_range
from llmk.ops.experts._grouped_products import (
    group_sums,
    grouped_outer,
    grouped_outer_cpu,
    grouped_product_cpu,
    grouped_rows,
)
from llmk.ops.experts._sorting import check_tokens
from llmk.registry import (
    Cost,
    KernelOp,
    Sample,
    autocast_dtype,
    check_dtype,
    check_same,
    check_shape,
    public_op,
    replicate_only,
)


def grouped_linear_reference(
    input: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None = None, *, transposed: bool = False
) -> Tensor:
    weight = weight.transpose(1, 2) if transposed else weight
    groups = groups_of(offsets)
    rows = [
        torch.nn.functional.linear(input[begin:end], weight[e], None if bias is None else bias[e])
        for e, (begin, end) in enumerate(groups)
    ]
    return torch.cat([*rows, input[groups[-1][1] :, :0] @ weight[0].transpose(0, 1)[:0]])


def _grouped_linear_fwd(
    input: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, transposed: bool
) -> Tensor:
    offsets = in_range(offsets, input.shape[0])
    return grouped_rows(input, weight.transpose(1, 2) if transposed else weight, offsets, bias)


def _grouped_linear_bwd(
    grad: Tensor, input: Tensor | None, weight: Tensor | None, offsets: Tensor, transposed: bool, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dx where there is a weight, dW where there is an input, db where asked for; an empty tensor for each other."""
    offsets = in_range(offsets, grad.shape[0])
    dx, dw, db = (torch.empty((0,), dtype=grad.dtype, device=grad.device) for _ in range(3))
    if weight is not None:
        dx = grouped_rows(grad, weight if transposed else weight.transpose(1, 2), offsets)
    if input is not None:
        dw = grouped_outer(input, grad, offsets) if transposed else grouped_outer(grad, input, offsets)
    if need_bias:
        db = group_sums(grad, offsets)
    return dx, dw, db


# A graph keeps each as one node: on a CPU it is a loop over the experts' rows.
grouped_linear_fwd = KernelOp(_grouped_linear_fwd, opaque=True)
grouped_linear_bwd = KernelOp(_grouped_linear_bwd, opaque=True)


@grouped_linear_fwd.register_kernel("cpu")
def _(input: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    groups = checked_groups("offsets", offsets, input.shape[0])
    y = grouped_product_cpu(input, weight.transpose(1, 2) if transposed else weight, groups, bias)
    return y.to(input.dtype)


@grouped_linear_bwd.register_kernel("cpu")
def _(grad, input, weight, offsets, transposed, need_bias) -> tuple[Tensor, Tensor, Tensor]:
    dtype, groups = grad.dtype, groups_of(offsets)
    dx, dw, db = (torch.empty((0,), dtype=dtype, device=grad.device) for _ in range(3))
    if weight is not None:
        dx = grouped_product_cpu(grad, weight if transposed else weight.transpose(1, 2), groups).to(dtype)
    if input is not None:
        a, b = (input, grad) if transposed else (grad, input)
        dw = grouped_outer_cpu(a, b, groups).to(dtype)
    if need_bias:
        db = torch.stack([grad[begin:end].float().sum(0) for begin, end in groups]).to(dtype)
    return dx, dw, db


@grouped_linear_fwd.register_fake
def _(input: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    return input.new_empty((input.shape[0], weight.shape[2 if transposed else 1]))


@grouped_linear_bwd.register_fake
def _(grad, input, weight, offsets, transposed, need_bias) -> tuple[Tensor, Tensor, Tensor]:
    (N, D), E = grad.shape, offsets.shape[0]
    dx = grad.new_empty((0,) if weight is None else (N, weight.shape[1 if transposed else 2]))
    if input is None:
        dw = grad.new_empty((0,))
    else:
        dw = grad.new_empty((E, input.shape[1], D) if transposed else (E, D, input.shape[1]))
    return dx, dw, grad.new_empty((E, D) if need_bias else (0,))


@grouped_linear_fwd.register_flop_formula
def _(input: Tensor, weight: Tensor, offsets, bias, transposed, out_val=None) -> int:
    return 2 * input.numel() * weight.shape[2 if transposed else 1]


@grouped_linear_bwd.register_flop_formula
def _(grad, input, weight, offsets, transposed, need_bias, out_val=None) -> int:
    features = [] if input is None else [input.shape[1]]
    if weight is not None:
        features.append(weight.shape[1 if transposed else 2])
    return sum(2 * grad.numel() * H for H in features)


grouped_linear_fwd.register_sharding(replicate_only)
grouped_linear_fwd.register_backward(
    grouped_linear_bwd,
    depends_on=[["input", "weight", "bias"]],
    saved_if={"input": lambda need_weight: need_weight, "weight": lambda need_input: need_input},
)


def grouped_linear_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    randn = partial(torch.randn, device=device, dtype=dtype)

    def ends(*rows: int) -> Tensor:
        return torch.tensor(rows, device=device, dtype=torch.int32)

    yield Sample((randn(16, 16), randn(4, 32, 16) / 4, ends(3, 8, 9, 16)), why="powers of two")
    yield Sample((randn(11, 19), randn(3, 21, 19) / 4, ends(4, 4, 11), randn(3, 21)), why="odd, bias, one without rows")
    weight, bias = randn(3, 19, 21) / 4, randn(3, 21)
    yield Sample(
        (randn(11, 19), weight, ends(4, 5, 9), bias), {"transposed": True}, why="transposed, rows of no expert"
    )
    yield Sample((randn(70, 72), randn(2, 65, 72) / 8, ends(0, 70)), why="one expert has all, several tiles")
    yield Sample((randn(0, 8), randn(2, 8, 8), ends(0, 0)), why="no rows")
    yield Sample((randn(12, 9).t(), randn(12, 10, 2).permute(2, 1, 0), ends(4, 9)), why="everything strided")


def grouped_linear_resized(rows: int, device: torch.device, dtype: torch.dtype) -> Sample:
    x, weight = torch.randn(rows, 24, device=device, dtype=dtype), torch.randn(2, 16, 24, device=device, dtype=dtype)
    return Sample((x, weight, torch.tensor([rows // 3, rows], device=device, dtype=torch.int32)), why="resized")


def grouped_linear_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    for N, E, D, H in [(131072, 128, 1536, 2048), (65536, 32, 5760, 2880)]:
        x = torch.randn(N, H, device=device, dtype=dtype)
        weight = torch.randn(E, D, H, device=device, dtype=dtype) / H**0.5
        ends = torch.arange(1, E + 1, device=device, dtype=torch.int32) * (N // E)
        yield Sample((x, weight, ends), why=f"{N}x{H}x{D}, {E} experts")


def grouped_linear_cost(
    input: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None = None, *, transposed: bool = False
) -> Cost:
    outputs = input.shape[0] * weight.shape[2 if transposed else 1]
    inputs = (input.numel() + weight.numel()) * input.element_size()
    output, flops = outputs * input.element_size(), 2 * outputs * input.shape[1]
    return Cost(inputs + output, 3 * inputs + 2 * output, flops, 3 * flops)


@public_op(
    reference=grouped_linear_reference,
    differentiable=("input", "weight", "bias"),
    kernel_ops=(grouped_linear_fwd, grouped_linear_bwd),
    samples=grouped_linear_samples,
    resized=grouped_linear_resized,
    workloads=grouped_linear_workloads,
    cost=grouped_linear_cost,
    choices=(
        "bfloat16 on NVIDIA GPUs of compute capability 9 and 10 is torch.nn.functional.grouped_mm; on others a Triton "
        "product that was not tuned, as there PyTorch's own waits for the device to count the rows; on a CPU a loop "
        "over the experts",
    ),
)
def grouped_linear(
    input: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None = None, *, transposed: bool = False
) -> Tensor:
    """`torch.nn.functional.linear` of each group of rows with a weight of its own.

    Under autocast it runs in autocast's dtype.

    Args:
        input: Rows sorted by group `[N, H]`, float32, float16 or bfloat16, any strides.
        weight: `[E, D, H]`, dtype of `input`, any strides; `[E, H, D]` where `transposed`.
        offsets: The end of each group's rows `[E]`, int32, none before the last, as `moe_permute` gives it. Rows after
            the last end belong to none: their results are zeros.
        bias: `[E, D]`, dtype of `input`.
        transposed: The layout of `weight`.

    Returns:
        `[N, D]`, contiguous, in the dtype of `input`.

    Raises:
        TypeError: A dtype does not fit.
        ValueError: A shape or a device does not fit.
        IndexError: On the CPU, `offsets` are not such ends. On a GPU they are made so.

    Source: `torch.nn.functional.grouped_mm`.
    """
    dtype = autocast_dtype(input.device)
    if dtype is not None:
        input, weight = input.to(dtype), weight.to(dtype)
        bias = bias if bias is None else bias.to(dtype)
    check_tokens(input)
    check_same("weight", weight, "input", input, dtype=True)
    if weight.dim() != 3 or weight.shape[1 if transposed else 2] != input.shape[1] or weight.shape[0] == 0:
        layout = f"[E, {input.shape[1]}, D]" if transposed else f"[E, D, {input.shape[1]}]"
        raise ValueError(f"weight: expected shape {layout} to fit input, got {tuple(weight.shape)}")
    check_dtype("offsets", offsets, (torch.int32,))
    check_shape("offsets", offsets, weight.shape[:1], "one for each expert")
    check_same("offsets", offsets, "input", input)
    if bias is not None:
        check_shape("bias", bias, (weight.shape[0], weight.shape[2 if transposed else 1]), "[E, D]")
        check_same("bias", bias, "input", input, dtype=True)
    return grouped_linear_fwd(input, weight, offsets, bias, transposed)
