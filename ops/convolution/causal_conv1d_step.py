"""One token of a causal convolution, as a sampler goes on from a state.

Source: the formulas and their sources are in `causal_conv1d.py`; here t is the only token, and the state holds the
inputs before it.

The forward pass is plain PyTorch in float32 on every device, which Inductor makes one kernel of; the backward pass is
autograd's derivative of the same function. No measurement asks for a kernel of its own yet.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from llmk.ops.common.activations import activation as activated
from llmk.ops.convolution.causal_conv1d import ACTIVATIONS, causal_conv1d_reference, check_filter
from llmk.registry import (
    REPLICATE,
    Cost,
    KernelOp,
    Sample,
    check_dtype,
    check_same,
    differentiating,
    gradient_of,
    no_gradient,
    or_no_gradient,
    public_op,
)


def causal_conv1d_step_reference(
    input: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = None
) -> tuple[Tensor, Tensor]:
    before = state[..., state.shape[-1] + 1 - weight.shape[1] :]
    output, _ = causal_conv1d_reference(input.unsqueeze(-1), weight, bias, activation=activation, initial_state=before)
    return output.squeeze(-1), torch.cat([state[..., 1:], input.unsqueeze(-1)], -1)


def _step(input: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    """The output, float32, and the next state."""
    x = torch.cat([state, input.unsqueeze(-1)], -1)
    z = (x[..., -weight.shape[1] :].float() * weight.float()).sum(-1)
    return activated(z if bias is None else z + bias.float(), activation), x[..., 1:]


def _causal_conv1d_step_fwd(
    input: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str
) -> tuple[Tensor, Tensor]:
    output, state = _step(input, state, weight, bias, activation)
    return output.to(input.dtype).contiguous(), state.clone(memory_format=torch.contiguous_format)


@differentiating
def _causal_conv1d_step_bwd(
    grad: Tensor,
    grad_state: Tensor,
    input: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def value(input: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        output, final = _step(input.float(), state.float(), weight, bias, activation)
        return (output * grad).sum() + (final * grad_state).sum()

    _, found = gradient_of(value, input, state, weight, *(() if bias is None else (bias,)))
    # Clones: the first two may be parts of one tensor.
    dinput, dstate, dweight, *dbias = (or_no_gradient(x, grad).clone() for x in found)
    return dinput, dstate, dweight, dbias[0] if dbias else no_gradient(grad)


causal_conv1d_step_fwd = KernelOp(_causal_conv1d_step_fwd)
causal_conv1d_step_bwd = KernelOp(_causal_conv1d_step_bwd, opaque=True)
causal_conv1d_step_fwd.register_kernel("cpu")(_causal_conv1d_step_fwd)
causal_conv1d_step_bwd.register_kernel("cpu")(_causal_conv1d_step_bwd)


@causal_conv1d_step_fwd.register_fake
def _(input, state):
    return input.new_empty(input.shape), state.new_empty(state.shape)


causal_conv1d_step_fwd.register_backward(
    causal_conv1d_step_bwd,
    outputs=("output", "final_state"),
    depends_on=[("input", "state", "weight", "bias"), ("input", "state")],
)


@causal_conv1d_step_fwd.register_sharding
def _():
    return [([0, 0], [0, 0, REPLICATE, REPLICATE]), ([1, 1], [1, 1, 0, 0])]


def causal_conv1d_step_samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    randn = partial(torch.randn, device=device, dtype=dtype)
    silu = {"activation": "silu"}
    yield Sample((randn(2, 16), randn(2, 16, 3), randn(16, 4), randn(16)), silu, why="powers of two")
    yield Sample((randn(3, 5), randn(3, 5, 2), randn(5, 3)), why="odd sizes, no bias, no activation")
    yield Sample((randn(2, 6), randn(2, 6, 4), randn(6, 4)), {"activation": "swish"}, why="a state of as many as taps")
    yield Sample((randn(1, 3), randn(1, 3, 9), randn(3, 2), randn(3)), why="a longer state")
    yield Sample((randn(0, 4), randn(0, 4, 3), randn(4, 4)), silu, why="no rows")
    wide = randn(2, 15)[:, 5:10]
    yield Sample((wide, randn(2, 7, 5).mT, randn(8, 5).t(), randn(5)), silu, why="a slice, state and filter strided")
    yield Sample((10 * randn(2, 6), 10 * randn(2, 6, 3), 10 * randn(6, 4), randn(6)), silu, why="large values")


def causal_conv1d_step_resized(rows: int, device: torch.device, dtype: torch.dtype) -> Sample:
    randn = partial(torch.randn, device=device, dtype=dtype)
    return Sample((randn(rows, 24), randn(rows, 24, 3), randn(24, 4), randn(24)), {"activation": "silu"}, why="resized")


def causal_conv1d_step_workloads(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    randn = partial(torch.randn, device=device, dtype=dtype)
    for B, D in ((32, 8192), (1, 8192)):
        args = (randn(B, D), randn(B, D, 4), randn(D, 4), randn(D))
        yield Sample(args, {"activation": "silu"}, why=f"{B}x{D}")


def causal_conv1d_step_cost(
    input: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None = None, **options: object
) -> Cost:
    moved = (input.numel() + state.numel()) * input.element_size()
    filters = sum(x.numel() * x.element_size() for x in (weight, bias) if x is not None)
    return Cost(2 * moved + filters, 5 * moved + 3 * filters)


@public_op(
    reference=causal_conv1d_step_reference,
    differentiable=("input", "state", "weight", "bias"),
    kernel_ops=(causal_conv1d_step_fwd, causal_conv1d_step_bwd),
    samples=causal_conv1d_step_samples,
    resized=causal_conv1d_step_resized,
    workloads=causal_conv1d_step_workloads,
    cost=causal_conv1d_step_cost,
    choices=("plain PyTorch in place of a kernel: no figure has been taken that asks for one",),
)
def causal_conv1d_step(
    input: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = None
) -> tuple[Tensor, Tensor]:
    """One token of a causal convolution, by which a model generates: `causal_conv1d` of one token after a state.

    With x the state and the token after it, and x_K the token, it is `activation(bias + sum over k of w_k * x_k)`, in
    float32 with one rounding. It is plain PyTorch on every device, which `torch.compile` fuses.

    Args:
        input: `[B, D]`, float32, float16 or bfloat16, any strides.
        state: The inputs before the token `[B, D, S]`, the last one last, in the dtype of `input`, with S at least
            K - 1: that many are read, and the next state has as many as this one. It is not changed.
        weight: `[D, K]`, any of these dtypes, with K from 2 to 8; the last tap is the token's own.
        bias: `[D]`, any of these dtypes; None for none.
        activation: None, "silu" or its other name, "swish".

    Returns:
        The output, `[B, D]`, contiguous, in the dtype of `input`, and the next state `[B, D, S]`.

    Raises:
        TypeError: A tensor is not float32, float16 or bfloat16, or `state` has not the dtype of `input`.
        ValueError: A shape does not fit the others, there is no channel, K is not from 2 to 8, the tensors are not on
            one device, or `activation` is none of these.

    Sources: Fu et al., 2022, https://arxiv.org/abs/2212.14052; Gu and Dao, 2023, https://arxiv.org/abs/2312.00752.
    """
    check_dtype("input", input)
    if input.dim() != 2 or input.shape[1] == 0:
        raise ValueError(f"input: expected shape [B, D] with D at least 1, got {tuple(input.shape)}")
    check_filter(weight, bias, activation, input)
    check_dtype("state", state)
    if state.dim() != 3 or state.shape[:2] != input.shape or state.shape[2] < weight.shape[1] - 1:
        B, D = input.shape
        expected = f"[{B}, {D}, S] with S at least {weight.shape[1] - 1}, the taps before the token's"
        raise ValueError(f"state: expected shape {expected}, got {tuple(state.shape)}")
    check_same("state", state, "input", input, dtype=True)
    return causal_conv1d_step_fwd(input, state, weight, bias, ACTIVATIONS[activation])
